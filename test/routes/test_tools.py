"""The tool prompt and the parser that finds a call in what a model writes."""

import json
import random

import pytest

from routes.chat.calls import ToolCall, ToolCallParser, canonical_json
from rwkv_batch.chat.tools import CLOSE, OPEN, tag_prompt

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                "days": {"type": "array", "items": {"type": "integer"}},
                "place": {"type": "object", "properties": {"lat": {"type": "number"}}},
            },
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
PARIS = ToolCall("get_weather", '{"city": "Paris"}')


def read(pieces: list[str], **limits) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(**limits)
    return "".join(parser.feed(p) for p in pieces) + parser.finish(), parser.calls


def splits(text: str) -> list[list[str]]:
    """Whole, every cut in two, single characters, and some random cuts."""
    rng = random.Random(7)
    cuts = [sorted(rng.sample(range(len(text) + 1), k=min(5, len(text)))) for _ in range(20)]
    several = [[text[a:b] for a, b in zip([0, *c], [*c, len(text)], strict=True)] for c in cuts]
    return [[text], list(text), *([text[:i], text[i:]] for i in range(len(text) + 1)), *several]


ROME = ToolCall("get_weather", '{"city": "Rome"}')
NAMED = '{"name": "get_weather", "arguments": {"city": "%s"}}'
# text -> what is shown, and the call
CASES = {
    "call alone": (CALL, "", PARIS),
    "text around": (f"Let me see. {CALL} Done.", "Let me see.  Done.", PARIS),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', "", ToolCall("now", "{}")),
    "line feeds inside": (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        ToolCall("now", "{}"),
    ),
    "other scripts": (
        '<tool_call>{"name": "a", "arguments": {"城市": "巴黎"}}</tool_call>',
        "",
        ToolCall("a", '{"城市": "巴黎"}'),
    ),
    "end tag in a string": (
        '<tool_call>{"name": "say", "arguments": {"text": "a </tool_call> b"}}</tool_call>!',
        "!",
        ToolCall("say", '{"text": "a </tool_call> b"}'),
    ),
    "arguments as text": (
        r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}</tool_call>',
        "",
        PARIS,
    ),
    "no arguments at all": (
        '<tool_call>{"name": "now", "arguments": null}</tool_call>',
        "",
        ToolCall("now", "{}"),
    ),
    "a fence": (f"Hm.\n```json\n{NAMED % 'Paris'}\n```\n", "Hm.\n\n", PARIS),
    "a fence on one line": (f"```json {NAMED % 'Paris'}```.", ".", PARIS),
    "a fence that is not closed": (f"```json\n{NAMED % 'Paris'}\n", "", PARIS),
    "a fence that is half closed": (f"```json\n{NAMED % 'Paris'}\n``", "", PARIS),
    "a fence under a heading": (f"So:\n**Tool Call:**\n```json\n{NAMED % 'Paris'}\n```", "So:\n", PARIS),
    "a fence in a string": (
        '```json\n{"name": "say", "arguments": {"text": "a\n```\nb"}}\n```',
        "",
        ToolCall("say", '{"text": "a\\n```\\nb"}'),
    ),
    "behind other JSON": (
        f'```json\n{{"a": 1}}\n```\n```json\n{NAMED % "Paris"}\n```',
        '```json\n{"a": 1}\n```\n',
        PARIS,
    ),
    "behind another fence": (
        f"```python\nx\n```\n```json\n{NAMED % 'Paris'}\n```",
        "```python\nx\n```\n",
        PARIS,
    ),
    "a list of one": (f"<tool_calls>[{NAMED % 'Paris'}]</tool_calls>", "", PARIS),
    "begins inside a broken one": (f"<tool_call>oops {CALL}", "<tool_call>oops ", PARIS),
    "after a broken one": (f"<tool_call>oops</tool_call>{CALL}", "<tool_call>oops</tool_call>", PARIS),
    "after an open string": (
        f'<tool_call>{{"name": "x</tool_call> {CALL}',
        '<tool_call>{"name": "x</tool_call> ',
        PARIS,
    ),
}
# text -> what is shown; all hold calls for Paris, then Rome
SEVERAL = {
    "tags": (f"{CALL}\n{CALL.replace('Paris', 'Rome')}", "\n"),
    "a list in tags": (f"a<tool_calls>[{NAMED % 'Paris'},\n {NAMED % 'Rome'}]</tool_calls>b", "ab"),
    "a list in a fence": (f"```json\n[{NAMED % 'Paris'}, {NAMED % 'Rome'}]\n```", ""),
    "fences": (f"```json\n{NAMED % 'Paris'}\n```\n```json\n{NAMED % 'Rome'}\n```", "\n"),
    "headings": (
        f"**Tool Call:**\n```json\n{NAMED % 'Paris'}\n```\n**Tool Call:**\n```json\n{NAMED % 'Rome'}\n```",
        "\n",
    ),
    "every form": (f"{CALL} and ```json\n{NAMED % 'Rome'}", " and "),
}
PLAIN = {
    "no tag": "a < b, <tool is not <tool_calls>",
    "a fence of other JSON": '```json\n{"city": "Paris"}\n```\n',
    "a name without arguments in a fence": '```json\n{"name": "get_weather"}\n```',
    "a fence of another language": f"```python\n{NAMED % 'Paris'}\n```",
    "a fence that is cut": '```json\n{"name": "get_weather", "argu',
    "a fence of words": "```json is a fence```",
    "a heading alone": "**Tool Call:** none",
    "a heading and other text": f"**Tool Call:**\n{NAMED % 'Paris'}",
    "a list of something else": '<tool_calls>["a"]</tool_calls><tool_calls>[]</tool_calls>',
    "one call in a list's tags": f"<tool_calls>{NAMED % 'Paris'}</tool_calls>",
    "half of a heading": "**Tool Call:**\n``",
    "not JSON": "<tool_call>get_weather(Paris)</tool_call> ok",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "empty name": '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    "name is no string": '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    "arguments are a list": '<tool_call>{"name": "a", "arguments": []}</tool_call>',
    "arguments are other text": '<tool_call>{"name": "a", "arguments": "{"}</tool_call>',
    "a list": "<tool_call>[1, 2]</tool_call>",
    "never ended": '<tool_call>{"name": "a", "arguments": {}}',
    "string never ended": '<tool_call>{"name": "a</tool_call> and more',
    "ends in half a tag": "text <tool_ca",
    "not a number": '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
    "number without bounds": '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>',
    "not Unicode": '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>',
    "name not Unicode": '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
}


@pytest.mark.parametrize(("text", "shown", "call"), CASES.values(), ids=CASES)
def test_call_is_found_for_every_split(text, shown, call):
    for pieces in splits(text):
        assert read(pieces) == (shown, [call]), pieces


@pytest.mark.parametrize(("text", "shown"), SEVERAL.values(), ids=SEVERAL)
def test_several_calls_are_found_for_every_split(text, shown):
    for pieces in splits(text):
        assert read(pieces) == (shown, [PARIS, ROME]), pieces


@pytest.mark.parametrize("text", [CASES["a fence"][0], CASES["call alone"][0], SEVERAL["a list in tags"][0]])
def test_a_call_of_a_tool_that_is_not_on_offer_is_text(text):
    for pieces in splits(text):
        assert read(pieces, names={"get_time", "get_weather_2"}) == (text, [])
    assert read([text], names={"get_weather"})[1]


def test_calls_that_do_not_count_are_text():
    for pieces in splits(CALL + CALL):
        assert read(pieces, most=1) == (CALL, [PARIS])
    assert read([SEVERAL["a list in a fence"][0]], most=1) == ("", [PARIS])


@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
def test_what_is_no_call_comes_out_unchanged_for_every_split(text):
    for pieces in splits(text):
        assert read(pieces) == (text, []), pieces


def test_nesting_bomb_is_no_call():
    text = OPEN + '{"name": "a", "arguments": ' + '{"x":' * 200_000 + CLOSE
    assert read([text]) == (text, [])


def test_many_open_tags_come_out_unchanged():
    assert read([OPEN * 3000]) == (OPEN * 3000, [])


def test_text_that_cannot_begin_a_call_is_shown_at_once():
    parser = ToolCallParser()
    assert parser.feed("Hello <b") == "Hello <b"
    assert parser.feed(" <tool") == " "
    assert parser.feed("box>") == "<toolbox>"


@pytest.mark.parametrize("bad", ["[]", "5", "{", '{"x": NaN}', '{"x": "\\ud800"}', None, 3, ["a"]])
def test_canonical_json_refuses(bad):
    with pytest.raises(ValueError):
        canonical_json(bad)


def test_canonical_json_is_one_line():
    assert (
        canonical_json('{\n\n  "x" : [1,\n2], "é": "\\u00e9"}')
        == canonical_json({"x": [1, 2], "é": "é"})
        == '{"x": [1, 2], "é": "é"}'
    )


def test_prompt_text():
    assert (
        tag_prompt([WEATHER])
        == """You can call one tool. To call it, answer with nothing but one line:
<tool_call>{"name": "the tool", "arguments": {...}}</tool_call>
Inside the tags stands only JSON. If no tool helps, answer normally.
Available tools:
Tool: get_weather
Purpose: The weather in a city.
Arguments:
- city (string, required): Where.
- unit (string, optional) One of: "celsius", "kelvin".
- days (array of integer, optional)
- place (object, optional)
  - lat (number, optional)
Example: <tool_call>{"name": "get_weather", "arguments": \
{"city": "...", "unit": "celsius", "days": [0], "place": {"lat": 0}}}</tool_call>"""
    )


def test_example_of_a_tool_without_parameters_has_no_arguments():
    text = tag_prompt([{"type": "function", "function": {"name": "now"}}])
    assert text.endswith('Tool: now\nExample: <tool_call>{"name": "now", "arguments": {}}</tool_call>')


def test_prompt_says_what_must_be_called():
    assert "\nYou must call a tool.\n" in tag_prompt([WEATHER], "required")
    assert "\nYou must call the tool get_weather.\n" in tag_prompt(
        [WEATHER], {"type": "function", "function": {"name": "get_weather"}}
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {
            "type": "object",
            "properties": {
                "a": {"type": ["string", "null"]},
                "b": True,
                "c": {"anyOf": [{"type": "string"}]},
            },
        },
        {
            "type": "object",
            "properties": {
                "a": {"type": "array"},
                "b": {"type": "array", "items": True},
                "c": {"enum": "no list"},
            },
        },
        {"properties": [], "required": None},
        {"type": 5},
    ],
)
def test_prompt_takes_any_schema_and_its_example_is_a_call(parameters):
    text = tag_prompt([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    example = text[text.rindex("Example: ") + len("Example: ") :]
    assert read([example])[1]
    for name in parameters["properties"] if isinstance(parameters.get("properties"), dict) else ():
        assert f"- {name} (" in text
        assert name in json.loads(example[len(OPEN) : -len(CLOSE)])["arguments"]

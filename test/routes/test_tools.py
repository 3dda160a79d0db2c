"""The tool prompt and the parser that finds a call in what a model writes."""

import json
import random

import pytest

from routes.chat.tools import CLOSE, OPEN, ToolCall, ToolCallParser, canonical_json, tool_prompt

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


def read(pieces: list[str]) -> tuple[str, ToolCall | None]:
    parser = ToolCallParser()
    return "".join(parser.feed(p) for p in pieces) + parser.finish(), parser.call


def splits(text: str) -> list[list[str]]:
    """Whole, every cut in two, single characters, and some random cuts."""
    rng = random.Random(7)
    cuts = [sorted(rng.sample(range(len(text) + 1), k=min(5, len(text)))) for _ in range(20)]
    several = [[text[a:b] for a, b in zip([0, *c], [*c, len(text)], strict=True)] for c in cuts]
    return [[text], list(text), *([text[:i], text[i:]] for i in range(len(text) + 1)), *several]


# text -> what is shown, and the call
CASES = {
    "call alone": (CALL, "", PARIS),
    "text around": (f"Let me see. {CALL} Done.", "Let me see.  Done.", PARIS),
    "only the first counts": (CALL + CALL, CALL, PARIS),
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
    "begins inside a broken one": (f"<tool_call>oops {CALL}", "<tool_call>oops ", PARIS),
    "after a broken one": (f"<tool_call>oops</tool_call>{CALL}", "<tool_call>oops</tool_call>", PARIS),
    "after an open string": (
        f'<tool_call>{{"name": "x</tool_call> {CALL}',
        '<tool_call>{"name": "x</tool_call> ',
        PARIS,
    ),
}
PLAIN = {
    "no tag": "a < b, <tool is not <tool_calls>",
    "not JSON": "<tool_call>get_weather(Paris)</tool_call> ok",
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "empty name": '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    "name is no string": '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    "arguments are a list": '<tool_call>{"name": "a", "arguments": []}</tool_call>',
    "arguments are text": '<tool_call>{"name": "a", "arguments": "{}"}</tool_call>',
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
        assert read(pieces) == (shown, call), pieces


@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
def test_what_is_no_call_comes_out_unchanged_for_every_split(text):
    for pieces in splits(text):
        assert read(pieces) == (text, None), pieces


def test_nesting_bomb_is_no_call():
    text = OPEN + '{"name": "a", "arguments": ' + '{"x":' * 200_000 + CLOSE
    assert read([text]) == (text, None)


def test_many_open_tags_come_out_unchanged():
    assert read([OPEN * 3000]) == (OPEN * 3000, None)


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
        tool_prompt([WEATHER])
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
    text = tool_prompt([{"type": "function", "function": {"name": "now"}}])
    assert text.endswith('Tool: now\nExample: <tool_call>{"name": "now", "arguments": {}}</tool_call>')


def test_prompt_says_what_must_be_called():
    assert "\nYou must call a tool.\n" in tool_prompt([WEATHER], "required")
    assert "\nYou must call the tool get_weather.\n" in tool_prompt(
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
    text = tool_prompt([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    example = text[text.rindex("Example: ") + len("Example: ") :]
    assert read([example])[1] is not None
    for name in parameters["properties"] if isinstance(parameters.get("properties"), dict) else ():
        assert f"- {name} (" in text
        assert name in json.loads(example[len(OPEN) : -len(CLOSE)])["arguments"]

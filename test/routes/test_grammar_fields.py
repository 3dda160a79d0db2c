"""What the fields that bind an answer make of a request, and what is refused."""

import json

import pytest
from msgspec.structs import replace
from responses_calls import prepare as respond

from routes.anthropic import messages
from routes.http.errors import ApiError
from routes.llama_cpp import infill
from routes.ollama import prepare as ollama
from routes.openai import chat, completions
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.protocol import AnswerHead, GenerateRequest, Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = json.dumps(SCHEMA)
BY_SCHEMA = Grammar("json_schema", JSON)
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
HI = [{"role": "user", "content": "Hi"}]
NAMED = {"type": "function", "function": {"name": "f"}}
CONTINUED = [*HI, {"role": "assistant", "content": "It is"}]


def tool(name: str, strict: bool) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": strict}}


def asked(**fields) -> GenerateRequest:
    model = fields.pop("model", "rwkv7-demo")
    return chat.prepare({"messages": HI, **fields}, model).request


def completed(**fields) -> GenerateRequest:
    return completions.prepare({"prompt": "Hi", **fields}, "rwkv7-demo").request


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"guided_json": SCHEMA}, "json_schema", JSON),
        ({"guided_json": JSON}, "json_schema", JSON),
        ({"guided_json": '{"const": 0.10000000000000001}'}, "json_schema", '{"const": 0.1}'),
        ({"guided_json": '{"maximum": 0.1000000000000000001}'}, "json_schema", '{"maximum": 0.1}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"guided_grammar": "start: A"}, "grammar", "start: A"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", JSON),
        ({"structured_outputs": {"regex": "a", "whitespace": None}}, "regex", "a"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            JSON,
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", JSON),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            JSON,
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", JSON),
        (
            {"response_format": {"type": "json_object", "schema": None, "json_schema": None}},
            "json_schema",
            '{"type": "object"}',
        ),
    ],
)
def test_a_field_is_a_grammar(fields: dict, kind: str, source: str):
    for made in (asked(**fields), completed(**fields)):
        assert made.grammar and (made.grammar.kind, made.grammar.source) == (kind, source)


def messaged(**fields) -> GenerateRequest:
    body = {"messages": HI, "max_tokens": 9, **fields}
    return messages.prepare(body, "rwkv7-demo", FrontendConfig()).request


def ollama_chat(**fields) -> GenerateRequest:
    return ollama.chat({"messages": HI, **fields}, "rwkv7-demo", FrontendConfig()).request


def ollama_text(**fields) -> GenerateRequest:
    return ollama.text({"prompt": "Hi", **fields}, "rwkv7-demo", FrontendConfig()).request


def infilled(**fields) -> GenerateRequest:
    return infill.prepare({"input_prefix": "Hi", **fields}, "rwkv7-demo").request


@pytest.mark.parametrize(
    ("prepare", "fields", "grammar"),
    [
        (messaged, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, BY_SCHEMA),
        (messaged, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, BY_SCHEMA),
        (messaged, {"guided_json": SCHEMA}, BY_SCHEMA),
        (messaged, {"output_config": {"effort": "low", "format": None}}, None),
        (ollama_chat, {"format": SCHEMA}, BY_SCHEMA),
        (ollama_chat, {"format": "json"}, Grammar("json_schema", '{"type": "object"}')),
        (ollama_chat, {"format": {}}, Grammar("json_schema", "{}")),
        (ollama_chat, {"format": ""}, None),
        (ollama_chat, {"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
        (ollama_text, {"format": SCHEMA}, BY_SCHEMA),
        (ollama_text, {"format": SCHEMA, "raw": True}, BY_SCHEMA),
        (ollama_text, {"format": SCHEMA, "suffix": "."}, BY_SCHEMA),
        (infilled, {"json_schema": SCHEMA}, BY_SCHEMA),
        (infilled, {"grammar": "root ::= [0-9]+"}, Grammar("grammar", "root ::= [0-9]+")),
        (infilled, {"grammar": "", "json_schema": None}, None),
        (infilled, {"guided_regex": "a+"}, Grammar("regex", "a+")),
    ],
)
def test_other_clients_have_fields_of_their_own(prepare, fields: dict, grammar: Grammar | None):
    made = prepare(**fields).grammar
    assert (made and replace(made, head=AnswerHead(), field="")) == grammar
    named = {key for key in fields if key not in ("raw", "suffix")}
    assert made is None or made.field.split(".")[0] in named


def test_the_count_of_a_message_s_tokens_needs_no_grammar():
    body = {"messages": HI, "guided_regex": "a+"}
    assert messages.count_tokens(body, "rwkv7-demo", FrontendConfig()).request.grammar is None


def test_a_tool_of_a_message_is_demanded_and_strict_as_in_a_chat():
    theirs = {"name": "f", "input_schema": SCHEMA, "strict": True}
    for choice, same in (("any", "required"), ("auto", "auto"), ("none", "none")):
        made = messaged(tools=[theirs], tool_choice={"type": choice})
        assert same_calls(made, asked(tools=[tool("f", True)], tool_choice=same))
    named = {"type": "function", "function": {"name": "f"}}
    made = messaged(tools=[theirs], tool_choice={"type": "tool", "name": "f"})
    assert made.grammar and same_calls(made, asked(tools=[tool("f", True)], tool_choice=named))


def same_calls(made: GenerateRequest, other: GenerateRequest) -> bool:
    """Whether two requests bind the same calls, whose fields may have other names."""
    sources = [each.grammar and each.grammar.source for each in (made, other)]
    return sources[0] == (sources[1] and sources[1].replace("function.parameters", "input_schema"))


def test_any_tool_is_demanded_by_mistrals_name_of_it():
    made = asked(tools=[tool("f", True)], tool_choice="any")
    same = asked(tools=[tool("f", True)], tool_choice="required")
    assert (made.prompts, made.grammar) == (same.prompts, same.grammar) and made.grammar
    with pytest.raises(ApiError, match=r"^tool_choice: any is only allowed when tools are given"):
        asked(tool_choice="any")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA, "response_format": FORMAT},
        {"guided_json": JSON, "structured_outputs": {"json": SCHEMA}},
        {"guided_grammar": "start: A", "structured_outputs": {"grammar": "start: A"}},
        {"guided_json_object": True, "response_format": {"type": "json_object"}},
    ],
)
def test_the_same_grammar_in_two_fields_is_one(fields: dict):
    both, one = asked(**fields), asked(**dict([next(iter(fields.items()))]))
    assert both.grammar == one.grammar is not None


@pytest.mark.parametrize(
    ("prepare", "fields"),
    [
        (asked, {"response_format": {"type": "json_object"}}),
        (asked, {"guided_json_object": True, "response_format": {"type": "json_object"}}),
        (lambda **f: respond(**f).request, {"text": {"format": {"type": "json_object"}}}),
        (ollama_chat, {"format": "json"}),
    ],
)
def test_a_schema_of_an_object_says_more_than_that_it_is_one(prepare, fields: dict):
    """Some clients ask for any object by themselves, and their users for one by a schema."""
    made = prepare(guided_json=SCHEMA, **fields).grammar
    assert made == prepare(guided_json=SCHEMA).grammar


def test_without_a_field_there_is_none():
    plain = [asked(), completed(), respond().request, asked(response_format={"type": "text"})]
    plain.append(asked(tools=[tool("f", False)]))
    assert [made.grammar for made in plain] == [None] * 5


def test_a_format_of_a_response_is_a_grammar():
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    assert respond(text={"format": form}).request.grammar == replace(BY_SCHEMA, field="text.format")
    with pytest.raises(ApiError, match=r"^text\.format: guided_regex says"):
        respond(text={"format": form}, guided_regex="a")
    loose = {"type": "json_object", "schema": SCHEMA}
    bound = respond(text={"format": loose}).request.grammar
    assert bound and bound.source == JSON
    with pytest.raises(ApiError, match=r"^text\.format: a schema is given"):
        respond(text={"format": {"type": "text", "schema": SCHEMA}})
    told = respond(text={"format": form}).reply.response["text"]["format"]
    assert (told["schema"], told["strict"]) == (SCHEMA, False)


@pytest.mark.parametrize(
    ("fields", "head"),
    [
        ({}, AnswerHead()),
        ({"enable_think": True}, AnswerHead(rest=">", closes="</think>")),
        ({"think_type": "preferChinese"}, AnswerHead(closes="</think>")),
        ({"think_type": "none"}, AnswerHead(space=True)),
        ({"messages": CONTINUED}, AnswerHead()),
        ({"model": "rwkv7-g1c-1.5b"}, AnswerHead(rest=">")),
    ],
)
def test_what_comes_before_the_answer_follows_the_template(fields: dict, head: AnswerHead):
    made = asked(guided_regex="a", **fields)
    assert made.grammar and made.grammar.head == head


def test_the_grammar_takes_the_place_of_the_template_s_stops():
    assert asked().stop_strings and not asked(guided_regex="a").stop_strings
    own = asked(guided_regex="a", stop=["x"]).late_stops
    assert own and own.strings == ["x"]


def by(schema: dict, number: int = 0, leniency: int = 0) -> dict:
    return {"field": f"tools[{number}].function.parameters", "schema": schema, "leniency": leniency}


def calls(made: GenerateRequest) -> dict:
    assert made.grammar
    return json.loads(made.grammar.source)


def test_a_demanded_call_goes_on_behind_its_opening():
    made = asked(tools=[tool("f", True), tool("g", False)], tool_choice="required", parallel_tool_calls=False)
    found = calls(made)
    assert made.prompts[0].endswith('<tool_call>{"name": "')
    assert found["first"] == [
        ['f", "arguments":', by(SCHEMA), "}</tool_call>"],
        ['g", "arguments":', by(SCHEMA, 1, leniency=1), "}</tool_call>"],
    ]
    assert not found["more"] and not found["until"]


def test_behind_a_thought_all_of_the_call_is_bound():
    choice = {"type": "function", "function": {"name": "f"}}
    made = asked(tools=[tool("f", True)], tool_choice=choice, enable_think=True)
    assert calls(made)["first"] == [['<tool_call>{"name": "f", "arguments":', by(SCHEMA), "}</tool_call>"]]
    assert made.grammar and made.grammar.head.closes


@pytest.mark.parametrize("strict", [False, True])
def test_a_function_without_parameters_takes_no_arguments(strict: bool):
    """OpenAI has it so; an empty schema allows any arguments."""
    bare, free = ({"name": "f", "strict": strict, **more} for more in ({}, {"parameters": {}}))
    schemas = []
    for function in (bare, free):
        made = asked(tools=[{"type": "function", "function": function}], tool_choice="required")
        schemas.append(calls(made)["first"][0][1]["schema"])
    assert schemas == [{"type": "object", "properties": {}}, {"type": "object"}]


def test_a_strict_tool_binds_what_follows_the_beginning_of_a_call():
    made = asked(tools=[tool("f", True)])
    assert calls(made)["until"] == '<tool_call>{"name": ' and made.stop_strings
    assert calls(made)["first"] == [['"f", "arguments":', by(SCHEMA), "}</tool_call>"]]
    free = calls(asked(tools=[tool("f", True), tool("g", False)]))["first"][1]
    assert free[1] == by({"type": "object"}, 1, leniency=1)


THEIRS = {"name": "f", "input_schema": SCHEMA}
FLAT = {"type": "function", "name": "f", "parameters": SCHEMA}
TEXT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
OUTPUT = {"format": {"type": "json_schema", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("prepare", "fields", "answer"),
    [
        (asked, {"tools": [tool("f", False)], "response_format": FORMAT}, "response_format"),
        (asked, {"tools": [tool("f", False)], "guided_json": SCHEMA}, "guided_json"),
        (lambda **f: respond(**f).request, {"tools": [FLAT], "text": TEXT}, "text.format"),
        (messaged, {"tools": [THEIRS], "output_config": OUTPUT}, "output_config.format"),
        (ollama_chat, {"tools": [tool("f", False)], "format": SCHEMA}, "format"),
    ],
)
def test_a_call_may_come_in_place_of_a_bound_answer(prepare, fields: dict, answer: str):
    """Each is bound by its own schema, and a tool need not be strict for that."""
    made = prepare(**fields)
    found = calls(made)
    assert found["answer"] == {"kind": "json_schema", "source": JSON, "field": answer}
    for begin, arguments, end in (*found["first"], *found["more"]):
        assert (begin, end) == ('<tool_call>{"name": "f", "arguments":', "}</tool_call>")
        assert (arguments["schema"], arguments["leniency"]) == (SCHEMA, 1)
    assert found["first"] and found["more"] and not found["until"] and not made.stop_strings


@pytest.mark.parametrize(
    ("choice", "answer"), [("auto", True), ("none", True), ("required", False), (NAMED, False)]
)
def test_a_bound_answer_may_come_where_no_call_must(choice: object, answer: bool):
    made = asked(tools=[tool("f", False)], tool_choice=choice, guided_regex="a+")
    assert made.grammar and (made.grammar.kind == "regex") == (choice == "none")
    if choice != "none":
        assert ("answer" in calls(made)) == answer


def test_one_call_may_come_where_several_may_not():
    made = asked(tools=[tool("f", False)], guided_regex="a+", parallel_tool_calls=False)
    assert calls(made)["first"] and not calls(made)["more"]


def test_a_text_that_is_continued_is_the_bound_answer():
    made = asked(messages=CONTINUED, tools=[tool("f", False)], guided_regex="a+")
    assert made.grammar and made.grammar.kind == "regex"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, "guided_json"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        ({"guided_json": '{"const": NaN}'}, "guided_json"),
        ({"guided_json": '{"minimum": 1e999}'}, "guided_json"),
        ({"guided_json": '{"items": {"const": 0.1000000000000000001}}'}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": [SCHEMA]}}, "response_format"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": SCHEMA}}},
            "response_format",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"guided_json": {"const": 1}, "structured_outputs": {"json": {"const": True}}},
            "structured_outputs.json",
        ),
        ({"guided_json": {"type": "array"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {"$ref": "#"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool("f", "yes")]}, "tools[0].function.strict"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_a": -1}, "top_a"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict, param: str):
    with pytest.raises(ApiError) as refused:
        asked(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)

"""Functions in namespaces, on Responses: the model knows them by one name, and clients by two."""

import json

import pytest
from responses_calls import CITY, pieces, prepare, prompt_of, streamed, whole

from routes.http.errors import ApiError
from routes.responses.tools import MAX_TOOLS


def function(name: str, **fields) -> dict:
    return {"type": "function", "name": name, "parameters": CITY, "strict": False, **fields}


def space(name: str, *tools: dict, description: str = "What it is for.") -> dict:
    return {"type": "namespace", "name": name, "description": description, "tools": list(tools)}


AGENTS = space("agents", function("spawn", description="Begin one."), function("close"))
DOCS = space("docs", function("close"), {"type": "custom", "name": "patch"})
TOOLS = [function("look"), AGENTS, {"type": "web_search"}, DOCS]
CALL = '<tool_call>{"name": "agents.close", "arguments": {"city": "Paris"}}</tool_call>'
CALLED = {
    "type": "function_call",
    "call_id": "call_1",
    "namespace": "agents",
    "name": "close",
    "arguments": '{"city": "Paris"}',
}


def test_the_model_reads_all_functions_by_their_whole_names():
    prompt = prompt_of(tools=TOOLS)
    names = [line.removeprefix("Tool: ") for line in prompt.splitlines() if line.startswith("Tool: ")]
    assert names == ["look", "agents.spawn", "agents.close", "docs.close"]
    assert "Tool: agents.spawn\nPurpose: What it is for. Begin one.\n" in prompt


@pytest.mark.parametrize("size", [1, 7, 999])
def test_a_call_names_its_namespace_and_its_function_apart(size: int):
    (item,) = whole(prepare(tools=TOOLS), pieces(CALL, size)).output
    assert (item.type, item.namespace, item.name) == ("function_call", "agents", "close")
    events = streamed(prepare(tools=TOOLS, stream=True), pieces(CALL, size))
    items = [event["item"] for event in events if event["type"].startswith("response.output_item.")]
    assert [(each["namespace"], each["name"]) for each in items] == [("agents", "close")] * 2
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "close"


def test_other_calls_have_none():
    call = CALL.replace("agents.close", "look")
    (item,) = whole(prepare(tools=TOOLS), pieces(call, 5)).output
    assert (item.name, item.namespace) == ("look", None)


def test_a_call_of_an_earlier_turn_is_read_as_the_model_wrote_it():
    made = prepare(input=[CALLED, {"type": "function_call_output", "call_id": "call_1", "output": "done"}])
    assert f"Assistant: {CALL}\n\nTool: done" in made.request.prompts[0]
    assert made.document().input[0].items() >= CALLED.items()


def test_the_reply_lists_what_was_taken_and_names_the_rest():
    made = prepare(tools=TOOLS)
    reply = whole(made, pieces("Hi", 5))
    assert [(tool.type, tool.name) for tool in reply.tools] == [
        ("function", "look"),
        ("namespace", "agents"),
        ("namespace", "docs"),
    ]
    assert [tool.name for tool in reply.tools[2].tools] == ["close"]
    assert made.reply.ignored == ["tools[2] (web_search)", "tools[3].tools[1] (custom)"]


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"name": "spawn"}, "agents.spawn"),
        ({"name": "agents.close"}, "agents.close"),
        ({"name": "close", "namespace": "docs"}, "docs.close"),
        ({"name": "look"}, "look"),
    ],
)
def test_a_function_is_demanded_by_a_name_that_no_other_has(choice: dict, name: str):
    named = {"type": "function", **choice}
    end = f'{{"name": "{name}", "arguments":'
    assert prompt_of(tools=TOOLS, tool_choice=named).endswith(end)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    made = prepare(tools=TOOLS, tool_choice=allowed).request
    assert made.prompts[0].count("Tool: ") == 1 and f"Tool: {name}\n" in made.prompts[0]


@pytest.mark.parametrize("choice", [{"name": "close"}, {"name": "spawn", "namespace": "docs"}, {"name": "x"}])
def test_a_name_that_several_or_none_have_is_refused(choice: dict):
    with pytest.raises(ApiError, match=r"^tool_choice\.name: input should be the name of one of the tools"):
        prepare(tools=TOOLS, tool_choice={"type": "function", **choice})


def test_a_schema_is_named_by_its_place():
    strict = space("agents", {"type": "custom"}, function("close", strict=True))
    grammar = prepare(tools=[function("look"), strict], tool_choice="required").request.grammar
    assert grammar
    fields = [call[1]["field"] for call in json.loads(grammar.source)["first"]]
    assert fields == ["tools[0].parameters", "tools[1].tools[1].parameters"]


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ([function("a.b"), space("a", function("b"))], r"tools\[1\]\.tools\[0\]\.name"),
        ([space("a", function("b")), space("a", function("b"))], r"tools\[0\]\.tools\[0\]\.name"),
        ([space(f"s{i}", *[function(f"f{j}") for j in range(43)]) for i in range(3)], "tools"),
    ],
)
def test_functions_that_cannot_be_told_apart_and_too_many_are_refused(tools: list, place: str):
    assert MAX_TOOLS == 128
    with pytest.raises(ApiError, match=rf"^{place}: "):
        prepare(tools=tools)

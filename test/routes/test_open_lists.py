"""Members of lists that a server may not know: left out, named in a header, refused where demanded."""

import httpx
import pytest
from frontend_process import PASSWORD, FrontendProcess

from routes.anthropic import messages
from routes.http.errors import ApiError
from routes.http.open_lists import MOST_NAMED, as_header
from routes.ollama import prepare as ollama
from routes.openai import chat
from routes.responses import prepare as responses
from routes.responses.schemas import ResponsesBody
from rwkv_batch.config import FrontendConfig

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
LOOK = {"name": "look", "parameters": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]
SETTINGS = FrontendConfig(chat_template="g1")
# By route: a tool that it takes, such as other servers have, and a demand for one of those.
TOOLS = {
    "/openai/v1/chat/completions": (
        {"type": "function", "function": LOOK},
        [{"type": "custom", "custom": {"name": "patch"}}, {"type": "web_search", "web_search": {}}],
        {"type": "custom", "custom": {"name": "patch"}},
    ),
    "/v1/responses": (
        {"type": "function", **LOOK},
        [
            {"type": "mcp", "server_label": "docs", "server_url": "http://127.0.0.1"},
            {"type": "web_search"},
        ],
        {"type": "web_search"},
    ),
    "/v1/messages": (
        {"name": "look", "input_schema": SCHEMA},
        [
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "mcp_toolset", "mcp_server_name": "x"},
        ],
        {"type": "tool", "name": "web_search"},
    ),
    "/api/chat": ({"type": "function", "function": LOOK}, [{"type": "browser"}, {"type": "x" * 99}], None),
}


def body_of(path, **fields):
    if path == "/v1/responses":
        return {"input": "Hi"} | fields
    return {"messages": HI, "max_tokens": 9, "stream": False, "model": "rwkv7"} | fields


def made(path, **fields):
    """The request for the engine and the reply."""
    body = body_of(path, **fields)
    if path == "/v1/responses":
        request, reply, _ = responses.prepare(ResponsesBody.from_json(body), "m", None, SETTINGS)
        return request, reply
    prepare = {"/v1/messages": messages.prepare, "/api/chat": ollama.chat}.get(path, chat.prepare)
    prepared = prepare(body, "m", SETTINGS)
    return prepared.request, prepared.reply


@pytest.mark.parametrize("path", TOOLS)
def test_tools_that_are_not_known_are_left_out_and_named(front: FrontendProcess, path):
    known, unknown, _ = TOOLS[path]
    reply = front.http.post(
        path,
        json=body_of(path, tools=[unknown[0], known, unknown[1]]),
        headers={"authorization": f"Bearer {PASSWORD}"},
    )
    assert reply.status_code == 200, reply.text
    kinds = [each["type"][:40] for each in unknown]
    assert reply.headers["x-ignored"] == f"tools[0] ({kinds[0]}), tools[2] ({kinds[1]})"
    assert "x-ignored" in reply.headers["access-control-expose-headers"]
    (prompt,) = front.engine.requests[-1].prompts
    (alone,) = made(path, tools=[known])[0].prompts
    assert prompt == alone and "Tool: look" in prompt
    if path == "/v1/responses":
        assert [tool["name"] for tool in reply.json()["tools"]] == ["look"]


@pytest.mark.parametrize("path", TOOLS)
def test_nothing_is_named_where_nothing_is_left_out(front: FrontendProcess, path):
    reply: httpx.Response = front.http.post(
        path, json=body_of(path, tools=[TOOLS[path][0]]), headers={"authorization": f"Bearer {PASSWORD}"}
    )
    assert reply.status_code == 200 and "x-ignored" not in reply.headers


@pytest.mark.parametrize("path", [path for path, (*_, choice) in TOOLS.items() if choice])
def test_a_choice_that_needs_one_that_is_left_out_is_refused(path):
    known, unknown, choice = TOOLS[path]
    for tools in (unknown, [known, *unknown]):
        with pytest.raises(ApiError, match=r"^tool_choice") as refused:
            made(path, tools=tools, tool_choice=choice)
        assert refused.value.status == 400
    with pytest.raises(ApiError, match=r"^tool_choice: "):
        made(path, tools=unknown, tool_choice={"type": "any"} if path == "/v1/messages" else "required")


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("tool", [5, {"type": 7}, {"type": "function"}])
def test_what_is_no_tool_is_refused_at_its_place(path, tool):
    known, unknown, _ = TOOLS[path]
    with pytest.raises(ApiError, match=r"^`?tools\[2\]"):
        made(path, tools=[unknown[0], known, tool])


@pytest.mark.parametrize("path", list(TOOLS)[:3])
def test_a_schema_is_named_by_its_place_in_the_request(path):
    known, unknown, _ = TOOLS[path]
    choice = {"type": "any"} if path == "/v1/messages" else "required"
    grammar = made(path, tools=[*unknown, known], tool_choice=choice)[0].grammar
    assert "tools[2]." in grammar.source and "tools[0]." not in grammar.source


def test_items_and_what_to_include_are_left_out_of_a_response_too():
    items = [*HI, {"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"type": "compaction"}]
    request, reply = made("/v1/responses", input=items, include=["reasoning.encrypted_content", "all.of_it"])
    assert request.prompts == made("/v1/responses")[0].prompts
    assert reply.ignored == ["input[1] (web_search_call)", "input[2] (compaction)", "include[1] (all.of_it)"]
    with pytest.raises(ApiError, match=r"^input: this holds no text"):
        made("/v1/responses", input=items[1:])


def test_calls_of_tools_that_are_not_known_are_left_out_of_a_chat():
    path = "/openai/v1/chat/completions"
    call = {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = [{"id": "a", "type": "custom", "custom": {"name": "patch", "input": "x"}}, call]
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
    request, reply = made(path, messages=[*HI, turn, *HI])
    assert request.prompts == made(path, messages=[*HI, turn | {"tool_calls": [call]}, *HI])[0].prompts
    assert reply.ignored == ["messages[1].tool_calls[0] (custom)"]
    with pytest.raises(ApiError, match=r"^messages\[1\]\.tool_calls\[1\]"):
        made(path, messages=[*HI, turn | {"tool_calls": [calls[0], {"type": "function"}]}])


def test_blocks_of_tools_that_anthropics_servers_run_are_left_out():
    said = [
        {"type": "text", "text": "Let me see."},
        {"type": "server_tool_use", "id": "s", "name": "web_search"},
    ]
    turns = [*HI, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    edits = [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]
    request, reply = made("/v1/messages", messages=turns, context_management={"edits": edits})
    assert "Assistant: Let me see.\n\nUser: And?" in request.prompts[0]
    assert reply.ignored == [
        "messages[1].content[1] (server_tool_use)",
        "context_management.edits[0] (clear_tool_uses_20250919)",
    ]
    turns[1]["content"] = [{"type": "image", "source": {}}]
    with pytest.raises(ApiError, match="reads text only"):
        made("/v1/messages", messages=turns)


def test_a_tool_that_only_code_may_call_is_left_out():
    tool = {"name": "look", "input_schema": SCHEMA, "allowed_callers": ["code_execution_20250825"]}
    request, reply = made("/v1/messages", tools=[tool, tool | {"allowed_callers": ["direct", "code"]}])
    assert request.prompts[0].count("Tool: look") == 1 and reply.ignored == ["tools[0] (look)"]


def test_a_header_holds_names_that_can_stand_there():
    assert as_header(["tools[0] (a\r\nb, é)"]) == "tools[0] (a??b? ?)"
    assert as_header([f"tools[{i}] (x)" for i in range(MOST_NAMED + 3)]).endswith(", and 3 more")

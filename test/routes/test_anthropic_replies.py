"""Messages without a server: what the model reads of them, and what its row becomes for a client.

Everything that is sent is validated with the SDK's types.
"""

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from routes.anthropic import messages
from routes.anthropic.blocks import InputMessage, to_messages
from routes.http.errors import ApiError
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import Accepted, RowDelta

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
FORMAT = {"format": {"type": "json_schema", "schema": CITY}}
TOOL_USE = {"type": "tool_use", "id": "t", "name": "n", "input": {}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}
TOOL = {"name": "get_weather", "input_schema": CITY}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
MODEL = "rwkv7-test"
HI = [{"role": "user", "content": "Hi"}]
HEAD = "Assistant: <think>\n</think>\n"
EVENT = TypeAdapter(RawMessageStreamEvent)


def prepare(**fields):
    body = {"model": "any", "max_tokens": 50, "messages": HI, **fields}
    return messages.prepare(body, MODEL, FrontendConfig(chat_template="g1"))


def prompt_of(**fields) -> str:
    (prompt,) = prepare(**fields).request.prompts
    return prompt


def job_of(prepared, prompt_tokens=9, cached=0) -> Job:
    job = Job(prepared.request, lambda _: None)
    job.acceptance = Accepted("", [prompt_tokens], [cached])
    return job


def whole(prepared, *deltas: RowDelta, **tokens) -> Message:
    body = prepared.reply.whole(job_of(prepared, **tokens), list(deltas))
    return Message.model_validate(json.loads(json.dumps(body)), strict=True)


def streamed(prepared, deltas: list[RowDelta]) -> list[dict]:
    """All events, each delta in a batch of its own, checked."""
    job, reply = job_of(prepared), prepared.reply
    events = reply.first(job) + [e for delta in deltas for e in reply.events([delta])] + reply.last(job)
    for event in events:
        assert reply.frame(event).startswith(f"event: {event['type']}\ndata: ".encode())
        if event["type"] != "ping":
            EVENT.validate_json(json.dumps(event), strict=True)
    return events


def accumulated(events: list[dict]) -> dict:
    """What a client that follows a stream ends up with."""
    message = dict(events[0]["message"])
    content: list[dict] = []
    arguments = ""
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(content)
                content.append(dict(event["content_block"]))
                arguments = ""
            case "content_block_delta":
                assert event["index"] == len(content) - 1
                kind, delta = event["delta"]["type"], event["delta"]
                if kind == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    field = kind.removesuffix("_delta")
                    content[-1][field] += delta[field]
            case "content_block_stop":
                if arguments:
                    content[-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    return message | {"content": content}


def without_ids(message: dict) -> dict:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return {k: v for k, v in message.items() if k != "id"} | {"content": content}


def pieces(text: str, size: int, reason: str) -> list[RowDelta]:
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return [*(RowDelta(0, part, len(part)) for part in parts), RowDelta(0, "", 0, reason)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "reason", "kinds", "stop_reason"),
    [
        (f">\nHm.\n</think>\nLook: {CALL}\n", "stop", ["thinking", "text", "tool_use"], "tool_use"),
        (f">Hm.</think>{CALL}\n{CALL}", "stop", ["thinking", "tool_use", "tool_use"], "tool_use"),
        (">So <b>so</thin k</think>\nNo <tool> here. ", "stop", ["thinking", "text"], "end_turn"),
        (">never ends <tool_call>", "length", ["thinking"], "max_tokens"),
        ("", "stop", [], "end_turn"),
    ],
)
def test_a_stream_holds_what_the_whole_reply_says(text, reason, kinds, stop_reason, size):
    fields = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = whole(prepare(**fields), RowDelta(0, text, len(text), reason))
    assert [block.type for block in message.content] == kinds
    assert (message.stop_reason, message.stop_sequence) == (stop_reason, None)
    got = accumulated(streamed(prepare(stream=True, **fields), pieces(text, size, reason)))
    assert without_ids(got) == without_ids(message.model_dump(exclude_unset=True))
    for block in message.content:
        if block.type == "tool_use":
            assert (block.name, block.input) == ("get_weather", {"city": "Paris"})


def test_a_thought_can_be_left_out_and_keeps_its_signature():
    def thought(display):
        thinking = {"type": "adaptive", "display": display}
        return whole(prepare(thinking=thinking), RowDelta(0, ">Hm.</think>Yes", 9, "stop")).content

    shown, omitted = thought("summarized"), thought("omitted")
    assert (shown[0].thinking, omitted[0].thinking) == ("Hm.", "")
    assert shown[0].signature == omitted[0].signature != ""
    assert shown[1] == omitted[1]


def test_the_stop_sequence_that_was_found_is_named():
    prepared = prepare(stop_sequences=["END", "STOP"], stop=["own"])
    assert set(prepared.request.late_stops.strings) == {"END", "STOP", "own"}
    found = whole(prepared, RowDelta(0, "Hi", 1, "stop", stop="STOP"))
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "STOP")
    turn = whole(prepare(stop_sequences=["END"]), RowDelta(0, "Hi", 1, "stop", stop="\n\nUser:"))
    assert (turn.stop_reason, turn.stop_sequence) == ("end_turn", None)


def test_usage_parts_cached_tokens_from_those_that_were_computed():
    usage = whole(prepare(), RowDelta(0, "Hi", 3, "stop"), prompt_tokens=9, cached=4).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 4, 3)


def test_a_stream_that_fails_ends_with_an_error_event():
    reply = prepare(stream=True).reply
    event = reply.failure("The engine failed.", 500)
    assert event == {"type": "error", "error": {"type": "api_error", "message": "The engine failed."}}
    assert reply.frame(event).startswith(b"event: error\n") and reply.done == b""


def test_blocks_become_the_turns_of_a_conversation():
    result = {"type": "tool_result", "tool_use_id": "t"}
    conversation = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "t", "name": "get_weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                result | {"content": [{"type": "text", "text": "sunny"}]},
                result | {"content": "no such city", "is_error": True},
                result,
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "user", "content": "Tell me."},
    ]
    read = to_messages(TypeAdapter(list[InputMessage]).validate_python(conversation))
    assert [(m.role, m.text) for m in read] == [
        ("user", "Weather?"),
        ("assistant", "Let me see."),
        ("tool", "sunny"),
        ("tool", "Error: no such city"),
        ("tool", ""),
        ("user", "So?\nTell me."),
    ]
    assert read[1].tool_calls == [("get_weather", '{"city": "Köln"}')]


def test_the_prompt_is_that_of_the_same_chat():
    blocks = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    assert prompt_of(system=blocks) == f"System: Be brief.\nBe kind.\n\nUser: Hi\n\n{HEAD}"
    assert prompt_of(system="Be brief.") == f"System: Be brief.\n\nUser: Hi\n\n{HEAD}"
    begun = [*HI, {"role": "assistant", "content": "The answer is ("}]
    assert prompt_of(messages=begun) == "User: Hi\n\nAssistant: The answer is ("
    assert prompt_of(thinking={"type": "enabled", "budget_tokens": 2048}).endswith("Assistant: <think")
    assert prompt_of(thinking={"type": "disabled"}) == f"User: Hi\n\n{HEAD}"


@pytest.mark.parametrize(
    ("choice", "ends_with"),
    [
        ({"type": "auto"}, HEAD),
        ({"type": "any"}, HEAD + '<tool_call>{"name": "'),
        ({"type": "tool", "name": "get_weather"}, HEAD + '<tool_call>{"name": "get_weather", "arguments":'),
    ],
)
def test_a_tool_choice_opens_the_call(choice, ends_with):
    assert prompt_of(tools=[TOOL], tool_choice=choice).endswith(ends_with)


def test_tools_are_offered_unless_none_may_be_used():
    assert "get_weather" in prompt_of(tools=[TOOL])
    unused = prepare(tools=[TOOL], tool_choice={"type": "none"})
    assert "get_weather" not in unused.request.prompts[0]
    assert whole(unused, RowDelta(0, CALL, 9, "stop")).content[0].type == "text"
    once = prepare(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    calls = [b for b in whole(once, RowDelta(0, CALL + CALL, 9, "stop")).content if b.type == "tool_use"]
    assert len(calls) == 1


PAGE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "It is blue."}}
PARTS = {
    "type": "document",
    "source": {"type": "content", "content": [{"type": "text", "text": "It is red."}]},
}
FOUND = {
    "type": "search_result",
    "source": "a/b",
    "title": "Seas",
    "content": [{"type": "text", "text": "Salt."}],
}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            PAGE | {"title": "Sky", "context": "A poem.", "citations": {"enabled": False}},
            "Sky\nA poem.\nIt is blue.",
        ),
        (PAGE, "It is blue."),
        (PARTS, "It is red."),
        (FOUND | {"cache_control": {"type": "ephemeral"}}, "Seas\na/b\nSalt."),
    ],
)
def test_documents_of_text_are_read(block: dict, text: str):
    """In messages and in results of tools."""
    question = {"type": "text", "text": "Why?"}
    assert prompt_of(messages=[{"role": "user", "content": [block, question]}]).startswith(
        f"User: {text}\nWhy?\n\n"
    )
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    assert f"Tool: {text}\n\n" in prompt_of(messages=[{"role": "user", "content": [result]}])


def test_a_limit_of_0_generates_nothing():
    prepared = prepare(max_tokens=0)
    assert prepared.request.max_tokens == 0
    message = whole(prepared, RowDelta(0, "", 0, "length"))
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    demanded = prepare(max_tokens=0, tools=[TOOL], tool_choice={"type": "any"})
    assert whole(demanded, RowDelta(0, "", 0, "length")).content == []


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": " "}]}, "messages: at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": 5}]},
         "messages[0].content: input should be a string or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0].type: this server reads text only"),
        ({"messages": [{"role": "user", "content": [PAGE | {"source": {"type": "base64", "data": ""}}]}]},
         "messages[0].content[0].source.type: input should be 'text' or 'content'"),
        ({"messages": [{"role": "user", "content": [PAGE | {"citations": {"enabled": True}}]}]},
         "messages[0].content[0].citations.enabled: this server does not cite"),
        ({"messages": [{"role": "user", "content": [FOUND | {"content": [5]}]}]},
         "messages[0].content[0].content[0]: input should be an object"),
        ({"messages": [{"role": "assistant", "content": [PAGE]}]},
         "messages[0].content[0].type: this server reads text only"),
        ({"messages": [{"role": "user", "content": [TOOL_RESULT]}]},
         "messages[0].content[0].content[0].type: this server reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: "),
        ({"messages": [{"role": "user", "content": [TOOL_USE]}]},
         "messages[0].content[0].type: input should be 'text' or 'document' or 'search_result' or"),
        ({"max_tokens": -1}, "max_tokens: "),
        ({"max_tokens": None}, "max_tokens: this field is required"),
        ({"temperature": "warm"}, "temperature: "),
        ({"system": [{"type": "image"}]}, "system[0].type: this server reads text only"),
        ({"tools": [TOOL | {"type": "function"}]}, "tools[0].type: input should be 'custom'"),
        ({"tools": [TOOL | {"strict": "yes!"}]}, "tools[0].strict: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: this field is required"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name: "),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: "),
        ({"thinking": {"type": "enabled"}, "think_type": "fast"}, "thinking.type: this contradicts"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type: "),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: "),
        ({"output_config": FORMAT, "guided_regex": "a"}, "output_config.format: guided_regex says"),
        ({"output_format": {"type": "json_object"}}, "output_format.type: "),
        ({"output_config": FORMAT, "output_format": FORMAT["format"] | {"schema": {}}},
         "output_format: output_config.format says"),
        ({"response_format": {"type": "json_object"}}, "response_format: "),
        ({"return_token_ids": True}, "return_token_ids: "),
        ({"mcp_servers": [{}]}, "mcp_servers: "),
        ({"container": "c"}, "container: "),
        ({"session_id": "s"}, "session_id: "),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(fields, sentence):
    with pytest.raises(ApiError) as refused:
        prepare(**fields)
    assert refused.value.status == 400 and refused.value.message.startswith(sentence)


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
        {"output_config": {"effort": "max"}, "speed": None, "container": None, "mcp_servers": []},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"tools": [TOOL | {"type": "custom", "strict": False, "cache_control": {"type": "ephemeral"}}]},
        {"tools": [TOOL | {"allowed_callers": ["direct"], "eager_input_streaming": True}]},
        {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "alpha_presence": 0.5, "use_prefix_cache": False},
    ],
)
def test_hints_and_defaults_of_clients_are_taken(fields):
    assert prepare(**fields).request.max_tokens == 50

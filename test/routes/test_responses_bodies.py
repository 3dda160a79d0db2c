"""Responses without a server: what a request becomes for the engine, what its rows become for a client, and
what is refused.

Everything that is sent is validated with the SDK's types.
"""

import json
from functools import partial

import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from routes.http.errors import ApiError
from routes.http.replies import RowResult
from routes.http.stream import EventStream, SlowJson
from routes.responses import prepare as preparing
from routes.responses import schemas
from routes.responses.prepare import decode_document
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import Accepted, Failed, Progress, RowDelta, Sampling, SessionTurn

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
MODEL = "rwkv7-test"
ANSWER = "Assistant: <think>\n</think>\n"
PREVIOUS = "resp_" + "0" * 32

EVENT = TypeAdapter(ResponseStreamEvent)


def prepare(previous=None, **fields):
    return preparing.prepare(
        schemas.ResponsesBody.from_json({"model": "any", "input": "Hi", **fields}), MODEL, previous
    )


def prompt_of(previous=None, **fields) -> str:
    (prompt,) = prepare(previous, **fields).request.prompts
    return prompt


def job_of(prepared, prompt_tokens=5, cached=0) -> Job:
    job = Job(prepared.request, lambda _: None)
    job.prompt_tokens, job.cached_tokens = [prompt_tokens], [cached]
    return job


def pieces(text: str, size: int, reason: str = "stop") -> list[RowDelta]:
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return [*(RowDelta(0, part, len(part)) for part in parts), RowDelta(0, "", 0, reason)]


def streamed(prepared, deltas, **tokens) -> list[dict]:
    """All events, each delta in a batch of its own, checked."""
    job, reply = job_of(prepared, **tokens), prepared.reply
    events = reply.first(job) + [e for delta in deltas for e in reply.events([delta])] + reply.last(job)
    for event in events:
        EVENT.validate_json(json.dumps(event), strict=True)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


def whole(prepared, deltas, **tokens) -> Response:
    prepared.reply.events(deltas)
    return Response.model_validate_json(
        json.dumps(prepared.reply.whole(job_of(prepared, **tokens), [])), strict=True
    )


def without_ids(value):
    if isinstance(value, dict):
        return {
            k: without_ids(v)
            for k, v in value.items()
            if k not in ("id", "call_id", "created_at", "completed_at")
        }
    return [without_ids(v) for v in value] if isinstance(value, list) else value


def test_a_first_response_is_a_turn_that_keeps_its_state():
    prepared = prepare()
    request = prepared.request
    assert request.prompts == ["User: Hi\n\n" + ANSWER]
    assert (request.max_tokens, request.n, request.flush_tokens, prepared.stream) == (4096, 1, 0, False)
    assert (request.stop_ids, request.stop_strings) == ([0], ["\n\nUser:", "\nUser:"])
    assert request.sampling == Sampling(
        temperature=1, top_k=20, top_p=0.6, alpha_presence=1, alpha_frequency=0.1, alpha_decay=0.996
    )
    response_id = prepared.reply.response["id"]
    assert (
        request.turn == SessionTurn(source=None, target=f"response:{response_id}", seam="\n\n")
        and prepared.key == request.turn.target
    )
    assert response_id.startswith("resp_") and len(response_id) == 5 + 32


def test_a_continued_response_sends_its_new_turns_only_and_demands_the_state():
    prepared = prepare(previous_response_id=PREVIOUS, input="And now?")
    assert prepared.request.prompts == ["User: And now?\n\n" + ANSWER]
    turn = prepared.request.turn
    assert (turn.source, turn.required, turn.seam) == (f"response:{PREVIOUS}", True, "\n\n")
    assert turn.target == prepared.key == f"response:{prepared.reply.response['id']}"
    other = prepare(previous_response_id=PREVIOUS, input="And now?")
    assert other.request.turn.source == turn.source and other.request.turn.target != turn.target  # a branch


def test_what_is_not_stored_has_no_target():
    assert prepare(store=False).request.turn is None and prepare(store=False).key is None
    turn = prepare(store=False, previous_response_id=PREVIOUS).request.turn
    assert (turn.source, turn.target, turn.required) == (f"response:{PREVIOUS}", None, True)


def test_fields_reach_the_engine():
    request = prepare(
        max_output_tokens=7, temperature=0, top_p=0.5, seed=3, stop="x", stream=True, use_prefix_cache=False
    ).request
    assert (request.max_tokens, request.flush_tokens, request.prefix_cache, request.stop_strings[-1]) == (
        7,
        1,
        False,
        "x",
    )
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0, 0.5, 3)


def test_items_become_turns():
    items = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Weather "}, {"type": "input_text", "text": "there?"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "secret"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "get_weather",
            "arguments": '{"city":"Paris"}',
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    assert prompt_of(input=items) == (
        f"System: Be brief.\n\nUser: Weather there?\n\nAssistant: Let me see.\n{CALL}\n\nTool: "
        f"sunny\n\n{ANSWER}"
    )
    listed = prepare(input=items).input
    ResponseItemList.model_validate_json(
        json.dumps(
            {
                "object": "list",
                "data": listed,
                "has_more": False,
                "first_id": listed[0]["id"],
                "last_id": listed[-1]["id"],
            }
        ),
        strict=True,
    )
    assert [item["type"] for item in listed] == [item.get("type", "message") for item in items]
    assert listed[3]["id"] == "msg_1" and [part["text"] for part in listed[1]["content"]] == [
        "Weather ",
        "there?",
    ]


def test_a_call_alone_is_the_assistants_turn():
    items = [
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    assert prompt_of(input=items) == f"Assistant: {CALL}\n\nTool: rain\n\n{ANSWER}"


def test_an_assistant_message_at_the_end_is_continued():
    assert prompt_of(
        input=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}],
        reasoning={"effort": "high"},
    ) == ("User: Hi\n\nAssistant: Hel")


def test_thinking_follows_the_effort():
    assert prompt_of(reasoning={"effort": "medium"}).endswith("Assistant: <think")
    for effort in (None, "none", "minimal"):
        assert prompt_of(reasoning={"effort": effort}).endswith(ANSWER)


def test_a_required_call_is_begun():
    assert prompt_of(tools=[TOOL], tool_choice="required").endswith('<tool_call>{"name": "')
    assert prompt_of(tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}).endswith(
        '"get_weather", "arguments":'
    )
    assert "get_weather" not in prompt_of(tools=[TOOL], tool_choice="none")


def test_instructions_and_tools_that_the_state_has_read_last_are_not_read_again():
    fields = {"instructions": "Be kind.", "tools": [TOOL]}
    first = prepare(**fields)
    assert (
        first.request.prompts[0].startswith("System: Be kind.\n\n")
        and "get_weather" in first.request.prompts[0]
    )
    seen = decode_document(first.document())
    again = partial(prepare, previous_response_id=PREVIOUS)
    same = again(seen, **fields)
    assert same.request.prompts == ["User: Hi\n\n" + ANSWER]
    assert same.reply.response["instructions"] == "Be kind." and same.reply.response["tools"]
    without = again(decode_document(same.document()))
    assert again(decode_document(without.document()), **fields).request.prompts == ["User: Hi\n\n" + ANSWER]
    other = again(seen, instructions="Be terse.", tools=[TOOL])
    assert other.request.prompts == ["System: Be terse.\n\nUser: Hi\n\n" + ANSWER]
    assert (
        again(decode_document(other.document()), instructions="Be kind.")
        .request.prompts[0]
        .startswith("System: Be kind.\n\nUser: Hi")
    )
    forced = again(seen, tools=[TOOL], tool_choice="required").request.prompts[0]
    assert "You must call a tool." in forced and "Be kind." not in forced


def test_a_plain_answer_and_its_events():
    events = streamed(
        prepare(stream=True),
        [RowDelta(0, "Hel", 1), RowDelta(0, "", 1), RowDelta(0, "lo", 1, "stop")],
        cached=3,
    )
    assert [e["type"] for e in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert [e["delta"] for e in events if e["type"].endswith("delta")] == ["Hel", "lo"] and events[6][
        "text"
    ] == "Hello"
    final = Response.model_validate(events[-1]["response"])
    assert (final.status, final.output_text, final.model) == (
        "completed",
        "Hello",
        MODEL,
    ) and final.incomplete_details is None
    assert final.output[0].id == events[2]["item"]["id"] == events[4]["item_id"]
    assert final.usage and (
        final.usage.input_tokens,
        final.usage.output_tokens,
        final.usage.total_tokens,
    ) == (5, 3, 8)
    assert (
        final.usage.input_tokens_details.cached_tokens == 3
        and final.usage.output_tokens_details.reasoning_tokens == 0
    )


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize(
    "text, reason, kinds",
    [
        ("Hello.\n\nWorld 🙂 ", "stop", ["message"]),
        ("", "stop", ["message"]),
        ("Hello", "length", ["message"]),
        (f"Let me see. {CALL}", "stop", ["message", "function_call"]),
        (CALL, "stop", ["function_call"]),
        (f"One {CALL} two", "length", ["message", "function_call"]),
        ("<tool_call>{never", "stop", ["message"]),
    ],
)
def test_a_stream_ends_in_what_the_whole_reply_says(think, text, reason, kinds):
    fields = {"tools": [TOOL], "reasoning": {"effort": "high" if think else "none"}}
    if think:
        text, kinds = ">\nHm,\nso.\n</think>\n" + text, ["reasoning", *kinds]
        kinds = kinds[:1] if kinds[1:] == ["message"] and text.endswith("</think>\n") else kinds
    want = whole(prepare(**fields), pieces(text, 10**6, reason))
    assert [item.type for item in want.output] == kinds
    cut = reason == "length" and "function_call" not in kinds
    assert want.status == ("incomplete" if cut else "completed")
    assert (want.incomplete_details and want.incomplete_details.reason) == (
        "max_output_tokens" if cut else None
    )
    for size in (1, 2, 3, 7, 100):
        events = streamed(prepare(stream=True, **fields), pieces(text, size, reason))
        final = events[-1]
        assert final["type"] == f"response.{want.status}"
        assert without_ids(final["response"]["output"]) == without_ids(
            json.loads(want.model_dump_json(exclude_unset=True))["output"]
        )
        assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == final["response"][
            "output"
        ]
        for index, item in enumerate(final["response"]["output"]):
            got = "".join(
                e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == index
            )
            assert got == (
                item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            )


def test_a_call_is_an_item_with_its_arguments():
    call = whole(prepare(tools=[TOOL]), pieces(CALL, 5)).output[0]
    assert (call.type, call.status, call.name) == ("function_call", "completed", "get_weather")
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert call.call_id.startswith("call_") and call.id.startswith("fc_")


def test_thoughts_are_counted_though_the_answer_is_held_back():
    thought, answer = ">abc</think>", CALL
    prepared = prepare(reasoning={"effort": "low"}, tools=[TOOL])
    assert prepared.request.flush_tokens == 1
    reply = whole(prepared, pieces(thought + answer, 1))
    assert reply.output[0].content[0].text == "abc"
    assert reply.usage.output_tokens_details.reasoning_tokens == len(thought)
    assert reply.usage.output_tokens == len(thought + answer)


def test_thoughts_that_are_cut_are_incomplete():
    reply = whole(prepare(reasoning={"effort": "low"}), pieces(">never ends", 3, "length"))
    assert [(item.type, item.status) for item in reply.output] == [
        ("reasoning", "incomplete")
    ] and reply.status == "incomplete"


def test_what_was_asked_for_is_told():
    reply = whole(
        prepare(
            metadata={"a": "b"},
            instructions="Be kind.",
            tools=[TOOL],
            tool_choice={"type": "function", "name": "get_weather"},
            user="u",
            previous_response_id=PREVIOUS,
            temperature=0.5,
            top_p=0.25,
            max_output_tokens=9,
            truncation="auto",
            parallel_tool_calls=False,
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "text"}},
            service_tier="flex",
            safety_identifier="s",
            include=["reasoning.encrypted_content"],
            prompt_cache_key="k",
            max_tool_calls=3,
        ),
        pieces("x", 1),
    )
    assert (reply.metadata, reply.instructions, reply.user, reply.previous_response_id) == (
        {"a": "b"},
        "Be kind.",
        "u",
        PREVIOUS,
    )
    assert (reply.temperature, reply.top_p, reply.max_output_tokens, reply.truncation) == (
        0.5,
        0.25,
        9,
        "auto",
    )
    assert (reply.tools[0].name, reply.tools[0].strict, reply.tool_choice.name) == (
        "get_weather",
        False,
        "get_weather",
    )
    assert (reply.reasoning.effort, reply.parallel_tool_calls, reply.prompt_cache_key) == ("low", False, "k")


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}]},
            "input[0].name",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"instructions": ["x"]}, "instructions"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"session_id": "s"}, "session_id"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": " "}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]}, "tool_choice.name"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": [TOOL]},
            "tool_choice",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"previous_response_id": 5}, "previous_response_id"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as caught:
        prepare(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(f"{param}: ") and caught.value.message.endswith(".")


def job_with(prepared, *events) -> Job:
    job = Job(prepared.request, lambda _: None)
    for event in [Accepted(prepared.request.id, [5]), *events]:
        job.put(event)
    return job


def frames(stream) -> list[dict]:
    """The events of a stream; each must name its type in the line above its data."""
    found = []
    for frame in b"".join(stream).decode().split("\n\n"):
        if frame.startswith("event: "):
            kind, data = frame.removeprefix("event: ").split("\ndata: ")
            assert json.loads(data)["type"] == kind
            found.append(json.loads(data))
        else:
            assert frame.strip() in ("", ":"), frame
    return found


def test_the_document_is_kept_before_the_last_event_and_holds_its_response():
    prepared, kept, seen = prepare(stream=True), [], b""
    job = job_with(prepared, Progress(prepared.request.id, pieces("Hello", 2)))
    stream = EventStream(
        job,
        prepared.reply,
        lambda _: None,
        lambda: False,
        lambda: kept.append((b"response.completed" in seen, prepared.document())),
    )
    for piece in stream:
        seen += piece
    ((sent_before, document),) = kept
    assert not sent_before and decode_document(document).response == frames([seen])[-1]["response"]
    assert decode_document(document).input == prepared.input and b"DONE" not in seen


def test_a_row_that_fails_ends_the_stream_as_a_failed_response():
    prepared, outcomes, kept = prepare(stream=True), [], []
    job = job_with(
        prepared,
        Progress(prepared.request.id, [RowDelta(0, "Hel", 1)]),
        Failed(prepared.request.id, "The device is gone."),
    )
    last = frames(EventStream(job, prepared.reply, outcomes.append, lambda: False, lambda: kept.append(1)))[
        -1
    ]
    EVENT.validate_json(json.dumps(last), strict=True)
    assert last["type"] == "response.failed" and last["response"]["error"] == {
        "code": "server_error",
        "message": "The device is gone.",
    }
    assert outcomes == ["ended"] and not kept


def test_a_response_that_cannot_be_kept_is_no_success():
    def full() -> None:
        raise OSError("disk full")

    for kind in ("stream", "whole"):
        prepared = prepare(stream=kind == "stream")
        job = job_with(prepared, Progress(prepared.request.id, pieces("Hello", 2)))
        if kind == "stream":
            events = frames(EventStream(job, prepared.reply, lambda _: None, lambda: False, full))
            assert events[-1]["type"] == "response.failed" and "response.completed" not in [
                e["type"] for e in events
            ]
        else:
            body = json.loads(b"".join(SlowJson(job, prepared.reply, lambda _: None, [RowResult()], full)))
            assert body["error"]["type"] == "server_error" and "output" not in body

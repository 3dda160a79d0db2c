"""Responses without a server: what the rows of a request become for a client, and what is stored of them."""

import json

import pytest
from openai.types.responses import Response
from responses_calls import CALL, EVENT, MODEL, PREVIOUS, TOOL, pieces, prepare, streamed, whole

from routes.http.stream import EventStream, SlowJson
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import Accepted, Failed, Progress, RowDelta


def without_ids(value):
    if isinstance(value, dict):
        return {
            k: without_ids(v)
            for k, v in value.items()
            if k not in ("id", "call_id", "created_at", "completed_at")
        }
    return [without_ids(v) for v in value] if isinstance(value, list) else value


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


def test_several_calls_are_items_in_their_order():
    rome = CALL.replace("Paris", "Rome")
    calls = whole(prepare(tools=[TOOL]), pieces(CALL + rome, 5)).output
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Rome"]
    assert len({call.call_id for call in calls}) == 2


def test_an_unasked_thought_is_an_item_and_counted():
    text = "<think>Hm, so.</think>\nYes."
    want = whole(prepare(), pieces(text, 1))
    assert [(i.type, i.content[0].text) for i in want.output] == [
        ("reasoning", "Hm, so."),
        ("message", "Yes."),
    ]
    assert want.usage.output_tokens_details.reasoning_tokens == len(">Hm, so.</think>")
    for size in (1, 2, 7, 100):
        final = streamed(prepare(stream=True), pieces(text, size))[-1]["response"]
        assert without_ids(final["output"]) == without_ids(
            json.loads(want.model_dump_json(exclude_unset=True))["output"]
        )


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
        True,
        "get_weather",
    )
    assert (reply.reasoning.effort, reply.parallel_tool_calls, reply.prompt_cache_key) == ("low", False, "k")


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
        lambda end: None,
        lambda: False,
        lambda: kept.append((b"response.completed" in seen, prepared.document())),
    )
    for piece in stream:
        seen += piece
    ((sent_before, document),) = kept
    assert not sent_before and document.response == frames([seen])[-1]["response"]
    assert document.input == prepared.unanswered.input and b"DONE" not in seen


def test_a_row_that_fails_ends_the_stream_as_a_failed_response():
    prepared, outcomes, kept = prepare(stream=True), [], []
    job = job_with(
        prepared,
        Progress(prepared.request.id, [RowDelta(0, "Hel", 1)]),
        Failed(prepared.request.id, "The device is gone."),
    )
    stream = EventStream(
        job, prepared.reply, outcomes.append, lambda end: None, lambda: False, lambda: kept.append(1)
    )
    last = frames(stream)[-1]
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
            events = frames(
                EventStream(job, prepared.reply, lambda _: None, lambda end: None, lambda: False, full)
            )
            assert events[-1]["type"] == "response.failed" and "response.completed" not in [
                e["type"] for e in events
            ]
        else:
            body = json.loads(
                b"".join(SlowJson(job, prepared.reply, lambda _: None, lambda end: None, [], full))
            )
            assert body["error"]["type"] == "server_error" and "output" not in body

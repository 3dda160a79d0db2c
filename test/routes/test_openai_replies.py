"""The OpenAI bodies without a server: what the engine's rows become for a client. Replies are validated with
the SDK's types.
"""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from routes.http.errors import ApiError
from routes.openai import chat as openai_chat
from routes.openai import completions as openai_completions
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import Accepted, RowDelta, TokenLogprob

HI = {"role": "user", "content": "Hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
MODEL = "rwkv7-test"


def chat(**fields):
    return openai_chat.prepare({"model": "any", "messages": [HI], **fields}, MODEL)


def complete(**fields):
    return openai_completions.prepare({"model": "any", "prompt": "Once", **fields}, MODEL)


def job_of(request, prompt_tokens=(5,)):
    job = Job(request, lambda _: None)
    job.acceptance = Accepted("", list(prompt_tokens))
    return job


def stream(prepared, deltas, prompt_tokens=(5,)):
    """All events of a stream whose deltas come in these batches."""
    request, _, reply = prepared
    job = job_of(request, prompt_tokens)
    return reply.first(job) + [e for batch in deltas for e in reply.events(batch)] + reply.last(job)


def joined(events, index=0):
    """What a client that reads one choice of a chat stream ends up with."""
    got = {"content": "", "reasoning_content": "", "tool_calls": [], "finish": [], "logprobs": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                got["content"] += choice["delta"].get("content") or ""
                got["reasoning_content"] += choice["delta"].get("reasoning_content") or ""
                got["tool_calls"] += choice["delta"].get("tool_calls") or []
                got["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
                got["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
    return got


def strict(model, body):
    return model.model_validate(json.loads(json.dumps(body)), strict=True)


def test_chat_reply_is_the_sdks_type_with_exact_usage():
    request, _, reply = chat(n=2)
    body = strict(
        ChatCompletion,
        reply.whole(
            job_of(request), [RowDelta(0, "Hello", 2, "stop"), RowDelta(1, "  a\n\nb ", 3, "length")]
        ),
    )
    assert body.id.startswith("chatcmpl-") and len(body.id) == 9 + 32 and body.model == MODEL
    assert [(c.index, c.message.content, c.finish_reason) for c in body.choices] == [
        (0, "Hello", "stop"),
        (1, "  a\n\nb ", "length"),
    ]
    assert (body.usage.prompt_tokens, body.usage.completion_tokens, body.usage.total_tokens) == (5, 5, 10)


def test_chat_stream_frames():
    events = stream(
        chat(stream=True), [[RowDelta(0, "Hel", 1)], [RowDelta(0, "", 1)], [RowDelta(0, "lo", 1, "stop")]]
    )
    assert [e["choices"][0]["delta"] for e in events] == [
        {"role": "assistant"},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, None, "stop"]
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert not any("usage" in e for e in events)
    for event in events:
        strict(ChatCompletionChunk, event)


def test_stream_usage_comes_last_and_only_when_asked_for():
    for prepare in (chat, complete):
        prepared = prepare(stream=True, n=2, stream_options={"include_usage": True})
        events = stream(
            prepared, [[RowDelta(0, "a", 1), RowDelta(1, "b", 2, "stop")], [RowDelta(0, "c", 3, "length")]]
        )
        assert events[-1]["choices"] == [] and events[-1]["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 6,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert all(e["usage"] is None for e in events[:-1])


def test_usage_counts_the_tokens_of_drafts():
    deltas = [
        RowDelta(0, "a", 3, accepted=2, rejected=1),
        RowDelta(0, "b", 2, "stop", accepted=1, rejected=4),
    ]
    want = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 5}
    for prepare in (chat, complete):
        prepared = prepare(stream=True, stream_options={"include_usage": True})
        events = stream(prepared, [[delta] for delta in deltas])
        assert events[-1]["usage"]["completion_tokens_details"] == want
        request, _, reply = prepare()
        assert reply.whole(job_of(request), deltas)["usage"]["completion_tokens_details"] == want


@pytest.mark.parametrize(
    ("content", "text"),
    [("a b", "a b"), ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"), ([], "")],
)
def test_a_prediction_is_a_text_or_its_parts(content: str | list, text: str):
    request, _, _ = chat(prediction={"type": "content", "content": content})
    assert request.prediction == text
    for wrong in (
        {"type": "text", "content": "a"},
        {"type": "content"},
        "a",
        {"type": "content", "content": 1},
    ):
        with pytest.raises(ApiError, match="prediction"):
            chat(prediction=wrong)


LOGPROB = TokenLogprob("你".encode(), -0.5, [("你".encode(), -0.5), (b"\xe4\xbd", -1.0)])


def test_everything_at_once_streams_what_the_whole_reply_says():
    """n, tools, thinking, logprobs and usage together, for every way to cut the text into deltas of k
    characters.
    """
    fields = {"n": 3, "tools": [TOOL], "enable_think": True, "logprobs": True, "top_logprobs": 2}
    texts = [
        f">\nHm.\n</think>\nLook: {CALL}\n",
        ">So <b>so</thin k</think>\nNo <tool> here. ",
        ">never ends <tool_call>",
    ]
    reasons = ["stop", "stop", "length"]
    request, _, reply = chat(**fields)
    whole = reply.whole(
        job_of(request),
        [
            RowDelta(i, text, len(text), reason, [LOGPROB] * len(text))
            for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ],
    )
    body = strict(ChatCompletion, whole)
    assert [c.finish_reason for c in body.choices] == ["tool_calls", "stop", "length"]
    assert [c.message.reasoning_content for c in body.choices] == [
        "Hm.",
        "So <b>so</thin k",
        "never ends <tool_call>",
    ]
    assert [c.message.content for c in body.choices] == ["Look:", "No <tool> here. ", ""]
    call = body.choices[0].message.tool_calls[0]
    assert (call.type, call.function.name, call.function.arguments) == (
        "function",
        "get_weather",
        '{"city": "Paris"}',
    )
    assert call.id.startswith("call_") and len(call.id) == 37
    for k in (1, 2, 3, 7, 1000):
        deltas = [
            [
                RowDelta(
                    row, part, len(part), reasons[row] if at + k >= len(text) else None, [LOGPROB] * len(part)
                )
                for row, text in enumerate(texts)
                if (part := text[at : at + k])
            ]
            for at in range(0, max(map(len, texts)), k)
        ]
        events = stream(chat(stream=True, stream_options={"include_usage": True}, **fields), deltas)
        for event in events:
            strict(ChatCompletionChunk, event)
        for index, choice in enumerate(whole["choices"]):
            got, message = joined(events, index), choice["message"]
            assert (
                got["content"] == (message["content"] or "")
                and got["reasoning_content"] == message["reasoning_content"]
            )
            assert [c["function"] for c in got["tool_calls"]] == [
                c["function"] for c in message.get("tool_calls", [])
            ]
            assert (
                got["finish"] == [choice["finish_reason"]]
                and got["logprobs"] == choice["logprobs"]["content"]
            )
        assert events[-1]["usage"] == whole["usage"]


def test_forced_call_is_read_from_where_the_prompt_opened_it():
    request, _, reply = chat(tools=[TOOL], tool_choice="required")
    whole = reply.whole(
        job_of(request), [RowDelta(0, 'get_weather", "arguments": {"city": "Paris"}}</tool_call>', 9, "stop")]
    )
    choice = strict(ChatCompletion, whole).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
    prepared = chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}}, stream=True
    )
    got = joined(
        stream(
            prepared,
            [[RowDelta(0, c, 1)] for c in ' {"city": "Paris"}}</tool_call>'] + [[RowDelta(0, "", 0, "stop")]],
        )
    )
    assert (
        got["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        and got["content"] == ""
    )


def test_calls_are_only_looked_for_when_tools_are_in_play():
    def read(**fields):
        request, _, reply = chat(**fields)
        return reply.whole(job_of(request), [RowDelta(0, CALL, 9, "stop")])["choices"][0]["finish_reason"]

    assert (
        read()
        == read(tools=[TOOL], tool_choice="none")
        == read(tools=[TOOL], rwkv_tool_compat_mode=False)
        == "stop"
    )
    assert read(tools=[TOOL]) == read(enable_tool_calls=True) == "tool_calls"


def test_chat_logprobs_name_the_bytes_of_every_token():
    request, _, reply = chat(logprobs=True, top_logprobs=2)
    assert request.top_logprobs == 2 and chat(logprobs=True)[0].top_logprobs == 0
    token = reply.whole(job_of(request), [RowDelta(0, "你", 1, "stop", [LOGPROB])])["choices"][0]["logprobs"][
        "content"
    ][0]
    assert (token["token"], token["bytes"], token["logprob"]) == ("你", [228, 189, 160], -0.5)
    assert [(t["bytes"], t["logprob"]) for t in token["top_logprobs"]] == [
        ([228, 189, 160], -0.5),
        ([228, 189], -1.0),
    ]


def test_logprobs_of_text_that_is_held_back_are_not_lost():
    events = stream(
        chat(stream=True, logprobs=True),
        [[RowDelta(0, "", 1, None, [LOGPROB])], [RowDelta(0, "", 1, "stop", [LOGPROB])]],
    )
    assert len(joined(events)["logprobs"]) == 2


def test_logprobs_are_json():
    never = TokenLogprob(b"a", float("-inf"), [(b"a", float("-inf"))])
    for request, _, reply in (chat(logprobs=True), complete(logprobs=1)):
        json.dumps(reply.whole(job_of(request), [RowDelta(0, "a", 1, "stop", [never])]), allow_nan=False)


def test_completion_reply_is_the_sdks_type():
    request, _, reply = complete(prompt=["a", "b"], n=2, echo=True)
    whole = reply.whole(job_of(request, [3, 4]), [RowDelta(i, str(i), 2, "length") for i in range(4)])
    body = strict(Completion, whole)
    assert [(c.index, c.text) for c in body.choices] == [(0, "a0"), (1, "a1"), (2, "b2"), (3, "b3")]
    assert {c.finish_reason for c in body.choices} == {"length"}
    assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (7, 8) and body.id.startswith("cmpl-")


def test_completion_stream():
    deltas = [
        [RowDelta(0, "b", 1), RowDelta(1, "", 1)],
        [RowDelta(1, "x", 1, "stop"), RowDelta(0, "", 0, "length")],
    ]
    events = stream(complete(prompt=["a", ""], echo=True, stream=True), deltas)
    got = [
        (e["choices"][0]["index"], e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in events
    ]
    assert got == [(0, "a", None), (0, "b", None), (1, "x", "stop"), (0, "", "length")]
    assert {e["object"] for e in events} == {"text_completion"}


def test_completion_logprobs_in_the_legacy_shape():
    tokens = [
        TokenLogprob(b"H\xc3\xa9", -0.1, [(b"H\xc3\xa9", -0.1)]),
        TokenLogprob(b"\xe4\xbd", -0.2, [(b" ", -0.15)]),
        TokenLogprob(b"\xa0", -0.3, []),
        TokenLogprob(b"!", -0.4, [(b"!", -0.4)]),
    ]
    request, _, reply = complete(logprobs=1)
    logprobs = (
        strict(Completion, reply.whole(job_of(request), [RowDelta(0, "Hé你!", 4, "stop", tokens)]))
        .choices[0]
        .logprobs
    )
    assert request.top_logprobs == 1
    assert logprobs.tokens == ["Hé", "bytes:\\xe4\\xbd", "bytes:\\xa0", "!"]
    assert logprobs.text_offset == [0, 2, 2, 3]
    assert logprobs.token_logprobs == [-0.1, -0.2, -0.3, -0.4]
    assert logprobs.top_logprobs == [
        {"Hé": -0.1},
        {" ": -0.15, "bytes:\\xe4\\xbd": -0.2},
        {"bytes:\\xa0": -0.3},
        {"!": -0.4},
    ]
    events = stream(complete(logprobs=0, stream=True), [[RowDelta(0, "", 1, None, [t])] for t in tokens])
    assert [e["choices"][0]["logprobs"]["text_offset"] for e in events] == [[0], [2], [2], [3]]
    assert all(e["choices"][0]["logprobs"]["top_logprobs"] is None for e in events)


def test_error_body_has_openais_shape():
    for _, _, reply in (chat(), complete()):
        assert set(reply.error("It broke.", 500)["error"]) == {"message", "type", "param", "code"}


def test_an_unasked_thought_is_reasoning_streamed_and_not():
    text = "<think>\nHm.\n</think>\nYes."
    request, _, reply = chat()
    message = reply.whole(job_of(request), [RowDelta(0, text, 9, "stop")])["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    for size in range(1, len(text)):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        deltas = [[RowDelta(0, part, 1)] for part in parts] + [[RowDelta(0, "", 0, "stop")]]
        got = joined(stream(chat(stream=True), deltas))
        assert (got["content"], got["reasoning_content"]) == ("Yes.", "Hm.")


TIME = {"type": "function", "function": {"name": "get_time", "parameters": CITY}}


def test_several_calls_are_numbered_streamed_and_not():
    text = (
        f"Both.\n{CALL}\n```json\n"
        r'{"name": "get_time", "arguments": "{\"city\": \"Rome\"}"}'
        '\n```\n<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    )
    calls = [("get_weather", '{"city": "Paris"}'), ("get_time", '{"city": "Rome"}')]
    rest = 'Both.\n\n\n<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    request, _, reply = chat(tools=[TOOL, TIME])
    (choice,) = strict(ChatCompletion, reply.whole(job_of(request), [RowDelta(0, text, 9, "stop")])).choices
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == calls
    assert (choice.message.content, choice.finish_reason) == (rest, "tool_calls")
    assert len({c.id for c in choice.message.tool_calls}) == 2
    for size in range(1, len(text) + 1):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        deltas = [[RowDelta(0, part, 1)] for part in parts] + [[RowDelta(0, "", 0, "stop")]]
        events = stream(chat(tools=[TOOL, TIME], stream=True), deltas)
        for event in events:
            strict(ChatCompletionChunk, event)
        got = joined(events)
        assert [(c["index"], *c["function"].values()) for c in got["tool_calls"]] == [
            (i, *call) for i, call in enumerate(calls)
        ]
        assert (got["content"], got["finish"]) == (rest, ["tool_calls"])


def test_without_parallel_calls_one_counts():
    request, _, reply = chat(tools=[TOOL], parallel_tool_calls=False)
    message = reply.whole(job_of(request), [RowDelta(0, CALL + CALL, 9, "stop")])["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1 and message["content"] == CALL


def test_a_forced_call_of_a_g1_checkpoint_is_read_from_its_fence():
    body = {"model": "any", "messages": [HI], "tools": [TOOL], "tool_choice": "required"}
    request, _, reply = openai_chat.prepare(body, "rwkv7-g1k-7.2b")
    assert request.prompts[0].endswith('Assistant: <think></think>\n```json\n{"name": "')
    row = RowDelta(0, 'get_weather", "arguments": {"city": "Paris"}}\n', 9, "stop")
    choice = reply.whole(job_of(request), [row])["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


def test_a_choice_that_fails_says_so_and_the_others_are_whole():
    """No member of the reply itself is named error, which clients take for the end of all of it."""
    error = {"message": "It broke.", "type": "server_error", "param": None, "code": None}
    deltas = [RowDelta(1, "half", 2, "error", error="It broke."), RowDelta(0, "all", 3, "stop")]
    for prepared in (chat(n=2), complete(n=2), complete(n=2, logprobs=1, echo=True)):
        job = job_of(prepared.request)
        job.acceptance = Accepted("", [1], prompt_bytes=[[b"Once"]], prompt_ids=[[1]])
        body = prepared.reply.whole(job, deltas)
        events = prepared.reply.first(job) + prepared.reply.events(deltas) + prepared.reply.last(job)
        ends = [c for event in events for c in event["choices"] if c["finish_reason"]]
        for choices in (body["choices"], sorted(ends, key=lambda choice: choice["index"])):
            assert [choice["finish_reason"] for choice in choices] == ["stop", "error"]
            assert choices[1]["error"] == error and "error" not in choices[0]
        assert "error" not in body and not any("error" in event for event in events)
    assert body["choices"][1]["text"] == "Oncehalf"

"""`session_id` on OpenAI chat, and the count of cached tokens, against an engine that echoes what a session
has seen.

Users run it by this name, so it stays here.
"""

import json

import pytest
from frontend_process import FrontendProcess
from native_calls import events

from routes.openai import chat, completions
from rwkv_batch.wire.protocol import SessionTurn

V1, CHAT, COMPLETIONS = "/v1/chat/completions", "/openai/v1/chat/completions", "/v1/completions"
NO_THINK = "Assistant: <think>\n</think>\n"


@pytest.fixture(scope="module")
def server():
    with FrontendProcess() as process:
        yield process


def said(text: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], "stop_tokens": [0], **fields}


@pytest.mark.parametrize("path", [V1, CHAT])
def test_a_session_needs_only_what_is_new(server, path):
    session = f"talk on {path}"
    first = server.http.post(path, json=said("My name is Ann.", session_id=session)).json()
    assert first["choices"][0]["message"]["content"] == f"User: My name is Ann.\n\n{NO_THINK}"
    second = server.http.post(path, json=said("Who am I?", session_id=session)).json()
    new = f"User: Who am I?\n\n{NO_THINK}"
    assert second["choices"][0]["message"]["content"] == f"User: My name is Ann.\n\n{NO_THINK}\n\n{new}"
    assert second["usage"]["prompt_tokens"] == len(new), "usage counts the new turn"
    request = server.engine.request(new)
    assert request.turn == SessionTurn(source=session, target=session, separator="\n\n")


def test_without_an_id_nothing_is_stored(server):
    before = dict(server.engine.sessions)
    for fields in ({}, {"session_id": ""}, {"session_id": None}):
        assert server.http.post(CHAT, json=said("stateless", **fields)).status_code == 200
        assert server.engine.requests[-1].turn is None
    assert server.engine.sessions == before


def test_native_and_openai_sessions_are_the_same(server):
    server.http.post("/state/chat/completions", json={"contents": ["User: raw"], "session_id": "both"})
    answer = server.http.post(CHAT, json=said("chat", session_id="both")).json()
    assert answer["choices"][0]["message"]["content"] == f"User: raw\n\nUser: chat\n\n{NO_THINK}"


def test_every_new_message_is_rendered_with_its_own_role():
    request = chat.prepare(
        {
            "session_id": "s",
            "system": " Be brief. ",
            "contents": ["Thanks. "],
            "messages": [
                {"role": "user", "content": " Time? "},
                {"role": "assistant", "content": "Noon."},
                {"role": "tool", "content": "12:00"},
                {"role": "developer", "content": "Be kind."},
            ],
        },
        "m",
    )[0]
    assert request.prompts == [
        "System: Be brief.\nBe kind.\n\nUser: Time?\n\nAssistant: Noon.\n\nTool: 12:00\n\nUser: "
        f"Thanks.\n\n{NO_THINK}"
    ]


def test_a_streamed_turn(server):
    body = said("stream", session_id="streamed", stream=True, stream_options={"include_usage": True})
    *chunks, usage = events(server.http.post(CHAT, json=body))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    text = f"User: stream\n\n{NO_THINK}"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
    assert usage["usage"]["completion_tokens"] == len(text)
    assert server.engine.sessions["streamed"] == text


def test_a_turn_at_its_limit_says_so(server):
    answer = server.http.post(CHAT, json=said("a long question", session_id="limit", max_tokens=4)).json()
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [], "contents": ["a", "b"]}, "State mode only supports a single contents item"),
        ({"messages": []}, "State mode requires incremental contents or messages"),
        (
            {"messages": [{"role": "user", "content": " "}]},
            "State mode requires incremental contents or messages",
        ),
        ({"n": 2}, "n: "),
        ({"session_id": "x" * 257}, "session_id"),
        ({"session_id": "tab\t"}, "session_id"),
        ({"session_id": 7}, "session_id"),
    ],
)
def test_what_a_session_cannot_take(server, fields, words):
    answer = server.http.post(CHAT, json=said("hi", session_id="s") | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]


def test_completions_have_no_sessions(server):
    answer = server.http.post(COMPLETIONS, json={"prompt": "a", "session_id": "s"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "session_id"


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, said("cached twice")), (COMPLETIONS, {"prompt": ["cached", "twice"]})]
)
def test_cached_tokens_are_reported(server, path, body):
    def cached(**fields) -> list[int]:
        whole = server.http.post(path, json=body | fields).json()["usage"]
        lines = server.http.post(
            path, json=body | fields | {"stream": True, "stream_options": {"include_usage": True}}
        ).text
        usage = next(
            event["usage"]
            for line in lines.split("\n\n")
            if line.startswith("data: {") and (event := json.loads(line.removeprefix("data: ")))["usage"]
        )
        assert usage["prompt_tokens"] == whole["prompt_tokens"]
        return [use["prompt_tokens_details"]["cached_tokens"] for use in (whole, usage)]

    assert server.http.post(path, json=body).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    rows = len(server.engine.requests[-1].prompts)
    total = sum(map(len, server.engine.requests[-1].prompts))
    assert cached() == [total - rows] * 2
    assert cached(use_prefix_cache=False) == [0, 0]


@pytest.mark.parametrize(
    "prepare",
    [
        lambda **f: chat.prepare(said("a", **f), "m"),
        lambda **f: completions.prepare({"prompt": "a", **f}, "m"),
    ],
)
def test_the_prefix_cache_can_be_declined(prepare):
    assert prepare()[0].prefix_cache
    assert not prepare(use_prefix_cache=False)[0].prefix_cache


def test_the_flags_reach_chats_and_leave_raw_prompts_alone():
    with FrontendProcess(chat_template="g1c", sampling_profile="open_think") as server:
        raw = "User: Hi\n\nAssistant:"

        def sent(path, body):
            assert server.http.post(path, json=body).status_code == 200
            return server.engine.requests[-1]

        for path in (V1, CHAT, "/v3/chat/completions"):
            request = sent(path, {"messages": [{"role": "user", "content": "Hi"}]})
            assert (request.prompts, request.prefix_ids) == ([f"{raw} <think></think"], [0])
            assert request.sampling.alpha_decay == 0.988
        assert sent("/v1/responses", {"input": "Hi"}).prompts == [f"{raw} <think></think"]
        for path in (V1, "/big_batch/completions", "/state/chat/completions"):
            request = sent(path, {"contents": [raw]})
            assert (request.prompts, request.prefix_ids) == ([raw], [])
            assert request.sampling.alpha_decay != 0.988
        assert sent(COMPLETIONS, {"prompt": raw}).prefix_ids == []


def test_a_conversation_in_another_form_is_parted_by_its_own_marks(server):
    kwargs = {"rwkv_prompt_template": "bot", "rwkv_generation_prompt": "open_think"}
    for text in ("One", "Two"):
        body = said(text, session_id="bot", chat_template_kwargs=kwargs)
        assert server.http.post(CHAT, json=body).status_code == 200
    assert server.engine.sessions["bot"] == "User✿One✿\nBot✿<think✿\nUser✿Two✿\nBot✿<think"

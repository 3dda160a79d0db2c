"""The header Idempotency-Key: which turns get an id by it, and what is refused."""

from pathlib import Path

import openai
import pytest
from fake_engine import ChatEngine
from frontend_process import FrontendProcess
from session_calls import STATE, TREE

from rwkv_batch.state.entries import REQUEST_ID


def request_of(server: FrontendProcess, key: str, path: str = STATE, **fields) -> bytes:
    """The id of the turn that comes to the engine."""
    body = {"contents": ["one"], "session_id": "a"} | fields
    reply = server.http.post(path, json=body, headers={"Idempotency-Key": key} if key else {})
    assert reply.status_code == 200, reply.text
    turn = server.engine.requests[-1].turn
    return turn.request if turn else b""


def test_an_id_follows_from_the_key_and_the_session(server):
    first = request_of(server, "k")
    assert len(first) == REQUEST_ID and request_of(server, "k", contents=["two"], stream=True) == first
    tree = {"path": TREE, "dialogue_idx": 0}
    others = [
        request_of(server, "l"),
        request_of(server, "k", session_id="b"),
        request_of(server, "k", **tree),
    ]
    assert len({first, *others}) == 4
    assert request_of(server, "k", **tree) == others[-1], "with any number of the node"


def test_without_a_key_or_a_session_there_is_no_id(server):
    assert request_of(server, "") == request_of(server, "k", session_id=None) == b""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    reply = server.http.post("/v1/chat/completions", json=chat, headers={"Idempotency-Key": "k"})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    ("key", "fields", "sentence"),
    [
        ("k" * 256, {}, "at most 255 characters"),
        ("k", {"logprobs": True}, "logprobs are not stored"),
    ],
    ids=["long", "logprobs"],
)
def test_what_cannot_be_kept_is_refused(server, key: str, fields: dict, sentence: str):
    chat = {"messages": [{"role": "user", "content": "hi"}], "session_id": "a"}
    reply = server.http.post("/v1/chat/completions", json=chat | fields, headers={"Idempotency-Key": key})
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert "Idempotency-Key" in message and sentence in message


def test_a_response_has_the_same_id_when_it_is_sent_again(tmp_path: Path):
    with (
        ChatEngine(f"ipc://{tmp_path}/engine") as engine,
        FrontendProcess(engine) as process,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{process.port}/v1", api_key="unused", max_retries=0
        ) as client,
    ):

        def ask(key: str, previous: str | None = None) -> str:
            headers = {"Idempotency-Key": key}
            made = client.responses.create(
                model="rwkv7", input="hi", previous_response_id=previous, extra_headers=headers
            )
            return made.id

        first = ask("k")
        assert ask("k") == first and engine.requests[-1].turn.target == f"response:{first}"
        assert len(engine.requests[-1].turn.request) == REQUEST_ID
        second = ask("k", first)
        assert second != first and second[:8] == first[:8], "of one chat"
        assert ask("k", first) == second and len({first, second, ask("l"), ask("l", first)}) == 4


def test_where_no_texts_are_stored_a_key_is_refused(tmp_path: Path):
    with (
        ChatEngine(f"ipc://{tmp_path}/engine") as engine,
        FrontendProcess(engine, token_log=False) as process,
    ):
        body = {"contents": ["one"], "session_id": "a"}
        reply = process.http.post(STATE, json=body, headers={"Idempotency-Key": "k"})
        assert (reply.status_code, "stores no texts" in reply.json()["error"]) == (400, True)

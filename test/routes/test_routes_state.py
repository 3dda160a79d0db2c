"""Turns of sessions over HTTP, against an engine that echoes everything a session has seen."""

import pytest
from native_calls import events, streamed
from session_calls import STATE, STRANGE, TREE, content, say

from rwkv_batch.wire.protocol import SessionTurn


@pytest.fixture
def empty(server):
    """The server, without sessions."""
    server.engine.sessions.clear()
    return server


def test_a_session_goes_on(empty):
    assert say(empty, "one", "a", model="mine") == {
        "id": "rwkv7-batch",
        "object": "chat.completion",
        "model": "mine",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "one"}, "finish_reason": "stop"}
        ],
    }
    assert content(say(empty, "two", "a")) == "one\n\ntwo", "a blank line parts the turns"
    assert content(say(empty, "\n\nthree", "a")) == "one\n\ntwo\n\nthree", "which is there once"
    assert content(say(empty, "other", STRANGE)) == "other"
    assert empty.engine.sessions == {"a": "one\n\ntwo\n\nthree", STRANGE: "other"}


def test_a_header_may_name_the_session(empty):
    def turn(text, **fields):
        header = {"X-RWKV-Session-Id": "a"}
        return empty.http.post(STATE, json={"contents": [text]} | fields, headers=header)

    assert content(turn("one").json()) == "one"
    assert content(turn("two", session_id="a").json()) == "one\n\ntwo"
    refused = turn("three", session_id="b")
    assert (refused.status_code, "session_id" in refused.json()["error"]) == (400, True)
    chat = {"messages": [{"role": "user", "content": "four"}]}
    reply = empty.http.post("/v1/chat/completions", json=chat, headers={"X-RWKV-Session-Id": "a"})
    assert reply.status_code == 200 and empty.engine.requests[-1].turn.target == "a"
    assert list(empty.engine.sessions) == ["a"]


@pytest.mark.parametrize("fields", [{}, {"session_id": None}])
def test_without_an_id_the_state_is_fresh_and_nothing_is_stored(empty, fields):
    for _ in range(2):
        answer = empty.http.post(STATE, json={"contents": ["alone"], **fields})
        assert content(answer.json()) == "alone"
    assert empty.engine.requests[-1].turn is None
    assert empty.engine.sessions == {}


def test_fields_of_a_turn_reach_the_engine(empty):
    say(
        empty,
        "fields",
        "a",
        max_tokens=7,
        temperature=0,
        top_k=3,
        stop_tokens=["x", 5],
        use_prefix_cache=False,
    )
    request = empty.engine.request("fields")
    assert (request.max_tokens, request.sampling.temperature, request.sampling.top_k) == (7, 0, 3)
    assert (request.stop_ids, request.stop_strings, request.prefix_cache) == ([5], ["x"], False)
    assert request.turn == SessionTurn(source="a", target="a", separator="\n\n")


def test_a_streamed_turn(empty):
    body = {"contents": ["🦄 one"], "session_id": "s", "stream": True, "chunk_size": 2}
    assert streamed(empty.http.post(STATE, json=body)) == ({0: "🦄 one"}, {0: "stop"})
    assert streamed(empty.http.post(STATE, json=body)) == ({0: "🦄 one\n\n🦄 one"}, {0: "stop"})


def test_a_tree_of_turns(empty):
    first = say(empty, "root", "tree", TREE, dialogue_idx=0)
    assert first == {
        "id": "rwkv7-multi-state",
        "object": "chat.completion",
        "model": "rwkv7",
        "dialogue_idx": 1,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "root"}, "finish_reason": "stop"}
        ],
    }
    left = say(empty, "left", "tree", TREE, dialogue_idx=1)
    right = say(empty, "right", "tree", TREE, dialogue_idx=1)
    assert (content(left), left["dialogue_idx"]) == ("root\n\nleft", 2)
    assert (content(right), right["dialogue_idx"]) == ("root\n\nright", 3), "a branch does not see the other"
    second_root = say(empty, "new", "tree", TREE, dialogue_idx=None)
    assert (content(second_root), second_root["dialogue_idx"]) == ("new", 4)
    assert set(empty.engine.sessions) == {"tree:1", "tree:2", "tree:3", "tree:4"}


def test_a_stored_root_is_begun_from(empty):
    say(empty, "given", "rooted:0")
    assert content(say(empty, "on", "rooted", TREE, dialogue_idx=0)) == "given\n\non"


def test_an_id_with_colons_is_an_id(empty):
    assert say(empty, "a", "x:9:y", TREE, dialogue_idx=0)["dialogue_idx"] == 1
    assert say(empty, "b", "x:9:y", TREE, dialogue_idx="1")["dialogue_idx"] == 2
    assert set(empty.engine.sessions) == {"x:9:y:1", "x:9:y:2"}


def test_a_streamed_node(empty):
    body = {"contents": ["text"], "session_id": "s:t", "dialogue_idx": 0, "stream": True}
    *chunks, metadata = events(empty.http.post(TREE, json=body))
    assert metadata == {"object": "multi_state.dialogue_idx", "session_id": "s:t:1", "dialogue_idx": 1}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "text"


@pytest.mark.parametrize("stream", [False, True])
def test_a_node_that_is_not_there(empty, stream):
    body = {"contents": ["a"], "session_id": "s", "dialogue_idx": 7, "stream": stream}
    answer = empty.http.post(TREE, json=body)
    assert (answer.status_code, answer.json()) == (404, {"error": "State not found for dialogue_idx=7"})


@pytest.mark.parametrize(("path", "fields"), [(STATE, {}), (TREE, {"dialogue_idx": 0})])
def test_a_turn_that_fails_stores_nothing_and_names_no_node(empty, path, fields):
    say(empty, "before", "kept")
    body = {"contents": ["broken promise"], "session_id": "kept", "stream": True, "chunk_size": 1, **fields}
    *chunks, error = events(empty.http.post(path, json=body))
    assert error == {"error": "The fake engine broke down."}
    assert chunks and all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert empty.engine.sessions == {"kept": "before"}


@pytest.mark.parametrize(("path", "fields"), [(STATE, {}), (TREE, {"dialogue_idx": 0})])
def test_a_client_that_leaves_ends_the_turn(empty, path, fields):
    prompt = f"slow {path} " * 500
    body = {"contents": [prompt], "session_id": "left", "stream": True, "chunk_size": 1, **fields}
    with empty.client() as http, http.stream("POST", path, json=body) as answer:
        next(answer.iter_lines())
        request = empty.engine.request(prompt)
    assert empty.engine.wait_for(lambda: request.id in empty.engine.cancelled, 30)
    assert empty.engine.sessions == {}

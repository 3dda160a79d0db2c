"""A real server that stores states and no tokens: what is forgotten, and what is refused by name."""

import httpx
import pytest
from serving import Server

CHAT = "/openai/v1/chat/completions"


@pytest.fixture(scope="module")
def http():
    server = Server("--device", "cpu", "--frontends", "1", "--no-token-log")
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
    server.stop()


def said(http: httpx.Client, text: str, session: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "session_id": session, "temperature": 0}
    reply = http.post(CHAT, json=body | {"max_tokens": 30})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


def test_rewinding_to_0_forgets_the_name(http):
    said(http, "My name is Ben.", "a")
    assert "Ben" in said(http, "What is my name?", "a")
    assert http.post("/v1/state/rewind", json={"session_id": "a", "turn": 0}).json()["position"] == 0
    assert "Ben" not in said(http, "What is my name?", "a")


def test_what_needs_turns_is_a_conflict_that_names_the_flag(http):
    said(http, "My name is Ben.", "b")
    replies = [
        http.get("/v1/state/history", params={"session_id": "b"}),
        http.post("/v1/state/rewind", json={"session_id": "b", "turn": 1}),
        http.post("/v1/state/fork", json={"session_id": "b", "new_session_id": "c", "turn": 1}),
        http.get("/v1/state/export", params={"session_id": "b", "what": "tokens"}),
    ]
    assert [reply.status_code for reply in replies] == [409] * 4, [reply.text for reply in replies]
    assert all("--no-token-log" in reply.json()["error"] for reply in replies)


def test_branches_of_a_tree_are_independent(http):
    def grown(node: int, text: str) -> dict:
        contents = [f"User: {text}\n\nAssistant:"]
        body = {"session_id": "tree", "dialogue_idx": node, "contents": contents, "temperature": 0}
        reply = http.post("/multi_state/chat/completions", json=body | {"max_tokens": 30})
        assert reply.status_code == 200, reply.text
        return reply.json()

    for name in ("Ben", "Eve"):
        node = grown(0, f"My name is {name}.")["dialogue_idx"]
        assert name in grown(node, "What is my name?")["choices"][0]["message"]["content"]

"""Calls of the routes of sessions, against an engine that echoes everything a session has seen."""

from frontend_process import FrontendProcess

STATE, TREE = "/state/chat/completions", "/multi_state/chat/completions"
STRANGE = 'räum:7 "quoted" 会话/🦄%41+b'


def say(server: FrontendProcess, text: str, session: str | None, path: str = STATE, **fields) -> dict:
    answer = server.http.post(path, json={"contents": [text], "session_id": session, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def content(reply: dict) -> str:
    (choice,) = reply["choices"]
    return choice["message"]["content"]

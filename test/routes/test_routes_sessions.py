"""Stored sessions over HTTP: lists, files, copies; and what no route of sessions takes."""

import json
import time
from urllib.parse import quote

import pytest
from fake_engine import FILE, HELD_TURN, UPDATED
from frontend_process import PASSWORD, FrontendProcess
from native_calls import V1
from session_calls import STATE, STRANGE, TREE, content, say

STATUS, DELETE = "/state/status", "/state/delete"
EXPORT, IMPORT, FORK = "/v1/state/export", "/v1/state/import", "/v1/state/fork"
HISTORY, REWIND = "/v1/state/history", "/v1/state/rewind"
PATHS = [STATE, TREE, STATUS, DELETE, EXPORT, IMPORT, FORK, REWIND]
PEERS, SECRET = "/cluster/state", "s" * 32
MAX_BODY, MAX_STATE = 1 << 16, 1 << 18


@pytest.fixture(scope="module")
def server():
    with FrontendProcess(max_body=MAX_BODY, max_state=MAX_STATE, cluster_secret=SECRET) as process:
        yield process


@pytest.fixture
def empty(server):
    """The server, without sessions."""
    server.engine.sessions.clear()
    return server


def test_status_lists_every_session_once(empty):
    assert empty.http.post(STATUS).json() == {
        "status": "success",
        "total_sessions": 0,
        "l1_cache_count": 0,
        "l2_cache_count": 0,
        "database_count": 0,
        "sessions": [],
    }
    for key in ("disk one", "vram", "ram", "disk two"):
        say(empty, key, key)
    reply = empty.http.post(STATUS, json={}).json()
    assert (
        reply["total_sessions"],
        reply["l1_cache_count"],
        reply["l2_cache_count"],
        reply["database_count"],
    ) == (4, 1, 1, 2)
    local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(UPDATED))
    rows = [(s["session_id"], s["cache_level"], s["last_updated"]) for s in reply["sessions"]]
    assert rows == [
        ("vram", "L1 (VRAM)", "In Memory"),
        ("ram", "L2 (RAM)", "In Memory"),
        ("disk one", "Database (Disk)", local),
        ("disk two", "Database (Disk)", local),
    ]
    assert [(s["timestamp"], s["tokens"]) for s in reply["sessions"]] == [
        (UPDATED, len(key)) for key, *_ in rows
    ]


def test_status_in_pages(empty):
    for key in ("b", "ram", "a", "vram"):
        say(empty, key, key)
    first = empty.http.post(STATUS, json={"limit": 2}).json()
    assert [s["session_id"] for s in first["sessions"]] == ["a", "b"]
    assert (first["total_sessions"], first["l1_cache_count"], first["l2_cache_count"]) == (4, 3, 1)
    rest = empty.http.post(STATUS, json={"limit": 10, "after": "b"}).json()
    assert [s["session_id"] for s in rest["sessions"]] == ["ram", "vram"]


def test_history(empty):
    for text in ("one", "two", "three"):
        say(empty, text, STRANGE)
    reply = empty.http.get(HISTORY, params={"session_id": STRANGE}).json()
    assert (reply["object"], reply["session_id"], reply["position"]) == ("session.history", STRANGE, 15)
    assert [(t["turn"], t["start"], t["end"], t["prompt"]) for t in reply["turns"]] == [
        (1, 0, 3, "one"),
        (2, 3, 8, "\n\ntwo"),
        (3, 8, 15, "\n\nthree"),
    ]
    assert reply["turns"][0] == {
        "turn": 1,
        "start": 0,
        "end": 3,
        "prompt": "one",
        "completion": "",
        "prompt_tokens": [111, 110, 101],
        "completion_tokens": [],
        "created": UPDATED,
    }
    page = empty.http.get(HISTORY, params={"session_id": STRANGE, "after": 1, "limit": 1}).json()
    assert [turn["turn"] for turn in page["turns"]] == [2] and page["position"] == 15


def test_rewind_and_fork_at_a_turn(empty):
    for text in ("one", "two", "three"):
        say(empty, text, "a")
    copy = {"session_id": "a", "new_session_id": "early", "turn": 1}
    assert empty.http.post(FORK, json=copy).status_code == 200
    answer = empty.http.post(REWIND, json={"session_id": "a", "turn": 2})
    assert answer.json() == {"status": "success", "session_id": "a", "turn": 2, "position": 8}
    assert content(say(empty, "4", "a")) == "one\n\ntwo\n\n4"
    assert content(say(empty, "5", "early")) == "one\n\n5"
    past = empty.http.post(REWIND, json={"session_id": "a", "turn": 4})
    assert past.status_code == 404 and "turn 4" in past.json()["error"]
    assert empty.http.post(FORK, json=copy | {"turn": 9, "new_session_id": "x"}).status_code == 404
    assert "x" not in empty.engine.sessions


def test_delete(empty):
    for key in ("a", "a:1", "a:2", "ab"):
        say(empty, key, key)
    answer = empty.http.post(DELETE, json={"session_id": "a"})
    assert (answer.status_code, answer.json()) == (
        200,
        {"status": "success", "message": "Session a deleted successfully"},
    )
    again = empty.http.post(DELETE, json={"session_id": "a"})
    assert (again.status_code, again.json()) == (
        404,
        {"status": "not_found", "message": "Session a not found in database"},
    )
    assert set(empty.engine.sessions) == {"a:1", "a:2", "ab"}
    for _ in range(2):
        assert empty.http.post(DELETE, json={"session_id": "a", "delete_prefix": True}).status_code == 200
        assert set(empty.engine.sessions) == {"ab"}


def test_a_session_leaves_as_a_file_and_comes_back(empty):
    say(empty, "memory", STRANGE)
    by_body = empty.http.post(EXPORT, json={"session_id": STRANGE})
    by_url = empty.http.get(EXPORT, params={"session_id": STRANGE})
    for answer in (by_body, by_url, empty.http.post(EXPORT, params={"session_id": STRANGE})):
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.content == FILE + b"memory"
        disposition = answer.headers["content-disposition"]
        assert disposition.startswith('attachment; filename="r_um_7__quoted_') and disposition.count('"') == 2
        assert disposition.endswith(quote(STRANGE, safe="") + ".rwkvstate")
    answer = empty.http.post(IMPORT, params={"session_id": "copy & more"}, content=by_url.content)
    assert (answer.status_code, answer.json()["session_id"]) == (200, "copy & more")
    assert content(say(empty, "on", "copy & more")) == "memory\n\non"
    assert empty.engine.sessions[STRANGE] == "memory"
    for answer in (
        empty.http.post(EXPORT, json={"session_id": STRANGE, "what": "tokens"}),
        empty.http.get(EXPORT, params={"session_id": STRANGE, "what": "tokens"}),
    ):
        assert answer.content == FILE + b"tokens memory"


def test_a_file_may_be_longer_than_a_body(empty):
    text = "x" * (MAX_STATE - len(FILE))
    assert MAX_STATE > MAX_BODY
    assert empty.http.post(IMPORT + "?session_id=long", content=FILE + text.encode()).status_code == 200
    assert empty.engine.sessions["long"] == text
    assert empty.http.get(EXPORT + "?session_id=long").content == FILE + text.encode()
    assert (
        empty.http.post(IMPORT + "?session_id=longer", content=FILE + text.encode() + b"x").status_code == 413
    )
    assert "longer" not in empty.engine.sessions


def test_fork(empty):
    say(empty, "shared", "a")
    answer = empty.http.post(FORK, json={"session_id": "a", "new_session_id": "b"})
    assert (answer.status_code, answer.json()["session_id"]) == (200, "b")
    assert content(say(empty, "mine", "b")) == "shared\n\nmine"
    assert content(say(empty, "yours", "a")) == "shared\n\nyours"
    taken = empty.http.post(FORK, json={"session_id": "a", "new_session_id": "b"})
    assert taken.status_code == 409 and "b" in taken.json()["error"]
    assert empty.engine.sessions["b"] == "shared\n\nmine"
    assert (
        empty.http.post(FORK, json={"session_id": "a", "new_session_id": "b", "overwrite": True}).status_code
        == 200
    )
    assert empty.engine.sessions["b"] == "shared\n\nyours"


ONE = {"contents": ["a"], "session_id": "s"}
BAD = [
    # path, body, status, words of the sentence
    (STATE, {"session_id": "s"}, 400, "must be single prompt"),
    (STATE, {"contents": [], "session_id": "s"}, 400, "must be single prompt"),
    (STATE, {"contents": ["a", "b"], "session_id": "s"}, 400, "must be single prompt"),
    (STATE, {"contents": ["a", "b"]}, 400, "must be single prompt"),
    (STATE, {"contents": [1], "session_id": "s"}, 400, "contents[0]"),
    (STATE, ONE | {"session_id": ""}, 400, "`session_id`: string should have at least 1 character"),
    (STATE, ONE | {"session_id": 5}, 400, "session_id"),
    (STATE, ONE | {"session_id": "x" * 257}, 400, "session_id"),
    (STATE, ONE | {"session_id": "line\nfeed"}, 400, "session_id"),
    (STATE, ONE | {"session_id": "\x85"}, 400, "session_id"),
    (STATE, b'{"contents":["a"],"session_id":"\\ud800"}', 400, "session_id"),
    (STATE, ONE | {"max_tokens": -1}, 400, "max_tokens"),
    (STATE, ONE | {"use_prefix_cache": "perhaps"}, 400, "use_prefix_cache"),
    (STATE, b"{", 400, "Invalid JSON"),
    (TREE, {"contents": ["a"]}, 400, "Missing dialogue_idx parameter"),
    (TREE, ONE, 400, "Missing dialogue_idx parameter"),
    (TREE, {"contents": ["a"], "dialogue_idx": 0}, 400, "Missing session_id parameter"),
    (TREE, {"contents": ["a"], "dialogue_idx": 0, "session_id": ""}, 400, "Missing session_id parameter"),
    (TREE, {"contents": ["a"], "dialogue_idx": 0, "session_id": None}, 400, "Missing session_id parameter"),
    (TREE, {"contents": ["a", "b"], "dialogue_idx": 0, "session_id": "s"}, 400, "must be single prompt"),
    (TREE, {"contents": [], "dialogue_idx": 0, "session_id": "s"}, 400, "must be single prompt"),
    (TREE, ONE | {"dialogue_idx": -1}, 400, "dialogue_idx"),
    (TREE, ONE | {"dialogue_idx": "first"}, 400, "dialogue_idx"),
    (TREE, ONE | {"dialogue_idx": 1.5}, 400, "dialogue_idx"),
    (TREE, ONE | {"dialogue_idx": True}, 400, "dialogue_idx"),
    (TREE, ONE | {"dialogue_idx": 0, "session_id": ["s"]}, 400, "session_id"),
    (TREE, b"[]", 400, "JSON object"),
    (STATUS, b"{", 400, "Invalid JSON"),
    (STATUS, b"[]", 400, "JSON object"),
    (STATUS, {"limit": 0}, 400, "limit"),
    (STATUS, {"limit": True}, 400, "limit"),
    (STATUS, {"after": 5}, 400, "after"),
    (REWIND, {"session_id": "a"}, 400, "turn"),
    (REWIND, {"session_id": "a", "turn": -1}, 400, "turn"),
    (REWIND, {"session_id": "nobody", "turn": 0}, 404, "nobody"),
    (REWIND, {"turn": 0}, 400, "Missing session_id parameter"),
    (REWIND, {"session_id": "response:x", "turn": 0}, 400, "session_id"),
    (FORK, {"session_id": "a", "new_session_id": "b", "turn": 0}, 400, "turn"),
    (EXPORT, {"session_id": "a", "what": "text"}, 400, "what"),
    (DELETE, b"", 400, "Missing session_id parameter"),
    (DELETE, {"session_id": None}, 400, "Missing session_id parameter"),
    (DELETE, {"session_id": "s", "delete_prefix": "perhaps"}, 400, "delete_prefix"),
    (DELETE, {"session_id": {"a": 1}}, 400, "session_id"),
    (DELETE, {"session_id": "overloaded"}, 429, "overloaded"),
    (DELETE, {"session_id": "fail"}, 500, "failed"),
    (EXPORT, {}, 400, "Missing session_id parameter"),
    (EXPORT, {"session_id": "nobody"}, 404, "nobody"),
    (EXPORT, {"session_id": 1}, 400, "session_id"),
    (EXPORT + "?session_id=%FF", {}, 400, "session_id"),
    (EXPORT + "?session_id=a%00b", {}, 400, "session_id"),
    (IMPORT, FILE, 400, "Missing session_id parameter"),
    (IMPORT + "?session_id=", FILE, 400, "Missing session_id parameter"),
    (IMPORT + "?session_id=s", b"", 400, "empty"),
    (IMPORT + "?session_id=s", b"{}", 400, "no state"),
    (IMPORT + "?session_id=s", b"\xff\x00\x01", 400, "no state"),
    (IMPORT + "?session_id=" + "x" * 257, FILE, 400, "session_id"),
    (FORK, {}, 400, "Missing session_id parameter"),
    (FORK, {"session_id": "a"}, 400, "new_session_id"),
    (FORK, {"session_id": "a", "new_session_id": ""}, 400, "`new_session_id`: string should have at least 1"),
    (FORK, {"session_id": "a", "new_session_id": "a"}, 400, "new_session_id"),
    (FORK, {"session_id": "a", "new_session_id": "b\r"}, 400, "new_session_id"),
    (FORK, {"session_id": "nobody", "new_session_id": "b"}, 404, "nobody"),
    (FORK, {"session_id": "a", "new_session_id": "b", "overwrite": 5}, 400, "overwrite"),
    *[
        (path, json.dumps({"session_id": "s", "x": "a" * MAX_BODY}).encode(), 413, str(MAX_BODY))
        for path in PATHS
        if path != IMPORT
    ],
]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"), BAD, ids=[f"{i}-{path[:40]}" for i, (path, *_) in enumerate(BAD)]
)
def test_bad_input_is_told_what_is_wrong(empty, path, body, status, words):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = empty.http.post(path, content=data)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error
    assert "\n" not in error and len(error) < 400, "one sentence"
    assert empty.engine.sessions == {}


@pytest.mark.parametrize(
    ("parameters", "status", "words"),
    [
        ({}, 400, "Missing session_id parameter"),
        ({"session_id": "nobody"}, 404, "nobody"),
        ({"session_id": "a", "limit": "0"}, 400, "limit"),
        ({"session_id": "a", "after": "x"}, 400, "after"),
    ],
)
def test_a_history_that_cannot_be_had(empty, parameters, status, words):
    answer = empty.http.get(HISTORY, params=parameters)
    assert answer.status_code == status and words in answer.json()["error"]


@pytest.mark.parametrize("path", PATHS)
def test_the_password_is_judged_first(locked, path):
    for data in (
        b"",
        b"{",
        json.dumps(ONE | {"dialogue_idx": 0, "new_session_id": "t", "password": "wrong"}).encode(),
    ):
        answer = locked.http.post(path, content=data)
        assert (answer.status_code, answer.json()) == (
            401,
            {"error": "Unauthorized: invalid or missing password"},
        )


@pytest.mark.parametrize(
    "send",
    [
        lambda body: {"headers": {"authorization": f"Bearer {PASSWORD}"}, "json": body},
        lambda body: {"json": body | {"password": PASSWORD}},
        lambda body: {"params": {"password": PASSWORD}, "json": body},
    ],
)
def test_every_way_to_give_the_password(locked, send):
    for path, body in (
        (STATE, ONE),
        (TREE, ONE | {"dialogue_idx": 0}),
        (STATUS, {}),
        (EXPORT, {"session_id": "s"}),
        (FORK, {"session_id": "s", "new_session_id": "t"}),
        (DELETE, {"session_id": "t"}),
    ):
        assert locked.http.post(path, **send(body)).status_code == 200, path
    for where in ({"headers": {"authorization": f"Bearer {PASSWORD}"}}, {"params": {"password": PASSWORD}}):
        params = {"session_id": "s", **where.get("params", {})}
        got = locked.http.get(EXPORT, params=params, headers=where.get("headers"))
        assert got.status_code == 200
        assert (
            locked.http.post(
                IMPORT, params=params, headers=where.get("headers"), content=got.content
            ).status_code
            == 200
        )
    assert locked.http.get(EXPORT, params={"session_id": "s"}).status_code == 401


@pytest.mark.parametrize("path", PATHS)
def test_preflights_methods_and_cors(locked, path):
    answer = locked.http.options(path)
    assert (answer.status_code, answer.headers["access-control-max-age"]) == (204, "86400")
    wrong = locked.http.put(path)
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == ("GET, POST, HEAD, OPTIONS" if path == EXPORT else "POST, OPTIONS")
    assert path in wrong.json()["error"]
    assert locked.http.post(path).headers["access-control-allow-origin"] == "*"


def test_downloads_and_streams_have_cors(empty):
    say(empty, "x", "s")
    file = empty.http.get(EXPORT + "?session_id=s")
    assert file.headers["access-control-allow-origin"] == "*"
    assert "content-disposition" in file.headers["access-control-expose-headers"]
    stream = empty.http.post(STATE, json=ONE | {"stream": True})
    assert stream.headers["access-control-allow-origin"] == "*"


def test_an_engine_that_does_not_answer_a_command():
    with FrontendProcess(patches={"routes.http.frontend.ANSWERED_WITHIN": 0.2}) as process:
        for key in ("mute", "late"):
            answer = process.http.post(DELETE, json={"session_id": key})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
        for prompt in (
            "late",
            "after",
        ):  # by the end of the first, the answer that nobody waits for has arrived
            assert process.http.post(V1, json={"contents": [prompt]}).status_code == 200


def test_commands_wait_for_the_model():
    with FrontendProcess(ready=False) as process:
        for path in (STATUS, STATE):
            answer = process.http.post(path, json=ONE)
            assert answer.status_code == 503 and "loading" in answer.json()["error"]


def test_other_servers_get_the_state_of_a_turn_for_the_secret_of_the_cluster(server):
    known = {"Authorization": f"Bearer {SECRET}"}
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Bearer {PASSWORD}"}):
        assert server.http.get(PEERS, params={"turn": HELD_TURN}, headers=headers).status_code == 401
    reply = server.http.get(PEERS, params={"turn": HELD_TURN}, headers=known)
    assert (reply.status_code, reply.content) == (200, FILE)
    assert server.http.get(PEERS, params={"turn": HELD_TURN + 1}, headers=known).status_code == 404
    for turn in ("", "x", "0", "-1", str(1 << 63)):
        reply = server.http.get(PEERS, params={"turn": turn}, headers=known)
        assert reply.status_code == 400 and "turn" in reply.text
    assert server.http.get(PEERS, headers=known).status_code == 400


def test_the_secret_of_the_cluster_opens_nothing_else():
    with FrontendProcess(password=PASSWORD, cluster_secret=SECRET) as process:
        assert process.http.get(HISTORY, headers={"Authorization": f"Bearer {SECRET}"}).status_code == 401
        known = {"Authorization": f"Bearer {PASSWORD}"}
        assert process.http.get(PEERS, params={"turn": HELD_TURN}, headers=known).status_code == 401


def test_a_server_without_a_secret_gives_no_states():
    with FrontendProcess() as process:
        reply = process.http.get(PEERS, params={"turn": HELD_TURN})
        assert reply.status_code == 404 and "--cluster-secret-file" in reply.json()["error"]

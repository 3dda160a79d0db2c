"""Requests that are listed, stopped, paused and resumed over HTTP, by any of two front ends."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path

import httpx
import pytest
from serving import Server

TOKENS = 300
TRIES = 20  # to pause a request while it runs, which a machine that stands still may keep from happening
LONG = {
    "stop_tokens": [],
    "max_tokens": TOKENS,
    "chunk_size": 1,
    "temperature": 0,
    "use_prefix_cache": False,
}
TALE = "User: Tell me a story.\n\nAssistant:"
ENDLESS_STREAM = LONG | {"contents": [TALE], "max_tokens": 10_000_000, "stream": True}


class Place:
    """A server over a database that outlives it."""

    def __init__(self, folder: Path) -> None:
        self._flags = ("--device", "cpu", "--frontends", "2", "--state-db", str(folder / "sessions.db"))
        self.start()

    def start(self) -> None:
        self.server = Server(*self._flags)
        self.http = httpx.Client(base_url=self.server.url, timeout=60)

    def post(self, path: str, body: dict, id_: str = "") -> httpx.Response:
        return self.http.post(path, json=body, headers={"X-Request-Id": id_} if id_ else {})

    def stream(self, path: str, body: dict, id_: str = "") -> AbstractContextManager[httpx.Response]:
        return self.http.stream("POST", path, json=body, headers={"X-Request-Id": id_} if id_ else {})

    def whole(self, path: str, body: dict) -> str:
        return self.post(path, body).json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("requests"))
    yield place
    assert place.server.stop() == 0, place.server.log()


def texts(lines: Iterator[str]) -> Iterator[tuple[str, str | None]]:
    """The text of each event, and why it ended."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            yield choice["delta"].get("content", ""), choice.get("finish_reason")


Said = list[tuple[str, str | None]]


def until_paused(place: Place, path: str, body: dict, id_: str, events: int) -> Said:
    """What a stream says until it is paused, which is asked for behind so many events.

    Empty: it had ended by then, as its client had to wait for its turn on a core.
    """
    with place.stream(path, body, id_) as stream:
        assert stream.headers["x-request-id"] == id_
        said = texts(stream.iter_lines())
        before = [*islice(said, events)]
        listed = place.http.get("/v1/server/status").json()["active_requests"]
        answer = place.post("/v1/server/pause", {"request_id": id_}).json()
        before += said
    assert answer["ok"] and answer["paused"] == (before[-1] == ("", "paused"))
    if not answer["paused"]:
        assert before[-1] == ("", "length")
        return []
    assert answer["request_id"] == id_ and [request["request_id"] for request in listed] == [id_]
    return before


def test_paused_streams_go_on_after_a_restart(place: Place) -> None:
    """One without a session, and one that is a turn of it."""
    body = LONG | {"contents": [TALE]}
    expected = place.whole("/v1/chat/completions", body)
    requests = {"tale": "/v1/chat/completions", "turn": "/state/chat/completions"}
    before: dict[str, Said] = {}
    for name, path in requests.items():
        for number in range(TRIES):
            teller = f"teller {number}"
            session = {"session_id": teller} if name == "turn" else {}
            if said := until_paused(place, path, body | {"stream": True} | session, name, 20):
                break
        before[name] = said
        listed = place.http.get("/v1/server/status").json()
        assert (listed["status"], listed["active_requests"]) == ("running", [])
        paused = [{"request_id": each, "model": "rwkv7-demo"} for each in before]
        assert sorted(listed["paused_requests"], key=lambda each: each["request_id"]) == paused
    assert place.server.stop() == 0, place.server.log()
    place.start()

    for name in requests:
        with place.stream("/v1/server/resume", {"request_id": name}) as stream:
            after = list(texts(stream.iter_lines()))
        assert after[-1] == ("", "length")
        assert "".join(text for text, _ in before[name] + after) == expected
        listed = place.http.get("/v1/server/status").json()["paused_requests"]
        assert name not in [request["request_id"] for request in listed]
        assert place.post("/v1/server/resume", {"request_id": name}).status_code == 404
    assert listed == []
    (turn,) = place.http.get("/v1/state/history", params={"session_id": teller}).json()["turns"]
    assert (turn["completion"], len(turn["completion_tokens"])) == (expected, TOKENS)


def test_a_stopped_stream_ends_with_what_it_has(place: Place) -> None:
    with place.stream("/v1/chat/completions", ENDLESS_STREAM) as stream:
        said = texts(stream.iter_lines())
        next(said)
        answer = place.post("/v1/server/stop", {}).json()  # there is just one
        assert answer["ok"] and answer["stopped"]
        assert answer["active_request"]["request_id"] == stream.headers["x-request-id"]
        assert list(said)[-1] == ("", "stop")
    assert place.post("/v1/server/stop", {}).json() == {"ok": True, "stopped": False, "active_request": None}


def test_a_resumed_request_may_be_paused_again_and_read_whole(place: Place) -> None:
    expected = place.whole("/v1/chat/completions", LONG | {"contents": [TALE]})
    again = {"request_id": "x"}
    began = "/v1/chat/completions", LONG | {"contents": [TALE], "stream": True}
    for _ in range(TRIES):
        if (first := until_paused(place, *began, "x", 5)) and (
            second := until_paused(place, "/v1/server/resume", again, "x", 5)
        ):
            break
    last = place.whole("/v1/server/resume", again | {"stream": False})
    assert "".join(text for text, _ in first + second) + last == expected


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("/v1/server/resume", {}, 400),
        ("/v1/server/resume", {"request_id": "nobody"}, 404),
        ("/v1/server/resume", {"request_id": 5}, 400),
        ("/v1/server/pause", {"request_id": ["x"]}, 400),
    ],
)
def test_wrong_requests(place: Place, path: str, body: dict, status: int) -> None:
    answer = place.post(path, body)
    assert answer.status_code == status and "error" in answer.json()


@pytest.mark.parametrize("body", [{}, {"request_id": "nobody"}])
def test_nobody_to_pause(place: Place, body: dict) -> None:
    answer = {"ok": True, "paused": False, "active_request": None}
    assert place.post("/v1/server/pause", body).json() == answer


def test_without_a_name_there_must_be_one_request(place: Place) -> None:
    with (
        place.stream("/v1/chat/completions", ENDLESS_STREAM, "one") as one,
        place.stream("/v1/chat/completions", ENDLESS_STREAM, "two") as two,
    ):
        said = [texts(stream.iter_lines()) for stream in (one, two)]
        for each in said:
            next(each)
        answer = place.post("/v1/server/pause", {})
        assert answer.status_code == 400 and "request_id" in answer.text
        for name, each in zip(("one", "two"), said, strict=True):
            assert place.post("/v1/server/stop", {"request_id": name}).json()["stopped"]
            assert list(each)[-1] == ("", "stop")

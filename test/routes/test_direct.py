"""Replies in pieces to clients of HTTP/1.0, where the system has no thread for one."""

import asyncio
import json
import threading
from typing import Any, NamedTuple

import pytest
from robyn import Headers, Response, StreamingResponse

from routes.direct import send_directly
from routes.guard.inbound import Note
from routes.http.errors import native_shape
from routes.http.stream import JobStream


class Pieces(JobStream):
    """A stream that notes whether it was closed."""

    live = False  # nothing is to be done when it is dropped

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def _next(self) -> bytes:
        raise AssertionError("nothing is asked of it")

    def _fail(self, message: str, status: int) -> bytes:
        raise AssertionError("nothing is asked of it")


class Connections:
    """In place of the guard."""

    def __init__(self) -> None:
        self.taken, self.released = list[Note](), list[Note]()

    def take(self, note: Note) -> None:
        self.taken.append(note)

    def release(self, note: Note) -> None:
        self.released.append(note)


class Old(NamedTuple):
    """A request of HTTP/1.0."""

    note: Note = Note()
    shape: Any = staticmethod(native_shape)


@pytest.mark.parametrize("name", ["direct", "asyncio"])
def test_a_reply_that_gets_no_thread_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Robyn sends it, as nobody has taken the connection from it; the job is cancelled."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    stream, guard, old = Pieces(), Connections(), Old()
    reply = StreamingResponse(stream, 200, Headers({}), "text/plain")  # type: ignore[arg-type]
    sent = asyncio.run(send_directly(guard, old, reply, 0))  # type: ignore[arg-type]
    assert isinstance(sent, Response) and sent.status_code == 503
    assert "thread" in json.loads(sent.description)["error"]
    assert guard.released == [old.note] and not guard.taken
    for thread in threading.enumerate():
        if thread.name == "direct":
            thread.join(60)
    assert stream.closed

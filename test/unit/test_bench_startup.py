"""bench/startup.py reads streams that begin as soon as a server answers."""

import asyncio
import gc
import time

import pytest
from fake_api import FakeServer, chat, open_stream, send, stream

from bench import startup

pytestmark = pytest.mark.thorough


def test_streams_are_read_for_a_while_and_left_without_a_word(monkeypatch, caplog):
    async def begin(writer, body):
        open_stream(writer)
        await send(writer, chat("a"))
        await asyncio.Event().wait()

    monkeypatch.setattr(startup, "STREAMED", 0.1)
    server, began = FakeServer(), time.monotonic()
    server.answer = begin
    try:
        first, gap = asyncio.run(startup.stream(server.port, began, 3))
        gc.collect()  # what was never looked at is said when it goes
    finally:
        server.close()
    assert 0 < first < time.monotonic() - began and gap > 0
    assert len(server.bodies) == 3 and "never retrieved" not in caplog.text


def test_a_stream_that_ends_is_an_error(monkeypatch):
    async def end(writer, body):
        await stream(writer, chat("a"))

    server = FakeServer()
    server.answer = end
    try:
        with pytest.raises(RuntimeError, match="a stream has ended, HTTP 200"):
            asyncio.run(startup.stream(server.port, time.monotonic(), 1))
    finally:
        server.close()

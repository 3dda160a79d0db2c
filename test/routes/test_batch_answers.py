"""What a row of a batch is answered with by a route that takes long, and sends its reply in pieces."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from frontend_process import FrontendProcess
from robyn import Headers, StreamingResponse

from routes import batching, table
from routes.batches.files import IN_PIECES
from routes.http.exchange import json_response
from routes.http.replies import Reply
from routes.http.stream import SlowJson
from routes.translate.errors import deepl_shape
from routes.translate.handlers import Urgency
from rwkv_batch.batches.lines import InputLine
from rwkv_batch.batches.runner import RowReply
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import Failed, GenerateRequest, Progress, Rejected, RowDelta

URL = "/v2/translate"
REQUEST = GenerateRequest(id="a", prompts=["Hund"], max_tokens=4)
FRONT = SimpleNamespace(
    audit=None, accounts=None, metered=False, settings=SimpleNamespace(max_body=1 << 20), models={}
)


class Translations(Reply):
    shape = staticmethod(deepl_shape)

    def whole(self, job, deltas):
        return {"translations": [{"text": "".join(delta.text for delta in deltas)}]}

    def events(self, deltas):
        return []


def answered(monkeypatch, job: Job, then: Callable[[asyncio.Task], object] = lambda task: None) -> RowReply:
    async def handler(front, http):
        stream = SlowJson(job, Translations(), lambda outcome: None, lambda end: None, [])
        return StreamingResponse(stream, 200, Headers({}), "application/json")

    route = SimpleNamespace(path=URL, methods=("POST",), shape=deepl_shape, handler=handler)
    monkeypatch.setattr(table, "ROUTES", [route])

    async def ask() -> RowReply:
        row = asyncio.ensure_future(batching.answers(FRONT)(InputLine("1", URL, {"text": ["x"]}), 1e12, ""))
        then(row)
        return await row

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (Progress("a", [RowDelta(0, "dog", 1, "stop")]), 200),
        (Failed("a", "The engine has stopped."), 500),
        (Rejected("a", "overloaded", "The server is busy."), 429),
    ],
)
def test_a_reply_in_pieces_has_the_status_that_it_would_have_whole(monkeypatch, event, status: int):
    """DeepL's errors have no field by which they could be known."""
    job = Job(REQUEST, lambda name: None)
    job.put(event)
    assert answered(monkeypatch, job).status == status


@pytest.mark.parametrize("now", [0.0, 1e12, 2e12])
def test_a_row_is_taken_whatever_the_clock_was_set_to_since_its_batch_began(monkeypatch, now: float):
    """The time that is left of a window may be more than a request may ask for, or less than nothing."""

    async def handler(front, http):
        return json_response(http, {"left": Urgency.from_json(http.json[0]).deadline})

    route = SimpleNamespace(path=URL, methods=("POST",), shape=deepl_shape, handler=handler)
    monkeypatch.setattr(table, "ROUTES", [route])
    monkeypatch.setattr(batching.time, "time", lambda: now)
    row = asyncio.run(batching.answers(FRONT)(InputLine("1", URL, {"text": ["x"]}), 1e12, ""))
    assert row.status == 200, row.body


def test_a_row_that_is_cancelled_ends_in_the_engine_too(monkeypatch):
    read, cancelled = threading.Event(), []

    class Waiting(Job):
        def read(self, timeout: float):
            loop.call_soon_threadsafe(row.cancel)
            assert read.wait(60)
            return []

    def cancel(name: str) -> None:
        cancelled.append(name)
        read.set()

    def then(task: asyncio.Task) -> None:
        nonlocal loop, row
        loop, row = asyncio.get_running_loop(), task

    loop = row = None
    with pytest.raises(asyncio.CancelledError):
        answered(monkeypatch, Waiting(REQUEST, cancel), then)
    assert cancelled == ["a"]


@pytest.mark.parametrize("size", [10, IN_PIECES + 1])
def test_a_file_that_is_deleted_while_it_is_asked_for_is_not_there(tmp_path: Path, size: int):
    """Its row has been read, and then its contents are gone."""
    with FrontendProcess(batch_dir=str(tmp_path)) as front:
        sent = {"file": ("rows.jsonl", b"\n" * size)}
        file = front.http.post("/v1/files", files=sent, data={"purpose": "batch"}).json()["id"]
        (tmp_path / file).unlink()
        reply = front.http.get(f"/v1/files/{file}/content")
        assert reply.status_code == 404 and file in reply.json()["error"]["message"], reply.text

"""What a request holds is free once it has been answered."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace, TracebackType

import prometheus_client.metrics
import prometheus_client.values
import pytest

from routes.guard.limits import Limits
from routes.guard.reads import Guard
from routes.http.frontend import Frontend
from routes.http.stream import EventStream
from routes.native.batch import NativeReply
from routes.table import application
from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.client import Job
from rwkv_batch.wire.protocol import GenerateRequest


class Headers(dict[str, str]):
    """Those of a request."""


@pytest.fixture
def without_collections() -> Iterator[None]:
    """A front end makes few objects for a request, so that none may come for long."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("path", ["/health", "/nowhere"])
def test_a_request_is_gone_when_it_has_been_answered(path: str):
    """With its body, which may be 256 MB."""
    front = Frontend(FrontendConfig(), None)
    app = application(front, Guard(Limits(body=1000)), 1)
    place = path if path == "/health" else "/*path"
    handler = next(r.function.handler for r in app.router.get_routes() if r.route == place)
    request = SimpleNamespace(
        method="GET",
        url=SimpleNamespace(path=path),
        headers=Headers(),
        body=b"",
        query_params=SimpleNamespace(to_dict=dict),
        ip_addr="127.0.0.1",
    )
    held = weakref.ref(request.headers)
    reply = asyncio.run(handler(request))
    assert reply.status_code in (200, 404, 503)
    del request
    assert held() is None


class Collecting:
    """A lock in which the garbage collector comes once, at the worst time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("library", [prometheus_client.values, prometheus_client.metrics])
def test_a_stream_may_be_found_by_the_garbage_collector_where_its_end_cannot_be_counted(
    monkeypatch: pytest.MonkeyPatch, library: ModuleType
) -> None:
    """In the thread that holds the lock of a count, or of one name's series, which it cannot take twice."""
    monkeypatch.setattr(library, "Lock", Collecting)
    front = Frontend(FrontendConfig(), None)
    counted, cancelled = [], []

    def count(outcome: str) -> None:
        front.shared.answered.add("/v1/batch", "POST", 200)
        counted.append(outcome)
        front.leave()

    front.enter()
    job = Job(GenerateRequest("job", ["p"], 8), cancelled.append)
    stream = EventStream(job, NativeReply("m"), count, front.shared.dropped.put, front.crowded)
    stream.itself = stream  # nothing but a collection ends it
    front.watch(stream)
    del stream
    counts = threading.Thread(target=front.shared.answered.add, args=("/v1/batch", "POST", 200), daemon=True)
    counts.start()
    counts.join(60)
    assert not counts.is_alive(), "it waits for a lock that it holds itself"
    with front.shared.changed:
        assert front.shared.changed.wait_for(lambda: not front.busy, 60)
    assert (cancelled, counted) == (["job"], ["client left"])

"""The front end's end of the wire against a bare ROUTER socket."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from rwkv_batch.wire.client import Client, EngineGone, Job, RequestFailed, RequestRejected
from rwkv_batch.wire.codec import decode_to_engine, encode
from rwkv_batch.wire.commands import DeleteSession
from rwkv_batch.wire.protocol import (
    Accepted,
    Cancel,
    CommandReply,
    Event,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    RowDelta,
    WatchLoad,
)

REQUEST = GenerateRequest(id="one", prompts=["a", "b"], max_tokens=5)


class StubEngine:
    """The other end, driven by the test."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.RCVTIMEO, 60_000)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.router.bind(address)

    def receive(self):
        self.frontend, data = self.router.recv_multipart()
        return decode_to_engine(data)

    def send(self, *events: Event) -> None:
        self.router.send_multipart([self.frontend, encode(list(events))])


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[tuple[StubEngine, Client]]:
    address = f"ipc://{tmp_path}/engine"
    engine, client = StubEngine(address), Client(address, "frontend-1")
    yield engine, client
    client.close()
    engine.router.close()
    engine.context.term()


def assert_nothing_is_in_flight(engine: StubEngine, client: Client) -> None:
    """When the engine is lost, what is in flight is cancelled before anything else is sent."""
    client.fail_all("The engine was lost.")
    client.submit(GenerateRequest(id="next", prompts=["c"], max_tokens=1))
    assert isinstance(engine.receive(), GenerateRequest)


def submitted(wire: tuple[StubEngine, Client]) -> tuple[StubEngine, Client, Job]:
    engine, client = wire
    job = client.submit(REQUEST)
    assert engine.receive() == REQUEST
    assert engine.frontend == b"frontend-1"
    return engine, client, job


def test_a_job_from_acceptance_to_its_last_delta(wire: tuple[StubEngine, Client]):
    engine, client, job = submitted(wire)
    engine.send(Accepted("one", [1, 2]))
    asyncio.run(asyncio.wait_for(job.accepted(), 30))
    assert job.acceptance.prompt_tokens == [1, 2]
    assert job.read(0) == []
    first, second, last = RowDelta(0, "x", 1), RowDelta(1, "y", 1, "stop"), RowDelta(0, "z", 1, "length")
    engine.send(Progress("one", [first]), Progress("one", [second]))
    assert job.read(60) == [first, second]
    assert not job.exhausted
    engine.send(Progress("one", [last]))
    assert asyncio.run(job.read_async(60)) == [last]
    assert job.exhausted
    assert_nothing_is_in_flight(engine, client)


def test_a_refusal_says_why(wire: tuple[StubEngine, Client]):
    engine, client, job = submitted(wire)
    engine.send(Rejected("one", "overloaded", "full"))
    with pytest.raises(RequestRejected, match="full") as caught:
        asyncio.run(asyncio.wait_for(job.accepted(), 30))
    assert caught.value.reason == "overloaded"
    assert_nothing_is_in_flight(engine, client)


def test_a_failure_comes_after_the_text_before_it(wire: tuple[StubEngine, Client]):
    engine, _, job = submitted(wire)
    engine.send(Accepted("one", [1, 2]))
    asyncio.run(asyncio.wait_for(job.accepted(), 30))
    engine.send(Progress("one", [RowDelta(0, "x", 1)]), Failed("one", "broken"))
    assert [delta.text for delta in job.read(60)] == ["x"]
    with pytest.raises(RequestFailed, match="broken"):
        job.read(60)


def test_a_job_has_failed_when_none_of_its_rows_is_left(wire: tuple[StubEngine, Client]):
    engine, client, job = submitted(wire)
    engine.send(Progress("one", [RowDelta(0, "x", 1), RowDelta(1, "y", 1, "error", error="broken")]))
    assert [(delta.text, delta.error) for delta in job.read(60)] == [("x", ""), ("y", "broken")]
    assert not job.exhausted
    engine.send(Progress("one", [RowDelta(0, "", 0, "error", error="broken too")]))
    with pytest.raises(RequestFailed, match="broken too"):
        job.read(60)
    assert not job.exhausted
    assert_nothing_is_in_flight(engine, client)


def test_cancelling_tells_the_engine_once_and_drops_what_still_comes(wire: tuple[StubEngine, Client]):
    engine, client, job = submitted(wire)
    job.cancel()
    job.cancel()
    assert engine.receive() == Cancel("one")
    engine.send(Progress("one", [RowDelta(0, "late", 1)]))
    other = client.submit(GenerateRequest(id="two", prompts=["c"], max_tokens=1))
    assert isinstance(engine.receive(), GenerateRequest)
    engine.send(Progress("two", [RowDelta(0, "z", 1, "stop")]))
    assert other.read(60) and not job.read(0)


class LateJob(Job):
    """Counts what comes when it is cancelled."""

    counts_late = True


def test_a_job_that_counts_what_comes_late_has_events_until_the_last(wire: tuple[StubEngine, Client]):
    engine, client = wire
    job = client.submit(GenerateRequest(id="one", prompts=["a"], max_tokens=5), LateJob)
    engine.receive()
    job.cancel()
    job.cancel()
    assert engine.receive() == Cancel("one", closes=True)
    engine.send(Progress("one", [RowDelta(0, "late", 1)]))
    assert [delta.text for delta in job.read(60)] == ["late"]
    engine.send(Progress("one", [RowDelta(0, "", 0, "stop")]))
    assert [delta.text for delta in job.read(60)] == [""]
    assert_nothing_is_in_flight(engine, client)


def test_a_finished_job_is_not_cancelled(wire: tuple[StubEngine, Client]):
    engine, client, job = submitted(wire)
    engine.send(Progress("one", [RowDelta(0, "x", 1, "stop"), RowDelta(1, "y", 1, "stop")]))
    assert len(job.read(60)) == 2
    job.cancel()
    client.submit(GenerateRequest(id="two", prompts=["c"], max_tokens=1))
    assert isinstance(engine.receive(), GenerateRequest), "no Cancel came in between"


def test_cancelling_does_not_wait_for_a_delivery(wire: tuple[StubEngine, Client]):
    """A handler that the garbage collector finds cancels its job in a thread that may hold any other lock."""
    engine, client, job = submitted(wire)
    other = client.submit(GenerateRequest(id="two", prompts=["c"], max_tokens=1))
    waiting, delivering, cancelled = threading.Event(), threading.Event(), threading.Event()

    class HeldUp(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *arguments: Any, **named: Any) -> asyncio.Handle:
            delivering.set()
            cancelled.wait(30)
            return super().call_soon_threadsafe(*arguments, **named)

    async def read() -> None:
        accepted = asyncio.ensure_future(job.accepted())
        await asyncio.sleep(0)
        waiting.set()
        await accepted

    loop = HeldUp()
    reader = threading.Thread(target=loop.run_until_complete, args=(read(),))
    reader.start()
    assert waiting.wait(30)
    engine.send(Accepted("one", [1, 2]))
    assert delivering.wait(30)
    threading.Thread(target=lambda: (other.cancel(), cancelled.set()), daemon=True).start()
    assert cancelled.wait(25), "cancelling waits for the delivery to the other job"
    reader.join()
    loop.close()


def test_a_failed_job_does_not_keep_its_reader(wire: tuple[StubEngine, Client]):
    """Otherwise only the garbage collector could free the stream of a failed request."""

    class Reader:
        def __init__(self, job: Job) -> None:
            self.job = job

        def read(self) -> None:
            with pytest.raises(RequestFailed, match="broken"):
                self.job.read(60)

    engine, _, job = submitted(wire)
    engine.send(Failed("one", "broken"))
    reader = Reader(job)
    gc.disable()
    try:
        reader.read()
        kept = weakref.ref(reader)
        del reader
        assert kept() is None
    finally:
        gc.enable()


class SlowReader:
    """Takes its event when it is let."""

    counts_late = False

    def __init__(self) -> None:
        self.entered, self.let = threading.Event(), threading.Event()

    def ends(self, event: Event) -> bool:
        return True

    def put(self, event: Event) -> None:
        self.entered.set()
        assert self.let.wait(30)


def test_messages_that_arrive_together_are_taken_in_their_order(wire: tuple[StubEngine, Client]):
    engine, client, job = submitted(wire)
    other = client.submit(GenerateRequest(id="two", prompts=["c"], max_tokens=1))
    broken = client.submit(GenerateRequest(id="three", prompts=["c"], max_tokens=1))
    client.send_for(slow := SlowReader(), DeleteSession("slow", "a"))
    for _ in range(3):
        engine.receive()
    engine.send(CommandReply("slow"))
    assert slow.entered.wait(30)
    engine.send(Accepted("one", [1, 2]), Progress("one", [RowDelta(0, "a", 1)]))
    engine.send(Progress("two", [RowDelta(0, "z", 1, "stop")]), Progress("one", [RowDelta(1, "x", 1)]))
    engine.send(Progress("three", [RowDelta(0, "z", 1)]), Failed("three", "broken"))
    engine.send(Progress("one", [RowDelta(0, "b", 1, "stop"), RowDelta(1, "y", 1, "length")]))
    slow.let.set()
    read = list[RowDelta]()
    while not job.exhausted:
        read += job.read(60)
    assert "".join([delta.text for delta in read if delta.row == 0]) == "ab"
    assert "".join([delta.text for delta in read if delta.row == 1]) == "xy"
    assert [delta.text for delta in other.read(60)] == ["z"] and other.exhausted
    assert [delta.text for delta in broken.read(60)] == ["z"]
    with pytest.raises(RequestFailed, match="broken"):
        broken.read(60)
    assert_nothing_is_in_flight(engine, client)


LITTLE, MUCH = 4000, 600  # deltas


def test_what_nobody_reads_becomes_one_delta_a_row(wire: tuple[StubEngine, Client]):
    engine, client = wire
    job = client.submit(REQUEST)
    engine.receive()
    engine.send(Accepted("one", [1, 1]))
    for first in range(0, LITTLE, 20):  # as ZeroMQ does not take so many messages here
        numbers = range(first, first + 20)
        engine.send(*(Progress("one", [RowDelta(r, f"{n},", 1, ids=[n]) for r in range(2)]) for n in numbers))
    engine.send(Progress("one", [RowDelta(row, "", 0, "length") for row in range(2)]))
    behind = client.submit(GenerateRequest(id="behind", prompts=["c"], max_tokens=1))
    engine.receive()
    engine.send(Accepted("behind", [1]))
    asyncio.run(behind.accepted(60))  # so all before it has arrived
    deltas = job.read(60)
    assert len(deltas) < LITTLE / 2 and job.exhausted
    for row in range(2):
        its = [delta for delta in deltas if delta.row == row]
        assert "".join(delta.text for delta in its) == "".join(f"{number}," for number in range(LITTLE))
        assert [each for delta in its for each in delta.ids] == [*range(LITTLE)]
        assert sum(delta.tokens for delta in its) == LITTLE and its[-1].finish_reason == "length"


def test_a_reader_that_is_far_behind_ends_the_request(wire: tuple[StubEngine, Client]):
    engine, client = wire
    job = client.submit(GenerateRequest(id="one", prompts=["a"], max_tokens=1 << 30))
    engine.receive()
    engine.send(Accepted("one", [1]))
    for _ in range(MUCH):
        engine.send(Progress("one", [RowDelta(0, "x" * 20_000, 1)]))
    assert engine.receive() == Cancel("one")
    assert len(job.read(60)) == 1
    with pytest.raises(RequestFailed, match="too slowly"):
        job.read(60)
    assert_nothing_is_in_flight(engine, client)


def test_waiting_ends_in_time(wire: tuple[StubEngine, Client]):
    _, _, job = submitted(wire)
    assert asyncio.run(job.read_async(0.01)) == []
    with pytest.raises(TimeoutError):
        asyncio.run(job.accepted(0.01))


def test_a_session_command_has_one_answer(wire: tuple[StubEngine, Client]):
    engine, client = wire

    async def delete(name: str, *answer: Event) -> CommandReply:
        asked = asyncio.ensure_future(client.ask(DeleteSession(name, "a")))
        assert await asyncio.to_thread(engine.receive) == DeleteSession(name, "a")
        engine.send(*answer)
        return await asyncio.wait_for(asked, 30)

    assert asyncio.run(delete("one", CommandReply("one", found=2))).found == 2
    with pytest.raises(RequestRejected, match="no such session"):
        asyncio.run(delete("two", Rejected("two", "not_found", "no such session")))
    assert_nothing_is_in_flight(engine, client)


def test_a_lost_engine_fails_every_job(wire: tuple[StubEngine, Client]):
    engine, client, job = submitted(wire)
    client.fail_all("The engine was restarted.")
    with pytest.raises(RequestFailed, match="restarted"):
        job.read(60)
    assert engine.receive() == Cancel("one")
    assert_nothing_is_in_flight(engine, client)


class Ignored:
    """A reader of what nobody reads."""

    counts_late = False

    def ends(self, event: Event) -> bool:
        return False

    def put(self, event: Event) -> None:
        pass


@pytest.mark.parametrize("method", ["send", "recv"])
@pytest.mark.parametrize("error", [zmq.Again(), zmq.ContextTerminated(), MemoryError()], ids=repr)
def test_a_socket_that_fails_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    """What is in flight fails and is cancelled, what lasts is asked again; what comes next is answered."""
    address = f"ipc://{tmp_path}/engine"
    engine, client = StubEngine(address), Client(address, "frontend-1")
    client.send_for(Ignored(), WatchLoad("load"), lasts=True)
    assert isinstance(engine.receive(), WatchLoad)
    job = client.submit(REQUEST)
    assert engine.receive() == REQUEST
    real, left = getattr(zmq.Socket, method), [error]

    def fail(socket: zmq.Socket, *arguments: Any, **options: Any) -> Any:
        if left and socket.type == zmq.DEALER:
            raise left.pop()
        return real(socket, *arguments, **options)

    monkeypatch.setattr(zmq.Socket, method, fail)
    if method == "recv":
        engine.send(Accepted("one", [1, 2]))
    else:
        client.submit(GenerateRequest(id="lost", prompts=["a"], max_tokens=1))
    with pytest.raises(EngineGone, match="connection to the engine"):
        while not left or job.read(60) == []:
            job.read(60)
    after = client.submit(GenerateRequest(id="after", prompts=["a"], max_tokens=1))
    received = []
    while not received or received[-1].id != "after":
        received.append(engine.receive())
    assert WatchLoad("load") in received and Cancel("one") in received
    engine.send(Progress("after", [RowDelta(0, "x", 1, "length")]))
    assert [row.text for row in after.read(60)] == ["x"]
    client.close()
    engine.router.close()
    engine.context.term()

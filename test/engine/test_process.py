"""The engine's process: messages that are not understood, and what the supervisor gets of it."""

import asyncio
import errno
import gc
import multiprocessing
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from checkpoints import tiny, write_pth
from msgspec.structs import replace

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.serving import process
from rwkv_batch.engine.serving.models import Models
from rwkv_batch.engine.serving.process import Announcer, Service, run
from rwkv_batch.runner import backends
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.wire.client import Client, Job, RequestRejected
from rwkv_batch.wire.codec import decode_events, encode
from rwkv_batch.wire.commands import LoadModel, MayChangeModels, RemoveModel
from rwkv_batch.wire.protocol import CommandReply, Failed, GenerateRequest
from rwkv_batch.wire.supervision import CatchUp, FrontendBroken, LoadFailure, Ping, Serving, Stop


@pytest.mark.parametrize("message", [{"type": "of the future", "id": "a"}, {"type": "generate", "id": "a"}])
def test_a_message_that_is_not_understood_is_answered(tmp_path: Path, message):
    address = f"ipc://{tmp_path}/engine"
    idle = {"busy": False, "improves_in": None, "improve": lambda: None, "close": lambda: None}
    engine = SimpleNamespace(launch=list, land=list, **idle)
    control, supervisor = multiprocessing.Pipe()
    wakeups, waker = socket.socketpair()
    served = Service(engine, None, address, control, wakeups, Announcer(control, 0))
    service = Thread(target=served.serve, daemon=True)
    service.start()
    context = zmq.Context()
    frontend = context.socket(zmq.DEALER)
    frontend.setsockopt(zmq.IDENTITY, b"frontend-1")
    frontend.connect(address)
    frontend.send(msgspec.msgpack.encode({"neither": "type nor id"}))
    frontend.send(msgspec.msgpack.encode(message))
    assert frontend.poll(30_000)
    (event,) = decode_events(frontend.recv())
    assert isinstance(event, Failed) and event.id == "a" and "does not understand" in event.message
    supervisor.send(Stop())
    service.join()
    frontend.close()
    context.destroy()
    waker.close()


@pytest.mark.parametrize("error", [zmq.Again(), zmq.ContextTerminated(), MemoryError()], ids=repr)
@pytest.mark.parametrize("method", ["send_multipart", "recv_multipart"])
def test_a_message_that_fails_once_is_sent_or_received_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, method: str
) -> None:
    """The text of the request comes whole, or it is refused; the process goes on."""
    engine = Engine(tiny(vocab=400), device="cpu", max_rows=2, prefix_cache_mb=0)
    control, supervisor = multiprocessing.Pipe()
    wakeups, waker = socket.socketpair()
    service = Service(
        Models([engine]), None, f"ipc://{tmp_path}/engine", control, wakeups, Announcer(control, 0)
    )
    real, left = getattr(zmq.Socket, method), [error]

    def fail(router: zmq.Socket, *arguments: Any, **options: Any) -> Any:
        if left and router.poll(0, zmq.POLLIN if method.startswith("recv") else zmq.POLLOUT):
            if method.startswith("recv") and isinstance(error, MemoryError):
                left.clear()
                monkeypatch.setattr(process, "decode_to_engine", once_without_memory(error))
            else:
                raise left.pop()
        return real(router, *arguments, **options)

    monkeypatch.setattr(zmq.Socket, method, fail)
    thread = Thread(target=service.serve, daemon=True)
    thread.start()
    client = Client(f"ipc://{tmp_path}/engine", "frontend-1")
    asked = GenerateRequest("a", [[5, 6]], 3, stop_ids=[], flush_tokens=1)
    job = client.submit(asked)
    try:
        while not job.exhausted:
            job.read(30)
    except RequestRejected as refused:
        assert refused.reason == "unavailable" and isinstance(error, MemoryError)
    assert not left
    again = client.submit(replace(asked, id="b"))
    while not again.exhausted:
        assert again.read(30)
    supervisor.send(Stop())
    thread.join()
    client.close()
    waker.close()


class TwoFrontEnds:
    """An engine and the clients of two front ends, of which nothing can be sent to some."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine(tiny(vocab=400), device="cpu", max_rows=2, prefix_cache_mb=0)
        control, self.supervisor = multiprocessing.Pipe()
        wakeups, self.waker = socket.socketpair()
        self.service = Service(
            Models([engine]), None, f"ipc://{folder}/engine", control, wakeups, Announcer(control, 0)
        )
        self.broken, real = set[bytes](), zmq.Socket.send_multipart

        def send(router: zmq.Socket, parts: list[bytes], **options: Any) -> Any:
            if parts[0] in self.broken:
                raise zmq.ZMQError(errno.ENOMEM)
            return real(router, parts, **options)

        monkeypatch.setattr(zmq.Socket, "send_multipart", send)
        self.clients = [Client(f"ipc://{folder}/engine", name) for name in ("frontend-1", "frontend-2")]

    def ask(self, client: Client, id_: str) -> Job:
        return client.submit(GenerateRequest(id_, [[5, 6]], 3, stop_ids=[], flush_tokens=1))

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.waker.close()


def test_a_front_end_to_which_nothing_can_be_sent_is_given_up_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SEND_AGAIN", 0.0)
    both = TwoFrontEnds(tmp_path, monkeypatch)
    broken, well = both.clients
    both.broken.add(b"frontend-1")
    thread = Thread(target=both.service.serve, daemon=True)
    thread.start()
    for number in range(2):
        both.ask(broken, f"a{number}")
        assert both.supervisor.poll(30) and both.supervisor.recv() == FrontendBroken("frontend-1")
        job = both.ask(well, f"b{number}")
        while not job.exhausted:
            assert job.read(30)
    both.supervisor.send(Stop())
    thread.join()
    both.close()


def test_an_engine_that_can_send_to_nobody_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SEND_AGAIN", 0.0)
    both = TwoFrontEnds(tmp_path, monkeypatch)
    both.broken |= {b"frontend-1", b"frontend-2"}
    for number, client in enumerate(both.clients):
        both.ask(client, f"{number}")
    with pytest.raises(zmq.ZMQError, match="Cannot allocate memory"):
        both.service.serve()
    both.close()


def once_without_memory(error: Exception) -> Callable[[bytes], Any]:
    """In place of what decodes messages."""
    left, real = [error], process.decode_to_engine

    def decode(data: bytes) -> Any:
        if left:
            raise left.pop()
        return real(data)

    return decode


class EndlessRunner(TorchRunner):
    """A step ends when it is told to."""

    entered, released = Event(), Event()

    def run(self, batch):
        if batch.draws:
            self.entered.set()
            self.released.wait()
        return super().run(batch)


def test_an_engine_answers_whether_it_lives_unless_a_step_does_not_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(backends, "TorchRunner", EndlessRunner)
    engine = Engine(tiny(vocab=400), device="cpu", max_rows=2, prefix_cache_mb=0)
    control, supervisor = multiprocessing.Pipe()
    wakeups, waker = socket.socketpair()
    service = Service(
        Models([engine]), None, f"ipc://{tmp_path}/engine", control, wakeups, Announcer(control, 0)
    )
    thread = Thread(target=service.serve, daemon=True)
    thread.start()
    supervisor.send(Ping())
    assert supervisor.recv() == Ping(0.0), "nothing waits"
    client = Client(f"ipc://{tmp_path}/engine", "frontend-1")
    job = client.submit(GenerateRequest("a", [[5, 6]], 2, stop_ids=[]))
    assert EndlessRunner.entered.wait(30)
    supervisor.send(Ping())
    assert not supervisor.poll(0.2), "it could not have come"
    EndlessRunner.released.set()
    assert supervisor.recv().waited > 0
    while not job.exhausted:
        job.read(30)
    supervisor.send(Stop())
    thread.join()
    client.close()
    waker.close()


class Started:
    """An engine's process in a thread, as the supervisor has it."""

    def __init__(self, folder: Path, *changes: LoadModel | RemoveModel) -> None:
        self.file = write_pth(folder / "one.pth", dict(tiny(vocab=400).tensors))
        self.control, theirs = multiprocessing.Pipe()
        config = EngineConfig(model_path=str(self.file), device="cpu", max_rows=2, prefix_cache_mb=0)
        encoded = [encode(change) for change in changes]
        self.ended = Future[None]()

        def work() -> None:
            try:
                run((config,), f"ipc://{folder}/engine", theirs, encoded)
            except BaseException as error:
                self.ended.set_exception(error)
            else:
                self.ended.set_result(None)

        Thread(target=work, daemon=True).start()

    def models(self) -> list[str]:
        """What it says that it serves, next."""
        assert self.control.poll(60)
        said = self.control.recv()
        assert isinstance(said, Serving) and said.loading == []
        return [info.model for info in said.models]

    def stop(self) -> None:
        self.control.send(Stop())
        self.ended.result(60)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Started]]:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of the tests stay
    yield partial(Started, tmp_path)
    gc.unfreeze()
    for thread in threading.enumerate():
        if thread.name == "models":
            thread.join(60)  # a deadline
            assert not thread.is_alive(), "it waits for an engine that has ended"


def loaded(folder: Path, name: str, file: str = "one.pth") -> LoadModel:
    return LoadModel("l", str(folder / file), name)


def test_it_is_ready_when_it_has_made_the_changes_of_other_engines(tmp_path: Path, start):
    """The first message means that requests may come."""
    engine = start(loaded(tmp_path, "two"))
    assert engine.models() == ["one", "two"]
    engine.stop()


def test_it_says_whether_it_would_begin_with_a_change(tmp_path: Path, start):
    engine = start()
    engine.models()
    wire = Client(f"ipc://{tmp_path}/engine", "frontend-1")
    asked = wire.ask(MayChangeModels("m"))
    assert asyncio.run(asyncio.wait_for(asked, 60)) == CommandReply("m")
    wire.close()
    engine.stop()


def test_it_makes_the_changes_of_others_that_came_while_it_started(tmp_path: Path, start):
    engine = start()
    assert engine.models() == ["one"]
    engine.control.send(CatchUp([encode(loaded(tmp_path, "two")), encode(RemoveModel("r", "one"))]))
    assert engine.models() == ["two"], "its next word comes when both are made"
    engine.stop()


def test_a_model_that_cannot_be_loaded_is_not_served_with_the_weights_of_before(tmp_path: Path, start):
    """The others have new ones under the name; requests for it go to these."""
    engine = start(
        loaded(tmp_path, "two"), loaded(tmp_path, "two", file="gone.pth"), RemoveModel("r", "three")
    )
    assert engine.models() == ["one"]
    engine.stop()


def test_one_whose_only_model_cannot_be_replaced_does_not_serve(tmp_path: Path, start):
    engine = start(loaded(tmp_path, "one", file="gone.pth"))
    with pytest.raises(SystemExit):
        engine.ended.result(60)
    assert isinstance(said := engine.control.recv(), LoadFailure) and "gone.pth" in said.message


def test_it_ends_while_it_makes_the_changes_of_others(tmp_path: Path, start):
    engine = start(loaded(tmp_path, "two"), loaded(tmp_path, "three"))
    engine.stop()

"""The engine's process: messages that are not understood, and what the supervisor gets of it."""

import gc
import multiprocessing
import signal
import socket
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from checkpoints import tiny, write_pth

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.serving.models import Models
from rwkv_batch.engine.serving.process import Service, run
from rwkv_batch.runner import backends
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.wire.client import Client
from rwkv_batch.wire.codec import decode_events, encode
from rwkv_batch.wire.commands import LoadModel
from rwkv_batch.wire.protocol import Failed, GenerateRequest
from rwkv_batch.wire.supervision import Ping, Stop


@pytest.mark.parametrize("message", [{"type": "of the future", "id": "a"}, {"type": "generate", "id": "a"}])
def test_a_message_that_is_not_understood_is_answered(tmp_path: Path, message):
    address = f"ipc://{tmp_path}/engine"
    idle = {"busy": False, "improves_in": None, "improve": lambda: None, "close": lambda: None}
    engine = SimpleNamespace(launch=list, land=list, **idle)
    control, supervisor = multiprocessing.Pipe()
    wakeups, waker = socket.socketpair()
    service = Thread(target=Service(engine, None, address, control, wakeups).serve, daemon=True)
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
    service = Service(Models([engine]), None, f"ipc://{tmp_path}/engine", control, wakeups)
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


def test_it_is_ready_when_it_has_made_the_changes_of_other_engines(tmp_path: Path, monkeypatch):
    """The first message means that requests may come, and that it answers whether it lives."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of the tests stay
    file = write_pth(tmp_path / "one.pth", dict(tiny(vocab=400).tensors))
    control, supervisor = multiprocessing.Pipe()
    supervisor.send(Stop())  # for the first step
    config = EngineConfig(model_path=str(file), device="cpu", max_rows=2, prefix_cache_mb=0)
    try:
        run((config,), f"ipc://{tmp_path}/engine", control, [encode(LoadModel("l", str(file), "two"))])
    finally:
        gc.unfreeze()
    assert supervisor.poll()
    first = supervisor.recv()
    assert [info.model for info in first.models] == ["one", "two"] and first.loading == []

"""The engine's process: what it answers to messages that no front end of this version sends."""

import multiprocessing
import socket
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from rwkv_batch.engine.serving.process import Service
from rwkv_batch.wire.codec import decode_events
from rwkv_batch.wire.protocol import Failed
from rwkv_batch.wire.supervision import Stop


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

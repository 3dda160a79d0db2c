"""The engine's process: requests in from the front ends, one message a step and front end out.

The supervisor holds the other end of `control`. It is told `EngineInfo` once the model is loaded, or the
sentence of a `LoadFailure`; it says `FrontendGone` when a front end has died and "stop" at the end. If it
dies itself, so does this process.
"""

import contextlib
import gc
import logging
import signal
import socket
import sys
from collections import defaultdict
from multiprocessing.connection import Connection

import msgspec
import zmq
from tqdm import tqdm

from rwkv_batch.config import EngineSettings, FrontendGone, LoadFailure
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.memory import DeviceError
from rwkv_batch.model.checkpoint import CheckpointError
from rwkv_batch.state.rows import StoreError
from rwkv_batch.state.store import Store
from rwkv_batch.wire.protocol import Cancel, Event, GenerateRequest, decode_to_engine, encode

log = logging.getLogger(__name__)


def run(settings: EngineSettings, control: Connection) -> None:
    """Load the model and serve until told to stop. Exit code 2 if the model cannot be loaded."""
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s engine: %(message)s")
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # Ctrl-C reaches the whole group; the supervisor decides
        signal.signal(number, signal.SIG_IGN)
    wake, wakened = socket.socketpair()
    try:
        engine = _load(settings, wake)
    except (CheckpointError, DeviceError, StoreError) as error:
        control.send(LoadFailure(str(error)))
        sys.exit(2)
    service = Service(engine, settings.address, control, wakened)
    gc.collect()
    # what is there by now stays: looking through all of it again would stop every row for some 70 ms, once in
    # a few requests
    gc.freeze()
    control.send(engine.info)
    service.serve()


def _load(settings: EngineSettings, waker: socket.socket) -> Engine:
    waker.setblocking(False)

    def wake() -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes just as well
            waker.send(b"x")

    store = Store(settings.state_db, settings.l3_bytes) if settings.state_db else None
    with tqdm(unit="B", unit_scale=True, desc="loading", disable=None, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return Engine(
            settings.model_path,
            device=settings.device,
            max_rows=settings.max_rows,
            prefill_tokens=settings.prefill_tokens,
            max_waiting=settings.max_waiting,
            wkv=settings.wkv,
            prefix_cache_mb=settings.prefix_cache_mb,
            l1=settings.l1,
            l2=settings.l2,
            store=store,
            durable=settings.durable,
            progress=progress,
            wake=wake,
        )


class Service:
    """The loop around an engine."""

    def __init__(self, engine: Engine, address: str, control: Connection, wakened: socket.socket) -> None:
        self.engine = engine
        self._control, self._wakened = control, wakened
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # sending to a front end that has died is an error, not silence
        self._router.setsockopt(
            zmq.SNDHWM, 0
        )  # a front end that lags is cancelled by its own limits, not by lost text
        self._router.setsockopt(zmq.LINGER, 1000)
        self._router.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(control.fileno(), zmq.POLLIN)
        self._poller.register(wakened.fileno(), zmq.POLLIN)
        self._stopping = False

    def serve(self) -> None:
        """Until told to stop; however it ends, sessions that are not stored yet are stored."""
        try:
            while not self._stopping:
                self._turn()
        finally:
            self.engine.close()
        self._router.close()
        self._context.term()

    def _turn(self) -> None:
        """Take what has come, run a step, send what it has brought."""
        ready = dict(self._poller.poll(0 if self.engine.busy else None))
        if self._control.fileno() in ready:
            self._hear_supervisor()
        if self._wakened.fileno() in ready:
            self._wakened.recv(4096)
        if self._router in ready:
            self._receive()
        outbox: defaultdict[bytes, list[Event]] = defaultdict(list)
        for (frontend, _), event in self.engine.step():
            outbox[frontend].append(event)
        self._send(outbox)

    def _hear_supervisor(self) -> None:
        try:
            message = self._control.recv()
        except EOFError:  # the supervisor is gone
            self._stopping = True
            return
        if isinstance(message, FrontendGone):
            self.engine.cancel_frontend(message.name.encode())
        else:
            self._stopping = True

    def _receive(self) -> None:
        while True:
            try:
                frontend, data = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_to_engine(data)
            except msgspec.DecodeError as error:
                log.error("front end %s sent a message that is not understood: %s", frontend.decode(), error)
                continue
            key = (frontend, message.id)
            match message:
                case GenerateRequest():
                    self.engine.add(key, message)
                case Cancel():
                    self.engine.cancel(key)
                case _:
                    self.engine.command(key, message)

    def _send(self, outbox: dict[bytes, list[Event]]) -> None:
        for frontend, events in outbox.items():
            try:
                self._router.send_multipart([frontend, encode(events)])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.engine.cancel_frontend(frontend)

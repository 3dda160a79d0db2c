"""The engine's process: requests from the front ends in, at most two messages a step to each of them out.

`control` is the pipe to the supervisor, whose messages are in `rwkv_batch.wire.supervision`. The process ends
when the supervisor does.
"""

import contextlib
import gc
import logging
import math
import multiprocessing
import signal
import socket
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from operator import attrgetter

import msgspec
import zmq
from msgspec.structs import replace
from tqdm import tqdm

from rwkv_batch.config import EngineConfig, file_name, writer_address
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.memory import MemoryShare
from rwkv_batch.engine.rows.rows import NO_THREAD
from rwkv_batch.engine.scheduling.row import Outbox
from rwkv_batch.engine.serving.changes import ModelChanges
from rwkv_batch.engine.serving.loads import LoadReports
from rwkv_batch.engine.serving.models import Models
from rwkv_batch.engine.startup import SharedDatabase, open_store
from rwkv_batch.logs import begin_logging
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner.loading import load_model, loading_bar
from rwkv_batch.sampling.flashinfer import SamplerError
from rwkv_batch.state.entries import DiskFailed, StoreAway, StoreError
from rwkv_batch.text import grammars
from rwkv_batch.wire.codec import ToEngine, decode_to_engine, encode, id_of
from rwkv_batch.wire.commands import LoadModel, MayChangeModels, RemoveModel
from rwkv_batch.wire.protocol import Cancel, Event, Failed, GenerateRequest, Rejected, RequestKey, WatchLoad
from rwkv_batch.wire.supervision import (
    CatchUp,
    DatabaseNeeded,
    FrontendBroken,
    FrontendLost,
    LoadFailure,
    Ping,
    Serving,
    Stop,
)

SEND_AGAIN = 0.01  # seconds until what could not be sent is sent again
MOST_FAILURES = 100  # in a row, of messages to a front end, which is given up then, or from all
MOST_GIVEN_UP = 1  # front ends in a row; of more the process ends, as the fault is its own

log = logging.getLogger(__name__)


def run(
    configs: tuple[EngineConfig, ...], address: str, control: Connection, changes: Sequence[bytes] = ()
) -> None:
    """Load the models and serve at `address` until `Stop`. Exit code 2 if one cannot be loaded.

    `changes`: what has been changed since the server began, encoded (supervision.ChangeWanted).
    """
    name = multiprocessing.current_process().name
    begin_logging(configs[0].log_level, configs[0].log_format, name)
    # Ctrl-C reaches the whole process group; the supervisor decides what follows.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Its own lock is a semaphore of the system too, of which multiprocessing warns on the terminal where
    # the process is killed.
    tqdm.set_lock(threading.RLock())
    wakeups, waker = socket.socketpair()
    waker.setblocking(False)

    def wake() -> None:
        # A full pipe wakes just as well, and at the end nobody needs to be.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            waker.send(b"x")

    try:
        shared = _shared_databases(configs[0].databases, control)
        models = Models(_load(configs, wake, shared))
    except (CheckpointError, DeviceError, SamplerError, StoreError) as error:
        # A disk that is full or fails is left to the operator, as what starts the server again cannot help.
        passes = isinstance(error, StoreAway) and not isinstance(error, DiskFailed)
        control.send(LoadFailure(str(error), passes))
        sys.exit(2)
    except RuntimeError as error:
        if NO_THREAD not in str(error):
            raise
        log.error("%s cannot begin, as the system has no thread left for it; raise the limit of tasks", name)
        sys.exit(1)
    for info in filter(attrgetter("texts"), models.infos):
        grammars.prepare(info.vocabulary)  # now, as no row could run meanwhile
    announcer = Announcer(control, configs[0].place)
    model_changes = ModelChanges(models, configs, announcer.say, wake, shared)
    service = Service(models, model_changes, address, control, wakeups, announcer)
    try:
        service.catch_up(changes)
    except CheckpointError as error:
        service.close()
        control.send(LoadFailure(str(error)))
        sys.exit(2)
    gc.collect()
    # What is there by now stays. A collection that looked through it would stop every row for some 70
    # ms, once in a few requests.
    gc.freeze()
    service.announce()
    service.serve()


def _shared_databases(folder: str, control: Connection) -> SharedDatabase | None:
    if not folder:
        return None

    def shared(path: str) -> str:
        control.send(DatabaseNeeded(path))
        return writer_address(folder, path)

    return shared


def _load(
    configs: Sequence[EngineConfig], wake: Callable[[], None], shared: SharedDatabase | None
) -> list[Engine]:
    """The weights of all models come first; the memory that they leave is divided."""
    hosts = len(configs) * configs[0].replicas
    with ExitStack() as on_error:
        stores = []  # first, as a database that is in use is known at once
        for config in configs:
            stores.append(store := open_store(config, MemoryShare(host=hosts), shared))
            if store:
                on_error.callback(store.close)
        loaded = []
        for config in configs:
            with loading_bar(config.model_name or file_name(config.model_path or "")) as progress:
                loaded.append(load_model(None, config, progress))
        engines: list[Engine] = []
        for model, config, store in zip(loaded, configs, stores, strict=True):
            kept = max((engine.step_bytes for engine in engines), default=0)
            share = MemoryShare(len(configs) - len(engines), hosts, kept)
            engines.append(Engine(model, config=config, store=store, share=share, wake=wake))
        on_error.pop_all()
    return engines


class Announcer:
    """Tells the supervisor what is served. The first word means that requests may come."""

    def __init__(self, control: Connection, place: int) -> None:
        """`place`: which of the host's engines this is."""
        self._control, self._place = control, place
        self.waits = True  # until all is there that the other engines have

    def say(self, serving: Serving) -> None:
        if not self.waits:
            self._control.send(replace(serving, engine=self._place))


class Service:
    """The loop around the models. `wakeups` is readable when one may have become busy by itself."""

    def __init__(
        self,
        models: Models,
        changes: ModelChanges,
        address: str,
        control: Connection,
        wakeups: socket.socket,
        announcer: Announcer,
    ) -> None:
        self.models, self._changes, self._announcer = models, changes, announcer
        self._control, self._wakeups = control, wakeups
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        # Sending to a front end that has died is an error, not silence.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a front end that connects again is the same
        # A front end that lags is cancelled by its own limits, not by lost text.
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.LINGER, 1000)
        self._router.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(control.fileno(), zmq.POLLIN)
        self._poller.register(wakeups.fileno(), zmq.POLLIN)
        self._loads = LoadReports(models)
        self._stopping = False
        self._unsent: defaultdict[bytes, list[Event]] = defaultdict(list)  # by front end
        self._failures = Counter[bytes]()  # in a row: to each front end, and b"": of receiving
        self._given_up = 0  # front ends, since something could be sent

    def serve(self) -> None:
        """Run until `Stop`. However it ends, sessions that are not stored yet are stored."""
        try:
            while not self._stopping:
                self._step()
        finally:
            self.close()

    def close(self) -> None:
        """Store what is not stored yet."""
        try:
            self.models.close()
        finally:
            self._context.destroy()

    def catch_up(self, changes: Sequence[bytes]) -> None:
        """Make these changes, one after the other, while it serves nobody. `announce` follows.

        A model that cannot be loaded is not served here, nor the one whose place it should take. Raises
        CheckpointError if that is the only one.
        """
        self._announcer.waits = True
        for number, change in enumerate(changes):
            message = decode_to_engine(change)
            answer = self._made(number, message)
            if self._stopping:
                return
            if not isinstance(answer, Rejected | Failed):
                continue
            names = [info.model for info in self.models.infos]
            if isinstance(message, RemoveModel) and message.name not in names:
                continue  # it was loaded and removed while this process did not run
            log.error("a change that the other engines have made has failed: %s", answer.message)
            if isinstance(message, LoadModel) and message.name in names:
                if len(names) == 1:
                    raise CheckpointError(answer.message)
                self._made(number, RemoveModel(message.id, message.name))

    def announce(self) -> None:
        """Everything is there, and requests may come."""
        self._announcer.waits = False
        self._announcer.say(Serving(self.models.infos))

    def _made(self, number: int, change: ToEngine) -> Event | None:
        """The answer to a change; None if the end has come first."""
        key = (b"", f"change {number}")
        self._carry_out(key, change)
        while not self._stopping:
            ready = wait([self._control, self._wakeups], 0 if self.models.busy else None)
            if self._control in ready:
                self._receive_control()
            if self._wakeups in ready:
                self._wakeups.recv(4096)
            for where, event in [*self.models.launch(), *self.models.land()]:
                if where == key:
                    return event
        return None

    def _step(self) -> None:
        """Receive what has arrived, run one step, send its events. Blocks while no model has work."""
        wait = 0.0 if self.models.busy else self._loads.due(self.models.improves_in)
        wait = min(wait or 0.0, SEND_AGAIN) if self._unsent else wait
        ready = dict(self._poller.poll(None if wait is None else math.ceil(1000 * wait)))
        if self._control.fileno() in ready:
            self._receive_control()
        if self._wakeups.fileno() in ready:
            self._wakeups.recv(4096)
        if self._router in ready:
            self._receive()
        self._send(self.models.launch())
        landed = self.models.land()
        if self._loads.wanted:
            landed += self._loads.take()
        self._send(landed)
        self.models.improve()

    def _receive_control(self) -> None:
        try:
            message: CatchUp | FrontendLost | Ping | Stop = self._control.recv()
        except (EOFError, OSError):  # the supervisor has died
            message = Stop()
        match message:
            case FrontendLost(name=name):
                self._loads.forget(name.encode())
                self.models.cancel_frontend(name.encode())
            case CatchUp(changes=changes):
                self.catch_up(changes)
                if not self._stopping:
                    self.announce()
            case Ping():
                self._control.send(Ping(self.models.pulse()))
            case Stop():
                self._stopping = True

    def _receive(self) -> None:
        while True:
            try:
                frontend, data = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if self._fails(b"", error):  # nothing has been taken
                    raise
                return
            self._failures.pop(b"", None)
            try:
                message = decode_to_engine(data)
            except (msgspec.DecodeError, MemoryError) as error:
                log.error("front end %s sent a message that cannot be read: %r", frontend.decode(), error)
                if identity := id_of(data):
                    self._send([((frontend, identity), _unread(identity, error))])
                continue
            self._carry_out((frontend, message.id), message)

    def _carry_out(self, key: RequestKey, message: ToEngine) -> None:
        match message:
            case GenerateRequest():
                self.models.add(key, message)
            case Cancel(closes=closes):
                self.models.cancel(key, closes)
            case WatchLoad():
                self._loads.add(key)
            case LoadModel() | RemoveModel() | MayChangeModels():
                self._changes.run(key, message)
            case _:
                self.models.command(key, message)

    def _send(self, outbox: Outbox) -> None:
        for (frontend, _), event in outbox:
            self._unsent[frontend].append(event)
        for frontend in [*self._unsent]:
            try:
                self._router.send_multipart([frontend, encode(self._unsent[frontend])])
            except (zmq.ZMQError, MemoryError) as error:
                if getattr(error, "errno", None) != zmq.EHOSTUNREACH:
                    if not self._fails(frontend, error):
                        continue  # it goes with what comes next
                    self._give_up(frontend, error)
                self.models.cancel_frontend(frontend)
            else:
                self._given_up = 0
            self._failures.pop(frontend, None)
            del self._unsent[frontend]

    def _fails(self, frontend: bytes, error: Exception) -> bool:
        """A message could not be sent or received, which is tried again. True: too often."""
        self._failures[frontend] += 1
        log.error("a message could not be sent or received (%r); that is tried again", error)
        return self._failures[frontend] > MOST_FAILURES

    def _give_up(self, frontend: bytes, error: Exception) -> None:
        """Nothing can be sent to it, while others may be well: the supervisor starts another in its place."""
        self._given_up += 1
        if self._given_up > MOST_GIVEN_UP:
            raise error
        log.error("nothing can be sent to %s, which is ended", frontend.decode())
        self._loads.forget(frontend)
        self._control.send(FrontendBroken(frontend.decode()))


def _unread(identity: str, error: Exception) -> Event:
    """The answer to a message that cannot be read."""
    if isinstance(error, MemoryError):
        sentence = "The engine has too little memory for this request; try again later."
        return Rejected(identity, "unavailable", sentence)
    return Failed(identity, "The engine does not understand this request; restart the server.")

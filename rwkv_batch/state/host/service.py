"""The process that writes to a database for all engines of a host: one group commit.

For the supervisor. It starts the process before the engines, for each database one, and again when it dies:

    Child("database", serve, DatabaseService(path, address, first))

    path      of the database; where nothing is to be kept, of a file in the runtime folder
    address   where the process listens: "ipc://" and a path in the runtime folder
    first     True at the server's start, False when it is started again while engines run

`serve` gets the other end of the supervisor's pipe as its last argument. It sends None there when it can be
used, or a sentence that says why the database cannot be; then it says the same to the engines for a moment
and ends (exit code 2). It ends when anything is received there: after the engines, as these commit when they
are stopped. If the pipe is closed, the supervisor has died, and the process ends when no engine is connected.
It also ends (exit code 0) when none has been for long, as when the model of the database has been removed.

For an engine: HostStore(path, address, limit) in place of Store(path, limit) is all
(rwkv_batch/state/host/store.py). Engines may start and die at any time. While the process is away, their
commits wait, and reading goes on; they are sent again to the next one, which knows by their numbers what the
one before has done.

No torch is loaded here.
"""

import logging
import math
import secrets
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from rwkv_batch.state import images
from rwkv_batch.state.entries import Removed, Stamp, StoreError
from rwkv_batch.state.host.messages import (
    Hello,
    HostMessage,
    Outcomes,
    Renewed,
    SentOutcome,
    Unusable,
    Welcome,
    decode_to_writer,
    encode,
)
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.log.writer import AGAIN, Commit, GroupCommit

REFUSING_SECONDS = 1.0  # for which engines that ask are told why the database cannot be used
ORPHANED_SECONDS = 60.0  # that engines may still commit, once the supervisor has died
UNUSED_SECONDS = 30.0  # without any engine, after which nobody needs the process

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatabaseService:
    """Which database to write to, and where engines find the process that does. See above."""

    path: str
    address: str
    first: bool = True


def serve(service: DatabaseService, control: Connection) -> None:
    """The process. See above."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s database: %(message)s")
    # Ctrl-C reaches the whole process group; the supervisor decides what follows.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        store = Store(service.path, serves_others=True)
    except StoreError as error:
        control.send(str(error))
        refuse(service.address, str(error), control)
        sys.exit(2)
    try:
        if service.first:
            store.forget_processes()
            if store.images_folder:  # of engines that are there, images may not have rows yet
                images.sweep(store.images_folder, store.image_turns)
        host = HostWriter(store, service.address)
        control.send(None)
        host.run(control)
    finally:
        store.close()


def refuse(address: str, sentence: str, control: Connection) -> None:
    """Say to every engine that asks why the database cannot be used, until `control` can be read."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 1000)
        router.bind(address)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(control.fileno(), zmq.POLLIN)
        end = time.monotonic() + REFUSING_SECONDS
        while (left := end - time.monotonic()) > 0 and control.fileno() not in (
            ready := dict(poller.poll(math.ceil(1000 * left)))
        ):
            if router in ready:
                engine, _ = router.recv_multipart()
                router.send_multipart([engine, encode(Unusable(sentence))])


class HostWriter:
    """Commits what engines send. All that has arrived goes into one transaction."""

    def __init__(self, store: Store, address: str) -> None:
        self._store = store
        self._number = 1 + secrets.randbits(62)
        self._commits = GroupCommit(store, lambda callback: callback(), self._renewed)
        self._outcomes: defaultdict[bytes, list[SentOutcome]] = defaultdict(list)  # to be sent, by engine
        self._engines: set[bytes] = set()  # that have sent something
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._router.setsockopt(option, 0)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an engine that connects again is the same
        self._router.setsockopt(zmq.LINGER, 1000)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._connected = 0  # engines
        self._router.bind(address)

    def run(self, control: Connection, unused: float = UNUSED_SECONDS) -> None:
        """Until something is received from `control`: then what has arrived is committed still.

        If `control` ends, until no engine is connected. Also until none has been for so many seconds.
        """
        poller = zmq.Poller()
        for readable in (self._router, self._monitor, control.fileno()):
            poller.register(readable, zmq.POLLIN)
        stopping = orphaned = False
        end = math.inf  # when it ends though nothing has been received
        try:
            while not stopping:
                left = max(0.0, end - time.monotonic())
                left = min(left, AGAIN) if self._commits.failed else left
                ready = dict(poller.poll(None if left == math.inf else math.ceil(1000 * left)))
                if self._monitor in ready:
                    self._count()
                    if not orphaned:
                        end = math.inf if self._connected else time.monotonic() + unused
                if control.fileno() in ready:
                    orphaned = _has_ended(control)
                    stopping = not orphaned
                    poller.unregister(control.fileno())
                    end = time.monotonic() + ORPHANED_SECONDS
                self._commit()
                stopping = stopping or end <= time.monotonic() or (orphaned and not self._connected)
        finally:
            self._context.destroy()
        if self._commits.failed:
            log.error("%d changes of sessions could not be stored and are lost.", len(self._commits.failed))

    def _count(self) -> None:
        """Engines that have come and gone."""
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                self._connected += 1 if event == zmq.EVENT_ACCEPTED else -1

    def _commit(self) -> None:
        """Everything that has arrived."""
        group: list[Commit] = []
        with suppress(zmq.Again):
            while True:
                engine, data = self._router.recv_multipart(zmq.NOBLOCK)
                group += self._received(engine, data)
        if not group and not self._commits.failed:
            return
        self._commits.run(group)
        for engine, outcomes in self._outcomes.items():
            self._send(engine, Outcomes(outcomes))
        self._outcomes.clear()
        self._store.checkpoint(quiet=not self._router.poll(0))

    def _received(self, engine: bytes, data: bytes) -> list[Commit]:
        self._engines.add(engine)
        try:
            message = decode_to_writer(data)
        except msgspec.DecodeError as error:
            log.error("a message of an engine is passed over: %s", error)
            return []
        if isinstance(message, Hello) or message.writer != self._number:
            self._send(engine, Welcome(self._number))
            return []
        stamp = partial(Stamp, message.client, known=message.known)
        return [
            Commit(
                [stamp(commit.number), *commit.operations], self._done(engine, commit.number), commit.retry
            )
            for commit in message.commits
        ]

    def _done(self, engine: bytes, number: int) -> Callable[[Removed | None, Exception | None], None]:
        def done(removed: Removed | None, error: Exception | None) -> None:
            self._outcomes[engine].append(SentOutcome.from_result(number, removed, error))

        return done

    def _renewed(self) -> None:
        for engine in self._engines:
            self._send(engine, Renewed())

    def _send(self, engine: bytes, message: HostMessage) -> None:
        """To one that has gone nothing is sent.

        An error ends the process: another one is started, and gets again what has had no outcome.
        """
        self._router.send_multipart([engine, encode(message)], zmq.NOBLOCK)


def _has_ended(control: Connection) -> bool:
    """Whether nothing can be received because nobody has the other end any more."""
    try:
        control.recv()
    except (EOFError, OSError):
        return True
    return False

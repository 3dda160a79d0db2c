"""An engine's connection to the process that writes for it, and the commits that are under way there.

A commit is under way until its outcome has come. If the process dies, all that are under way are sent to the
next one, in their order. What the one before has done is in the database by the commit's number (Stamp), so
nothing is done twice, and nothing is lost.
"""

import logging
import queue
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread

import zmq

from rwkv_batch.state.entries import CommittedBefore, Operation, Removed, StoreError
from rwkv_batch.state.host.messages import (
    Commits,
    Hello,
    Outcomes,
    SentCommit,
    Welcome,
    decode_to_engine,
    encode,
)
from rwkv_batch.state.log.protocol import Committed

ASK_AGAIN_MS = 50  # without a word, while something is under way, until it is asked who is there
PATIENCE = 20.0  # seconds that a process may take to answer for the first time
CLOSE_SECONDS = 15.0  # for what is under way at the end

SILENT = "The process that writes to the database does not answer; start the server again."

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _UnderWay:
    number: int
    operations: Sequence[Operation]
    done: Committed  # called on the link's thread
    retry: bool


class Link(Thread):
    """Commits go through `put`, from any thread.

    `looked`: called on this thread when another process writes from now on, or another file has taken the
    place of the database. Raises StoreError if no process answers.
    """

    def __init__(self, address: str, looked: Callable[[], None]) -> None:
        super().__init__(name="state link", daemon=True)
        self._address, self._looked = address, looked
        self._client = 1 + secrets.randbits(62)
        self._queue: queue.SimpleQueue[tuple[Sequence[Operation], Committed, bool] | None] = (
            queue.SimpleQueue()
        )
        self._under_way: dict[int, _UnderWay] = {}  # by number, in order
        self._unsent: list[_UnderWay] = []  # of these, what has not been sent to the process that is there
        self._last = 0  # number
        self._writer = 0  # the number of the process; 0: not known yet
        self._there = Event()
        self._wakened, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self.start()
        if not self._there.wait(PATIENCE):
            self.close()
            raise StoreError(SILENT)

    def put(self, operations: Sequence[Operation], done: Committed, retry: bool = False) -> None:
        """Send a commit; `done` is called on the link's thread. See CommitQueue.put."""
        self._queue.put((operations, done, retry))
        self._wake()

    def close(self) -> None:
        """Returns when nothing is under way any more, or no outcome has come for long. Idempotent."""
        if self.is_alive():
            self._queue.put(None)
            self._wake()
            self.join()
            self._waker.close()
            self._wakened.close()

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.IDENTITY, self._client.to_bytes(8, "little").hex().encode())
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                dealer.setsockopt(option, 0)
            dealer.setsockopt(zmq.RECONNECT_IVL, 10)
            dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a process that is not there
            dealer.connect(self._address)
            poller = zmq.Poller()
            poller.register(dealer, zmq.POLLIN)
            poller.register(self._wakened.fileno(), zmq.POLLIN)
            closing_at: float | None = None
            latest = 0.0  # when something came, or was asked for
            while closing_at is None or (self._under_way and time.monotonic() < closing_at):
                waits = self._under_way or not self._writer
                ready = dict(poller.poll(ASK_AGAIN_MS if waits else None))
                if self._wakened.fileno() in ready:
                    self._wakened.recv(4096)
                    if self._take():
                        closing_at = time.monotonic() + CLOSE_SECONDS
                now = time.monotonic()
                if dealer in ready:
                    self._receive(dealer)
                    latest = now
                elif waits and 1000 * (now - latest) > ASK_AGAIN_MS:
                    self._ask(dealer)
                    latest = now
                self._send(dealer)
        if self._under_way:
            log.error("%d changes of sessions could not be stored and are lost.", len(self._under_way))
        for commit in self._under_way.values():
            commit.done(None, StoreError("The server ended before this could be stored."))

    def _take(self) -> bool:
        """What has been put since the last call; whether it was the end."""
        with suppress(queue.Empty):
            while put := self._queue.get_nowait():
                self._last += 1
                commit = _UnderWay(self._last, *put)
                self._under_way[commit.number] = commit
                self._unsent.append(commit)
            return True
        return False

    def _ask(self, dealer: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            dealer.send(encode(Hello()), zmq.NOBLOCK)

    def _send(self, dealer: zmq.Socket[bytes]) -> None:
        """In one message all that can be sent."""
        if not self._unsent or not self._writer:
            return
        commits = [SentCommit(each.number, each.operations, each.retry) for each in self._unsent]
        known = next(iter(self._under_way)) - 1
        try:
            data = encode(Commits(self._writer, self._client, known, commits))
        except UnicodeEncodeError:
            self._drop_unreadable()
            return
        with suppress(zmq.Again):  # it is away: asked who is there, the next one will get them
            dealer.send(data, zmq.NOBLOCK)
            self._unsent.clear()

    def _drop_unreadable(self) -> None:
        """Of what is to be sent, that which holds a name that is no text."""
        for each in [*self._unsent]:
            try:
                encode(SentCommit(each.number, each.operations, each.retry))
            except UnicodeEncodeError:
                self._unsent.remove(each)
                self._finish(each.number, None, StoreError("A name is no text, and cannot be stored."))

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            while True:
                message = decode_to_engine(dealer.recv(zmq.NOBLOCK))
                if isinstance(message, Outcomes):
                    for outcome in message.outcomes:
                        self._finish(outcome.number, outcome.removed, outcome.error)
                elif not isinstance(message, Welcome):
                    self._looked()
                elif message.writer != self._writer:
                    if self._writer:
                        log.info("another process writes to the database by now")
                        self._looked()
                    self._writer, self._unsent = message.writer, [*self._under_way.values()]
                    self._there.set()

    def _finish(self, number: int, removed: Removed | None, error: StoreError | None) -> None:
        commit = self._under_way.pop(number, None)
        if commit is None:  # the process before has answered, too
            return
        if isinstance(error, CommittedBefore):
            removed, error = Removed(), None
        commit.done(removed, error)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # a full pipe wakes the thread just as well
            self._waker.send(b"x")

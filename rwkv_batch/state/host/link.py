"""An engine's connection to the process that writes for it, and the commits that are under way there.

A commit is under way until its outcome has come. If the process dies, all that are under way are sent to the
next one, in their order. What the one before has done is in the database by the commit's number (Stamp), so
nothing is done twice, and nothing is lost. If no process answers for long, or it says that the database
cannot be used, they fail.
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

import msgspec
import zmq

from rwkv_batch.state.entries import UNKNOWN, CommittedBefore, Operation, Removed, StoreAway, StoreError
from rwkv_batch.state.host.messages import (
    Commits,
    Hello,
    Outcomes,
    Renewed,
    SentCommit,
    Unusable,
    Welcome,
    decode_to_engine,
    encode,
)
from rwkv_batch.state.log.protocol import Committed

ASK_AGAIN_MS = 50  # without a word, while something is under way, until it is asked who is there
PATIENCE = 20.0  # seconds that a process may take to answer for the first time
SILENCE = 60.0  # seconds without an answer, while something is under way, until that fails
CLOSE_SECONDS = 15.0  # for what is under way at the end
FAILURES = 3  # of this thread itself in a row, as where there is no memory, until what is under way fails
REST = 1.0  # seconds between more of them

SILENT = "The process that writes to the database does not answer; start the server again."
BROKEN = "The connection to the process that writes to the database fails; try again in a moment."

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _UnderWay:
    number: int
    operations: Sequence[Operation]
    done: Committed  # called on the link's thread
    retry: bool
    sent: bool = False  # to any process


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
        self._refusal = ""  # why the database cannot be used, as was said last
        self._ended = False
        self._there = Event()
        self._wakened, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self.start()
        if not self._there.wait(PATIENCE) or self._refusal:
            self.close()
            raise StoreError(self._refusal or SILENT)

    def put(self, operations: Sequence[Operation], done: Committed, retry: bool = False) -> None:
        """Send a commit; `done` is called on the link's thread, if that runs. See CommitQueue.put."""
        self._queue.put((operations, done, retry))
        self._wake()
        if self._ended:
            self._fail_queued()

    def close(self) -> None:
        """Returns when nothing is under way any more, or no outcome has come for long. Idempotent."""
        if self.is_alive():
            self._queue.put(None)
            self._wake()
            self.join()
        self._waker.close()
        self._wakened.close()

    def run(self) -> None:
        try:
            self._run()
        except Exception:
            log.exception("the connection to the process that writes to the database has failed")
        finally:
            self._ended = True
            self._fail_all(BROKEN)
            self._fail_queued()
            self._refusal = self._refusal or BROKEN
            self._there.set()

    def _run(self) -> None:
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
            answered = time.monotonic()  # when something came, or nothing was waited for
            failures = 0
            while closing_at is None or (self._under_way and time.monotonic() < closing_at):
                waits = bool(self._under_way) or not self._writer
                try:
                    ready = dict(poller.poll(ASK_AGAIN_MS if waits else None))
                    if self._wakened.fileno() in ready:
                        self._wakened.recv(4096)
                        if self._take():
                            closing_at = time.monotonic() + CLOSE_SECONDS
                    now = time.monotonic()
                    if dealer in ready or not waits:
                        answered = now
                    elif now - answered > SILENCE:
                        self._fail_all(SILENT)
                    if dealer in ready:
                        self._receive(dealer)
                        latest = now
                    elif waits and 1000 * (now - latest) > ASK_AGAIN_MS:
                        self._ask(dealer)
                        latest = now
                    self._send(dealer)
                    if dealer in ready:
                        failures = 0
                except Exception:
                    log.exception("a message of the process that writes may be lost; it is asked again")
                    self._writer = 0  # whoever it is gets again what is under way
                    failures += 1
                    if failures > FAILURES:
                        self._fail_all(BROKEN)
                        time.sleep(REST)
        if self._under_way:
            log.error("%d changes of sessions could not be stored and are lost.", len(self._under_way))
        self._fail_all("The server ended before this could be stored.")

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
        known = min(self._under_way) - 1
        try:
            data = encode(Commits(self._writer, self._client, known, commits))
        except UnicodeEncodeError:
            self._drop_unreadable()
            return
        with suppress(zmq.Again):  # it is away: asked who is there, the next one will get them
            dealer.send(data, zmq.NOBLOCK)
            for each in self._unsent:
                each.sent = True
            self._unsent.clear()

    def _drop_unreadable(self) -> None:
        """Of what is to be sent, that which holds a name that is no text."""
        for each in [*self._unsent]:
            try:
                encode(SentCommit(each.number, each.operations, each.retry))
            except UnicodeEncodeError:
                self._finish(each.number, None, StoreError("A name is no text, and cannot be stored."))

    def _receive(self, dealer: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            while True:
                data = dealer.recv(zmq.NOBLOCK)
                try:
                    message = decode_to_engine(data)
                except msgspec.DecodeError as error:
                    log.error("a message of the process that writes is passed over: %s", error)
                    continue
                match message:
                    case Outcomes(outcomes=outcomes):
                        for outcome in outcomes:
                            self._finish(outcome.number, outcome.removed, outcome.error)
                    case Renewed():
                        self._look()
                    case Unusable(sentence=sentence):
                        self._refusal, self._writer = sentence, 0
                        self._fail_all(sentence)  # for now: another process is started
                        self._there.set()
                    case Welcome(writer=writer) if writer != self._writer:
                        self._begin(writer)

    def _begin(self, writer: int) -> None:
        """Another process writes from now on, and gets what is under way."""
        if self._there.is_set():
            log.info("another process writes to the database by now")
            self._look()
        self._writer, self._refusal, self._unsent = writer, "", [*self._under_way.values()]
        self._there.set()

    def _look(self) -> None:
        try:
            self._looked()
        except Exception:
            log.exception("the database could not be looked at again")

    def _fail_all(self, sentence: str) -> None:
        """What is under way."""
        for commit in [*self._under_way.values()]:
            error = f"{sentence} {UNKNOWN}" if commit.sent else sentence
            self._finish(commit.number, None, StoreAway(error))

    def _fail_queued(self) -> None:
        """What has been put and nobody takes."""
        with suppress(queue.Empty):
            while True:
                if put := self._queue.get_nowait():
                    put[1](None, StoreError(BROKEN))

    def _finish(self, number: int, removed: Removed | None, error: StoreError | None) -> None:
        commit = self._under_way.pop(number, None)
        if commit is None:  # the process before has answered, too
            return
        if self._unsent:
            self._unsent = [each for each in self._unsent if each is not commit]
        if isinstance(error, CommittedBefore):
            removed, error = Removed(), None
        try:
            commit.done(removed, error)
        except Exception:
            log.exception("the outcome of a commit could not be handed on")

    def _wake(self) -> None:
        with suppress(OSError):  # a full pipe wakes the thread just as well; one that has ended wakes nobody
            self._waker.send(b"x")

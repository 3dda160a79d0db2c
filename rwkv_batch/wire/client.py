"""The front end's side of the wire: submit requests, read their events, cancel them; ask commands.

One thread owns the socket; it hands every event to the job it belongs to. Jobs can be read from any thread
(`Job.read`) or from an event loop (`await Job.read_async`), by one reader at a time.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import zmq

from rwkv_batch.wire.codec import ToEngine, decode_events, encode
from rwkv_batch.wire.commands import Command
from rwkv_batch.wire.deltas import merge, size
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
)
from rwkv_batch.wire.supervision import ChangeGranted, Serving

MOST_MESSAGES = 64  # of an engine that are taken at once
# Deltas that nobody has read, from which on they are merged: so many, and so many of each row.
MANY, MANY_OF_A_ROW = 512, 64
MOST_UNREAD = 8 << 20  # bytes of such
BEHIND = "The reply was read too slowly, and too much of it was waiting."
SOCKET_PAUSE = 0.05  # seconds before a socket that has failed is replaced
UNKNOWN = "It is not known whether this has been stored; look at the session before it is sent again."
CONNECTION_LOST = f"The connection to the engine has failed. {UNKNOWN}"

log = logging.getLogger(__name__)


class RequestRejected(Exception):
    """The engine did not accept the request. `reason` and `field` are those of `protocol.Rejected`."""

    def __init__(self, reason: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.reason, self.field = reason, field


class RequestFailed(Exception):
    """The engine gave up on the request after it had begun."""


class EngineGone(RequestFailed):
    """It has died, and another one can be asked."""


def error_from(event: Rejected | Failed) -> Exception:
    """The exception for the reader of a request or command that has ended with this event."""
    if isinstance(event, Rejected):
        return RequestRejected(event.reason, event.message, event.field)
    return EngineGone(event.message) if event.gone else RequestFailed(event.message)


class EventReader(Protocol):
    """What the events of one id go to, on the client's thread."""

    @property
    def counts_late(self) -> bool:
        """Whether it takes events until the last one, also once it is cancelled."""

    def ends(self, event: Event) -> bool:
        """Whether this is the last event. Called before `put`."""

    def put(self, event: Event) -> None:
        """Take the event."""


class Job:
    """One request under way. Its deltas queue here until they are read.

    Where each of its rows has ended with an error, the request has failed.
    """

    def __init__(self, request: GenerateRequest, cancel: Callable[[str], None]) -> None:
        self.request = request
        self.acceptance = Accepted(request.id, [])  # from the engine; empty until it comes
        self.submitted = time.monotonic()  # seconds, as are these:
        self.began: float | None = None  # when the first text came
        self.ended: float | None = None  # and the last
        self.exhausted = False  # the last delta of every row has been read
        self._cancel = cancel
        self._deltas: list[RowDelta] = []
        self._error: Rejected | Failed | None = None  # an exception would keep its reader alive by its frames
        self._running_rows, self._failed_rows = self.rows, 0
        self._arrived = threading.Condition()
        self._wake: Callable[[], object] | None = None
        self._watched = False  # `_note` and `_noted` get each event; else `_note` those that are no text

    @property
    def rows(self) -> int:
        return len(self.request.prompts) * self.request.n

    @property
    def counts_late(self) -> bool:
        """Whether it takes events also once it is cancelled; see EventReader."""
        return False

    def ends(self, event: Event) -> bool:
        """Whether this is the last event. Called by the client's thread before `put`."""
        if isinstance(event, Progress):
            ended = 0
            for delta in event.rows:  # no list of them: this runs for each token
                if delta.finish_reason:
                    ended += 1
            return self._running_rows == ended
        return isinstance(event, Rejected | Failed)

    def put(self, event: Event) -> None:
        """Called by the client's thread."""
        behind = False
        if self._watched or not isinstance(event, Progress):
            event = self._note(event)
        self._arrived.acquire()  # `with` would call two functions more, for each token
        try:
            if isinstance(event, Progress):
                if not self._deltas:  # else who waits has been notified
                    self._arrived.notify()
                self._progress(event.rows)
                if (count := len(self._deltas)) >= MANY and count >= MANY + MANY_OF_A_ROW * self.rows:
                    behind = self._shorten()
            elif isinstance(event, Accepted):
                self.acceptance = event
            elif isinstance(event, Rejected | Failed):
                self._error = event
                self._arrived.notify()
            wake, self._wake = self._wake, None
        finally:
            self._arrived.release()
        if behind:
            self.cancel()
        if wake:
            wake()
        if self._watched:
            self._noted(event)

    def _note(self, event: Event) -> Event:
        """An event that comes; what is taken in its place."""
        return event

    def _noted(self, event: Event) -> None:
        """It has been taken."""

    def _shorten(self) -> bool:
        """Keep little of what nobody reads. Whether it is too much, and the request ends."""
        self._deltas = merge(self._deltas)
        behind = size(self._deltas) > MOST_UNREAD and bool(self._running_rows) and not self._error
        if behind:
            self._error = Failed(self.request.id, BEHIND)
        return behind

    def _progress(self, rows: list[RowDelta]) -> None:
        ended = None
        for delta in rows:
            if delta.finish_reason:
                ended = [d for d in rows if d.finish_reason]
                break
        if ended:
            self._running_rows -= len(ended)
            self._failed_rows += len([d for d in ended if d.error])
            if self._failed_rows == self.rows:
                self._error = Failed(self.request.id, ended[-1].error)
                rows = [d for d in rows if not d.error]
        self._deltas += rows
        self.ended = time.monotonic()
        if self.began is None:
            self.began = self.ended

    def read(self, timeout: float) -> list[RowDelta]:
        """New text, a delta for each row, waiting at most `timeout` seconds for some; empty if none came.

        Raises RequestRejected or RequestFailed, after which nothing more comes.
        """
        with self._arrived:
            self._arrived.wait_for(self._readable, timeout)
        return self._take()

    async def read_async(self, timeout: float) -> list[RowDelta]:
        """`read` for an event loop."""
        await self._wait_until(self._readable, timeout)
        return self._take()

    async def accepted(self, within: float | None = None) -> None:
        """Wait until the engine has accepted the request; `acceptance` is known from here on.

        Raises RequestRejected or RequestFailed, and TimeoutError after so many seconds.
        """
        if not await self._wait_until(lambda: self.acceptance.prompt_tokens or self._error, within):
            raise TimeoutError
        if self._error and not self.acceptance.prompt_tokens:
            raise error_from(self._error)

    def when_readable(self, call: Callable[[], object]) -> None:
        """Have `call` called once there is something to read, at once or by the client's thread.

        Only the last such call counts, and none once the job has been read again.
        """
        with self._arrived:
            if not self._readable():
                self._wake = call
                return
        call()

    def cancel(self) -> None:
        """Stop the request. Safe from any thread, at any time, more than once."""
        self._cancel(self.request.id)

    def _readable(self) -> bool:
        return bool(self._deltas or self._error)

    async def _wait_until(self, condition: Callable[[], object], within: float | None = None) -> bool:
        """Whether it has come to hold within so many seconds. No task is made, as most wait for little."""
        loop = asyncio.get_running_loop()
        end = None if within is None else loop.time() + within
        while True:
            arrived = loop.create_future()
            with self._arrived:
                if condition():
                    return True
                self._wake = partial(loop.call_soon_threadsafe, _resolve, arrived)
            if end is None:
                await arrived
                continue
            late = loop.call_at(end, _resolve, arrived)
            try:
                await arrived
            finally:
                late.cancel()
            if loop.time() >= end:
                return bool(condition())

    def _take(self) -> list[RowDelta]:
        with self._arrived:
            self._wake = None
            deltas, self._deltas = self._deltas, []
            self.exhausted = self._running_rows == 0 and not self._error
        if self._error and not deltas:
            raise error_from(self._error)
        return merge(deltas) if len(deltas) > 1 else deltas


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


MakeJob = Callable[[GenerateRequest, Callable[[str], None]], Job]


class PendingCommand:
    """A command that has been sent; its reply is its only event."""

    counts_late = False

    def __init__(self) -> None:
        self.reply: concurrent.futures.Future[Event] = concurrent.futures.Future()

    def ends(self, event: Event) -> bool:
        """Whether this is the last event."""
        return True

    def put(self, event: Event) -> None:
        """Called by the client's thread."""
        if self.reply.set_running_or_notify_cancel():  # False: the caller has stopped waiting
            self.reply.set_result(event)


class Wire(Protocol):
    """What serves a front end: the one engine (Client), or all of the host's (host/engines.py)."""

    @property
    def count(self) -> int:
        """How many engines there are."""

    @property
    def most_rows(self) -> int | None:
        """How many rows one reply may have at once; None: the engines say."""

    def submit(self, request: GenerateRequest, kind: MakeJob = Job) -> Job:
        """Have a request run. kind: what makes its job."""

    async def ask(self, command: Command) -> CommandReply:
        """Send a command, which is carried out even if the caller stops waiting, and wait for the reply.

        Raises RequestRejected, RequestFailed.
        """

    def serves(self, serving: Serving) -> Serving:
        """An engine has these models; returns what all have together."""

    def lose(self, engine: int, message: str) -> Serving | None:
        """An engine has died. What the others have together; None: nothing, and `fail_all` follows."""

    def may_change(self, granted: ChangeGranted) -> None:
        """The supervisor lets this front end change models and adapters of all engines."""

    def fail_all(self, message: str) -> None:
        """Everything in flight fails."""


class Client:
    """The wire to one engine, for any number of jobs at once. Safe to use from any thread."""

    count, most_rows = 1, None

    def __init__(self, address: str, name: str) -> None:
        """`address`: where the engine listens; `name`: one that no other front end has."""
        self._jobs: dict[str, EventReader] = {}  # until their last event has arrived
        self._late: set[str] = set()  # of these, those that are cancelled and count what comes still
        self._lasting: dict[str, ToEngine] = {}  # of these, what is sent again over another connection
        self._outbox: deque[ToEngine] = deque()
        # One event is delivered at a time. Nothing else may wait for this lock: a handler that the garbage
        # collector finds cancels its job in the thread that runs, which may hold a job's own lock.
        self._delivering = threading.Lock()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._woken = False  # until the thread has begun to send what is there
        self._closed = False
        self._gone = ""  # why nothing is sent: the engine has died, and others serve
        self._thread = threading.Thread(
            target=self._run, args=(address, name.encode()), name="engine-wire", daemon=True
        )
        self._thread.start()

    def submit(self, request: GenerateRequest, kind: MakeJob = Job) -> Job:
        job = self._jobs[request.id] = kind(request, self.cancel)
        self._send(request)
        return job

    def send_for(self, reader: EventReader, message: ToEngine, lasts: bool = False) -> None:
        """Send a message whose events go to the reader. lasts: also over another connection."""
        self._jobs[message.id] = reader
        if lasts:
            self._lasting[message.id] = message
        self._send(message)

    async def ask(self, command: Command) -> CommandReply:
        """Send a command and wait for its reply; see Wire."""
        pending = self._jobs[command.id] = PendingCommand()
        self._send(command)
        try:
            reply = await asyncio.wrap_future(pending.reply)
        except asyncio.CancelledError:
            self._forget(command.id)
            raise
        if isinstance(reply, Rejected | Failed):
            raise error_from(reply)
        assert isinstance(reply, CommandReply)
        return reply

    def serves(self, serving: Serving) -> Serving:
        """Note what an engine serves; returns what all have together. See Wire."""
        self._gone = ""
        return serving

    def lose(self, engine: int, message: str) -> Serving | None:
        """Note that an engine has died; what the others have. See Wire."""
        return None

    def may_change(self, granted: ChangeGranted) -> None:
        """Return at once: a single engine is asked without it. See Wire."""

    def fail_all(self, message: str, gone: bool = False) -> None:
        """The engine is gone: everything in flight fails.

        gone: others serve, so what was meant for this one fails too, until it serves again.
        """
        self._gone = message if gone else ""  # first: what is not in flight by now sees it
        for key in list(self._jobs):
            self._deliver([Failed(key, message, gone)])
            self._send(Cancel(key))  # the request may still be queued, and would reach the next engine

    def close(self) -> None:
        self._closed = True
        self._wake()
        self._thread.join()
        self._waker.close()
        self._wakened.close()

    def cancel(self, key: str) -> None:
        """Have the engine drop a request. Safe from any thread, at any time, more than once."""
        reader = self._jobs.get(key)
        if reader is None or key in self._late:
            return
        if reader.counts_late:
            self._late.add(key)
            if key not in self._jobs:  # its last event has come meanwhile
                self._late.discard(key)
                return
        elif not self._forget(key):
            return
        if not self._closed:
            self._send(Cancel(key, closes=reader.counts_late))

    def _forget(self, key: str) -> bool:
        self._late.discard(key)
        self._lasting.pop(key, None)
        return self._jobs.pop(key, None) is not None

    def _send(self, message: ToEngine) -> None:
        self._outbox.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._woken:
            return
        self._woken = True
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread just as well
            self._waker.send(b"x")

    def _run(self, address: str, name: bytes) -> None:
        """The thread that owns the ZeroMQ socket, which only one thread may touch.

        Where that fails, what is in flight does too, as nobody knows which events are lost; another socket
        takes its place.
        """
        while not self._closed:
            try:
                self._use_socket(address, name)
            except Exception:
                log.exception("the connection to the engine has failed; there is another one")
                self._lose_connection()
                time.sleep(SOCKET_PAUSE)

    def _lose_connection(self) -> None:
        """What is in flight fails, or runs on another engine; what lasts is asked for again."""
        for key, reader in list(self._jobs.items()):
            if key in self._lasting:
                self._send(self._lasting[key])
                continue
            if isinstance(reader, PendingCommand):  # which may have been carried out here
                self._deliver([Rejected(key, "unavailable", CONNECTION_LOST)])
            else:
                self._deliver([Failed(key, CONNECTION_LOST, gone=True)])
            self._send(Cancel(key))

    def _use_socket(self, address: str, name: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.IDENTITY, name)
            dealer.setsockopt(zmq.LINGER, 500)
            dealer.connect(address)
            poller = zmq.Poller()
            poller.register(dealer, zmq.POLLIN)
            poller.register(self._wakened, zmq.POLLIN)
            while not self._closed:
                ready = dict(poller.poll())
                if self._wakened.fileno() in ready:
                    self._wakened.recv(4096)
                    self._woken = False  # before it looks what is to be sent
                while self._outbox:
                    self._transmit(dealer, self._outbox.popleft())
                if dealer in ready:
                    self._deliver(_received(dealer))

    def _transmit(self, dealer: zmq.Socket[bytes], message: ToEngine) -> None:
        if self._gone and not isinstance(message, Cancel):
            self._deliver([Failed(message.id, self._gone, gone=True)])
        else:
            dealer.send(encode(message))

    def _deliver(self, events: Iterable[Event]) -> None:
        with self._delivering:
            for event in events:
                job = self._jobs.get(event.id)  # None: cancelled a moment ago
                if job is None:
                    continue
                if job.ends(event):
                    self._forget(event.id)  # before its reader goes on
                job.put(event)


def _received(dealer: zmq.Socket[bytes]) -> list[Event]:
    """The events of all messages that have arrived. New text of a request in several of them is one event."""
    events = decode_events(dealer.recv())
    for _ in range(MOST_MESSAGES - 1):
        if not int(dealer.get(zmq.EVENTS)) & zmq.POLLIN:
            break
        events += decode_events(dealer.recv())
    if len({event.id for event in events}) == len(events):  # as of a step
        return events
    found, texts = list[Event](), dict[str, list[RowDelta]]()
    for event in events:
        if not isinstance(event, Progress):
            texts.pop(event.id, None)  # what comes later stands behind this
        elif (before := texts.get(event.id)) is not None:
            before += event.rows
            continue
        else:
            texts[event.id] = event.rows
        found.append(event)
    return found

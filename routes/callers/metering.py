"""What keys use, counted in each front end: written to the file of usage, and taken from their limits."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from queue import Empty, SimpleQueue

from msgspec.structs import replace

from routes.callers.caller import Caller, RowPlaces
from routes.callers.counts import KeyCounts
from rwkv_batch.keys.ledger import DAY, Ledger, limits_file
from rwkv_batch.keys.records import Key, Keyring
from rwkv_batch.keys.usage import UsageStore, Used, day_of, usage_file
from rwkv_batch.wire.client import Job, RequestFailed, RequestRejected
from rwkv_batch.wire.protocol import (
    Accepted,
    Event,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    RowDelta,
    RowTimes,
)

WRITE_EVERY = 0.5  # seconds, while streams run; what has ended is written at once,
TOGETHER = 0.25  # but so long after the write before
REVOKED = "This key has been revoked; ask whoever runs the server for another one."
LEFT = "The request was cancelled before its reply was read."

log = logging.getLogger(__name__)


class Accounts:
    """One for each front end. Safe to use from any thread. Raises KeysError.

    Usage may be refused by the disk when this begins, as at any time later: it waits until there is room.
    """

    def __init__(self, path: str, copy: str = "") -> None:
        """path: the file of keys; copy: see Keyring."""
        self.keys = Keyring(path, copy)
        self.ledger = Ledger(limits_file(path))
        self.jobs: set[MeteredJob] = set()  # under way
        self._path = usage_file(path)
        self._store: UsageStore | None = None  # until it could be opened
        self._counts = KeyCounts()
        # A handler that the garbage collector finds ends its job in the running thread, which may be in here.
        self._lock = threading.RLock()
        self._used: dict[tuple[str, str, int], list[int]] = {}  # by name, model and day; not written yet
        self._spent = deque[tuple[Key, int]]()  # tokens that the ledger does not have yet
        self._writing = threading.Lock()
        self._due = SimpleQueue[None]()  # which, unlike an Event, the same thread may be in already
        self._silent = False
        threading.Thread(target=self._write_always, name="usage", daemon=True).start()

    def began(self, caller: Caller, requests: int, prompt: int, cached: int) -> None:
        """The engine has accepted prompts of the caller, of so many tokens."""
        with self._lock:
            counts = self._counts_of(caller, prompt)
            counts[0] += requests
            counts[1] += prompt
            counts[2] += cached

    def drew(self, caller: Caller, tokens: int) -> None:
        """Count so many tokens, which go into the reply to the caller."""
        with self._lock:
            self._counts_of(caller, tokens)[3] += tokens

    def spend(self) -> None:
        """Take from the limits what has been used until now."""
        spent: dict[int, tuple[Key, int]] = {}  # by place
        with suppress(IndexError):  # another thread may take the rest
            while self._spent:
                key, tokens = self._spent.popleft()
                spent[key.place] = key, tokens + spent.get(key.place, (key, 0))[1]
        if spent:
            self.ledger.spend(spent.values())

    def hold(self, key: Key, places: RowPlaces, rows: int) -> None:
        """Count so many more rows of a request that run, in its places first. See `release`."""
        with self._lock:
            places.running += rows
            more = max(0, places.running - places.held)
            places.held += more
        if more:
            self.ledger.hold(key, more)

    def release(self, key: Key, places: RowPlaces, rows: int) -> None:
        """Note that so many rows of a request have ended."""
        with self._lock:
            places.running -= rows
            over = 0 if places.running else places.held
            places.held -= over
        if over:
            self.ledger.release(key, over)

    def write_soon(self) -> None:
        self._due.put(None)

    def tick(self) -> None:
        """Called ten times a second: look at the file of keys, and end what revoked ones have running."""
        self.spend()
        self._refresh()

    def find(self, secret: bytes) -> Key | None:
        """The record of a key that is not revoked, also of one that has been added just now."""
        key = self.keys.find(secret)
        if key is None:
            self._refresh(again=False)  # looking costs 2 us; who guesses keys cannot have the file read
            key = self.keys.find(secret)
        return key

    def _refresh(self, again: bool = True) -> None:
        if self.keys.refresh(again):
            for job in list(self.jobs):
                self.end_if_revoked(job)

    def end_if_revoked(self, job: "MeteredJob") -> None:
        """End a job whose key is not taken any more."""
        if job.caller.key and self.keys.is_revoked(job.caller.key):
            job.put(Failed(job.request.id, REVOKED))
            job.cancel()

    def write(self) -> None:
        """Write to the file what has been used until now. What it does not take is kept."""
        with self._writing:
            with self._lock:
                used, self._used = self._used, {}
            if not used:
                return
            try:
                self._opened().add(
                    Used(name, model, day_of(day * DAY), *counts)
                    for (name, model, day), counts in used.items()
                )
            except Exception as error:  # of any kind: nothing is written, and what is counted stays
                if not self._silent:
                    log.error("usage of keys cannot be written (%s); it waits until it can", error)
                self._silent = True
                self._put_back(used)
                return
            self._silent = False
            for (name, _, _), (requests, prompt, _, completion) in used.items():
                self._counts.add(name, requests, prompt, completion)

    def read_now(self, key: str | None, first: str, last: str) -> list[Used]:
        """What has been written, with what this front end has not written yet.

        Raises sqlite3.Error, KeysError.
        """
        self.write()
        with self._writing:
            return self._opened().read(key, first, last)

    def _opened(self) -> UsageStore:
        """Raises KeysError."""
        if self._store is None:
            self._store = UsageStore(self._path)
        return self._store

    def _counts_of(self, caller: Caller, tokens: int) -> list[int]:
        """What is counted for the caller and not written yet. tokens: which its limits have to pay."""
        if caller.limited and (key := caller.key):
            self._spent.append((key, tokens))
        place = caller.name, caller.served.model, int(time.time()) // DAY
        return self._used.setdefault(place, [0, 0, 0, 0])

    def _put_back(self, used: dict[tuple[str, str, int], list[int]]) -> None:
        with self._lock:
            for place, counts in used.items():
                later = self._used.setdefault(place, [0, 0, 0, 0])
                for number, count in enumerate(counts):  # in its place: a stream that is found now adds to it
                    later[number] += count

    def _write_always(self) -> None:
        while True:
            with suppress(Empty):
                self._due.get(timeout=max(0.0, WRITE_EVERY - TOGETHER))
            while not self._due.empty():
                self._due.get()
            try:
                self.write()
            except Exception as error:  # of the files of /metrics: the thread goes on
                log.error("usage of keys is not in /metrics (%s: %s)", type(error).__name__, error)
            # What ends meanwhile is written together: a transaction costs as much as a short request.
            time.sleep(WRITE_EVERY if self._silent else TOGETHER)


class JobStage(Enum):
    """Whether what a job has done is known."""

    RUNNING = "running"
    LEAVING = "leaving"  # cancelled; what the engine has done until then comes still
    OVER = "over"


RUNNING, LEAVING, OVER = JobStage


class MeteredJob(Job):
    """A job that says what it has had.

    `number`: from 1, of the jobs of its HTTP request, of which there may be several at once.
    """

    def __init__(
        self,
        request: GenerateRequest,
        cancel: Callable[[str], None],
        caller: Caller,
        accounts: Accounts | None,
        number: int,
    ) -> None:
        super().__init__(request, cancel)
        self.caller, self._accounts, self._number = caller, accounts, number
        self._stage, self._counted = RUNNING, False
        self._repeated = False  # the reply was stored before, and costs nothing
        self._watched = True  # until the prompt is counted: then what reads the text counts it
        if accounts:
            accounts.jobs.add(self)

    async def accepted(self, within: float | None = None) -> None:
        """Wait until the engine has accepted the request; see Job."""
        try:
            await super().accepted(within)
        except (RequestRejected, RequestFailed) as error:
            raise plain_error(error, self.caller.plain) from None

    def _note(self, event: Event) -> Event:
        if isinstance(event, Accepted):
            event = replace(event, target=self.caller.plain(event.target)) if event.target else event
            # A turn that can be found again may be stored already, which its first text says. One that is
            # accepted twice, as its engine has died, is stored by this job if it is.
            may_be_stored = self.request.turn and self.request.turn.request
            if not may_be_stored or self.acceptance.prompt_tokens:
                self._count(event)
        elif not self._counted and self.acceptance.prompt_tokens and isinstance(event, Progress):
            # Of rows that are spread over engines some go on before all are accepted.
            self._repeated = event.repeated
            self._count(self.acceptance)
        elif isinstance(event, RowTimes) and self.caller.trace:
            self.caller.trace.rows.append(event)
        return event

    def _noted(self, event: Event) -> None:
        if self._stage is not RUNNING:
            self._take_late(isinstance(event, Rejected | Failed) or not self._running_rows)

    def cancel(self) -> None:
        """Stop the request; see Job."""
        try:
            super().cancel()
        finally:  # also where it cannot be sent
            self._end()

    @property
    def counts_late(self) -> bool:
        """A turn may be stored though its client has left: then all of it counts, as it can be read later."""
        turn = self.request.turn
        return turn is not None and (turn.target is not None or turn.branch is not None)

    def _take(self) -> list[RowDelta]:
        try:
            deltas = super()._take()
        except (RequestRejected, RequestFailed) as error:
            self._end()
            raise plain_error(error, self.caller.plain) from None
        if deltas:
            tokens = self.caller.served.drew(self._number, deltas)
            if self._repeated:
                self.caller.served.completion_tokens -= tokens
            elif self._accounts:
                self._accounts.drew(self.caller, tokens)
        if self.exhausted:
            self._end()
        return deltas

    def _count(self, accepted: Accepted) -> None:
        """The tokens of the prompts, if they are fed and not only counted. Once, also if they run again."""
        counted, self._counted = self._counted, True
        if counted:
            return
        with self._arrived:
            self._watched = self._stage is not RUNNING
        request, prompt, cached = self.request, 0, 0
        feeds = request.max_tokens > 0 or request.turn or request.prompt_logprobs is not None
        if feeds and not self._repeated:
            prompt, cached = sum(accepted.prompt_tokens), sum(accepted.cached_tokens)
        self.caller.served.prompt_tokens += prompt
        self.caller.served.cached_tokens += cached
        if self._accounts:
            self._accounts.began(self.caller, int(self._number == 1), prompt, cached)

    def _end(self) -> None:
        """Once: its rows do not count any more, and all that it has used does.

        What nobody has read yet counts too: a turn that is stored can be read later.
        """
        with self._arrived:
            if self._stage is not RUNNING:
                return
            leaves = self.counts_late and self._running_rows > 0 and not self._error
            self._stage, self._watched = LEAVING if leaves else OVER, True
            if self._deltas and not self._error:  # without them no reply is whole
                self._error = Failed(self.request.id, LEFT)
        if leaves:
            self.caller.served.job_leaves()
        elif self.acceptance.prompt_tokens:
            self._count(self.acceptance)
        self._count_unread()
        if accounts := self._accounts:
            accounts.jobs.discard(self)
            if self.caller.limited and (key := self.caller.key):
                accounts.spend()
                accounts.release(key, self.caller.places, self.rows)
            accounts.write_soon()

    def _take_late(self, is_last: bool) -> None:
        """What comes when it is cancelled and nobody reads it."""
        self._count_unread()
        if is_last and self._stage is LEAVING:
            self._stage = OVER
            if self.acceptance.prompt_tokens:
                self._count(self.acceptance)
            if self._accounts:
                self._accounts.write_soon()
            self.caller.served.job_left()

    def _count_unread(self) -> None:
        with self._arrived:
            unread, self._deltas = self._deltas, []
        tokens = 0 if self._repeated else sum([delta.tokens for delta in unread])
        self.caller.served.completion_tokens += tokens
        if tokens and self._accounts:
            self._accounts.drew(self.caller, tokens)


def plain_error(
    error: RequestRejected | RequestFailed, plain: Callable[[str], str]
) -> RequestRejected | RequestFailed:
    """The error as its reader may see it."""
    if isinstance(error, RequestRejected):
        return RequestRejected(error.reason, plain(str(error)), error.field)
    return type(error)(plain(str(error)))

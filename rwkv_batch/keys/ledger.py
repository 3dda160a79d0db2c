"""What the limits of keys count, in one file that all front ends of a host share as memory.

A request is counted before the engine gets it, under a lock of the file, so that a limit holds over all front
ends and engines. Each front end notes in a part of its own how many rows it has running for each key; it
holds a lock on that part while it lives, so what a dead one has left there does not count.

Minutes begin with the first request after the minute before has ended, days at midnight UTC. A request is
taken while its key has tokens left, as nobody knows how many it will need; what it needs is taken from the
minute and the day in which it is read or drawn.
"""

import ctypes
import fcntl
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rwkv_batch.keys.records import MOST_KEYS, Key, KeysError

HOLDERS = 256  # front ends of all servers that share the file
MINUTE, DAY = 60 * 10**9, 86400  # nanoseconds, seconds
# Numbers of 8 bytes for each key: which it is, when its minute began (by the clock that never jumps, which
# all processes share), what it had in that minute, which day it is (since 1970), and what it had on that.
WHOSE, BEGAN, REQUESTS, TOKENS, TODAY, DAY_TOKENS = range(6)
CELLS = 8
HEAD = 8  # in front of all: how many holders there have been
HELD = HEAD + MOST_KEYS * CELLS  # where rows of holders begin
SIZE = 8 * (HELD + HOLDERS * MOST_KEYS)
FLOCK = "hhqqi4x"  # struct flock
# That of Python lets other threads run meanwhile. It takes a microsecond, and to have its turn again a thread
# may wait for milliseconds, while others wait for what it has locked.
_fcntl = ctypes.PyDLL(None).fcntl


class Standing(NamedTuple):
    """What a key has of a limit: how much there is in all, what is left, seconds until all of it is back."""

    limit: int
    remaining: int
    reset: float


class Standings(NamedTuple):
    """Of the limits that a key has."""

    requests: Standing | None
    tokens: Standing | None


class OverLimit(Exception):
    """The request is not taken now. The message is a sentence."""

    def __init__(self, message: str, retry_after: float, standings: Standings) -> None:
        """retry_after: seconds."""
        super().__init__(message)
        self.retry_after, self.standings = retry_after, standings


class TooManyRows(Exception):
    """The request has more rows than its key may have at all."""


def limits_file(keys: str | Path) -> Path:
    """The file that belongs to a file of keys."""
    return Path(f"{keys}.limits")


class Ledger:
    """One for each front end. Safe to use from any thread. Raises KeysError."""

    def __init__(self, path: str | Path) -> None:
        # A handler that the garbage collector finds ends its job in the running thread, which may be in here.
        self._threads = threading.RLock()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self._file, 0, SIZE)  # written as memory: without room a page ends the process
            self._memory = mmap.mmap(self._file, SIZE)
        except OSError as error:
            raise KeysError(
                f"{path}, where limits are counted, cannot be written ({error.strerror}); make room, or put "
                "the file of --keys into a folder that the server may write to"
            ) from None
        self._counts = _LedgerLock(self._file, self._threads)  # of all but rows that run
        self._cells = (ctypes.c_int64 * (SIZE // 8)).from_buffer(self._memory)
        self._holder = self._claim(path)

    def admit(self, key: Key, rows: int) -> Standings:
        """Count a request of so many rows, which run until `release`. Raises OverLimit, TooManyRows."""
        if key.rows is not None and rows > key.rows:
            raise TooManyRows(
                f"The request has {rows} rows and its key may have {key.rows} at once; send fewer prompts."
            )
        with self._counts:
            at, now = self._at(key), time.monotonic_ns()
            self._refuse_over(key, at, now)
            if key.rows is not None and (running := self._running(key.place, key.rows - rows)) > (
                key.rows - rows
            ):
                raise OverLimit(
                    f"This key has {running} rows running of {key.rows} that it may have at once; try again "
                    "when some have ended.",
                    1.0,
                    self._standings(key, at, now),
                )
            self._cells[at + REQUESTS] += 1
            self._cells[self._place_of(self._holder, key.place)] += rows
            return self._standings(key, at, now)

    def hold(self, key: Key, rows: int) -> None:
        """Count so many more rows of an admitted request, which run until `release`."""
        with self._threads:
            self._cells[self._place_of(self._holder, key.place)] += rows

    def release(self, key: Key, rows: int) -> None:
        """Note that so many rows of an admitted request have ended."""
        with self._threads:  # a part of its own, which others only read
            place = self._place_of(self._holder, key.place)
            left = self._cells[place] - rows  # and no call before it is stored: one may have the collector
            self._cells[place] = left if left > 0 else 0  # end another stream of this key, in this thread

    def spend(self, tokens: Iterable[tuple[Key, int]]) -> None:
        """Tokens that keys have had since the last call."""
        with self._counts:
            for key, count in tokens:
                at = self._at(key)
                self._cells[at + TOKENS] += count
                self._cells[at + DAY_TOKENS] += count

    def close(self) -> None:
        del self._cells
        with suppress(BufferError):  # an error that somebody still holds may hold the cells
            self._memory.close()
        os.close(self._file)

    def _at(self, key: Key) -> int:
        """Where its counts are, those of a minute or day that is over cleared."""
        at, whose = HEAD + key.place * CELLS, int(key.hash[:15], 16)
        cells, now, today = self._cells, time.monotonic_ns(), int(time.time()) // DAY
        if cells[at + WHOSE] != whose:  # the place was that of a key which is revoked
            for cell in range(at, at + CELLS):
                cells[cell] = 0
            cells[at + WHOSE] = whose
        if not cells[at + BEGAN] <= now < cells[at + BEGAN] + MINUTE or not cells[at + BEGAN]:
            cells[at + BEGAN], cells[at + REQUESTS], cells[at + TOKENS] = now, 0, 0
        # A clock that is set back over midnight begins no day anew. One that is set back by more was wrong.
        if not cells[at + TODAY] - 1 <= today <= cells[at + TODAY]:
            cells[at + TODAY], cells[at + DAY_TOKENS] = today, 0
        return at

    def _refuse_over(self, key: Key, at: int, now: int) -> None:
        cells = self._cells
        minute = (cells[at + BEGAN] + MINUTE - now) / 1e9
        day = self._until_tomorrow(at)
        limits = [
            (key.requests_per_minute, cells[at + REQUESTS], minute, "requests a minute"),
            (key.tokens_per_minute, cells[at + TOKENS], minute, "tokens a minute"),
            (key.tokens_per_day, cells[at + DAY_TOKENS], day, "tokens a day"),
        ]
        # The one that lasts longest: before that nothing comes through.
        for limit, count, wait, what in sorted(limits, key=lambda each: -each[2]):
            if limit is not None and count >= limit:
                seconds = math.ceil(wait)
                message = f"This key has used its {limit} {what}; try again in {seconds} s."
                raise OverLimit(message, wait, self._standings(key, at, now))

    def _standings(self, key: Key, at: int, now: int) -> Standings:
        cells, minute = self._cells, (self._cells[at + BEGAN] + MINUTE - now) / 1e9
        requests = _standing(key.requests_per_minute, cells[at + REQUESTS], minute)
        tokens = _standing(key.tokens_per_minute, cells[at + TOKENS], minute)
        if tokens is None:
            tokens = _standing(key.tokens_per_day, cells[at + DAY_TOKENS], self._until_tomorrow(at))
        return Standings(requests, tokens)

    def _until_tomorrow(self, at: int) -> float:
        """Seconds until the day ends that is counted there."""
        return (self._cells[at + TODAY] + 1) * DAY - time.time()

    def _running(self, place: int, enough: int) -> int:
        """Rows of a key at all front ends. If that is more than enough, those of dead ones are cleared."""
        places = [self._place_of(holder, place) for holder in range(self._cells[0])]
        running = sum(self._cells[each] for each in places)
        if running <= enough:
            return running
        for holder, each in enumerate(places):
            if self._cells[each] and holder != self._holder and self._try_lock(holder):
                self._clear(holder)
                _lock(self._file, _flock(fcntl.F_UNLCK, 1 + holder))
        return sum(self._cells[each] for each in places)

    def _claim(self, path: str | Path) -> int:
        """A part of its own, while it lives."""
        for holder in range(HOLDERS):
            if self._try_lock(holder):
                self._clear(holder)
                with self._counts:
                    self._cells[0] = max(self._cells[0], holder + 1)
                return holder
        raise KeysError(f"{path} is shared by {HOLDERS} front ends, and no more fit; start fewer --frontends")

    def _clear(self, holder: int) -> None:
        first = self._place_of(holder, 0)
        self._memory[8 * first : 8 * (first + MOST_KEYS)] = bytes(8 * MOST_KEYS)

    def _place_of(self, holder: int, place: int) -> int:
        return HELD + holder * MOST_KEYS + place

    def _try_lock(self, holder: int) -> bool:
        try:
            _lock(self._file, _flock(fcntl.F_WRLCK, 1 + holder))
        except BlockingIOError:
            return False
        return True


class _LedgerLock:
    """The lock of the whole file, for one thread of one process at a time, which may take it again."""

    def __init__(self, file: int, threads: threading.RLock) -> None:
        self._file, self._threads = file, threads
        self._depth = 0

    def __enter__(self) -> None:
        self._threads.acquire()
        self._depth += 1
        if self._depth > 1:
            return
        try:
            _lock(self._file, TAKEN, wait=True)
        except BaseException:
            self._depth -= 1
            self._threads.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1:
                _lock(self._file, FREE)
        finally:
            self._depth -= 1
            self._threads.release()


def _flock(kind: int, byte: int) -> bytes:
    return struct.pack(FLOCK, kind, os.SEEK_SET, byte, 1, 0)


TAKEN, FREE = _flock(fcntl.F_WRLCK, 0), _flock(fcntl.F_UNLCK, 0)


def _lock(file: int, what: bytes, wait: bool = False) -> None:
    """Of this opening of the file, which ends with the process. Raises BlockingIOError."""
    if _fcntl(file, fcntl.F_OFD_SETLK, what) < 0:  # another process has it, or there is an error
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, what)


def _standing(limit: int | None, used: int, reset: float) -> Standing | None:
    return None if limit is None else Standing(limit, max(0, limit - used), reset)

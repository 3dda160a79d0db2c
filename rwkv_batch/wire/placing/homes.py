"""Which engine has a session: a table in memory that all front ends of a host share.

Sessions that belong together have one entry, that of their root (placement.root_of). Whoever meets one first
that is not in the table notes an engine, under a lock, so two front ends never choose two. Reading takes no
lock, as an entry is one word. Beside it the sessions of each engine in the last minutes are counted. The
table holds those that were used last; of one that it has dropped an engine is noted anew. It ends with the
server: what is stored of sessions is in the database, and any engine can go on with it.
"""

import fcntl
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import c_uint64
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

SETS, WAYS = 1 << 14, 8  # a session may be in any of the entries of one set
SPAN_SECONDS = 30.0  # time is counted in spans
SPANS = 10  # for so many a session counts that is not used again
LOCK_SECONDS = 0.2  # that a front end waits for others; one that is stopped just then may keep the lock
LOCK_PAUSE = 0.0002

# An entry, from its highest bits: 32 of the session's hash, 8 of its engine's number and 1, 24 of the span in
# which it was used last. 0: empty. Two sessions of one hash have one engine, which is no harm.
SPAN_BITS, ENGINE_BITS, TAG_AT = 24, 8, 32
MOST_ENGINES = (1 << ENGINE_BITS) - 1

Lock = Callable[[], AbstractContextManager[bool]]  # whether it is held inside


@contextmanager
def _alone() -> Iterator[bool]:
    yield True


def _standing() -> float:
    return 0.0


def size_for(engines: int) -> int:
    """Bytes of the memory of a table, which are 0 at the beginning."""
    return 8 * (1 + engines * SPANS + SETS * WAYS)


class Homes:
    """For one caller at a time in each process.

    `memory`: `size_for` bytes; None: of its own. `lock`: the one of all that share them. `clock`: seconds,
    the same for all.
    """

    def __init__(
        self,
        engines: int,
        memory: mmap.mmap | bytearray | None = None,
        lock: Lock = _alone,
        clock: Callable[[], float] = _standing,
    ) -> None:
        if engines > MOST_ENGINES:
            raise ValueError(f"{engines} engines are more than {MOST_ENGINES}")
        memory = bytearray(size_for(engines)) if memory is None else memory
        # The span up to which is counted; each engine's sessions by the span of their last use; the sets.
        self._words = (c_uint64 * (size_for(engines) // 8)).from_buffer(memory)
        self._sets = 1 + engines * SPANS  # where they begin
        self._counts = range(1, self._sets, SPANS)  # where those of each engine do
        self._lock, self._clock = lock, clock

    def find(self, session: str) -> int | None:
        """Its engine, if one is noted. The session counts as used now."""
        _, entry = self._entry(session)
        if not entry:
            return None
        if _span(entry) != self._now:
            self._use(session)
        return _engine(entry)

    def give(self, session: str, choose: Callable[[list[int]], int]) -> int | None:
        """Its engine. If none is noted, that is the one chosen by the sessions that each has.

        None: the lock cannot be had, and nothing is noted.
        """
        with self._lock() as held:
            if not held:
                return None
            place, entry = self._entry(session)
            if entry:
                return _engine(entry)
            now = self._go_on()
            engine = choose([sum(self._words[each : each + SPANS]) for each in self._counts])
            self._put(place, hash_of(session) >> TAG_AT, engine, now)
            return engine

    @property
    def _now(self) -> int:
        return int(self._clock() / SPAN_SECONDS)

    def _entry(self, session: str) -> tuple[int, int]:
        """Where the session is, and its entry; of one that is not there, where it comes, and 0."""
        whole = hash_of(session)
        tag, first = whole >> TAG_AT, self._sets + whole % SETS * WAYS
        ways = self._words[first : first + WAYS]
        for way, entry in enumerate(ways):
            if entry >> TAG_AT == tag and entry:
                return first + way, entry
        oldest = min(range(WAYS), key=lambda way: (ways[way] != 0, _span(ways[way])))
        return first + oldest, 0

    def _use(self, session: str) -> None:
        """It counts in the present span; where the lock cannot be had, its next turn sees to that."""
        with self._lock() as held:
            place, entry = self._entry(session)
            if held and entry:
                self._put(place, entry >> TAG_AT, _engine(entry), self._go_on())

    def _put(self, place: int, tag: int, engine: int, now: int) -> None:
        """Write an entry in place of another one."""
        if before := self._words[place]:
            self._count(_engine(before), _span(before), -1)
        self._count(engine, now, 1)
        self._words[place] = tag << TAG_AT | (engine + 1) << SPAN_BITS | now

    def _count(self, engine: int, span: int, change: int) -> None:
        if span > self._words[0] - SPANS:
            place = self._counts[engine] + span % SPANS
            # Below 0 it would come where a front end has died between two of these lines.
            self._words[place] = max(0, self._words[place] + change)

    def _go_on(self) -> int:
        """Count from now on in the present span, which is returned; the oldest counts no more."""
        before, now = self._words[0], max(self._words[0], self._now)
        for span in range(max(before, now - SPANS) + 1, now + 1):
            for first in self._counts:
                self._words[first + span % SPANS] = 0
        self._words[0] = now
        return now


def hash_of(session: str) -> int:
    """64 bits."""
    found = blake2b(session.encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(found.digest(), "little")


def _engine(entry: int) -> int:
    return (entry >> SPAN_BITS & MOST_ENGINES) - 1


def _span(entry: int) -> int:
    return entry & (1 << SPAN_BITS) - 1


def create(file: Path, engines: int) -> None:
    """An empty table, whose blocks are there: memory without one would end who writes to it."""
    file.write_bytes(bytes(size_for(engines)))


def shared(file: str, engines: int) -> Homes:
    """The table in this file, as one of the front ends uses it."""
    opened = open(file, "r+b", buffering=0)  # noqa: SIM115  as long as the process
    memory = mmap.mmap(opened.fileno(), size_for(engines))
    return Homes(engines, memory, _FileLock(opened).held, time.monotonic)


class _FileLock:
    """The lock of a file, which the system takes from a process that ends."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Whether it is, before long."""
        end = time.monotonic() + LOCK_SECONDS
        while not (held := self._take()) and time.monotonic() < end:
            time.sleep(LOCK_PAUSE)
        try:
            yield held
        finally:
            if held:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _take(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another one has it
            return False
        return True

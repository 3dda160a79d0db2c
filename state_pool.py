"""Sessions in three tiers: L1 slots of the device, L2 host memory, L3 a SQLite file.

All methods of `StatePool` are called by one thread, and none of them waits: copies and reads run on one other
thread, commits on another, and `poll` runs the callbacks of what they have done. L1 and L2 are exact LRU.

A saved session is readable at any time: the snapshot that is taken at the save stays in host memory as long
as the session is in L1 or L2 or its commit is in flight. So moving from L1 to L2 costs no copy.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from itertools import chain

from torch import Tensor

from rwkv_batch.config import EngineConfig
from rwkv_batch.state.catalog import Catalog, Documents
from rwkv_batch.state.entries import (
    SESSIONS,
    Done,
    Image,
    L1Entry,
    Row,
    RowDamaged,
    SessionEntry,
    StoreError,
    Tables,
    message,
)
from rwkv_batch.state.slots import States
from rwkv_batch.state.snapshot import Damaged, Transfer, tensor_from_bytes
from rwkv_batch.state.store import MemoryStore, Store
from rwkv_batch.state.workers import Mover, Writer
from rwkv_batch.state.writeback import Writeback

log = logging.getLogger(__name__)

L1 = EngineConfig.l1  # sessions in slots of the device
L2 = EngineConfig.l2  # sessions in host memory, besides those in L1
COPIES = 4  # states in flight to host memory by `copy_out`
LAG_BYTES = 1 << 30  # unwritten states past which saves that need not be durable wait for the disk too


class StatePool:
    """Sessions by key; `documents`: opaque bytes by key.

    A method's `done` is called once, inside a later `poll`. Its last argument is None or a sentence that says
    what failed. `free` gets each slot that becomes the caller's, inside any method.

    `fingerprint`: of the model; states of another one are refused. `l1`, `l2`: how many sessions these tiers
    hold. `store`: None keeps sessions in memory only, where those that leave L2 are gone; the pool closes it.
    `durable`: a save is done when it is committed, otherwise when it is in host memory and the disk follows.
    `wake` is called, from any thread, when `poll` has something to do.
    """

    def __init__(
        self,
        states: States,
        fingerprint: str,
        *,
        free: Callable[[int], None],
        l1: int = L1,
        l2: int = L2,
        store: Store | None = None,
        durable: bool = EngineConfig.durable,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._capacity = l1, l2
        self._store: Store | MemoryStore = store or MemoryStore()
        self._states, self._free, self._wake = states, free, wake
        self._transfer = Transfer(states, fingerprint)
        self._l1: OrderedDict[str, L1Entry] = OrderedDict()
        self._l2: OrderedDict[str, Image] = OrderedDict()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._mover = Mover(self._report)
        writer = self._writer = Writer(self._store, self._report, self._renewed)
        self._catalog = Catalog(
            self._store.rows,
            self._store.limit,
            self._mover,
            writer,
            lambda key: self._in_memory(key) is not None,
        )
        lag = 0 if durable else LAG_BYTES // self._transfer.layout.size
        self._writes = Writeback(self._mover, writer, lag, self._committed, self._commit_failed)
        self.documents = Documents(self._store, self._catalog, self._mover)
        self._copies = 0
        self._closed = False

    def find(self, key: str) -> SessionEntry | None:
        """Where the session is, None if it is nowhere."""
        if entry := self._l1.get(key):
            return SessionEntry(key, "L1", entry.image.updated, entry.image.tokens)
        if image := self._l2.get(key):
            return SessionEntry(key, "L2", image.updated, image.tokens)
        known = self._writes.newest(key) or self._catalog.get(SESSIONS, key)
        return SessionEntry(key, "L3", known.updated, known.tokens) if known else None

    def status(self) -> list[SessionEntry]:
        """Every session at its fastest tier: L1, L2 from the least recently used; L3 from the newest."""
        warm = [*self._l1, *self._l2]
        cold = {*self._catalog.sessions(), *self._writes.keys()}.difference(warm)
        entries = [entry for key in chain(warm, cold) if (entry := self.find(key))]
        split = len(warm)
        return entries[:split] + sorted(entries[split:], key=lambda entry: entry.updated, reverse=True)

    def keys(self, prefix: str) -> set[str]:
        """The keys of all sessions that start with `prefix`; quick also where there are very many."""
        everywhere = chain(self._l1, self._l2, self._writes.keys(), self._catalog.sessions())
        return {key for key in everywhere if key.startswith(prefix)}

    def take(self, key: str) -> int | None:
        """The slot of a session in L1, now the caller's; None if there is none or it is being copied.

        The session as it was saved stays readable: a turn that fails only has to give up the slot.
        """
        entry = self._l1.get(key)
        if entry is None or entry.copies:
            return None
        del self._l1[key]
        self._catalog.touch(SESSIONS, key)
        if not self._store.keeps_sessions:
            self._l2[key] = entry.image  # past the capacity until the next save, so that no other has to go
        self._mover.discard(entry.image)
        return entry.slot

    def load(self, key: str, slot: int, done: Done) -> None:
        """Fill a slot of the caller's with a copy of the session. It must not be used until then.

        After an error the contents of the slot are undefined.
        """
        target = self._states.access(slot)
        self._catalog.touch(SESSIONS, key)
        if entry := self._l1.get(key):
            self._l1.move_to_end(key)
            work = partial(self._transfer.duplicate, self._states.access(entry.slot), target)
            self._copy(entry, work, lambda error: done(message(error)))
            return
        read, row = self._reader(key)
        if image := self._in_memory(key):
            self._keep(key, image)

        def restore() -> Image:
            image = read()
            self._transfer.restore(image.whole(), target)
            return image

        def loaded(image: Image | None, error: Exception | None) -> None:
            self._check_row(key, row, error)
            if image and row and row is self._catalog.get(SESSIONS, key) and self._in_memory(key) is None:
                self._keep(key, image)
            done(message(error))

        self._mover.put(restore, loaded)

    def save(self, key: str, slot: int, tokens: int, done: Done) -> None:
        """The caller's slot becomes the state of `key`, which has seen that many tokens.

        After an error the session is what was committed last, and the slot is freed.
        """
        image, source = Image(tokens, time.time()), self._states.access(slot)
        self._evict(key)
        entry = self._l1[key] = L1Entry(slot, image)

        def work() -> None:
            image.snapshot = self._transfer.snapshot(source, tokens, image.updated)

        self._copy(entry, work)
        self._writes.add(key, image, done)
        self._trim()

    def copy_out(self, slot: int, done: Callable[[Tensor], None]) -> None:
        """Copy the slot's current state to host memory; `done` gets it, on a CPU at once.

        On a GPU it is not called when COPIES are in flight already, or when the copy fails: this is for what
        can be computed again.
        """
        if self._copies == COPIES:
            return
        state = self._states.clone(slot)
        if not self._transfer.pinned:
            done(state.data)
            return
        self._copies += 1

        def copied(result: Tensor | None, error: Exception | None) -> None:
            self._copies -= 1
            if result is not None:
                done(result)

        self._mover.put(partial(self._transfer.to_host, state), copied)

    def delete(self, key: str, prefix: bool, done: Callable[[int, str | None], None]) -> None:
        """Remove the session from every tier, with `prefix` also all whose keys start with "{key}:".

        `done` gets how many there were, when it is committed. After an error they are still in the database,
        and back when it is opened again. Saves of them that are in flight have no effect, and no error.
        """
        wanted = {key, *(self.keys(f"{key}:") if prefix else ())}
        found = sorted(name for name in wanted if self.find(name))
        for name in found:
            self._evict(name)
            self._writes.drop(name)
        if found:
            self._catalog.delete(SESSIONS, found, lambda error: done(len(found), message(error)))
        else:
            self._report(partial(done, 0, None))

    def fork(self, source: str, target: str, done: Done) -> None:
        """Copy a session to another key."""
        read, row = self._reader(source)

        def work() -> Image:
            image = read()
            return Image(image.tokens, time.time(), image.whole())

        def copied(image: Image | None, error: Exception | None) -> None:
            self._check_row(source, row, error)
            self._adopt(target, done, image, error)

        self._mover.put(work, copied)

    def export(self, key: str, done: Callable[[bytes | None, str | None], None]) -> None:
        """`done` gets the session as a file, or None and the error."""
        read, row = self._reader(key)

        def finished(data: bytes | None, error: Exception | None) -> None:
            self._check_row(key, row, error)
            done(data, message(error))

        self._mover.put(lambda: read().whole().numpy().tobytes(), finished)

    def import_(self, key: str, data: bytes, done: Done) -> None:
        """Store an exported file as the session `key`, unless it is damaged or of another model."""

        def work() -> Image:
            header, snapshot = self._transfer.fitted(tensor_from_bytes(data))
            return Image(header.tokens, time.time(), snapshot)

        self._mover.put(work, partial(self._adopt, key, done))

    def poll(self) -> None:
        """Run the callbacks of what has been done since the last call."""
        while self._callbacks:
            self._callbacks.popleft()()

    def close(self) -> None:
        """Write what is not written yet, and stop both threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._mover.close()
        self._writer.close()
        self.poll()
        unwritten = self._writes.unwritten()  # their commits failed
        try:
            self._store.commit(unwritten)
        except StoreError as error:
            log.error("%d sessions could not be written and are lost: %s", len(unwritten), error)
        self._store.close()

    # Tiers

    def _in_memory(self, key: str) -> Image | None:
        if entry := self._l1.get(key):
            return entry.image
        return self._l2.get(key) or self._writes.newest(key)

    def _evict(self, key: str) -> None:
        """Out of L1 and L2."""
        self._mover.discard(self._l2.pop(key, None))
        if entry := self._l1.pop(key, None):
            self._mover.discard(entry)
            entry.evicted = True
            if not entry.copies:
                self._free(entry.slot)

    def _keep(self, key: str, image: Image) -> None:
        """Make it the most recently used of L2."""
        self._l2[key] = image
        self._l2.move_to_end(key)
        self._trim()

    def _adopt(self, key: str, done: Done, image: Image | None, error: Exception | None) -> None:
        """A state for `key` has come into host memory, not from a slot."""
        if image is None:
            done(message(error))
            return
        self._evict(key)
        self._keep(key, image)
        self._writes.add(key, image, done)

    def _trim(self) -> None:
        """Push what is over the capacity out of L1 into L2, and out of L2."""
        l1, l2 = self._capacity
        while len(self._l1) > l1:
            key, entry = next(iter(self._l1.items()))
            if entry.copies:
                break  # until the copy is done
            del self._l1[key]
            self._l2[key] = entry.image
            self._free(entry.slot)
        while len(self._l2) > l2:
            self._mover.discard(self._l2.popitem(last=False))

    def _copy(
        self,
        entry: L1Entry,
        work: Callable[[], None],
        done: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        """Have the mover copy from or to the entry's slot, which is kept meanwhile."""
        entry.copies += 1

        def copied(_: None, error: Exception | None) -> None:
            entry.copies -= 1
            if entry.evicted and not entry.copies:
                self._free(entry.slot)
            self._trim()
            done(error)

        self._mover.put(work, copied)

    # The database

    def _reader(self, key: str) -> tuple[Callable[[], Image], Row | None]:
        """A function for the mover that reads the session, and the row it reads; None if in memory."""
        if image := self._in_memory(key):
            return lambda: image, None
        row = self._catalog.get(SESSIONS, key)
        return partial(self._read, key, row), row

    def _read(self, key: str, row: Row | None) -> Image:
        """On the mover's thread. Raises StoreError, SnapshotError."""
        data = self._store.read(SESSIONS, key, self._transfer.pinned) if row else None
        if row is None or data is None:
            raise StoreError(f"There is no session {key}.")
        header, snapshot = self._transfer.fitted(data)
        return Image(header.tokens, row.updated, snapshot)

    def _check_row(self, key: str, row: Row | None, error: Exception | None) -> None:
        """Drop a row that turned out to be damaged, if it is still the session's."""
        current = row is not None and row is self._catalog.get(SESSIONS, key) and key not in self._writes
        if isinstance(error, RowDamaged | Damaged) and current:
            self._catalog.delete(SESSIONS, [key])

    def _committed(self, key: str, row: Row) -> None:
        if self._store.keeps_sessions:
            self._catalog.add(SESSIONS, key, row)

    def _commit_failed(self, key: str, image: Image) -> None:
        """A state that could not be committed is no longer the session's."""
        if self._l2.get(key) is image:
            del self._l2[key]
        entry = self._l1.get(key)
        if entry and entry.image is image:
            self._evict(key)

    def _renewed(self, rows: Tables) -> None:
        """The database was broken; the new one has these rows. Write what is in memory once more."""
        self._catalog.reset(rows)
        for key, image in {**self._l2, **{key: entry.image for key, entry in self._l1.items()}}.items():
            row = rows[SESSIONS].get(key)
            if key not in self._writes and (row is None or row.updated != image.updated):
                self._writes.add(key, image, None)

    def _report(self, callback: Callable[[], None]) -> None:
        """From any thread: run the callback in the next `poll`."""
        self._callbacks.append(callback)
        self._wake()

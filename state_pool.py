"""Sessions in three tiers: L1 slots of the device, L2 host memory, L3 a SQLite file.

All methods of `StatePool` are called by one thread, and none of them waits: copies and reads run on one
thread, commits on another, and `poll` brings what they have done. L1 and L2 are exact LRU. What was saved
stays readable all the time: the snapshot that is taken at the save stays in host memory as long as the
session is in L1 or L2 or its commit is not done. So moving from L1 to L2 costs no copy.
"""

import logging
import queue
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from rwkv_batch.config import EngineConfig
from rwkv_batch.model.rwkv7 import States
from rwkv_batch.state.catalog import Catalog
from rwkv_batch.state.entries import Answer, Hot, Image, Write, release, sentence, whole
from rwkv_batch.state.events import (
    Deleted,
    DocumentDone,
    Event,
    Exported,
    Forked,
    Freed,
    Imported,
    Loaded,
    Saved,
)
from rwkv_batch.state.snapshot import Damaged
from rwkv_batch.state.store import (
    DOCUMENTS,
    SESSIONS,
    TABLES,
    Delete,
    Put,
    Row,
    RowDamaged,
    Store,
    StoreError,
    Volatile,
    tensor_of,
)
from rwkv_batch.state.transfer import Transfer
from rwkv_batch.state.workers import Finish, Mover, Writer, nothing
from rwkv_batch.state.writeback import Writes
from rwkv_batch.wire.protocol import SessionInfo

log = logging.getLogger(__name__)

L1 = EngineConfig.l1  # sessions in slots of the device
L2 = EngineConfig.l2  # sessions in host memory, besides those in L1
COPIES = 4  # states on their way out of the device by `copy_out`
BEHIND_BYTES = 1 << 30  # states that may wait for the disk when turns do not; past it they do

__all__ = [
    "L1",
    "L2",
    "Deleted",
    "DocumentDone",
    "Event",
    "Exported",
    "Forked",
    "Freed",
    "Imported",
    "Loaded",
    "Saved",
    "StatePool",
    "Store",
    "StoreError",
]


class StatePool:
    """Sessions by key. `fingerprint` is the model's; states of another one are refused.

    `l1`, `l2`: sessions that these tiers hold. `store`: None keeps sessions in memory only, where what L2
    pushes out is gone. `durable`: a save is done when it is committed, otherwise when it is in host memory,
    and the disk follows. `wake` is called, from any thread, whenever `poll` has something. `settle` is called
    before the state in a slot of the caller's is read or replaced: the device may have put off a part of it.
    The pool owns the store and closes it.
    """

    def __init__(
        self,
        states: States,
        fingerprint: str,
        *,
        l1: int = L1,
        l2: int = L2,
        store: Store | None = None,
        durable: bool = EngineConfig.durable,
        wake: Callable[[], None] = lambda: None,
        settle: Callable[[list[int]], None] = lambda slots: None,
    ) -> None:
        self._capacity = l1, l2
        self._store, self._wake, self._settle = store or Volatile(), wake, settle
        self._transfer = Transfer(states, fingerprint)
        self._l1: OrderedDict[str, Hot] = OrderedDict()
        self._l2: OrderedDict[str, Image] = OrderedDict()
        self._catalog = Catalog(self._store.rows)
        self._events: list[Event] = []
        self._freed: list[int] = []
        self._done: queue.SimpleQueue[tuple[Finish, Any, Exception | None]] = queue.SimpleQueue()
        self._mover = Mover(self._report)
        self._writer = Writer(self._store, self._report, self._renewed)
        behind = 0 if durable else BEHIND_BYTES // self._transfer.layout.size
        self._writes = Writes(
            self._mover, self._writer, behind, lambda event: self._events.append(event), self._written
        )
        self._copies = 0
        self._closed = False

    def find(self, key: str) -> SessionInfo | None:
        """Where the session is, None if it is nowhere."""
        if hot := self._l1.get(key):
            return SessionInfo(key, "L1", hot.image.updated, hot.image.tokens)
        if image := self._l2.get(key):
            return SessionInfo(key, "L2", image.updated, image.tokens)
        known = self._writes.newest(key) or self._catalog.get(SESSIONS, key)
        return SessionInfo(key, "L3", known.updated, known.tokens) if known else None

    def status(self) -> list[SessionInfo]:
        """Every session once, at its fastest tier: L1 and L2 the least recently used first, then L3 the
        newest first.
        """
        cold = (
            ({key for key, _ in self._catalog.sessions()} | self._writes.keys())
            - self._l1.keys()
            - self._l2.keys()
        )
        infos = [self.find(key) for key in (*self._l1, *self._l2)] + sorted(
            (self.find(key) for key in cold), key=lambda info: info.updated if info else 0, reverse=True
        )
        return [info for info in infos if info]

    def keys(self, beginning: str) -> set[str]:
        """The keys of all sessions that begin so; quick also where there are very many."""
        everywhere = chain(
            self._l1, self._l2, self._writes.keys(), (key for key, _ in self._catalog.sessions())
        )
        return {key for key in everywhere if key.startswith(beginning)}

    def take(self, key: str) -> int | None:
        """The slot of a session in L1, which leaves L1 and is the caller's now; None if there is none, or it
        is being copied.

        The session as it was saved stays readable: a turn that fails needs only give up the slot.
        """
        hot = self._l1.get(key)
        if hot is None or hot.copies:
            return None
        del self._l1[key]
        self._catalog.touch(SESSIONS, key)
        if not self._store.keeps_sessions:
            self._l2[key] = hot.image  # past the capacity until the next save, so that nobody else has to go
        self._mover.discard(hot.image)
        return hot.slot

    def load(self, key: str, slot: int, token: object = None) -> None:
        """Fill a slot of the caller's with a copy of the session. `Loaded` follows; until then the slot must
        be left alone.
        """
        self._settle([slot])
        fence = self._transfer.fence()
        self._catalog.touch(SESSIONS, key)
        if hot := self._l1.get(key):
            self._l1.move_to_end(key)
            hot.copies += 1
            self._mover.put(
                partial(self._transfer.duplicate, hot.slot, slot, fence),
                partial(self._duplicated, key, slot, token, hot),
            )
            return
        image, row = self._in_memory(key), self._catalog.get(SESSIONS, key)
        if image:
            self._keep(key, image)

        def work() -> Image:
            found = image or self._read(key, row)
            self._transfer.restore(whole(found), slot, fence)
            return found

        self._mover.put(work, partial(self._loaded, key, slot, token, None if image else row))

    def save(self, key: str, slot: int, tokens: int, token: object = None) -> list[int]:
        """The caller's slot becomes the state of `key`, which has seen that many tokens. Returns slots that
        are the caller's now.

        `Saved` follows. If it has an error, the session is what was committed last.
        """
        self._settle([slot])
        image, fence = Image(tokens, time.time()), self._transfer.fence()
        freed = self._leave(key)
        hot = self._l1[key] = Hot(slot, image, copies=1)

        def work() -> None:
            image.snapshot = self._transfer.snapshot(slot, tokens, image.updated, fence)

        self._mover.put(work, partial(self._copied, hot))
        self._writes.add(key, image, lambda error, slots: Saved(key, error, slots, token))
        return freed + self._trim()

    def copy_out(self, slot: int, done: Callable[[Tensor], None]) -> None:
        """Copy the state that the slot has now to host memory; `done` gets it during a later `poll`, on a CPU
        at once.

        On a GPU nothing is copied when COPIES are under way already, or when it fails: this is for what can
        be computed again.
        """
        if self._copies == COPIES:
            return
        self._settle([slot])
        if not self._transfer.pinned:
            done(self._transfer.clone(slot))
            return
        self._copies += 1
        state, fence = self._transfer.clone(slot), self._transfer.fence()

        def copied(result: Tensor | None, error: Exception | None) -> None:
            self._copies -= 1
            if result is not None:
                done(result)

        self._mover.put(partial(self._transfer.to_host, state, fence), copied)

    def delete(self, key: str, prefix: bool = False, token: object = None) -> list[int]:
        """Remove the session from every tier, with `prefix` also all whose keys begin with "{key}:". Returns
        slots that are the caller's now. `Deleted` follows when it is committed. Saves of them that are under
        way come to nothing, without an error.
        """
        wanted = {key, *(self.keys(f"{key}:") if prefix else ())}
        found = sorted(name for name in wanted if self.find(name))
        freed: list[int] = []
        for name in found:
            freed += self._leave(name)
            self._writes.drop(name)
            self._catalog.remove(SESSIONS, name)
        self._drop(
            SESSIONS,
            found,
            lambda error: self._events.append(Deleted(key, len(found), sentence(error), token)),
        )
        return freed

    def fork(self, source: str, target: str, token: object = None) -> None:
        """Copy a session to another key. `Forked` follows."""
        image, row = self._in_memory(source), self._catalog.get(SESSIONS, source)

        def work() -> Image:
            found = image or self._read(source, row)
            return Image(found.tokens, time.time(), whole(found))

        def event(error: str | None, _: list[int]) -> Event:
            return Forked(target, error, token)

        self._mover.put(work, partial(self._arrived, target, event, None if image else (source, row)))

    def export(self, key: str, token: object = None) -> None:
        """The session as a file. `Exported` follows."""
        image, row = self._in_memory(key), self._catalog.get(SESSIONS, key)

        def work() -> bytes:
            return whole(image or self._read(key, row)).numpy().tobytes()

        def finish(data: bytes | None, error: Exception | None) -> None:
            self._check_row(key, None if image else row, error)
            self._events.append(Exported(key, data, sentence(error), token))

        self._mover.put(work, finish)

    def import_(self, key: str, data: bytes, token: object = None) -> None:
        """Store an exported file as the session `key`. `Imported` follows, with an error if the file is
        damaged or of another model.
        """

        def work() -> Image:
            header, snapshot = self._transfer.fitted(tensor_of(data))
            return Image(header.tokens, time.time(), snapshot)

        def event(error: str | None, _: list[int]) -> Event:
            return Imported(key, error, token)

        self._mover.put(work, partial(self._arrived, key, event, None))

    def put_document(self, key: str, data: bytes, token: object = None) -> None:
        """Store bytes of any kind, in place of any older ones of that key. `DocumentDone` follows when they
        are committed.
        """
        row = Row(time.time(), 0, len(data))

        def finish(_: object, error: Exception | None) -> None:
            if error is None:
                self._catalog.put(DOCUMENTS, key, row)
                self._shrink()
            self._events.append(DocumentDone(key, None, 0 if error else 1, sentence(error), token))

        self._operate([Put(DOCUMENTS, key, row, data)], finish)

    def get_document(self, key: str, token: object = None) -> None:
        """`DocumentDone` follows."""
        self._catalog.touch(DOCUMENTS, key)

        def finish(data: bytes | None, error: Exception | None) -> None:
            if isinstance(error, RowDamaged) and self._catalog.remove(DOCUMENTS, key):
                self._drop(DOCUMENTS, [key])
            self._events.append(DocumentDone(key, data, 0 if data is None else 1, sentence(error), token))

        self._mover.put(partial(self._read_document, key), finish)

    def remove_document(self, key: str, token: object = None) -> None:
        """`DocumentDone` follows when that is committed."""

        def finish(_: object, error: Exception | None) -> None:
            found = error is None and self._catalog.remove(DOCUMENTS, key)
            self._events.append(DocumentDone(key, None, int(found), sentence(error), token))

        self._operate([Delete(DOCUMENTS, [key])], finish)

    def poll(self) -> list[Event]:
        """What has been done since the last call."""
        self._take_in()
        if self._freed:
            self._events.append(Freed(self._freed))
        events, self._events, self._freed = self._events, [], []
        return events

    def close(self) -> None:
        """Write what is not written yet, and end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._mover.close()
        self._writer.close()
        self._take_in()
        rest = self._writes.rest()  # their commits failed
        try:
            self._store.commit(rest)
        except StoreError as error:
            log.error("%d sessions could not be written and are lost: %s", len(rest), error)
        self._store.close()

    # The parts of those, on the same thread

    def _in_memory(self, key: str) -> Image | None:
        if hot := self._l1.get(key):
            return hot.image
        return self._l2.get(key) or self._writes.newest(key)

    def _leave(self, key: str) -> list[int]:
        """Out of L1 and L2."""
        self._mover.discard(self._l2.pop(key, None))
        hot = self._l1.pop(key, None)
        self._mover.discard(hot)
        return release(hot) if hot else []

    def _keep(self, key: str, image: Image) -> None:
        """The most recent of L2."""
        self._l2[key] = image
        self._l2.move_to_end(key)
        self._freed += self._trim()

    def _trim(self) -> list[int]:
        """Push what is over the capacity out of L1 into L2, and out of L2. Returns the slots."""
        freed: list[int] = []
        l1, l2 = self._capacity
        while len(self._l1) > l1:
            key, hot = next(iter(self._l1.items()))
            if hot.copies:
                break  # until the copy is done
            del self._l1[key]
            self._l2[key] = hot.image
            freed.append(hot.slot)
        while len(self._l2) > l2:
            self._mover.discard(self._l2.popitem(last=False))
        return freed

    def _written(self, write: Write, row: Row | None, error: Exception | None) -> None:
        """A write is over."""
        freed: list[int] = []
        if error and not write.dropped:
            freed = self._revert(write)
        elif row and not write.dropped and self._store.keeps_sessions:
            self._catalog.put(SESSIONS, write.key, row)
            self._shrink()
            self._writes.again()
        if write.answer:
            self._events.append(write.answer(None if write.dropped else sentence(error), freed))
            write.answer = None

    def _revert(self, write: Write) -> list[int]:
        """What could not be committed is no longer the session's state."""
        if self._l2.get(write.key) is write.image:
            del self._l2[write.key]
        hot = self._l1.get(write.key)
        return self._leave(write.key) if hot and hot.image is write.image else []

    def _drop(
        self, table: str, keys: list[str], then: Callable[[Exception | None], None] = lambda error: None
    ) -> None:
        """Delete rows that the catalog has forgotten."""

        def finish(_: object, error: Exception | None) -> None:
            if error:
                log.error("%d deleted %s are still in the database: %s", len(keys), table, error)
            then(error)

        if keys:
            self._operate([Delete(table, keys)], finish)
        else:
            then(None)

    def _shrink(self) -> None:
        """Keep to the size limit."""
        if self._store.limit is None:
            return

        def in_use(name: tuple[str, str]) -> bool:
            table, key = name
            return table == SESSIONS and self._in_memory(key) is not None

        victims = self._catalog.surplus(self._store.limit, in_use)
        for table in TABLES:
            self._drop(table, [key for of, key in victims if of == table])

    def _duplicated(
        self, key: str, slot: int, token: object, hot: Hot, _: object, error: Exception | None
    ) -> None:
        self._copied(hot, None, None)
        self._events.append(Loaded(key, slot, hot.image.tokens, sentence(error), token))

    def _copied(self, hot: Hot, _: object, error: Exception | None) -> None:
        hot.copies -= 1
        if hot.gone:
            self._freed += release(hot)
        self._freed += self._trim()

    def _loaded(
        self,
        key: str,
        slot: int,
        token: object,
        row: Row | None,
        image: Image | None,
        error: Exception | None,
    ) -> None:
        self._check_row(key, row, error)
        if image and row and row is self._catalog.get(SESSIONS, key) and self._in_memory(key) is None:
            self._keep(key, image)
        self._events.append(Loaded(key, slot, image.tokens if image else 0, sentence(error), token))

    def _arrived(
        self,
        key: str,
        answer: Answer,
        origin: tuple[str, Row | None] | None,
        image: Image | None,
        error: Exception | None,
    ) -> None:
        """A state for `key` has come into host memory, not from a slot."""
        if origin:
            self._check_row(*origin, error)
        if image is None:
            self._events.append(answer(sentence(error), []))
            return
        self._freed += self._leave(key)
        self._keep(key, image)
        self._writes.add(key, image, answer)

    def _check_row(self, key: str, row: Row | None, error: Exception | None) -> None:
        """Drop a row that turned out to be damaged, if it is still the session's."""
        if (
            isinstance(error, RowDamaged | Damaged)
            and row
            and row is self._catalog.get(SESSIONS, key)
            and key not in self._writes
        ):
            self._catalog.remove(SESSIONS, key)
            self._drop(SESSIONS, [key])

    def _renewed(self, rows: dict[str, dict[str, Row]], _: object) -> None:
        """The database was broken; the new one has these rows. What is in memory is written once more."""
        self._catalog = Catalog(rows)
        for key, image in {**self._l2, **{key: hot.image for key, hot in self._l1.items()}}.items():
            row = rows[SESSIONS].get(key)
            if key not in self._writes and (row is None or row.updated != image.updated):
                self._writes.add(key, image, None)

    def _operate(self, operations: list[Put | Delete], finish: Finish) -> None:
        """Commit after everything that was asked for before."""
        self._mover.put(partial(self._writer.put, operations, finish), nothing)

    def _take_in(self) -> None:
        while True:
            try:
                finish, result, error = self._done.get_nowait()
            except queue.Empty:
                return
            finish(result, error)

    # On the mover's thread

    def _read(self, key: str, row: Row | None) -> Image:
        data = self._store.read(SESSIONS, key, self._transfer.pinned) if row else None
        if row is None or data is None:
            raise StoreError(f"There is no session {key}.")
        header, snapshot = self._transfer.fitted(data)
        return Image(header.tokens, row.updated, snapshot)

    def _read_document(self, key: str) -> bytes | None:
        data = self._store.read(DOCUMENTS, key)
        return None if data is None else data.numpy().tobytes()

    def _report(self, finish: Finish, result: Any, error: Exception | None) -> None:
        self._done.put((finish, result, error))
        self._wake()

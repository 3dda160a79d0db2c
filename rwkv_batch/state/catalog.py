"""What the database holds, known without reading it, and the changes to it in order; documents."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rwkv_batch.state.entries import (
    DOCUMENTS,
    SESSIONS,
    TABLES,
    Delete,
    Done,
    Operation,
    Put,
    Row,
    RowDamaged,
    Tables,
    message,
)
from rwkv_batch.state.store import MemoryStore, Store
from rwkv_batch.state.workers import Committed, Mover, Writer

log = logging.getLogger(__name__)


class Catalog:
    """The committed rows of both tables, the least recently used first.

    `limit`: bytes that all rows together should take at most (None: any number). Past it the least recently
    used are deleted, but for sessions that are `in_use`.
    """

    def __init__(
        self, rows: Tables, limit: int | None, mover: Mover, writer: Writer, in_use: Callable[[str], bool]
    ) -> None:
        self._limit, self._mover, self._writer, self._in_use = limit, mover, writer, in_use
        self.reset(rows)

    def reset(self, tables: Tables) -> None:
        """Start from what the store has, by table and key."""
        self._rows: OrderedDict[tuple[str, str], Row] = OrderedDict()
        self._size = 0
        rows = [(table, key, row) for table, by_key in tables.items() for key, row in by_key.items()]
        for table, key, row in sorted(rows, key=lambda entry: entry[2].updated):
            self._rows[table, key] = row
            self._size += row.size

    def get(self, table: str, key: str) -> Row | None:
        return self._rows.get((table, key))

    def sessions(self) -> Iterator[str]:
        """The keys of all sessions."""
        return (key for table, key in self._rows if table == SESSIONS)

    def touch(self, table: str, key: str) -> None:
        """The row has been used just now."""
        if (table, key) in self._rows:
            self._rows.move_to_end((table, key))

    def add(self, table: str, key: str, row: Row) -> None:
        """The row has been committed."""
        self.remove(table, key)
        self._rows[table, key] = row
        self._size += row.size
        self._keep_to_limit()

    def remove(self, table: str, key: str) -> bool:
        """Forget the row; whether there was one."""
        row = self._rows.pop((table, key), None)
        self._size -= row.size if row else 0
        return row is not None

    def commit(self, operations: Sequence[Operation], committed: Committed) -> None:
        """Commit after everything that was asked for before."""
        self._mover.put(partial(self._writer.put, operations, committed))

    def delete(self, table: str, keys: list[str], committed: Committed = lambda error: None) -> None:
        """Forget rows and delete them from the database."""

        def deleted(error: Exception | None) -> None:
            if error:
                log.error("%d deleted %s are still in the database: %s", len(keys), table, error)
            committed(error)

        for key in keys:
            self.remove(table, key)
        self.commit([Delete(table, keys)], deleted)

    def _keep_to_limit(self) -> None:
        if self._limit is None:
            return
        excess, victims = self._size - self._limit, {table: list[str]() for table in TABLES}
        for (table, key), row in self._rows.items():
            if excess <= 0:
                break
            if table != SESSIONS or not self._in_use(key):
                victims[table].append(key)
                excess -= row.size
        for table, keys in victims.items():
            if keys:
                self.delete(table, keys)


class Documents:
    """Opaque bytes by key, in the same database as the sessions and unrelated to them.

    Methods and callbacks are like those of the pool that it belongs to.
    """

    def __init__(self, store: Store | MemoryStore, catalog: Catalog, mover: Mover) -> None:
        self._store, self._catalog, self._mover = store, catalog, mover

    def put(self, key: str, data: bytes, done: Done) -> None:
        """Store the bytes in place of any older ones; `done` when they are committed."""
        row = Row(time.time(), 0, len(data))

        def committed(error: Exception | None) -> None:
            if error is None:
                self._catalog.add(DOCUMENTS, key, row)
            done(message(error))

        self._catalog.commit([Put(DOCUMENTS, key, row, data)], committed)

    def get(self, key: str, done: Callable[[bytes | None, str | None], None]) -> None:
        """`done` gets the bytes, None if there is no such document, and the error."""
        self._catalog.touch(DOCUMENTS, key)

        def read(data: bytes | None, error: Exception | None) -> None:
            if isinstance(error, RowDamaged) and self._catalog.get(DOCUMENTS, key):
                self._catalog.delete(DOCUMENTS, [key])
            done(data, message(error))

        self._mover.put(partial(self._read, key), read)

    def remove(self, key: str, done: Callable[[int, str | None], None]) -> None:
        """`done` gets how many documents there were, when the removal is committed, and the error."""

        def committed(error: Exception | None) -> None:
            found = error is None and self._catalog.remove(DOCUMENTS, key)
            done(int(found), message(error))

        self._catalog.commit([Delete(DOCUMENTS, [key])], committed)

    def _read(self, key: str) -> bytes | None:
        """On the mover's thread."""
        data = self._store.read(DOCUMENTS, key)
        return None if data is None else data.numpy().tobytes()

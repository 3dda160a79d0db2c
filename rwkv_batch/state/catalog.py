"""What the database holds, known without reading it, and the changes to it in order."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rwkv_batch.state.rows import SESSIONS, TABLES, Delete, Operation, Row, Tables
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

"""What a damaged database still holds."""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rwkv_batch.state.entries import (
    NONE,
    Head,
    Operation,
    PutImage,
    PutSession,
    Removed,
    StoreError,
    Turn,
)
from rwkv_batch.state.sql import sqlite, tables

T = TypeVar("T")

# Of each table the columns, that which identifies a row, and the orders in which the rows are looked for.
# Each order gets as far as it can.
_TABLES = {
    "models": ("id, fingerprint, vocabulary", "id", ("id", "id DESC")),
    "turns": (tables.TURN, "id", ("id", "id DESC", "parent")),
    "sessions": (tables.SESSION, "key", ("key", "key DESC", "turn", "updated")),
    "images": ("turn, model, saves, size, used", "turn", ("turn", "turn DESC")),
    "documents": (tables.DOCUMENT, "key", ("id", "id DESC", "key", "updated")),
}


def copy_whole_rows(damaged: Path, new: Path) -> tuple[int, int]:
    """Copy the rows that can still be read to a new database; how many sessions and documents there were.

    Raises StoreError, and then there is no new database.
    """
    sqlite.remove(new)
    try:
        with contextlib.closing(sqlite.connect(new, 0)) as database:
            tables.prepare(database, new)
            counts = _copy(damaged, database)
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return counts
    except sqlite3.Error as error:
        sqlite.remove(new)
        raise StoreError(str(sqlite.explain(error, new))) from error


def _copy(damaged: Path, database: sqlite3.Connection) -> tuple[int, int]:
    with contextlib.closing(sqlite3.connect(damaged, isolation_level=None)) as source:
        source.text_factory = sqlite.readable
        with contextlib.suppress(sqlite3.Error):
            # lets SQLite open a file that is shorter than it should be
            source.execute("PRAGMA writable_schema = ON")
        database.execute("BEGIN IMMEDIATE")
        for model in _rows(source, "models", tuple):
            database.execute(
                "INSERT OR IGNORE INTO models (id, fingerprint, vocabulary) VALUES (?, ?, ?)", model
            )
        ends = {}
        for turn in _rows(source, "turns", tables.as_turn):
            tables.insert_turn(database, turn)
            ends[turn.id] = turn.end
        images = {row[0]: row for row in _rows(source, "images", _image)}
        found = list(_rows(source, "sessions", tables.as_session))
        for head in (session.head for session in found):
            if head.turn not in ends and head.turn in images:  # its state is all that is left of it
                tables.insert_turn(database, _stand_in(head))
                ends[head.turn] = head.tokens
        sessions = _apply(database, map(PutSession, found))
        kept = (
            PutImage(turn, model, ends[turn], saves, size, used)
            for turn, model, saves, size, used in images.values()
            if turn in ends
        )
        _apply(database, kept)
        documents = _apply(database, _rows(source, "documents", tables.as_document))
        database.execute("COMMIT")
        return sessions, documents


def _image(row: Sequence[Any]) -> tuple[Any, ...]:
    """Raises ValueError unless the row holds numbers."""
    if not all(isinstance(value, int | float) for value in row):
        raise ValueError("a damaged row")
    return tuple(row)


def _stand_in(head: Head) -> Turn:
    """A turn of an unknown past, in place of one that is lost."""
    return Turn(head.turn, NONE, 0, head.tokens, [], [], time.time(), head.model, head.digest)


def _apply(database: sqlite3.Connection, operations: Iterator[Operation]) -> int:
    """Carry out what can be carried out; how much that was."""
    count = 0
    for operation in operations:
        with contextlib.suppress(StoreError):
            tables.apply(operation, database, Removed())
            count += 1
    return count


def _has_requests(source: sqlite3.Connection) -> bool:
    """Whether the turns have the column that came with schema 3."""
    found = source.execute("SELECT count(*) FROM pragma_table_info('turns') WHERE name = 'request'")
    return bool(found.fetchone()[0])


def _rows(source: sqlite3.Connection, table: str, parse: Callable[[Sequence[Any]], T]) -> Iterator[T]:
    """Each row once that can be read."""
    columns, identifier, orders = _TABLES[table]
    with contextlib.suppress(sqlite3.Error):
        if table == "turns" and not _has_requests(source):
            columns = columns.replace("request", "NULL")
    found: dict[Any, None] = {}
    for order in orders:
        with contextlib.suppress(sqlite3.Error):
            for (value,) in source.execute(f"SELECT {identifier} FROM {table} ORDER BY {order}"):
                found[value] = None
    for value in found:
        with contextlib.suppress(sqlite3.Error, StoreError, ValueError, TypeError):
            row = source.execute(f"SELECT {columns} FROM {table} WHERE {identifier} = ?", (value,)).fetchone()
            yield parse(row)

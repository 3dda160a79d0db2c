"""From the first version of the database, which held states in its rows, to the present one.

A new database is made beside the old one and takes its name when it is complete; the old one is kept as
"NAME.v1". Its states become images whose past is unknown.
"""

import contextlib
import logging
import secrets
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rwkv_batch.state import images, snapshot
from rwkv_batch.state.entries import (
    NONE,
    PutImage,
    PutSession,
    PutTurn,
    Removed,
    Session,
    StoreDocument,
    StoreError,
    Turn,
)
from rwkv_batch.state.log import sqlite, tables

log = logging.getLogger(__name__)

FIRST = 1


def migrate(path: Path) -> None:
    """Replace a database of the first version. Raises StoreError, which leaves it as it was."""
    new, old = path.with_name(path.name + ".migrating"), path.with_name(path.name + ".v1")
    if not path.exists():
        if new.exists() and old.exists():  # the server was stopped between the last steps
            sqlite.rename(path, old)  # what is left of its log
            sqlite.rename(new, path)
        return
    if _schema(path) != FIRST:
        return
    if old.exists():
        raise StoreError(
            f"The database {path} is of an older version, and {old}, where it would be kept, exists; "
            "move that away."
        )
    log.info("%s is made into a database of the present version; this takes a while.", path)
    sqlite.remove(new)
    try:
        sessions, documents = _copy(path, new)
        images.sync(images.folder(path))
        sqlite.rename(path, old)
        sqlite.rename(new, path)
        images.sync(path.parent)
    except sqlite3.Error as error:
        raise sqlite.explain(error, new) from error
    except OSError as error:
        raise StoreError(
            f"The database {path} cannot be made into one of the present version ({error.strerror}); "
            "it takes as much room again as it has."
        ) from error
    log.info(
        "%d sessions and %d documents are in %s; the old database is %s.", sessions, documents, path, old
    )


def _copy(path: Path, new: Path) -> tuple[int, int]:
    """Make the new database; how many sessions and documents it has."""
    folder = images.prepared_folder(images.folder(path))
    sessions = documents = 0
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as source,
        contextlib.closing(sqlite.connect(new, 0)) as database,
    ):
        source.execute("PRAGMA writable_schema = ON")  # lets SQLite open a file that is cut short
        tables.prepare(database, new)
        database.execute("BEGIN IMMEDIATE")
        removed = Removed()
        for key, updated, _, data in _rows(source, "documents"):
            tables.apply(StoreDocument(key, updated, data), database, removed)
            documents += 1
        for number, (key, updated, tokens, data) in enumerate(_rows(source, "sessions"), 1):
            state = snapshot.tensor_from_bytes(data)
            try:
                header = snapshot.relabel(state, secrets.token_bytes(16))
            except snapshot.SnapshotError as error:
                log.warning("The session %s is left out: %s", key, error)
                continue
            model = tables.model_id(database, header.fingerprint, 0)
            turn = Turn(number, NONE, 0, tokens, [], [], updated, model, header.digest)
            images.write(folder, number, state)
            tables.apply(PutTurn(turn), database, removed)
            tables.apply(PutSession(Session(key, turn.head(tokens), updated)), database, removed)
            image = PutImage(number, model, tokens, tokens, len(state), updated)
            tables.apply(image, database, removed)
            sessions += 1
        database.execute("COMMIT")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return sessions, documents


def _schema(path: Path) -> int:
    """The version of the database's schema; 0 if it is none of ours."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA writable_schema = ON")  # as in `_copy`
            version = int(database.execute("PRAGMA user_version").fetchone()[0])
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            return version if {("sessions",), ("documents",)} <= set(tables) else 0
    except sqlite3.Error:
        return 0


def _rows(source: sqlite3.Connection, table: str) -> Iterator[tuple[str, float, int, bytes]]:
    """Key, time, tokens and data of each row that can still be read."""
    ids: dict[int, None] = {}
    for order in ("id", "id DESC", "key"):  # each gets as far as it can
        with contextlib.suppress(sqlite3.Error):
            for (number,) in source.execute(f"SELECT id FROM {table} ORDER BY {order}"):
                ids[number] = None
    columns = f"SELECT key, updated, tokens, size, checksum, data FROM {table} WHERE id = ?"
    for number in ids:
        with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):
            row: tuple[Any, ...] | None = source.execute(columns, (number,)).fetchone()
            if row is None or not isinstance(row[0], bytes) or not isinstance(row[5], bytes):
                continue
            key, updated, tokens, size, checksum, data = row
            checked = repr((tables.decoded(key), updated, tokens, size)).encode("utf-8", "backslashreplace")
            if len(data) == size and zlib.crc32(checked, zlib.crc32(data)) == checksum:
                yield tables.decoded(key), updated, tokens, data
            else:
                log.warning("A row of %s is damaged and left out.", table)

"""SQL of the database file: its schema, its rows with checksums, and what a damaged file still holds."""

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rwkv_batch.state.entries import (
    DOCUMENTS,
    SESSIONS,
    TABLES,
    Operation,
    Put,
    Row,
    RowDamaged,
    StoreBroken,
    StoreError,
)

SCHEMA = 1
PAGE = 16384  # states are long: long pages make short chains
READ_BYTES = 1 << 20  # at a time; other threads run in between

# What SQLite reports of a file that is broken. Everything else is a matter of the disk or of rights.
_BROKEN = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_CONSTRAINT,
}


def connect(path: Path, log_bytes: int) -> sqlite3.Connection:
    """A connection for any thread, one at a time. `log_bytes`: size that the log is cut to when empty."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.executescript(f"""
            PRAGMA page_size = {PAGE};
            PRAGMA trusted_schema = OFF;
            PRAGMA cell_size_check = ON;
            PRAGMA journal_mode = WAL;
            PRAGMA synchronous = NORMAL;
            PRAGMA wal_autocheckpoint = 0;
            PRAGMA journal_size_limit = {log_bytes};""")
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Check the schema, or make it in an empty file. Raises StoreError for any other database."""
    schema = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    if schema != SCHEMA and (schema or tables):
        raise StoreError(
            f"The database {path} has schema {schema}, but this server uses {SCHEMA}; "
            "name another file, or move this one away."
        )
    if tables:
        return
    columns = """(id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, updated REAL NOT NULL,
                  tokens INTEGER NOT NULL, size INTEGER NOT NULL, checksum INTEGER NOT NULL,
                  data BLOB NOT NULL)"""
    connection.executescript(f"""
        BEGIN IMMEDIATE;
        CREATE TABLE {SESSIONS} {columns};
        CREATE TABLE {DOCUMENTS} {columns};
        PRAGMA user_version = {SCHEMA};
        COMMIT;""")


def list_rows(connection: sqlite3.Connection, table: str) -> dict[str, Row]:
    """All rows by key. Those whose columns are damaged are left out."""
    rows: dict[str, Row] = {}
    for key, updated, tokens, size in connection.execute(f"SELECT key, updated, tokens, size FROM {table}"):
        if [type(value) for value in (key, updated, tokens, size)] == [bytes, float, int, int]:
            with contextlib.suppress(UnicodeDecodeError):
                rows[_decoded(key)] = Row(updated, tokens, size)
    return rows


def read_row(connection: sqlite3.Connection, table: str, key: str, pinned: bool) -> Tensor | None:
    """A row's data (uint8), None if there is no such row. Raises RowDamaged, sqlite3.Error."""
    connection.execute("BEGIN")  # the row may be replaced between its columns and its data otherwise
    try:
        found = connection.execute(f"SELECT id FROM {table} WHERE key = ?", (_encoded(key),)).fetchone()
        return None if found is None else _row_by_id(connection, table, found[0], key, pinned)[2]
    finally:
        connection.execute("COMMIT")


def apply(connection: sqlite3.Connection, operation: Operation) -> None:
    """Carry out the operation. Raises sqlite3.Error."""
    if isinstance(operation, Put):
        row, key, data = operation.row, operation.key, operation.data
        connection.execute(
            f"INSERT OR REPLACE INTO {operation.table} (key, updated, tokens, size, checksum, data) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (_encoded(key), row.updated, row.tokens, row.size, _checksum(key, row, data), data),
        )
    else:
        keys = [(_encoded(key),) for key in operation.keys]
        connection.executemany(f"DELETE FROM {operation.table} WHERE key = ?", keys)


def explain(error: sqlite3.Error, path: Path) -> StoreError:
    """The error to raise in place of one of SQLite's: StoreBroken if the file is damaged."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the higher bits are details
    if code in _BROKEN:
        return StoreBroken(f"The database {path} is damaged ({error}).")
    if code == sqlite3.SQLITE_FULL:
        return StoreError(
            f"The disk of the database {path} is full; nothing can be stored before there is room again."
        )
    return StoreError(
        f"The database {path} cannot be used ({error}); see that the file and its directory can be written."
    )


def move_aside(path: Path) -> Path:
    """Rename a damaged database with its log; the new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            file.rename(aside.with_name(aside.name + suffix))
    return aside


def whole_rows(path: Path) -> Iterator[Put]:
    """The rows of a damaged database that can still be read."""
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection,
        contextlib.suppress(sqlite3.Error),
    ):
        # lets SQLite open a file that is shorter than it should be
        connection.execute("PRAGMA writable_schema = ON")
        for table in TABLES:
            ids: dict[int, None] = {}
            for order in ("id", "id DESC", "key"):  # each gets as far as it can
                with contextlib.suppress(sqlite3.Error):
                    for (number,) in connection.execute(f"SELECT id FROM {table} ORDER BY {order}"):
                        ids[number] = None
            for number in ids:
                with contextlib.suppress(sqlite3.Error, RowDamaged, UnicodeDecodeError):
                    key, row, data = _row_by_id(connection, table, number)
                    yield Put(table, key, row, data.numpy().data)


def _row_by_id(
    connection: sqlite3.Connection, table: str, number: int, key: str | None = None, pinned: bool = False
) -> tuple[str, Row, Tensor]:
    """A row by its id, whose key has to be `key`, if given. Raises RowDamaged, sqlite3.Error."""
    columns = f"SELECT key, updated, tokens, size, checksum FROM {table} WHERE id = ?"
    stored, updated, tokens, size, checksum = connection.execute(columns, (number,)).fetchone() or [None] * 5
    with connection.blobopen(table, "data", number, readonly=True) as blob:
        if (
            not isinstance(stored, bytes)
            or (key is not None and stored != _encoded(key))
            or len(blob) != size
        ):
            raise RowDamaged(f"{key} is stored damaged: its parts do not fit.")
        data = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        view = data.numpy().data
        for start in range(0, size, READ_BYTES):
            view[start : start + READ_BYTES] = blob.read(READ_BYTES)
    row, key = Row(updated, tokens, size), _decoded(stored)
    if _checksum(key, row, view) != checksum:
        raise RowDamaged(f"{key} is stored damaged: its checksum is wrong.")
    return key, row, data


def _checksum(key: str, row: Row, data: bytes | memoryview) -> int:
    columns = repr((key, row.updated, row.tokens, row.size))
    return zlib.crc32(columns.encode("utf-8", "backslashreplace"), zlib.crc32(data))


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _decoded(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")

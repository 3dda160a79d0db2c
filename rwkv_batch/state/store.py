"""The database of sessions and documents: one SQLite file in WAL mode, which one server uses at a time.

One thread writes, one reads. A file that is broken is moved aside and a new one begun; damage inside one row
is found when that row is read, because every row carries a checksum over its key, its columns and its data.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SCHEMA = 1
PAGE = 16384  # states are long: long pages make short chains
CHECKPOINT_BYTES = (
    64 << 20
)  # written to the log before it is moved into the file, four times that if there is no quiet moment
READ_BYTES = 1 << 20  # at a time; other threads run in between
TABLES = SESSIONS, DOCUMENTS = "sessions", "documents"

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


class StoreError(Exception):
    """The database cannot be used, or could not carry something out; the message is one sentence."""


class StoreBroken(StoreError):
    """The file itself is damaged, so that nothing can be written to it."""


class RowDamaged(StoreError):
    """One row cannot be read."""


@dataclass(frozen=True)
class Row:
    """What is known of a stored session or document without reading it."""

    updated: float  # seconds since 1970
    tokens: int  # that a session's state has seen
    size: int  # bytes of its data


@dataclass(frozen=True)
class Put:
    """Write a row in place of any older one. `data`: a contiguous run of bytes."""

    table: str
    key: str
    row: Row
    data: bytes | memoryview


@dataclass(frozen=True)
class Delete:
    """Delete rows; those that are not there do not matter."""

    table: str
    keys: Sequence[str]


class Store:
    """An open database. `rows`: what each table held when it was opened or begun anew.

    `limit`: bytes that all rows together should take at most (None: any number); the pool sees to it. Raises
    StoreError.
    """

    keeps_sessions = True

    def __init__(self, path: str | Path, limit: int | None = None) -> None:
        self.path, self.limit = Path(path), limit
        if not self.path.name:
            raise StoreError(f"{self.path} is a directory; name a file for the database.")
        if not self.path.parent.is_dir():
            raise StoreError(
                f"There is no directory {self.path.parent} for the database; make it, or name another file."
            )
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._reads_from = self._files = (
            0  # which file the reader has open, and how many there have been before this one
        )
        self._replacing = Lock()  # nobody reads meanwhile
        self._logged = 0  # bytes written since the last checkpoint
        self._lock: int | None = self._locked()
        try:
            try:
                self._open()
            except StoreBroken:
                self.restart()
        except BaseException:
            self.close()
            raise

    def commit(self, operations: Sequence[Put | Delete]) -> None:
        """Carry all of them out in one transaction, or none. For the writing thread. Raises StoreError
        (StoreBroken: see `restart`).
        """
        assert self._writer
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for operation in operations:
                self._apply(self._writer, operation)
            self._writer.execute("COMMIT")
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):  # some errors have ended the transaction already
                self._writer.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._explained(error) from error
            raise

    def checkpoint(self, quiet: bool) -> None:
        """Move the log into the file if it has grown long. For the writing thread, after it has told of its
        commits.
        """
        assert self._writer
        if self._logged < CHECKPOINT_BYTES * (1 if quiet else 4):
            return
        self._logged = 0
        try:
            self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            log.warning(
                "The log of %s could not be moved into it (%s); it grows until that works again.",
                self.path,
                error,
            )

    def read(self, table: str, key: str, pinned: bool = False) -> Tensor | None:
        """A row's data (uint8), None if there is no such row. For the reading thread. Raises RowDamaged,
        StoreError.
        """
        with self._replacing:
            try:
                return _read(self._reading(), table, key, pinned)
            except sqlite3.Error as error:
                explained = self._explained(error)
                raise (
                    RowDamaged(f"{key} is stored damaged ({error}).")
                    if isinstance(explained, StoreBroken)
                    else explained
                ) from error

    def restart(self) -> None:
        """Move the broken file aside and begin a new one with all rows that are still whole. For the writing
        thread. Raises StoreError.
        """
        with self._replacing:
            if self._writer:
                self._writer.close()
            aside = self._move_aside()
            self._files += 1
            self._open()
            saved = {table: 0 for table in TABLES}
            for put in _whole_rows(aside):
                self.commit([put])
                self.rows[put.table][put.key] = put.row
                saved[put.table] += 1
        log.error(
            "The database %s is damaged: it is now %s, and a new one has been begun with what is whole of "
            "it: %d sessions and %d "
            "documents.",
            self.path,
            aside,
            saved[SESSIONS],
            saved[DOCUMENTS],
        )

    def close(self) -> None:
        """When both threads have ended. Idempotent."""
        for connection in (self._reader, self._writer):
            if connection:
                connection.close()
        self._reader = self._writer = None
        if self._lock is not None:
            self._lock_file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _reading(self) -> sqlite3.Connection:
        """The reader's connection to the file that is in use now."""
        if self._reader is None or self._reads_from != self._files:
            if self._reader:
                self._reader.close()
            self._reader, self._reads_from = _connect(self.path), self._files
        return self._reader

    def _move_aside(self) -> Path:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        for suffix in ("", "-wal", "-shm"):
            file = self.path.with_name(self.path.name + suffix)
            if file.exists():
                file.rename(aside.with_name(aside.name + suffix))
        return aside

    @property
    def _lock_file(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def _locked(self) -> int:
        """An exclusive lock beside the file; it ends with the process, however that ends."""
        try:
            while True:
                lock = os.open(self._lock_file, os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._lock_file.exists() and self._lock_file.stat().st_ino == os.fstat(lock).st_ino:
                    return lock
                os.close(lock)  # its last holder has just removed it
        except BlockingIOError:
            os.close(lock)
            raise StoreError(
                f"The database {self.path} is in use by another server; stop that one, or name another file."
            ) from None
        except OSError as error:
            raise StoreError(
                f"The database {self.path} cannot be locked ({error.strerror}); "
                "name a file where this server may write."
            ) from None

    def _open(self) -> None:
        """Connect, and make the tables in a new file. Raises StoreError."""
        try:
            self._writer = _connect(self.path)
            schema = self._writer.execute("PRAGMA user_version").fetchone()[0]
            tables = {
                name
                for (name,) in self._writer.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            if schema != SCHEMA and (schema or tables):
                raise StoreError(
                    f"The database {self.path} has schema {schema}, but this server uses {SCHEMA}; "
                    "name another file, or move this one away."
                )
            if not tables:
                _create(self._writer)
            self.rows = {table: _rows(self._writer, table) for table in TABLES}
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _apply(self, writer: sqlite3.Connection, operation: Put | Delete) -> None:
        if isinstance(operation, Delete):
            writer.executemany(
                f"DELETE FROM {operation.table} WHERE key = ?", [(_stored(key),) for key in operation.keys]
            )
            return
        row = operation.row
        writer.execute(
            f"INSERT OR REPLACE INTO {operation.table} (key, updated, tokens, size, checksum, data) VALUES "
            "(?, ?, ?, ?, ?, ?)",
            (
                _stored(operation.key),
                row.updated,
                row.tokens,
                row.size,
                _checksum(operation.key, row, operation.data),
                operation.data,
            ),
        )
        self._logged += row.size

    def _explained(self, error: sqlite3.Error) -> StoreError:
        code = (
            getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        )  # the rest of the bits are details
        if code in _BROKEN:
            return StoreBroken(f"The database {self.path} is damaged ({error}).")
        if code == sqlite3.SQLITE_FULL:
            return StoreError(
                f"The disk of the database {self.path} is full; nothing can be stored before there is room "
                "again."
            )
        return StoreError(
            f"The database {self.path} cannot be used ({error}); see that the file and its directory can be "
            "written."
        )


class Volatile:
    """Stands where no database is wanted: keeps documents, in memory, and no sessions."""

    keeps_sessions = False
    limit = None

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Row]] = {}
        self._documents: dict[str, Tensor] = {}

    def commit(self, operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            if operation.table == DOCUMENTS:
                if isinstance(operation, Put):
                    self._documents[operation.key] = tensor_of(operation.data)
                else:
                    for key in operation.keys:
                        self._documents.pop(key, None)

    def read(self, table: str, key: str, pinned: bool = False) -> Tensor | None:
        return self._documents.get(key) if table == DOCUMENTS else None

    def checkpoint(self, quiet: bool) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def tensor_of(data: bytes | memoryview) -> Tensor:
    """A copy, uint8."""
    tensor = torch.empty(len(data), dtype=torch.uint8)
    tensor.numpy().data[:] = data
    return tensor


def _connect(path: Path) -> sqlite3.Connection:
    """Any thread may use the connection, one at a time."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.executescript(f"""
            PRAGMA page_size = {PAGE};
            PRAGMA trusted_schema = OFF;
            PRAGMA cell_size_check = ON;
            PRAGMA journal_mode = WAL;
            PRAGMA synchronous = NORMAL;
            PRAGMA wal_autocheckpoint = 0;
            PRAGMA journal_size_limit = {CHECKPOINT_BYTES};""")
    except BaseException:
        connection.close()
        raise
    return connection


def _create(connection: sqlite3.Connection) -> None:
    columns = """(id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, updated REAL NOT NULL,
                  tokens INTEGER NOT NULL, size INTEGER NOT NULL, checksum INTEGER NOT NULL,
                  data BLOB NOT NULL)"""
    connection.executescript(f"""
        BEGIN IMMEDIATE;
        CREATE TABLE {SESSIONS} {columns};
        CREATE TABLE {DOCUMENTS} {columns};
        PRAGMA user_version = {SCHEMA};
        COMMIT;""")


def _rows(connection: sqlite3.Connection, table: str) -> dict[str, Row]:
    """All rows. Those whose columns are damaged are left out."""
    rows: dict[str, Row] = {}
    for key, updated, tokens, size in connection.execute(f"SELECT key, updated, tokens, size FROM {table}"):
        if (
            isinstance(key, bytes)
            and isinstance(updated, float)
            and isinstance(tokens, int)
            and isinstance(size, int)
        ):
            with contextlib.suppress(UnicodeDecodeError):
                rows[key.decode("utf-8", "surrogatepass")] = Row(updated, tokens, size)
    return rows


def _read(connection: sqlite3.Connection, table: str, key: str, pinned: bool) -> Tensor | None:
    connection.execute("BEGIN")  # the row may be replaced between its columns and its data otherwise
    try:
        found = connection.execute(f"SELECT id FROM {table} WHERE key = ?", (_stored(key),)).fetchone()
        return None if found is None else _row(connection, table, found[0], key, pinned)[2]
    finally:
        connection.execute("COMMIT")


def _row(
    connection: sqlite3.Connection, table: str, number: int, key: str | None = None, pinned: bool = False
) -> tuple[str, Row, Tensor]:
    """A row by its id, which `key` has to be the key of, if given. Raises RowDamaged, sqlite3.Error."""
    stored, updated, tokens, size, checksum = (
        connection.execute(
            f"SELECT key, updated, tokens, size, checksum FROM {table} WHERE id = ?", (number,)
        ).fetchone()
        or [None] * 5
    )
    with connection.blobopen(table, "data", number, readonly=True) as blob:
        if not isinstance(stored, bytes) or (key is not None and stored != _stored(key)) or len(blob) != size:
            raise RowDamaged(f"{key} is stored damaged: its parts do not fit.")
        data = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        view = data.numpy().data
        for start in range(0, size, READ_BYTES):
            view[start : start + READ_BYTES] = blob.read(READ_BYTES)
    row, key = Row(updated, tokens, size), stored.decode("utf-8", "surrogatepass")
    if _checksum(key, row, view) != checksum:
        raise RowDamaged(f"{key} is stored damaged: its checksum is wrong.")
    return key, row, data


def _whole_rows(path: Path) -> Iterator[Put]:
    """What can still be read of a damaged database."""
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection,
        contextlib.suppress(sqlite3.Error),
    ):
        connection.execute(
            "PRAGMA writable_schema = ON"
        )  # lets SQLite open a file that is shorter than it should be
        for table in TABLES:
            numbers: dict[int, None] = {}
            for order in ("id", "id DESC", "key"):  # each gets as far as it can
                with contextlib.suppress(sqlite3.Error):
                    for (number,) in connection.execute(f"SELECT id FROM {table} ORDER BY {order}"):
                        numbers[number] = None
            for number in numbers:
                with contextlib.suppress(sqlite3.Error, RowDamaged, UnicodeDecodeError):
                    key, row, data = _row(connection, table, number)
                    yield Put(table, key, row, data.numpy().data)


def _checksum(key: str, row: Row, data: bytes | memoryview) -> int:
    return zlib.crc32(
        repr((key, row.updated, row.tokens, row.size)).encode("utf-8", "backslashreplace"), zlib.crc32(data)
    )


def _stored(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")

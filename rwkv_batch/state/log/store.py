"""The database of sessions and documents: one SQLite file in WAL mode, which one server uses at a time.

One thread writes, one reads. A broken file is moved aside and a new one begun. Damage inside one row is found
when that row is read, because every row carries a checksum over its key, its columns and its data.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from torch import Tensor

from rwkv_batch.state import sqlite
from rwkv_batch.state.entries import (
    DOCUMENTS,
    TABLES,
    Operation,
    Put,
    RowDamaged,
    StoreBroken,
    StoreError,
    Tables,
    written_bytes,
)
from rwkv_batch.state.snapshot import tensor_from_bytes

log = logging.getLogger(__name__)

# written to the log before it is moved into the file; four times that if there is no quiet moment
CHECKPOINT_BYTES = 64 << 20


class Store:
    """An open database. `rows`: what each table held when it was opened or begun anew.

    `limit`: bytes that all rows together should take at most (None: any number); the pool keeps to it. Raises
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
        self._reading = Lock()  # also held while the file is replaced
        self._logged = 0  # bytes written since the last checkpoint
        self._lock_file = self.path.with_name(self.path.name + ".lock")
        self._lock: int | None = self._acquire_lock()
        try:
            try:
                self._open()
            except StoreBroken:
                self.restart()
        except BaseException:
            self.close()
            raise

    def commit(self, operations: Sequence[Operation]) -> None:
        """Carry out all of them in one transaction, or none, on the writing thread. Raises StoreError.

        After StoreBroken the file can only be replaced (`restart`).
        """
        assert self._writer
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for operation in operations:
                sqlite.apply(self._writer, operation)
            self._logged += written_bytes(operations)
            self._writer.execute("COMMIT")
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):  # some errors have ended the transaction already
                self._writer.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise sqlite.explain(error, self.path) from error
            raise

    def checkpoint(self, quiet: bool) -> None:
        """Move the log into the file if it is long, on the writing thread after it reported its commits."""
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
        """A row's data (uint8) or None, on the reading thread. Raises RowDamaged, StoreError."""
        with self._reading:
            try:
                self._reader = self._reader or sqlite.connect(self.path, CHECKPOINT_BYTES)
                return sqlite.read_row(self._reader, table, key, pinned)
            except sqlite3.Error as error:
                explained = sqlite.explain(error, self.path)
                if isinstance(explained, StoreBroken):
                    explained = RowDamaged(f"{key} is stored damaged ({error}).")
                raise explained from error

    def restart(self) -> None:
        """Move the broken file aside and begin a new one with the rows that are still whole.

        On the writing thread. Raises StoreError.
        """
        with self._reading:
            self._disconnect()
            aside = sqlite.move_aside(self.path)
            self._open()
            for put in sqlite.whole_rows(aside):
                self.commit([put])
                self.rows[put.table][put.key] = put.row
        sessions, documents = (len(self.rows[table]) for table in TABLES)
        log.error(
            "The database %s is damaged: it is now %s, and a new one has been begun with what is whole of it"
            ": %d sessions and %d documents.",
            self.path,
            aside,
            sessions,
            documents,
        )

    def close(self) -> None:
        """Close the file, after both threads have stopped. Idempotent."""
        self._disconnect()
        if self._lock is not None:
            self._lock_file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _disconnect(self) -> None:
        for connection in (self._reader, self._writer):
            if connection:
                connection.close()
        self._reader = None

    def _acquire_lock(self) -> int:
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
            self._writer = sqlite.connect(self.path, CHECKPOINT_BYTES)
            sqlite.prepare(self._writer, self.path)
            self.rows = {table: sqlite.list_rows(self._writer, table) for table in TABLES}
        except sqlite3.Error as error:
            raise sqlite.explain(error, self.path) from error


class MemoryStore:
    """The store of a server without a database: documents in memory, and no sessions."""

    keeps_sessions = False
    limit = None

    def __init__(self) -> None:
        self.rows: Tables = {}
        self._documents: dict[str, Tensor] = {}

    def commit(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if operation.table != DOCUMENTS:
                continue
            if isinstance(operation, Put):
                self._documents[operation.key] = tensor_from_bytes(operation.data)
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

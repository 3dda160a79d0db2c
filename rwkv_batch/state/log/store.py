"""The database of sessions and documents: one SQLite file in WAL mode, which one server uses at a time.

A broken file is moved aside and a new one begun with the rows that can still be read. Images of states are
files beside it (images.py), and the database is their only index.
"""

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock
from typing import TypeVar

from rwkv_batch.state import images
from rwkv_batch.state.claim import Claim, real_path
from rwkv_batch.state.entries import (
    NONE,
    Operation,
    Removed,
    RowDamaged,
    Session,
    SessionEntry,
    Status,
    StoreBroken,
    StoreError,
    Turn,
    written_bytes,
)
from rwkv_batch.state.log import salvage, sqlite, tables

log = logging.getLogger(__name__)

# written to the log before it is moved into the file; four times that if there is no quiet moment
CHECKPOINT_BYTES = 4 << 20

T = TypeVar("T")


class _Connection:
    """A connection for one kind of caller, opened when it is first used."""

    def __init__(self, path: Path | str) -> None:
        self._path, self._lock = path, RLock()
        self._open: sqlite3.Connection | None = None

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._open is None:
                self._open = sqlite.connect(self._path, CHECKPOINT_BYTES)
            yield self._open

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close it, and let no other thread open it again inside."""
        with self._lock:
            self.close()
            yield

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open.close()
            self._open = None


class Store:
    """An open database; without a path, one in memory that ends with it. Raises StoreError.

    `commit` and `checkpoint` are for one thread, `find_session` for another, everything else for a third.
    `limit`: bytes that the file and all images should take at most; None: any number.
    """

    def __init__(self, path: str | Path | None, limit: int | None = None) -> None:
        self.limit = limit
        self.path = real_path(path) if path is not None else None
        self._claim: Claim | None = None
        self._logged = 0  # bytes since the last checkpoint, about
        if self.path:
            self._check_place(self.path)
            self._claim = Claim(self.path)
            if sqlite.is_other(self.path):
                self._claim.close()
                raise StoreError(f"{self.path} is no database; name another file for it.")
            self._writer, self._finder, self._reader = (_Connection(self.path) for _ in range(3))
        else:  # every other connection would have a database of its own
            self._writer = self._finder = self._reader = _Connection(":memory:")
        try:
            try:
                self._prepare()
            except StoreBroken:
                self.restart()
        except BaseException:
            self.close()
            raise

    @property
    def images_folder(self) -> Path | None:
        """The folder of the images; None: none are stored."""
        return images.folder(self.path) if self.path else None

    def model_id(self, fingerprint: str, vocabulary: int) -> int:
        """The id of a model in this database."""
        return self._ask(self._writer, lambda db: tables.model_id(db, fingerprint, vocabulary))

    def model(self, model: int) -> tuple[str, int]:
        """Fingerprint and vocabulary. Raises StoreError if there is no such model."""
        query = "SELECT fingerprint, vocabulary FROM models WHERE id = ?"
        found = self._ask(self._reader, lambda db: db.execute(query, (model,)).fetchone())
        if found is None:
            raise RowDamaged("The model of a session is missing from the database.")
        return str(found[0]), int(found[1])

    def last_turn(self) -> int:
        """The highest id of a turn."""
        found = self._ask(self._writer, lambda db: db.execute("SELECT max(id) FROM turns").fetchone()[0])
        return int(found or NONE)

    def commit(self, groups: Sequence[Sequence[Operation]]) -> list[Removed]:
        """Carry out all groups in one transaction, or none; what each has removed. Raises StoreError.

        After StoreBroken the file can only be replaced (`restart`).
        """
        removed = [Removed() for _ in groups]
        with self._writer.use() as db:
            changes = db.total_changes
            data = sum(written_bytes(operation) for group in groups for operation in group)
            try:
                db.execute("BEGIN IMMEDIATE")
                for operations, its_removed in zip(groups, removed, strict=True):
                    for operation in operations:
                        tables.apply(operation, db, its_removed)
                self._logged += (db.total_changes - changes) * sqlite.PAGE + data
                db.execute("COMMIT")
            except Exception as error:
                with contextlib.suppress(sqlite3.Error):  # some errors have ended the transaction already
                    db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise self._explain(error) from error
                raise
        return removed

    def checkpoint(self, quiet: bool) -> None:
        """Move the log into the file if it is long, after its commits were reported."""
        if self.path is None:
            return
        if self._logged < CHECKPOINT_BYTES * (1 if quiet else 4):
            return
        self._logged = 0
        try:
            with self._writer.use() as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            log.warning(
                "The log of %s could not be moved into it (%s); it grows until that works again.",
                self.path,
                error,
            )

    def size(self) -> int:
        """Bytes of the database and of all images."""
        return self._ask(self._writer, tables.size)

    def find_session(self, key: str) -> Session | None:
        """Raises RowDamaged, StoreError."""
        return self._ask(self._finder, lambda db: tables.find_session(db, key))

    def list_sessions(self, after: str | None, limit: int, prefix: str = "") -> list[Session]:
        """See tables.list_sessions."""
        return self._ask(self._reader, lambda db: tables.list_sessions(db, after, limit, prefix))

    def status(self, listed: list[SessionEntry], l1: Sequence[int], l2: Sequence[int]) -> Status:
        """A list with the numbers of all sessions, and of those that end with these turns."""
        counts = self._ask(
            self._reader, lambda db: [tables.count_sessions(db, turns) for turns in (None, l1, l2)]
        )
        return Status(listed, *counts)

    def read_turn(self, turn: int) -> Turn:
        """Raises RowDamaged, StoreError."""
        return self._ask(self._reader, lambda db: tables.read_turn(db, turn))

    def turn_ids(self, turn: int, numbers: range) -> list[int]:
        """Of the turns up to this one that have these numbers, the oldest first. Raises StoreError."""
        return self._ask(self._reader, lambda db: tables.turn_ids(db, turn, numbers.start, numbers.stop - 1))

    def image_model(self, turn: int) -> int | None:
        """The model whose state the turn's image holds; None: there is no image."""
        return self._ask(self._reader, lambda db: tables.image_model(db, turn))

    def image_turns(self) -> set[int]:
        """Ids of all turns that have images."""
        return self._ask(self._reader, lambda db: set(tables.image_turns(db)))

    def read_document(self, key: str) -> bytes | None:
        """Raises RowDamaged, StoreError."""
        return self._ask(self._reader, lambda db: tables.read_document(db, key))

    def document_keys(self, prefix: str) -> list[str]:
        """Those that begin with `prefix`, which is not empty, in their order. Raises StoreError."""
        return self._ask(self._reader, lambda db: tables.document_keys(db, prefix))

    def restart(self) -> None:
        """Move the broken file aside and begin a new one with the rows that are still whole.

        For the thread that commits. Raises StoreError.
        """
        if self.path is None:
            raise StoreError("The sessions in memory cannot be changed any more; start the server again.")
        with ExitStack() as nobody_else:
            for connection in (self._writer, self._finder, self._reader):
                nobody_else.enter_context(connection.closed())
            sessions, documents = salvage.copy_whole_rows(self.path, self._salvaged)
            aside = sqlite.move_aside(self.path)
            sqlite.rename(self._salvaged, self.path)
            if self._claim:
                self._claim.take_file()
            self._sync_names()
        log.error(
            "The database %s is damaged: it is now %s, and a new one has been begun with what is whole of it"
            ": %d sessions and %d documents.",
            self.path,
            aside,
            sessions,
            documents,
        )

    def close(self) -> None:
        """Close the file, after all threads have stopped. Idempotent."""
        self._disconnect()
        if self._claim:
            self._claim.close()
            self._claim = None

    @property
    def _salvaged(self) -> Path:
        """The file in which a damaged one is made anew."""
        assert self.path
        return self.path.with_name(self.path.name + ".salvaged")

    def _ask(self, connection: _Connection, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with connection.use() as db:
                return question(db)
        except sqlite3.Error as error:
            explained = self._explain(error)
            if isinstance(explained, StoreBroken) and connection is not self._writer:
                explained = RowDamaged(f"A part of the session is stored damaged ({error}).")
            raise explained from error

    def _explain(self, error: sqlite3.Error) -> StoreError:
        return sqlite.explain(error, self.path or Path(":memory:"))

    def _prepare(self) -> None:
        """Connect, and make the tables in a new file. Raises StoreError."""
        if self.path:
            if not self.path.exists():  # a server was stopped while it replaced a damaged file
                sqlite.move_aside(self.path)  # what is left of its log
                sqlite.rename(self._salvaged, self.path)
            sqlite.remove(self._salvaged)
            if self._claim:
                self._claim.take_file(create=True)
        self._ask(self._writer, lambda db: tables.prepare(db, self.path))
        self._sync_names()

    def _sync_names(self) -> None:
        """SQLite syncs its files, but not the names of those that it has just made."""
        if self.path:
            with contextlib.suppress(OSError):  # a folder that may not be listed
                images.sync(self.path.parent)

    def _disconnect(self) -> None:
        for connection in (self._reader, self._finder, self._writer):
            connection.close()

    @staticmethod
    def _check_place(path: Path) -> None:
        if os.path.isdir(path):  # False for a name that is too long, where Path.is_dir raises
            raise StoreError(f"{path} is a directory; name a file for the database.")
        if os.path.exists(path) and not os.path.isfile(path):
            raise StoreError(f"{path} is no file on a disk; name one for the database.")
        if not os.path.isdir(path.parent):
            raise StoreError(
                f"There is no directory {path.parent} for the database; make it, or name another file."
            )

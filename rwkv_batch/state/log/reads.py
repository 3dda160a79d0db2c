"""Reading from a SQLite file of sessions and documents, or from one in memory."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import TypeVar

from rwkv_batch.state import images
from rwkv_batch.state.elsewhere.fetching import Elsewhere
from rwkv_batch.state.entries import (
    RowDamaged,
    Session,
    SessionEntry,
    Status,
    StoreBroken,
    StoreError,
    Turn,
    Unread,
)
from rwkv_batch.state.log.protocol import Wanted
from rwkv_batch.state.sql import sqlite, tables

T = TypeVar("T")

LOOKED_AT = 64 << 20  # bytes of a database that the pool's thread reads to tell damage from a disk that fails


class StoreConnection:
    """A connection for one kind of caller, opened when it is first used."""

    def __init__(self, path: Path | str, connect: Callable[[Path | str], sqlite3.Connection]) -> None:
        self._path, self._connect, self._lock = path, connect, RLock()
        self._open: sqlite3.Connection | None = None

    @contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._open is None:
                self._open = self._connect(self._path)
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


class StoreReads:
    """What a store answers by reading. See SessionStore."""

    remote = False
    elsewhere: Elsewhere | None = None

    def __init__(
        self,
        path: Path | None,
        finder: StoreConnection,
        reader: StoreConnection,
        writer: StoreConnection | None = None,
    ) -> None:
        self.path, self._finder, self._reader, self._writer = path, finder, reader, writer

    @property
    def images_folder(self) -> Path | None:
        """The folder of the images; None: none are stored."""
        return images.folder(self.path) if self.path else None

    def model(self, model: int) -> tuple[str, int]:
        """Fingerprint and vocabulary. Raises StoreError if there is no such model."""
        query = "SELECT fingerprint, vocabulary FROM models WHERE id = ?"
        found = self._ask(self._reader, lambda db: db.execute(query, (model,)).fetchone())
        if found is None:
            raise RowDamaged("The model of a session is missing from the database.")
        return str(found[0]), int(found[1])

    def refresh(self, wanted: Wanted) -> None:
        """A file is read at once."""

    def find_session(self, key: str) -> Session | None:
        """Raises RowDamaged, StoreError."""
        return self._ask(self._finder, lambda db: tables.find_session(db, key))

    def list_sessions(self, after: str | None, limit: int, prefix: str = "") -> list[Session]:
        """Some of the sessions in the order of their keys; see tables.list_sessions."""
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

    def find_request(self, request: bytes) -> tuple[str, Turn] | None:
        """The turn of a request, and a session that ends with it. Raises RowDamaged, StoreError."""
        return self._ask(self._finder, lambda db: tables.find_request(db, request))

    def turn_ids(self, turn: int, numbers: range) -> list[int]:
        """Of the turns up to this one that have these numbers, the oldest first. Raises StoreError."""
        return self._ask(self._reader, lambda db: tables.turn_ids(db, turn, numbers.start, numbers.stop - 1))

    def image_model(self, turn: int) -> int | None:
        """The model whose state the turn's image holds; None: there is no image."""
        return self._ask(self._reader, lambda db: tables.image_model(db, turn))

    def fetch_image(self, turn: int) -> bool:
        """The database has no images but those on the disk."""
        return False

    def image_turns(self) -> set[int]:
        """Ids of all turns that have images."""
        return self._ask(self._reader, lambda db: set(tables.image_turns(db)))

    def read_document(self, key: str) -> bytes | None:
        """Raises RowDamaged, StoreError."""
        return self._ask(self._reader, lambda db: tables.read_document(db, key))

    def document_keys(self, prefix: str) -> list[str]:
        """Those that begin with `prefix`, which is not empty, in their order. Raises StoreError."""
        return self._ask(self._reader, lambda db: tables.document_keys(db, prefix))

    def _ask(self, connection: StoreConnection, question: Callable[[sqlite3.Connection], T]) -> T:
        """Raises StoreError: Unread or RowDamaged where a connection that reads finds damage."""
        try:
            return self._asked(connection, question)
        except StoreBroken:  # or the disk could not read once, of which SQLite says the same
            with suppress(StoreBroken):
                return self._asked(connection, question)
            if connection is self._writer:
                raise
            raise self._unread(connection) from None

    def _asked(self, connection: StoreConnection, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with connection.use() as db:
                try:
                    return question(db)
                except sqlite3.Error:
                    if db.in_transaction:
                        db.rollback()
                    raise
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _unread(self, connection: StoreConnection) -> RowDamaged:
        """What is wrong where reading finds damage twice."""
        most = LOOKED_AT if connection is self._finder else None
        if self.path and (why := sqlite.unreadable(self.path, most)):
            return Unread(f"A part of the session cannot be read now ({why}); send the request again.")
        return RowDamaged("A part of the session is stored damaged.")

    def _explain(self, error: sqlite3.Error) -> StoreError:
        return sqlite.explain(error, self.path or Path(":memory:"))

"""The database of sessions and documents: one SQLite file in WAL mode, which one server uses at a time.

A broken file is moved aside and a new one begun with the rows that can still be read. Images of states are
files beside it (images.py), and the database is their only index.
"""

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rwkv_batch.disk.commits import may_be_found, take_back
from rwkv_batch.disk.syncing import sync
from rwkv_batch.state.entries import (
    NONE,
    UNKNOWN,
    Collect,
    CommittedBefore,
    Dangling,
    Operation,
    Refused,
    Removed,
    StoreBroken,
    StoreError,
    written_bytes,
)
from rwkv_batch.state.jobs import Report
from rwkv_batch.state.log import turn_ids
from rwkv_batch.state.log.protocol import Outcome
from rwkv_batch.state.log.reads import StoreConnection, StoreReads
from rwkv_batch.state.log.writer import Writer
from rwkv_batch.state.sql import clients, salvage, sqlite, tables
from rwkv_batch.state.sql.claim import Claim, real_path

log = logging.getLogger(__name__)

# written to the log before it is moved into the file; four times that if there is no quiet moment
CHECKPOINT_BYTES = 4 << 20


class Store(StoreReads):
    """An open database; without a path, one in memory that ends with it. Raises StoreError.

    See SessionStore. `serves_others`: whether it writes for several processes (rwkv_batch/state/host).
    """

    shared = False
    _writer: StoreConnection

    def __init__(
        self, path: str | Path | None, limit: int | None = None, *, serves_others: bool = False
    ) -> None:
        self.limit, self._serves_others = limit, serves_others
        self.path = real_path(path) if path is not None else None
        self._claim: Claim | None = None
        self._logged = 0  # bytes since the last checkpoint, about
        self._doubtful = False  # whether the log may hold a commit that has failed
        if self.path:
            self._check_place(self.path)
            self._claim = Claim(self.path)
            if sqlite.is_other(self.path):
                self._claim.close()
                raise StoreError(f"{self.path} is no database; name another file for it.")
        connect = partial(sqlite.connect, log_bytes=CHECKPOINT_BYTES)
        writer = StoreConnection(self.path or ":memory:", connect)
        # Of a database in memory every other connection would have one of its own.
        finder, reader = (StoreConnection(self.path, connect) if self.path else writer for _ in range(2))
        super().__init__(self.path, finder, reader, writer)
        try:
            try:
                self._prepare()
                if not serves_others:
                    self.forget_processes()
            except StoreBroken:
                self.restart()
        except BaseException:
            self.close()
            raise

    def model_id(self, fingerprint: str, vocabulary: int) -> int:
        """The id of a model in this database."""
        return self._ask(self._writer, lambda db: tables.model_id(db, fingerprint, vocabulary))

    def last_turn(self) -> int:
        """The highest id of a turn."""
        found = self._ask(self._writer, lambda db: db.execute("SELECT max(id) FROM turns").fetchone()[0])
        return int(found or NONE)

    def turn_numbers(self) -> Iterator[int]:
        """Ids for new turns; see SessionStore."""
        return turn_ids.count_on(self.last_turn())

    def commit_queue(self, report: Report, renewed: Callable[[], None]) -> Writer:
        """What a pool commits with; see SessionStore."""
        return Writer(self, report, renewed)

    def commit(self, groups: Sequence[Sequence[Operation]]) -> list[Outcome]:
        """Carry out all groups in one transaction; see SessionStore."""
        if self._claim:
            self._claim.check()
        with self._writer.use() as db:
            try:
                return self._carry_out(db, groups, apart=False)
            except Refused:
                return self._carry_out(db, groups, apart=True)

    def _carry_out(
        self, db: sqlite3.Connection, groups: Sequence[Sequence[Operation]], apart: bool
    ) -> list[Outcome]:
        """`commit`. apart: where a group may be refused; otherwise that raises Refused, and undoes all.

        A StoreError that says UNKNOWN: after a crash all of them may be found carried out.
        """
        outcomes: list[Outcome] = []
        changes, asked = db.total_changes, False
        data = sum(written_bytes(operation) for group in groups for operation in group)
        try:
            db.execute("BEGIN IMMEDIATE")
            for operations in groups:
                outcomes.append(_apply_apart(db, operations) if apart else _apply(db, operations))
            self._logged += (db.total_changes - changes) * sqlite.PAGE + data
            asked = True
            db.execute("COMMIT")
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):  # some errors have ended the transaction already
                db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                self._doubtful |= asked and may_be_found(error)
                raise self._failed(db, error) from error
            raise
        self._doubtful &= db.total_changes == changes  # what writes nothing writes over nothing
        return outcomes

    def _failed(self, db: sqlite3.Connection, error: sqlite3.Error) -> StoreError:
        """The error of a transaction, of which no start is to find anything."""
        explained = self._explain(error)
        if self._doubtful:
            try:
                take_back(db)
            except sqlite3.Error:
                return type(explained)(f"{explained} {UNKNOWN}")
            self._doubtful = False
        return explained

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
        self._prepare_clients()
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
        self._prepare_clients()
        self._sync_names()

    def forget_processes(self) -> None:
        """Of those that used the database before none is left: what is there for them alone goes.

        That are commits of clients, and turns of deleted sessions that were in use then, if the process that
        would have removed them was killed. Raises StoreBroken.
        """
        if self._serves_others:
            self._ask(self._writer, clients.forget)
        if unused := self._ask(self._writer, tables.unused_turns):
            try:
                self.commit([[Collect(unused)]])
            except StoreBroken:
                raise
            except StoreError as error:
                log.error("What is left of deleted sessions cannot be removed now (%s)", error)

    def _prepare_clients(self) -> None:
        if self._serves_others:
            self._ask(self._writer, clients.prepare)

    def _sync_names(self) -> None:
        """SQLite syncs its files, but not the names of those that it has just made."""
        if self.path:
            with contextlib.suppress(OSError):  # a folder that may not be listed
                sync(self.path.parent)

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


def _apply(db: sqlite3.Connection, operations: Sequence[Operation]) -> Removed:
    removed = Removed()
    for operation in operations:
        tables.apply(operation, db, removed)
    clients.keep(operations, removed, db)
    return removed


def _apply_apart(db: sqlite3.Connection, operations: Sequence[Operation]) -> Outcome:
    """Carry out the operations, or none of them if they are refused."""
    db.execute("SAVEPOINT apart")
    try:
        outcome: Outcome = _apply(db, operations)
    except Refused as refused:
        db.execute("ROLLBACK TO apart")
        outcome = refused
        if isinstance(refused, CommittedBefore):
            outcome = refused.removed or refused
        elif isinstance(refused, Dangling):  # as a rule because another process has changed the session
            outcome = tables.conflict(db, operations) or refused
    db.execute("RELEASE apart")
    return outcome

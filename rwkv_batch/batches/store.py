"""The folder of files and batches: a SQLite database, and a file for each file.

Front ends and the process that runs batches have it open at the same time. What is committed survives the end
of any of them. A method may be called from any thread, and takes milliseconds.
"""

import contextlib
import fcntl
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch.batches.records import (
    UNDER_WAY,
    BatchRecord,
    BatchStatus,
    RowResult,
    StoredFile,
    new_id,
)
from rwkv_batch.disk.commits import may_be_found, take_back
from rwkv_batch.disk.shared import use_write_ahead_log
from rwkv_batch.disk.syncing import sync

DATABASE = "batches.db"
LOCK = "running"  # locked by the process that runs the batches
BUSY_SECONDS = 20  # that a statement waits for another process
UNCERTAIN = "it is not known whether this has been stored"
OURS = re.compile(r"file-[0-9a-f]{32}(output|error)?(\.part)?")  # names of contents; others we leave alone
TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT, created INTEGER, expires INTEGER, bytes INTEGER, record BLOB);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT, created INTEGER, status TEXT, input TEXT, record BLOB);
CREATE TABLE IF NOT EXISTS results (batch TEXT, line INTEGER, succeeded INTEGER, text TEXT,
    PRIMARY KEY (batch, line)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS removed (id TEXT PRIMARY KEY);
"""

log = logging.getLogger(__name__)


class BatchesError(Exception):
    """The folder cannot be used; one sentence with the way out."""


class QuotaExceeded(Exception):
    """The files would be larger together than they may; one sentence."""


class FileInUse(Exception):
    """The file is the input of a batch that is under way; one sentence."""


class BatchStore:
    """`folder`: is made if it is not there; `quota`: bytes of all files. Raises BatchesError."""

    def __init__(self, folder: str | Path, quota: int = 1 << 62) -> None:
        self._folder, self.quota = Path(folder), quota
        self._lock = threading.RLock()
        self._rests: dict[str, float] = {}  # files that nobody knows, and when they were written last
        try:
            _make_folder(self._folder)
            with contextlib.ExitStack() as on_error:
                self._database = sqlite3.connect(
                    self._folder / DATABASE,
                    timeout=BUSY_SECONDS,
                    isolation_level=None,
                    check_same_thread=False,
                )
                on_error.callback(self._database.close)
                use_write_ahead_log(self._database, BUSY_SECONDS)
                self._database.execute("PRAGMA synchronous=NORMAL")
                self._database.executescript(TABLES)
                # Where a file cannot be opened to be written SQLite opens it to be read, for as long as the
                # connection lasts: what writes nothing fails then, too.
                self._database.execute("DELETE FROM results WHERE false")
                on_error.pop_all()
        except (OSError, sqlite3.Error) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise BatchesError(f"--batch-dir {folder} cannot be used ({why}); name another folder.") from None

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def claim(self) -> bool:
        """Whether this process runs the batches until it ends, as no other one does. Raises OSError."""
        file = open(self._folder / LOCK, "wb")  # noqa: SIM115  kept open, as closing it unlocks it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._claim = file
        return True

    @property
    def version(self) -> int:
        """Changes when another process has changed something."""
        return int(self._row("PRAGMA data_version")[0])

    # Files

    def path(self, file: str) -> Path:
        """Where the contents of the file of that id are."""
        return self._folder / file

    def add_file(self, file: StoredFile, write: Callable[[Path], int], most: int | None = None) -> StoredFile:
        """Keep a file whose contents `write` writes to the path that it gets; it returns their bytes.

        most: bytes of all files of its owner. Raises QuotaExceeded, OSError.
        """
        part, place, named = self._folder / f"{file.id}.part", self.path(file.id), False
        self._execute("DELETE FROM removed WHERE id = ?", part.name)  # it is written anew
        try:
            file = msgspec.structs.replace(file, bytes=write(part))
            sync(part)
            with self._durable():
                taken = self.bytes_of_files()
                if file.purpose == "batch" and taken + file.bytes > self.quota:
                    raise QuotaExceeded(
                        f"There is no room for {file.bytes} bytes: all files together have {self.quota} at "
                        "most; delete some, or ask whoever runs the server for more."
                    )
                if most is not None and self.bytes_of_files(file.owner) + file.bytes > most:
                    raise QuotaExceeded(
                        f"There is no room for {file.bytes} bytes: the files of this key together have "
                        f"{most} at most; delete some, or ask whoever runs the server for more."
                    )
                os.replace(part, place)
                named = True
                sync(self._folder)
                self._put(
                    "files", file.id, file.owner, file.created, file.expires, file.bytes, _encoded(file)
                )
        except BaseException as failed:
            self._remove(part)
            with contextlib.suppress(sqlite3.Error):
                if named and UNCERTAIN not in str(failed) and self.file(file.id) is None:
                    self._remove(place)
            raise
        return file

    def bytes_of_files(self, owner: str | None = None) -> int:
        """Of one owner; None: of all."""
        query = "SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = coalesce(?, owner)"
        return int(self._row(query, owner)[0])

    def file(self, name: str) -> StoredFile | None:
        found = self._row("SELECT record FROM files WHERE id = ?", name)
        return msgspec.json.decode(found[0], type=StoredFile) if found else None

    def files(self, owner: str | None = None) -> list[StoredFile]:
        """The newest first. owner: None: those of all."""
        rows = self._rows(
            "SELECT record FROM files WHERE owner = coalesce(?, owner) ORDER BY rowid DESC", owner
        )
        return [msgspec.json.decode(record, type=StoredFile) for (record,) in rows]

    def remove_file(self, name: str) -> bool:
        """Whether it was there. Raises FileInUse."""
        with self._durable():
            for (batch,) in self._rows(
                f"SELECT id FROM batches WHERE input = ? AND status IN ({_marks(UNDER_WAY)})",
                name,
                *UNDER_WAY,
            ):
                raise FileInUse(f"{name} is the input of {batch}, which is under way; cancel that first.")
            if gone := self._execute("DELETE FROM files WHERE id = ?", name).rowcount > 0:
                self._execute("INSERT OR IGNORE INTO removed VALUES (?)", name)
        if gone:
            with contextlib.suppress(sqlite3.Error):  # the process that runs batches does it then
                self.remove_contents()
        return gone

    def remove_contents(self) -> bool:
        """Remove the contents of all files that are no more, by whichever process; whether none is left."""
        whole = True
        for (name,) in self._rows("SELECT id FROM removed"):
            try:
                with self._transaction():  # within which nobody stores a file of that name
                    if self.file(name) is None:
                        self.path(name).unlink(missing_ok=True)
                    self._execute("DELETE FROM removed WHERE id = ?", name)
            except OSError as error:
                log.error("%s cannot be removed now (%s)", self.path(name), error.strerror)
                whole = False
        return whole

    def _remove(self, path: Path) -> None:
        """Remove a file that no row stands for; if not now, the process that runs batches does it."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be removed now (%s)", path, error.strerror)
            with contextlib.suppress(sqlite3.Error):  # it is found by its age then
                self._execute("INSERT OR IGNORE INTO removed VALUES (?)", path.name)

    # Batches

    def add_batch(self, batch: BatchRecord) -> None:
        with self._durable():
            self.put_batch(batch)

    def put_batch(self, batch: BatchRecord) -> None:
        """Store it as it is now."""
        data = _encoded(batch)
        self._put("batches", batch.id, batch.owner, batch.created, batch.status, batch.input_file, data)

    def change(
        self, name: str, expected: Iterable[BatchStatus], status: BatchStatus, **fields: Any
    ) -> BatchRecord | None:
        """Bring a batch to a status if it is in one of those that are expected; the batch as it is now."""
        with self._durable():
            batch = self.batch(name)
            if batch is None or batch.status not in expected:
                return batch
            at = batch.at | ({status: int(time.time())} if status != batch.status else {})
            batch = msgspec.structs.replace(batch, status=status, at=at, **fields)
            self.put_batch(batch)
            return batch

    def batch(self, name: str) -> BatchRecord | None:
        found = self._row("SELECT record FROM batches WHERE id = ?", name)
        return self._counted(found[0]) if found else None

    def batches(self, owner: str | None = None) -> list[BatchRecord]:
        """The newest first. owner: None: those of all."""
        rows = self._rows(
            "SELECT record FROM batches WHERE owner = coalesce(?, owner) ORDER BY rowid DESC", owner
        )
        return [self._counted(record) for (record,) in rows]

    def under_way(self) -> list[BatchRecord]:
        """The oldest first."""
        rows = self._rows(
            f"SELECT record FROM batches WHERE status IN ({_marks(UNDER_WAY)}) ORDER BY rowid", *UNDER_WAY
        )
        return [msgspec.json.decode(record, type=BatchRecord) for (record,) in rows]

    def _counted(self, record: bytes) -> BatchRecord:
        """With the rows that are done, while it is under way."""
        batch = msgspec.json.decode(record, type=BatchRecord)
        if batch.status not in UNDER_WAY:
            return batch
        done, completed = self._row(
            "SELECT count(*), coalesce(sum(succeeded), 0) FROM results WHERE batch = ?", batch.id
        )
        return msgspec.structs.replace(batch, completed=completed, failed=done - completed)

    # Rows

    def put_result(self, batch: str, result: RowResult) -> None:
        """A row is done; it is not done again."""
        self._put("results", batch, result.line, result.succeeded, result.text)

    def done(self, batch: str) -> set[int]:
        """The lines of the rows that are done."""
        return {line for (line,) in self._rows("SELECT line FROM results WHERE batch = ?", batch)}

    def counts(self, batch: str) -> tuple[int, int]:
        """Rows that have succeeded, and that have failed."""
        query = "SELECT coalesce(sum(succeeded), 0), count(*) FROM results WHERE batch = ?"
        completed, done = self._row(query, batch)
        return completed, done - completed

    def write_results(self, batch: BatchRecord, succeeded: bool) -> str | None:
        """The rows that have succeeded, or failed, as a file of its owner; its id, None if there are none.

        The id follows from the batch's, so that what has been interrupted is done again in its place.
        """
        kind = "output" if succeeded else "error"
        query = "SELECT text FROM results WHERE batch = ? AND succeeded = ? ORDER BY line"
        if not self._row(f"{query} LIMIT 1", batch.id, succeeded):
            return None
        name = f"file-{batch.id.removeprefix('batch_')}{kind}"

        def write(path: Path) -> int:
            with open(path, "w", encoding="utf-8") as file:
                for (text,) in self._cursor(query, batch.id, succeeded):
                    file.write(text + "\n")
                return file.tell()

        now = int(time.time())
        self.add_file(
            StoredFile(name, batch.owner, f"{batch.id}_{kind}.jsonl", "batch_output", 0, now), write
        )
        return name

    def forget_results(self, batch: str) -> None:
        """They are in files."""
        self._execute("DELETE FROM results WHERE batch = ?", batch)

    def expire(self, days: float) -> None:
        """Remove files that have expired or are that old, batches that have been over so long, and rests."""
        now = int(time.time())
        old = now - int(days * 86400)
        query = "SELECT id FROM files WHERE created < ? OR expires <= ?"
        for (name,) in self._rows(query, old, now):
            with contextlib.suppress(FileInUse):
                self.remove_file(name)
        for (record,) in self._rows(
            f"SELECT record FROM batches WHERE created < ? AND status NOT IN ({_marks(UNDER_WAY)})",
            old,
            *UNDER_WAY,
        ):
            batch = msgspec.json.decode(record, type=BatchRecord)
            if max(batch.at.values(), default=batch.created) < old:
                self._execute("DELETE FROM batches WHERE id = ?", batch.id)
        # What a process has left that was killed between two statements.
        self._execute(
            f"DELETE FROM results WHERE batch NOT IN (SELECT id FROM batches WHERE status IN "
            f"({_marks(UNDER_WAY)}))",
            *UNDER_WAY,
        )
        # Where the clock has been set, the file of an upload that is under way is as old: it grows until the
        # next look, or is known by then.
        seen, self._rests = self._rests, {}
        known = {name for (name,) in self._rows("SELECT id FROM files")}
        for path in self._folder.iterdir():
            if OURS.fullmatch(path.name) and path.name not in known:
                with contextlib.suppress(FileNotFoundError):
                    if (written := path.stat().st_mtime) < now - 86400:
                        self._rests[path.name] = written
                        if seen.get(path.name) == written:
                            self._remove(path)

    # The database

    @contextlib.contextmanager
    def _durable(self) -> Iterator[None]:
        """A transaction that is on the disk at the end, with all before it; others are there soon."""
        with self._lock:
            self._database.execute("PRAGMA synchronous=FULL")
            try:
                with self._transaction():
                    yield
            finally:
                self._database.execute("PRAGMA synchronous=NORMAL")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            if self._database.in_transaction:
                yield
                return
            self._database.execute("BEGIN IMMEDIATE")
            committing = False
            try:
                yield
                committing = True
                self._database.execute("COMMIT")
            except BaseException as error:
                if self._database.in_transaction:  # SQLite ends some by itself, as on a full disk
                    self._database.execute("ROLLBACK")
                if committing and may_be_found(error):
                    self._take_back(error)
                raise

    def _take_back(self, error: BaseException) -> None:
        """Let no process find what could not be committed. Raises sqlite3.Error where that fails, too."""
        try:
            take_back(self._database)
        except sqlite3.Error:
            raise sqlite3.OperationalError(f"{error}; {UNCERTAIN}") from None

    def _put(self, table: str, *values: object) -> None:
        """A row, in place of one with the same key; it keeps its place in the order."""
        if table == "results":
            self._execute(f"INSERT OR REPLACE INTO results VALUES ({_marks(values)})", *values)
            return
        columns = {
            "files": "owner created expires bytes record",
            "batches": "owner created status input record",
        }
        changes = ", ".join(f"{each} = excluded.{each}" for each in columns[table].split())
        statement = f"INSERT INTO {table} VALUES ({_marks(values)}) ON CONFLICT (id) DO UPDATE SET {changes}"
        self._execute(statement, *values)

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        with self._lock:
            return self._database.execute(statement, values)

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def _row(self, query: str, *values: object) -> Any:
        with self._lock:
            return self._database.execute(query, values).fetchone()

    def _cursor(self, query: str, *values: object) -> Iterator[Any]:
        """One row after the other, over a connection of its own."""
        with contextlib.closing(sqlite3.connect(self._folder / DATABASE, timeout=BUSY_SECONDS)) as reader:
            yield from reader.execute(query, values)


def file_of(owner: str, filename: str, expires: int | None = None) -> StoredFile:
    """A file of requests that is being uploaded."""
    return StoredFile(new_id("file-"), owner, filename, "batch", 0, int(time.time()), expires)


def _make_folder(path: Path) -> None:
    """Make a folder for its owner alone, with those above it, if need be. Its name is on the disk then.

    Raises OSError.
    """
    made = [each for each in path.parents if not each.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (path, *made):
        with contextlib.suppress(PermissionError):  # of a folder that may not be listed
            sync(each.parent)


def _encoded(record: object) -> bytes:
    return msgspec.json.encode(record)


def _marks(values: Iterable[object]) -> str:
    return ", ".join("?" for _ in values)

"""A SQLite file as this server uses one: connections, what its errors mean, and a damaged file put aside."""

import math
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from threading import Lock
from urllib.parse import quote

from rwkv_batch.state.entries import DiskFailed, StoreBroken, StoreError

BEGINNING = b"SQLite format 3\0"  # of every file
READ_BYTES = 1 << 20  # at a time
PAGE = 4096  # rows are short, and a commit writes whole pages

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
_lasting_files: dict[tuple[int, int], int] = {}  # descriptors by device and inode
_lasting_lock = Lock()
# What it reports of values, in a file that is whole.
_REFUSED = {sqlite3.SQLITE_CONSTRAINT_NOTNULL, sqlite3.SQLITE_CONSTRAINT_CHECK}


def connect(path: Path | str, log_bytes: int) -> sqlite3.Connection:
    """A connection for any thread, one at a time. `log_bytes`: size that the log is cut to when empty.

    A commit is on the disk when it returns: `synchronous = FULL` syncs the log each time. A new file is for
    its owner alone, as it holds texts, and so are the log and its index, which SQLite makes after it.
    """
    if isinstance(path, Path):
        # Never one that is there: to close it would end the locks of other connections of this process.
        with suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.text_factory = readable
    try:
        connection.executescript(f"""
            PRAGMA page_size = {PAGE};
            PRAGMA trusted_schema = OFF;
            PRAGMA cell_size_check = ON;
            PRAGMA secure_delete = FAST;
            PRAGMA journal_mode = WAL;
            PRAGMA synchronous = FULL;
            PRAGMA wal_autocheckpoint = 0;
            PRAGMA journal_size_limit = {log_bytes};""")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_to_read(path: Path | str) -> sqlite3.Connection:
    """A connection to a file to which another process writes, for any thread, one at a time."""
    name = quote(os.fspath(path))
    connection = sqlite3.connect(
        f"file:{name}?mode=rw", uri=True, isolation_level=None, check_same_thread=False
    )
    connection.text_factory = readable
    try:
        connection.executescript("""
            PRAGMA trusted_schema = OFF;
            PRAGMA cell_size_check = ON;
            PRAGMA query_only = ON;""")
    except BaseException:
        connection.close()
        raise
    return connection


def readable(data: bytes) -> str:
    """Text also of bytes that are none: a damaged column must not keep others from being read."""
    return data.decode(errors="surrogateescape")


def explain(error: sqlite3.Error, path: Path) -> StoreError:
    """The error to raise in place of one of SQLite's: StoreBroken if the file is damaged.

    DiskFailed: a matter of the disk or of rights, which may be otherwise soon.
    """
    details = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if details in _REFUSED:
        return StoreError(f"The database {path} takes no such values ({error}).")
    code = details & 0xFF
    if code in _BROKEN:
        return StoreBroken(f"The database {path} is damaged ({error}).")
    if code == sqlite3.SQLITE_FULL:
        return DiskFailed(
            f"The disk of the database {path} is full; nothing can be stored before there is room again."
        )
    return DiskFailed(
        f"The database {path} cannot be used ({error}); see that the file and its directory can be written."
    )


def unreadable(path: Path, most: int | None = None) -> str:
    """Why the disk does not give all bytes of a database and of its log; empty: it does.

    SQLite says that a file is damaged where the disk cannot read it (EIO), too. `most`: bytes that are read.
    """
    left = math.inf if most is None else most
    for suffix in ("", "-wal"):
        try:
            descriptor, place = _lasting(f"{path}{suffix}"), 0
            while data := os.pread(descriptor, READ_BYTES, place):
                place += len(data)
                left -= len(data)
                if left < 0:
                    return "the database may be damaged"
        except FileNotFoundError:
            continue
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _lasting(path: str) -> int:
    """A descriptor to read a file that connections of this process may have open. Raises OSError.

    It is never closed, as that would end their locks, and there is one for each file.
    """
    with _lasting_lock:
        found = os.stat(path)
        identity = found.st_dev, found.st_ino
        if identity not in _lasting_files:
            _lasting_files[identity] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _lasting_files[identity]


def is_other(path: Path) -> bool:
    """Whether the file holds something else: most of its first bytes are wrong, and not only zeros.

    For a file to which this process has no connection, whose locks would end.
    """
    with suppress(OSError), path.open("rb") as file:
        found = file.read(len(BEGINNING))
        right = sum(one == other for one, other in zip(found, BEGINNING, strict=False))
        return any(found) and 2 * right < len(found)
    return False


def move_aside(path: Path) -> Path:
    """Rename a damaged database with its log; the new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    rename(path, aside)
    return aside


def rename(path: Path, target: Path) -> None:
    """Rename a database with its log.

    When that is cut off between the two, the log is still there under the old name: no other database may get
    that name before the log has been moved as well, as SQLite would take the log for its own.
    """
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            file.rename(target.with_name(target.name + suffix))


def remove(path: Path) -> None:
    """Remove a database with its log, if there is one."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)

"""A database is one server's: by its name, by the file itself, and only where SQLite's log stays beside it.

A file can have several names: links, paths through mounts. Symbolic links are followed, so that everything
that belongs to the file is beside it. The other names lead to the same file, which is locked too.
"""

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from threading import Lock

from rwkv_batch.state import images
from rwkv_batch.state.entries import StoreAway, StoreError

# The byte of the file that is locked: SQLite's own locks are on bytes behind 2^30, and its files end before
# 2^48.
LOCKED_BYTE = 1 << 62
LONGEST_SUFFIX = 20  # bytes: what stands behind the name in those of the log and of copies, and some room
MOUNTS = Path("/proc/self/mountinfo")

_own: set[tuple[int, int]] = set()  # device and inode of the files that this process has claimed
_own_lock = Lock()


def real_path(path: str | Path) -> Path:
    """The path without symbolic links, also where there is no file yet. Raises StoreError."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = error.strerror if isinstance(error, OSError) else "its links lead in a circle"
        raise StoreError(f"The database {path} cannot be found ({reason}); name another file.") from None


class Claim:
    """The right to use a database, until it is closed or the process ends, however that ends.

    `path`: as `real_path` gives it. Raises StoreError if another server uses the file, by any name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside: int | None = None
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None
        _check_name(path)
        belongings = lock_file(path), path.with_name(path.name + "-wal"), images.folder(path)
        self._was_used = any(file.exists() for file in belongings)  # by this name, when it was used last
        self._beside = self._lock_beside()
        try:
            self.take_file()
        except BaseException:
            self.close()
            raise

    def take_file(self, create: bool = False) -> None:
        """Lock the file that has the name by now, and let go of one that had it before.

        No connection of this process to either file may be open: to close a file ends SQLite's locks on it.
        A file that is made is for its owner alone, as it holds texts. Raises StoreError.
        """
        try:
            if create:
                with suppress(FileExistsError):
                    os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            found = self._path.stat()
        except FileNotFoundError:
            return self._release_file()
        except OSError as error:
            raise self._cannot(error) from None
        identity = found.st_dev, found.st_ino
        if identity == self._identity:
            return
        self._release_file()
        with _own_lock:  # looked up before it is opened, as closing it would end the locks of its holder
            if identity in _own:
                raise self._in_use()
            _own.add(identity)
        self._identity = identity
        try:
            self._file = os.open(self._path, os.O_RDWR)
        except OSError as error:
            self._release_file()
            raise self._cannot(error) from None
        try:
            if not _lock_byte(self._file):
                raise self._in_use()
            self._check_companions(found.st_nlink)
        except StoreError:
            self._release_file()
            raise

    def check(self) -> None:
        """Raises StoreAway if the name leads to another file by now, or to none.

        What is written to a file that has no name is gone with the process.
        """
        found = _identity(self._path)
        if self._identity and found not in (self._identity, None):
            change = "replaced by another file" if found else "moved or deleted"
            raise StoreAway(
                f"The database {self._path} has been {change} while it is in use, and nothing can be stored; "
                f"put it back, or start the server again."
            )

    def close(self) -> None:
        """Let go of it. No connection of this process may be open. Idempotent."""
        if self._beside is not None:
            if self._file is None or os.fstat(self._file).st_nlink <= 1:
                lock_file(self._path).unlink(missing_ok=True)  # else it tells this name from the others
            self._release_file()
            os.close(self._beside)
            self._beside = None

    def _release_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._identity is not None:
            with _own_lock:
                _own.discard(self._identity)
            self._identity = None

    def _lock_beside(self) -> int:
        """A lock on a file of its own, which guards the name, also while no database has it."""
        file = lock_file(self._path)
        lock = -1
        try:
            while True:
                lock = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with suppress(FileNotFoundError):
                    if file.stat().st_ino == os.fstat(lock).st_ino:
                        return lock
                os.close(lock)  # its last holder has just removed it
        except BlockingIOError:
            os.close(lock)
            raise self._in_use() from None
        except OSError as error:
            raise self._cannot(error) from None

    def _check_companions(self, names: int) -> None:
        """Refuse a name beside which the log may be missing.

        SQLite looks for the log beside the name by which it opens a file. Without its log, a database lacks
        what was committed last, and the log would later be applied to a file that it does not fit.
        """
        if _is_mounted(self._path):
            raise StoreError(
                f"The database {self._path} is a single file that is mounted, and its log and states belong "
                f"beside it; mount its directory."
            )
        if names > 1 and not self._was_used:
            raise StoreError(
                f"The database {self._path} has {names} names (hard links), and its log and states may be "
                f"beside another one; start with that name, remove the others, or copy the file."
            )

    def _in_use(self) -> StoreError:
        return StoreError(
            f"The database {self._path} is in use by another server; stop that one, or name another file."
        )

    def _cannot(self, error: OSError) -> StoreError:
        return StoreError(
            f"The database {self._path} cannot be locked ({error.strerror}); "
            "name a file where this server may write."
        )


def _identity(path: Path) -> tuple[int, ...] | None:
    """Device and inode; empty: there is no file; None: that cannot be known now."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock_byte(descriptor: int) -> bool:
    """Lock a byte of the open file for this descriptor alone; whether no other one has it.

    Unlike a POSIX lock, it does not end when another descriptor of the process is closed. Where the file
    system has no such locks, the one beside the file has to do.
    """
    command = getattr(fcntl, "F_OFD_SETLK", None)  # Linux alone has it
    if command is None:
        return True
    wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LOCKED_BYTE, 1, 0)
    try:
        fcntl.fcntl(descriptor, command, wanted)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _check_name(path: Path) -> None:
    """Refuse a name that leaves no room for those of the log and of copies."""
    try:
        most = os.pathconf(path.parent, "PC_NAME_MAX") - LONGEST_SUFFIX
    except OSError:
        return  # the file system sets no limit, or it is noticed when the file is opened
    if len(os.fsencode(path.name)) > most:
        raise StoreError(
            f"The name of the database {path} is too long, as other files beside it have longer ones; use at "
            f"most {most} bytes."
        )


def _is_mounted(path: Path) -> bool:
    """Whether something is mounted at the path itself."""
    wanted = os.fsencode(path)
    for old, new in ((b"\\", rb"\134"), (b" ", rb"\040"), (b"\t", rb"\011"), (b"\n", rb"\012")):
        wanted = wanted.replace(old, new)
    with suppress(OSError):  # no Linux, or no /proc
        return any(line.split(b" ", 5)[4] == wanted for line in MOUNTS.read_bytes().splitlines())
    return False

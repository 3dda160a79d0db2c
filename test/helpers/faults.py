"""Makes a call of the operating system fail once, in any process of a running server; see disk_trace.c.

All processes below share a page of memory with this one. It says which call fails next: the N-th of its
kind from then on, on a file below a folder. What has failed is noted there, so nothing is started again
between two faults.
"""

import ctypes
import errno
import mmap
import os
import re
import shlex
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import power_cut
from serving import alive, until

KINDS = 16
ALWAYS = 1 << 40  # times: until it is disarmed


class Call(IntEnum):
    """Kinds of calls, as disk_trace.c numbers them."""

    OPEN = 1
    READ = 2
    WRITE = 3
    PART = 4  # a write that takes the first half, whereupon the next one fails
    SYNC = 5
    RENAME = 6
    UNLINK = 7
    MKDIR = 8
    TRUNCATE = 9
    MAP = 10
    ALLOCATE = 11
    SEND = 12  # to PostgreSQL, as the next
    RECEIVE = 13


# With which errors each fails.
ERRORS = {
    Call.OPEN: (errno.EMFILE, errno.ENOSPC, errno.EIO),
    Call.READ: (errno.EIO,),
    Call.WRITE: (errno.ENOSPC, errno.EIO),
    Call.PART: (errno.ENOSPC,),
    Call.SYNC: (errno.EIO, errno.ENOSPC),
    Call.RENAME: (errno.ENOSPC, errno.EIO),
    Call.UNLINK: (errno.EIO,),
    Call.MKDIR: (errno.ENOSPC,),
    Call.TRUNCATE: (errno.EIO,),
    Call.MAP: (errno.ENOMEM,),
    Call.ALLOCATE: (errno.ENOSPC,),
    Call.SEND: (errno.ECONNRESET,),
    Call.RECEIVE: (errno.ECONNRESET,),
}
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')


class _Page(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("left", ctypes.c_int64),
        ("times", ctypes.c_int64),
        ("fired", ctypes.c_int64),
        ("process", ctypes.c_int32),
        ("thread", ctypes.c_int32),
        ("only", ctypes.c_char * 256),
        ("path", ctypes.c_char * 512),
        ("counts", ctypes.c_int64 * KINDS),
    ]


@dataclass(frozen=True)
class Fault:
    """A call that has failed. `caller`: the function of this repository that has made it, if Python has."""

    call: Call
    error: int
    times: int  # how many have failed
    process: int
    path: str
    caller: str

    def __str__(self) -> str:
        name = errno.errorcode[self.error]
        return f"{self.call.name.lower()} {name} {self.path} in {self.caller or 'no Python'}"


class Faults:
    """The page, in a file of that folder. `prefix`: calls on files whose path begins with it may fail."""

    def __init__(self, folder: Path, prefix: Path) -> None:
        self._file, self.prefix = folder / "faults", prefix
        self._preload, self._armed = power_cut.preloaded(folder), Call.OPEN
        self._file.write_bytes(bytes(mmap.PAGESIZE))
        with self._file.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._page, self._times = _Page.from_buffer(self._memory), 0

    @property
    def environment(self) -> dict[str, str]:
        """Of processes whose calls fail."""
        return {
            "LD_PRELOAD": self._preload,
            "DISK_TRACE_PREFIX": str(self.prefix),
            "DISK_FAULTS": str(self._file),
        }

    @property
    def shell(self) -> str:
        """The environment as a script, for `through` of serving.Server."""
        set_ = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return f'{set_} exec "$@"'

    def arm(self, call: Call, error: int, number: int = 0, only: str = "", times: int = 1) -> None:
        """Let the call fail that comes behind `number` others of its kind on paths that hold `only`."""
        self.disarm()
        page = self._page
        page.error, page.left, page.times, page.fired, self._times = error, number, times, 0, times
        page.process, page.only, page.path = 0, only.encode(), b""
        self._armed = page.kind = call

    def disarm(self) -> Fault | None:
        """What has failed since `arm`, if anything has. Nothing fails any more."""
        page = self._page
        page.kind = 0
        if page.times == self._times:
            return None
        # A call has been chosen, which may be noting what it is, unless its process has been killed over it.
        until(lambda: bool(page.fired or (page.process and not alive(page.process))))
        path = page.path.decode(errors="replace")
        path = os.path.relpath(path, self.prefix) if path.startswith("/") else path
        fault = Fault(self._armed, page.error, page.fired, page.process, path, self._caller())
        page.fired, page.times = 0, self._times
        return fault

    @property
    def fired(self) -> bool:
        return bool(self._page.fired)

    def counts(self) -> dict[Call, int]:
        """How many calls of each kind there have been."""
        return {call: self._page.counts[call] for call in Call}

    def _caller(self) -> str:
        try:
            stack = Path(f"{self._file}.stack").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        frames = [found.groupdict() for found in FRAME.finditer(stack)]
        root = str(Path(__file__).resolve().parents[2])
        ours = [
            each for each in frames if each["file"].startswith(root) and "site-packages" not in each["file"]
        ]
        return " < ".join(
            f"{Path(each['file']).relative_to(root).with_suffix('')}.{each['name']}" for each in ours[:2]
        )

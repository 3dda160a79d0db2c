"""The audit log as a process appends to it.

All front ends append to the same file under a lock. A line is in the file within a tenth of a second, where
kill -9 does not reach it, and on the disk within two, where a power cut does not. What a power cut leaves of
later ones is put aside at the next start.
"""

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from rwkv_batch.audit.lines import FIRST, AuditError, previous_hash
from rwkv_batch.disk.syncing import sync

MOST_AT_ONCE = 1000  # lines of a write: what a full disk refuses is made anew each time
MOST_WAITING = 100_000  # lines that wait for a disk that is full; older ones are lost, and counted
RETRY_SECONDS = 1.0
TOGETHER = 0.05  # seconds until the next write: lines that come meanwhile share it
SYNC_SECONDS = 1.0  # between two syncs, while lines come
TAIL = 65536  # bytes at the end of the file in which the last line is
BEGIN = b'{"'  # what a line begins with
UNSURE = 4 << 20  # bytes at its end that a power cut may have left with holes

log = logging.getLogger(__name__)


class AuditLog:
    """The file, as one process appends to it: in a thread of its own, so that nobody waits for the disk."""

    def __init__(self, path: str | Path) -> None:
        """Raises AuditError."""
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AuditError(
                f"{path} cannot be written ({error.strerror}); name a file in a folder of your own"
            ) from None
        try:
            self._look_through()
        except AuditError:
            os.close(self._file)
            raise
        with contextlib.suppress(OSError):  # a folder that may not be listed
            sync(Path(path).parent)
        self._waiting = deque[dict[str, Any]]()
        self._lost = 0
        self._end, self._last = -1, FIRST  # how long the file was after this process wrote, and the last hash
        self._changed = threading.Condition()
        self._closed = self._silent = False
        self._sync_at = math.inf  # when what has been written is put on the disk; nothing has
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def add(self, entry: dict[str, Any]) -> None:
        """Append a line soon. Safe from any thread; waits for nothing."""
        with self._changed:
            self._waiting.append(entry)
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, if the disk takes it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        while True:
            if time.monotonic() >= self._sync_at:
                self._sync()
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed, self._until_sync())
                count = min(len(self._waiting), MOST_AT_ONCE)
                entries = [self._waiting.popleft() for _ in range(count)]
                (lost, self._lost), closing = (self._lost, 0), self._closed
            written = self._write(entries, lost) if entries else 0
            if written < len(entries):
                with self._changed:
                    self._waiting.extendleft(reversed(entries[written:]))
                    self._lost += 0 if written else lost
                    if not closing:
                        self._changed.wait_for(lambda: self._closed, RETRY_SECONDS)
                        continue
                log.error(
                    "%d lines of the audit log %s are lost", self._lost + len(self._waiting), self._path
                )
                break
            if closing and not self._waiting:
                break
            if entries:
                time.sleep(TOGETHER)
        self._sync()

    def _until_sync(self) -> float | None:
        """Seconds; None: nothing is to be put on the disk."""
        return None if self._sync_at == math.inf else max(0.0, self._sync_at - time.monotonic())

    def _sync(self) -> None:
        """Put on the disk what this process has written. A disk that refuses that ends nothing."""
        self._sync_at = math.inf
        try:
            os.fdatasync(self._file)
        except OSError as error:
            log.error(
                "the audit log %s cannot be put on the disk (%s); a power cut may take its last lines",
                self._path,
                error.strerror,
            )

    def _write(self, entries: Sequence[dict[str, Any]], lost: int) -> int:
        """How many of the first ones the file has now. The first of them says how many are lost."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                written, error = self._append(entries, lost)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError as refused:
            written, error = 0, refused
        if error and not self._silent:
            log.error(
                "the audit log %s cannot be written (%s); its lines wait until it can",
                self._path,
                error.strerror,
            )
        self._silent = error is not None
        if written:
            self._sync_at = min(self._sync_at, time.monotonic() + SYNC_SECONDS)
        return written

    def _append(self, entries: Sequence[dict[str, Any]], lost: int) -> tuple[int, OSError | None]:
        """How many lines the file has got, and what refused the next one. Raises OSError."""
        size = os.fstat(self._file).st_size
        if size != self._end:  # another process has written meanwhile
            size, self._last = self._whole_lines(size)
        data, last, hashes = bytearray(), self._last, list[str]()
        for entry in entries:
            gap = {"lost": lost} if lost else {}
            line = _line(entry | gap | {"previous": last})
            data += line + b"\n"
            last, lost = sha256(line).hexdigest(), 0
            hashes.append(last)
        written, refused = 0, None
        try:
            while written < len(data):
                written += os.write(self._file, memoryview(data)[written:])
        except OSError as error:
            refused = error
        # Lines that are whole stay, as they would come twice where the disk does not take them off again.
        count = data.count(b"\n", 0, written)
        self._end = size + data.rfind(b"\n", 0, written) + 1
        self._last = hashes[count - 1] if count else self._last
        if refused:
            with contextlib.suppress(OSError):  # the next write takes it off: the file is longer than `_end`
                os.ftruncate(self._file, self._end)  # no half of a line stays
        return count, refused

    def _look_through(self) -> None:
        """Put aside what a power cut has left of lines, if this is an audit log. Raises AuditError if not."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                size = os.fstat(self._file).st_size
                begins = max(0, size - UNSURE)
                end = os.pread(self._file, size - begins, begins)
                if not _is_ours(os.pread(self._file, TAIL, 0), end, size):
                    raise AuditError(f"{self._path} is no audit log; name another file for --audit-log")
                whole = begins + _before_hole(end)
                if whole < size:
                    aside = _put_aside(self._path, os.pread(self._file, size - whole, whole))
                    os.ftruncate(self._file, whole)
                    log.error(
                        "the audit log %s had lost lines at its end in a crash; what came behind is in %s",
                        self._path,
                        aside,
                    )
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno == errno.ESPIPE:
                raise AuditError(f"{self._path} is no file; name one for --audit-log") from None
            log.error("the end of the audit log %s is not looked at (%s)", self._path, error.strerror)

    def _whole_lines(self, size: int) -> tuple[int, str]:
        """The size of the file without a line that was cut off by a crash, and the hash of the last one."""
        tail = os.pread(self._file, min(size, TAIL), max(0, size - TAIL))
        if tail and not tail.endswith(b"\n"):
            whole = size - len(tail) + tail.rfind(b"\n") + 1
            os.ftruncate(self._file, whole)
            tail, size = tail[: tail.rfind(b"\n") + 1], whole
        lines = tail.splitlines()
        return size, sha256(lines[-1]).hexdigest() if lines else FIRST


def _line(entry: dict[str, Any]) -> bytes:
    """Without the end of the line."""
    try:
        return msgspec.json.encode(entry)
    except UnicodeEncodeError:  # a string that is no text
        text = json.dumps(entry, ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="backslashreplace")


def _is_ours(begin: bytes, end: bytes, size: int) -> bool:
    """Whether a file is empty or an audit log, also one to whose lines a crash has done something.

    begin, end: its first TAIL bytes and its last UNSURE, or all; size: how many bytes it has.
    """
    lines = [
        begin.split(b"\n", 1)[0],
        *end[-TAIL:].rstrip(b"\n").split(b"\n")[-2:],
    ]  # the last may be cut off
    if not size or any(previous_hash(line) for line in lines):
        return True
    if size == len(end) and not end.strip(b"\0"):  # the first lines, of which the disk had nothing yet
        return True
    return b"\n" not in end and begin.startswith(BEGIN) and size < TAIL and not _is_json(begin)  # half a line


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _before_hole(data: bytes) -> int:
    """Bytes of whole lines before the first zero, which no line has. Of half a line there are none."""
    if b"\n" not in data:
        return 0
    hole = data.find(b"\0")
    if hole < 0:
        return len(data)
    whole = data.rfind(b"\n", 0, hole) + 1
    before = data[:whole].splitlines()[-1:]
    return whole if before and previous_hash(before[0]) else len(data)


def _put_aside(path: str | Path, data: bytes) -> str:
    """A file of its own beside that one; its name."""
    number = 1
    while os.path.exists(aside := f"{path}.cut-{number}"):
        number += 1
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync(Path(aside).parent)
    return aside

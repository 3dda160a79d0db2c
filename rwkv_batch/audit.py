"""The audit log: one line for each request that the engine has got, chained by hashes.

A line is a JSON object. Its member `previous` is the SHA-256 of the line before it, so no line can be changed
or taken out without all that follow being made anew; who keeps the last hash elsewhere sees that too. Texts
stand there as hashes only. All front ends append to the same file under a lock.

    python -m rwkv_batch.audit verify FILE
"""

import argparse
import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

FIRST = "0" * 64  # what the first line has for the hash of the one before
MOST_AT_ONCE = 1000  # lines of a write: what a full disk refuses is made anew each time
MOST_WAITING = 100_000  # lines that wait for a disk that is full; older ones are lost, and counted
RETRY_SECONDS = 1.0
TOGETHER = 0.05  # seconds until the next write: lines that come meanwhile share it
TAIL = 65536  # bytes at the end of the file in which the last line is

log = logging.getLogger(__name__)


def text_hash(texts: Iterable[str | bytes]) -> str:
    """Of one text its SHA-256; of several that of their hashes, one after the other."""
    digests = [sha256(_bytes(text)).hexdigest() for text in texts]
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


def ids_text(ids: Iterable[int]) -> str:
    """What is hashed of a prompt of token ids."""
    return ",".join(map(str, ids))


class AuditError(Exception):
    """The file cannot be used. The message is one sentence with the way out."""


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
        self._waiting = deque[dict[str, Any]]()
        self._lost = 0
        self._end, self._last = -1, FIRST  # how long the file was after this process wrote, and the last hash
        self._changed = threading.Condition()
        self._closed = self._silent = False
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
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                count = min(len(self._waiting), MOST_AT_ONCE)
                entries = [self._waiting.popleft() for _ in range(count)]
                (lost, self._lost), closing = (self._lost, 0), self._closed
            if entries and not self._write(entries, lost):
                with self._changed:
                    self._waiting.extendleft(reversed(entries))
                    self._lost += lost
                    if closing:
                        return
                    self._changed.wait_for(lambda: self._closed, RETRY_SECONDS)
            elif closing and not self._waiting:
                return
            elif entries:
                time.sleep(TOGETHER)

    def _write(self, entries: Iterable[dict[str, Any]], lost: int) -> bool:
        """Whether the disk took all. If not, nothing has been written."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                self._append(entries, lost)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        except OSError as error:
            if not self._silent:
                log.error(
                    "the audit log %s cannot be written (%s); its lines wait until it can",
                    self._path,
                    error.strerror,
                )
            self._silent = True
            return False
        self._silent = False
        return True

    def _append(self, entries: Iterable[dict[str, Any]], lost: int) -> None:
        size = os.fstat(self._file).st_size
        if size != self._end:  # another process has written meanwhile
            size, self._last = self._whole_lines(size)
        data, last = bytearray(), self._last
        for entry in entries:
            gap = {"lost": lost} if lost else {}
            line = json.dumps(
                entry | gap | {"previous": last}, ensure_ascii=False, separators=(",", ":")
            ).encode(errors="backslashreplace")
            data += line + b"\n"
            last, lost = sha256(line).hexdigest(), 0
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, memoryview(data)[written:])
        except OSError:
            os.ftruncate(self._file, size)  # no half of a line stays
            raise
        self._end, self._last = size + len(data), last

    def _whole_lines(self, size: int) -> tuple[int, str]:
        """The size of the file without a line that was cut off by a crash, and the hash of the last one."""
        tail = os.pread(self._file, min(size, TAIL), max(0, size - TAIL))
        if tail and not tail.endswith(b"\n"):
            whole = size - len(tail) + tail.rfind(b"\n") + 1
            os.ftruncate(self._file, whole)
            tail, size = tail[: tail.rfind(b"\n") + 1], whole
        lines = tail.splitlines()
        return size, sha256(lines[-1]).hexdigest() if lines else FIRST


def verify(file: BinaryIO) -> tuple[int, str]:
    """How many lines the log has, and the hash of the last one. Raises AuditError at the first wrong line."""
    number, last = 0, FIRST
    for number, line in enumerate(_lines(file), 1):
        try:
            previous = json.loads(line)["previous"]
        except (ValueError, KeyError, TypeError):
            raise AuditError(f"line {number} is no line of an audit log") from None
        if previous != last:
            what = "does not begin the log" if number == 1 else f"does not follow line {number - 1}"
            raise AuditError(f"line {number} {what}: a line was changed, taken out or put in")
        last = sha256(line).hexdigest()
    return number, last


def _lines(file: BinaryIO) -> Iterator[bytes]:
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            raise AuditError(f"line {number} was cut off; the server removes it when it writes again")
        yield line[:-1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rwkv_batch.audit", description=verify.__doc__)
    commands = parser.add_subparsers(required=True, metavar="verify")
    check = commands.add_parser("verify", help="whether no line was changed, taken out or put in")
    check.add_argument("file", metavar="FILE", help="that of --audit-log")
    check.add_argument("--last", metavar="HASH", help="that the log must hold, kept from an earlier check")
    options = parser.parse_args(argv)
    try:
        with open(options.file, "rb") as file:
            count, last = verify(file)
        if options.last and not _holds(options.file, options.last):
            raise AuditError(f"no line has the hash {options.last}: the end of the log was taken off")
    except OSError as error:
        print(f"error: {options.file} cannot be read ({error.strerror})", file=sys.stderr)
        return 2
    except AuditError as error:
        print(f"error: {options.file}: {error}", file=sys.stderr)
        return 1
    print(f"{count} lines, none changed; the last has the hash {last}")
    return 0


def _holds(path: str, wanted: str) -> bool:
    with open(path, "rb") as file:
        return any(sha256(line[:-1]).hexdigest() == wanted for line in file)


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")


if __name__ == "__main__":
    sys.exit(main())

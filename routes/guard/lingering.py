"""Connections whose requests were refused early stay open until their clients have sent what they wanted to.

If such a connection were closed while its body still comes, the system would answer the rest with a reset.
Many clients and proxies then never read the reply that has arrived before it (RFC 9112, section 9.6).
"""

import os
import select
import socket
import threading
import time
from contextlib import suppress

MOST = 256  # connections at once; each takes a file
SILENT = 5.0  # seconds without a byte
LONGEST = 30.0  # seconds in all
PART = 1 << 18  # bytes read at once


class _Refused:
    """One connection, in a copy of its socket that stays open when Robyn has closed its own."""

    def __init__(self, copy: socket.socket) -> None:
        self.copy = copy
        self.began = self.seen = time.monotonic()


class Lingering:
    """Throws away what refused clients still send. Its thread begins with the first of them."""

    def __init__(self) -> None:
        self._refused: dict[int, _Refused] = {}  # by the number of the copy
        self._changes = threading.Condition(threading.Lock())
        self._poll: select.epoll | None = None

    def add(self, number: int) -> None:
        """Read the connection of that number until its client ends, or does not seem to.

        Where there is no file or thread for it, or too many linger, it ends as Robyn ends it.
        """
        with self._changes, suppress(OSError, RuntimeError):  # no file, no thread
            if len(self._refused) >= MOST:
                return
            if self._poll is None:
                poll = select.epoll()
                threading.Thread(target=self._read_all, args=(poll,), name="lingering", daemon=True).start()
                self._poll = poll
            with socket.socket(fileno=os.dup(number)) as copy:
                self._poll.register(copy.fileno(), select.EPOLLIN)
                kept = socket.socket(fileno=copy.detach())
            self._refused[kept.fileno()] = _Refused(kept)
            self._changes.notify()

    def _read_all(self, poll: select.epoll) -> None:
        buffer = bytearray(PART)
        while True:
            with self._changes:  # not in a poll without a limit, which a silent client would never end
                self._changes.wait_for(lambda: self._refused)
            ready = poll.poll(SILENT / 4)
            now = time.monotonic()
            with self._changes:
                for number, _ in ready:
                    if not _read(self._refused[number], buffer, now):
                        self._end(poll, number)
                for number, refused in list(self._refused.items()):
                    if now - refused.seen > SILENT or now - refused.began > LONGEST:
                        self._end(poll, number)

    def _end(self, poll: select.epoll, number: int) -> None:
        poll.unregister(number)  # Robyn's may still be open, and with it what is waited for
        self._refused.pop(number).copy.close()


def _read(refused: _Refused, buffer: bytearray, now: float) -> bool:
    """Throw away what has come. Whether more may come."""
    try:
        got = refused.copy.recv_into(buffer, 0, socket.MSG_DONTWAIT)
    except BlockingIOError:  # Robyn has read it
        return True
    except OSError:
        return False
    refused.seen = now
    return got > 0

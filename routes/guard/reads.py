"""Where Robyn's reads of sockets are guarded: its calls of `accept4` and `recv` come here first.

Robyn has no hook before it reads a body. A relay in front of it would cost a process, and 25 us for each
event of a stream. So the addresses through which its library calls functions of the C library are replaced
(the ELF relocations of their symbols). Replies do not pass here, and an ordinary request costs a look at it.
"""

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from routes.guard.connection import Connection
from routes.guard.inbound import Note
from routes.guard.limits import Limits
from routes.guard.lingering import Lingering
from routes.guard.threads import keep_state
from routes.guard.watch import Watch

MOST_THROWN = 8 << 20  # bytes at once of what follows a request that ends its connection
DROPPED_WITHIN = 5.0  # seconds; generous
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
DYNAMIC_SYMBOLS, RELOCATIONS = 11, 4  # types of sections

c = ctypes.CDLL(None, use_errno=True)
Recv = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, use_errno=True
)
Accept = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, use_errno=True
)


class Unguarded(Exception):
    """The library cannot be guarded here. The text is one sentence."""


class Guard:
    """One per process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._serials = itertools.count(1)
        self._connections: dict[int, Connection] = {}
        self.watch = Watch(limits, self._connections)
        self._lingering = Lingering()
        self._listeners: set[int] = set()
        self._real_recv, self._real_accept = _recv_at_once(), Accept(("accept4", c))
        # What is called in place of the C library's; they must live as long as Robyn.
        self.recv, self.accept = Recv(self._read), Accept(self._accepted)

    def install(self, library: str) -> None:
        """Stand before the calls of the shared library in that file. Raises Unguarded."""
        try:
            replace_calls(library, {b"recv": self.recv, b"accept4": self.accept})
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise Unguarded(f"the reads of {Path(library).name} cannot be guarded here ({error}).") from None

    def take(self, note: Note) -> socket.socket | None:
        """The connection of a request of HTTP/1.0, which Robyn lets go of. Blocks.

        None: the client has left.
        """
        connection = self._connections.get(note.connection)
        if connection is None or connection.serial != note.serial or connection.own is None:
            return None
        own, connection.own = connection.own, None
        connection.dropped, connection.taken = threading.Event(), True
        with contextlib.suppress(OSError):  # the client has left
            own.shutdown(socket.SHUT_RD)  # wakes Robyn, whose read then fails
        if connection.dropped.wait(DROPPED_WITHIN):
            return own
        own.close()
        return None

    def release(self, note: Note) -> None:
        """Robyn alone answers the request of HTTP/1.0 that has that note."""
        connection = self._connections.get(note.connection)
        if connection and connection.serial == note.serial and connection.own:
            own, connection.own = connection.own, None
            own.close()

    def _accepted(self, listener: int, address: int, size: int, flags: int) -> int:
        keep_state()
        if listener not in self._listeners:
            self._listeners.add(listener)
            self.watch.listens(listener)
        number: int = self._real_accept(listener, address, size, flags)
        if number >= 0:
            if self.watch.full(number):
                self.watch.refuse(number)
                ctypes.set_errno(errno.ECONNABORTED)
                return -1
            self._connections[number] = Connection(self._limits, number, next(self._serials))
        return number

    def _read(self, number: int, buffer: int, room: int, flags: int) -> int:
        """What `recv` does, and returns, for requests as Robyn is to read them."""
        keep_state()
        got: int = self._real_recv(number, buffer, room, flags)
        connection = self._connections.get(number)
        if connection is None:
            return got
        if connection.taken:
            connection.dropped.set()
            ctypes.set_errno(errno.ECONNRESET)
            return -1
        if got > 0 and connection.passes(ctypes.string_at(buffer, got)):
            connection.clock.asks()
            return got
        if got > 0 or connection.out or connection.part:
            return self._changed(connection, number, buffer, room, got)
        return got

    def _changed(self, connection: Connection, number: int, buffer: int, room: int, got: int) -> int:
        """Fill the buffer with what is to be read in place of what the client has sent.

        `got`: bytes of that which have been taken. Robyn waits for the system to report more only when the
        buffer is not full. So this reads until it is, or nothing more has come. What comes is counted as it
        does: a client that sends faster than this reads would otherwise pass all limits until its body ends.
        """
        thrown = waiting = 0
        while True:
            problem = ctypes.get_errno() if got < 0 else 0
            if expired := connection.expired:
                connection.expired = None
                connection.refuse(*expired)
            if got > 0:
                self._after(connection, number)
                if connection.over and not connection.lingers:  # the rest may be on its way
                    connection.lingers = True
                    self._lingering.add(number)
            elif got == 0:
                connection.end()
            elif problem not in (errno.EAGAIN, errno.EINTR):
                connection.forget()
            before, waiting = waiting, len(connection.out)
            if connection.clock.goes_on(connection.part, asks=waiting > before) or waiting > room:
                self.watch.holds(max(got, 0))
            thrown += got if connection.over else 0
            if got <= 0 or waiting >= room or thrown > MOST_THROWN:
                problem = problem or errno.EAGAIN
                break
            got = self._real_recv(number, buffer, room, 0)
            if got > 0 and connection.passes(data := ctypes.string_at(buffer, got)):
                connection.out.add(data)
        if connection.out:
            return connection.out.move(buffer, room)
        ctypes.set_errno(problem)
        return 0 if got == 0 else -1

    def _after(self, connection: Connection, number: int) -> None:
        if connection.waits:
            connection.waits = False
            if connection.part == "body":
                with contextlib.suppress(OSError):
                    os.write(number, CONTINUE)
        # What no request has come of would be kept by no answer, and the client would wait for the end.
        if connection.old and connection.out and connection.own is None and not connection.part:
            with contextlib.suppress(OSError):
                connection.own = socket.socket(fileno=os.dup(number))


def _recv_at_once() -> Callable[[int, int, int, int], int]:
    """The C library's `recv`, during which the caller keeps Python's lock: Robyn's sockets do not block."""
    recv = ctypes.PyDLL(None, use_errno=True).recv
    recv.restype = ctypes.c_ssize_t
    recv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return recv


def replace_calls(library: str, functions: dict[bytes, Callable[..., int]]) -> None:
    """Have a loaded shared library call `functions` in place of those of these names.

    Raises OSError, ValueError, KeyError or struct.error if it is no ELF file of 64 bits that calls them so.
    """
    if sys.platform != "linux" or sys.byteorder != "little" or struct.calcsize("P") != 8:
        raise ValueError("not Linux on a processor of 64 bits")
    path = os.path.realpath(library)
    base = _base_of(path)
    with open(path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as file:
        places = _places(file)
    for name, function in functions.items():
        for place in places[name]:
            page = (base + place) & -mmap.PAGESIZE
            if c.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            ctypes.c_void_p.from_address(base + place).value = ctypes.c_void_p.from_buffer(function).value  # type: ignore[arg-type]


def _base_of(path: str) -> int:
    """Where the file at `path` is in memory."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5] == path and int(fields[2], 16) == 0:
                return int(fields[0].split("-")[0], 16)
    raise ValueError("it is not loaded")


def _places(file: mmap.mmap) -> dict[bytes, list[int]]:
    """Where the addresses stand of the functions that an ELF file calls, by their names.

    The format is ELF-64 of the System V ABI. Raises ValueError or struct.error for another file.
    """
    if file[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it is no ELF file")
    (table,) = struct.unpack_from("<Q", file, 40)
    (count,) = struct.unpack_from("<H", file, 60)
    sections = [struct.unpack_from("<IIQQQQIIQQ", file, table + 64 * i) for i in range(count)]
    symbols = next(section for section in sections if section[1] == DYNAMIC_SYMBOLS)
    strings = sections[symbols[6]][4]
    found: dict[bytes, list[int]] = {}
    for section in sections:
        if section[1] != RELOCATIONS:
            continue
        for at in range(section[4], section[4] + section[5], 24):
            place, info, _ = struct.unpack_from("<QQq", file, at)
            if symbol := info >> 32:
                (name,) = struct.unpack_from("<I", file, symbols[4] + 24 * symbol)
                found.setdefault(file[strings + name : file.find(b"\0", strings + name)], []).append(place)
    return found

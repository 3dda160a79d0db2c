"""Connections that take too long, or too much, are found and ended here; Robyn itself waits for ever.

A look at all of them about once a second finds requests that do not end. Of connections on which none has
begun the system is asked (tcp_info), seldom: replies do not pass through the guard, and cost nothing here.
"""

import ctypes
import errno
import os
import socket
import stat
import struct
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from routes.guard.connection import Connection
from routes.guard.limits import Limits
from routes.guard.pieces import BytePieces

LARGE = 4 << 20  # bytes of bodies after which memory is given back
AFTER = 5  # looks, by which they have been read
UNSENT = 128 << 10  # bytes of a reply that the system keeps beside those on their way
DONE = 5.0  # seconds of silence after which a reply is over; else it sends a byte four times a second
SLACK = 0.05  # seconds by which the times of the system and these may differ
SILENT = 4.0  # seconds without a byte after which a connection may end to make room
ROOM = 16  # for so large a part of all
BEHIND = 1.0  # seconds after which a whole body waits behind a reply, as Robyn reads others at once
CROWDED = 0.25  # seconds until room is made again
STANDSTILL = 1.0  # seconds in which this has not run; then the process may have stopped, or the machine
LATE = "The {} of the request took too long to come."
SLOWEST = "Too many bodies are being sent at once, and this one is the slowest; try again in a moment."
REFUSAL = b'{"error": "The server has as many connections as it takes; try again in a moment."}'
REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 2\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(REFUSAL), REFUSAL)
)
malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)  # which say nothing of the connection
LINGER = struct.pack("ii", 1, 0)  # what is not sent yet is dropped

# struct tcp_info of linux/tcp.h: milliseconds since the last data, bytes, segments
_INFO_BYTES = 160
_UNACKED, _SENT_AGO, _RECEIVED_AGO = 24, 44, 52
_ACKED, _UNSENT, _SEGMENTS_SENT = 120, 144, 156


class Traffic(NamedTuple):
    """What the system knows of a connection."""

    sent_ago: float  # seconds since data was sent
    silent: float  # and since any went either way
    unread: bool  # something that was sent has not arrived
    acked: int  # bytes that have
    replied: bool  # anything was sent


class Watch:
    """One per process."""

    def __init__(self, limits: Limits, connections: dict[int, Connection]) -> None:
        """connections: by the numbers of their files. Those that have ended are there too."""
        self._limits, self._connections = limits, connections
        self._ports: set[int] = set()  # where connections are accepted
        self._looking = threading.Lock()
        self._next_look = self._next_room = 0.0
        self._ran = time.monotonic()  # when this was last called, as far as no standstill is seen
        self._held = 0  # bytes of bodies that are not complete, or not read by Robyn yet
        self._gone: set[int] = set()  # numbers of connections that have ended
        self._releases = 0  # looks at which memory is given back

    def listens(self, number: int) -> None:
        """Connections of that socket are watched, and keep little that is not sent."""
        with suppress(OSError), _copy(number) as listener:
            self._ports.add(listener.getsockname()[1])
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)  # which they inherit

    def tick(self) -> None:
        """Called ten times a second."""
        now = time.monotonic()
        if now - self._ran < STANDSTILL:
            self._ran = now
        if now >= self._next_look:
            self.look()

    def holds(self, more: int) -> None:
        """So many bytes of a body have come."""
        self._held += more
        if self._held > self._limits.held:
            self.look()

    def look(self) -> None:
        """End what takes too long."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            now = time.monotonic()
            self._next_look = now + self._limits.every
            self._excuse(now)
            bodies, unread = [], []
            for connection in list(self._connections.values()):
                clock = connection.clock
                if connection.out:
                    unread.append(connection)
                if not clock.part:
                    if now >= clock.due and not clock.gone:
                        self._ask(connection, now)
                elif not connection.expired:
                    if self._is_late(connection, now):
                        self._expire(connection, 408, LATE.format(clock.part))
                    elif clock.part == "body":
                        bodies.append(connection)
            held = sum(each.holding for each in bodies) + sum(len(each.out) for each in unread)
            self._release(self._held - held)
            self._held = held
            if self._held > self._limits.held:
                self._shed_unread(unread, now)
                self._shed(bodies, now)
        finally:
            self._looking.release()

    def _excuse(self, now: float) -> None:
        """A standstill does not count against clients, whose bytes nobody has read."""
        stood, self._ran = now - self._ran, now
        if stood >= STANDSTILL:
            for connection in list(self._connections.values()):
                connection.clock.excuse(stood, now)

    def full(self, number: int) -> bool:
        """Whether there is no room for a new connection with that number, even if others are ended for it."""
        if number in self._connections and number not in self._gone:  # the one before it has just ended
            return False
        if self._living >= self._limits.connections and (now := time.monotonic()) >= self._next_room:
            self._next_room = now + CROWDED
            self._make_room(now)
        if self._living >= self._limits.connections:
            return True
        self._gone.discard(number)
        return False

    @property
    def _living(self) -> int:
        """How many connections have not ended, as far as is known."""
        return len(self._connections) - len(self._gone)

    def _ends(self, connection: Connection) -> None:
        """Note that it has ended, or is ending."""
        connection.clock.gone = True
        if self._connections.get(connection.number) is connection:
            self._gone.add(connection.number)

    def refuse(self, number: int) -> None:
        """Answer a new connection, and close it."""
        with suppress(OSError), socket.socket(fileno=number) as connection:
            connection.send(REFUSED)

    def _is_late(self, connection: Connection, now: float) -> bool:
        clock, limits = connection.clock, self._limits
        if clock.part == "head":
            return now - clock.began > limits.head_seconds
        return now - clock.seen > limits.body_seconds or limits.lasts(connection.holding, now - clock.began)

    def _expire(self, connection: Connection, status: int, message: str) -> bool:
        """Have what has begun answered so: Robyn reads an end, in place of which the guard gives it this.

        Whether the connection ends. Where no file can be opened now, a later look does it.
        """
        connection.expired = status, message
        try:
            with self._copy_of(connection) as copy:
                if self._traffic(copy):
                    copy.shutdown(socket.SHUT_RD)
                    return True
        except OSError as error:
            if error.errno in SCARCE:
                connection.expired = None
                return False
        self._ends(connection)
        connection.forget()
        return True

    def _shed_unread(self, unread: list[Connection], now: float) -> None:
        """End connections whose whole bodies wait behind replies that nobody reads, the oldest first."""
        for each in sorted(unread, key=lambda each: each.clock.seen):
            if self._held <= self._limits.held or now - each.clock.seen < BEHIND:
                return
            self._held -= len(each.out)
            with suppress(OSError), self._copy_of(each) as copy:
                if self._traffic(copy):
                    _reset(copy)
            self._ends(each)
            each.out = BytePieces()

    def _shed(self, bodies: list[Connection], now: float) -> None:
        """End the slowest bodies until the others have room."""
        bodies.sort(key=lambda each: each.holding / (1.0 + now - each.clock.began))
        for each in bodies:
            if self._held <= self._limits.held:
                return
            self._held -= each.holding
            self._expire(each, 503, SLOWEST)

    def _ask(self, connection: Connection, now: float) -> None:
        """Look at a connection on which no request has begun."""
        clock, limits = connection.clock, self._limits
        clock.due = now + limits.soon
        try:
            with self._copy_of(connection) as copy:
                if (traffic := self._traffic(copy)) is None:
                    self._ends(connection)
                elif traffic.unread:
                    if traffic.acked != clock.acked:
                        clock.acked, clock.moved = traffic.acked, now
                    elif now - clock.moved >= limits.unread_seconds:
                        _reset(copy)
                elif _is_idle(connection, traffic, now):
                    if traffic.silent >= limits.idle_seconds:
                        copy.shutdown(socket.SHUT_RD)
                    elif traffic.silent >= DONE or not clock.asked:
                        clock.due = now + limits.idle_seconds - traffic.silent
        except OSError as error:
            if error.errno not in SCARCE:
                self._ends(connection)
                connection.out = BytePieces()  # Robyn has not read it

    def _make_room(self, now: float) -> None:
        """End connections on which nothing happens, and count those that have ended."""
        silent: list[tuple[float, Connection]] = []
        for connection in list(self._connections.values()):
            clock = connection.clock
            if clock.gone:
                continue
            try:
                with self._copy_of(connection) as copy:
                    traffic = self._traffic(copy)
            except OSError as error:
                if error.errno not in SCARCE:
                    self._ends(connection)
                continue
            if traffic is None:
                self._ends(connection)
                continue
            if traffic.unread or traffic.silent < SILENT:
                continue
            if clock.part or _is_idle(connection, traffic, now):
                silent.append((traffic.silent, connection))
        silent.sort(key=lambda each: -each[0])
        for _, connection in silent[: 1 + self._limits.connections // ROOM]:
            if part := connection.clock.part:
                if not self._expire(connection, 408, LATE.format(part)):
                    continue
            else:
                with suppress(OSError), self._copy_of(connection) as copy:
                    copy.shutdown(socket.SHUT_RD)
            self._ends(connection)

    def _release(self, gone: int) -> None:
        """Give memory back to the system at the next looks after so many bytes of bodies have gone.

        They come in small pieces to many threads, each of which would keep what it has had once.
        """
        if self._releases and malloc_trim:
            malloc_trim(0)
        self._releases = AFTER if gone >= LARGE else max(0, self._releases - 1)

    def _copy_of(self, connection: Connection) -> socket.socket:
        """That of its socket, and not of a later connection with its number. Raises OSError."""
        copy = _copy(connection.number)
        if self._connections.get(connection.number) is not connection:
            copy.close()
            raise OSError(errno.EBADF, "the connection has ended")
        return copy

    def _traffic(self, copy: socket.socket) -> Traffic | None:
        """None if it is no connection that was accepted here. Raises OSError for one that has ended."""
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.getsockname()[1] not in self._ports:
            return None
        copy.getpeername()
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        unacked, sent_ago, received_ago, unsent, segments = (
            struct.unpack_from("=I", info, place)[0]
            for place in (_UNACKED, _SENT_AGO, _RECEIVED_AGO, _UNSENT, _SEGMENTS_SENT)
        )
        (acked,) = struct.unpack_from("=Q", info, _ACKED)
        sent, received = sent_ago / 1000, received_ago / 1000
        return Traffic(sent, min(sent, received), bool(unacked or unsent), acked, segments > 0)


def _is_idle(connection: Connection, traffic: Traffic, now: float) -> bool:
    """Whether it waits for no reply, if everything has been read."""
    asked = connection.clock.asked
    return not asked or (traffic.replied and now - traffic.sent_ago >= asked - SLACK)


def _reset(copy: socket.socket) -> None:
    """End a connection, and what its client has not read."""
    copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
    copy.shutdown(socket.SHUT_RDWR)


def _copy(number: int) -> socket.socket:
    """That of a socket, which stays what it is while others close theirs.

    Raises OSError, also where the connection has ended and its number is that of a file by now.
    """
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        if not stat.S_ISREG(os.fstat(copy).st_mode):  # to close it would end this process's locks of a file
            os.close(copy)
        raise

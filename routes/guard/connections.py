"""Room for requests where few files may be open: connections that ask for nothing are closed.

Robyn closes none, however long it is silent. Each takes a file of the process, and without a free one nobody
else is served. So when nearly all are taken, those that have been silent for longest end first. A reply that
is being made is not silent: while a client waits for it, it gets a byte every HEARTBEAT_EVERY seconds.
"""

import os
import resource
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

ROOM = 64  # files that are kept free, or a quarter of all
ASKED_NOTHING = 1.0  # seconds that a connection may be open before its first byte, while files are scarce
SILENT = 4.0  # seconds without a further request, or without a byte of one that has begun
WAITING = 90.0  # seconds without a byte of a reply, or of a request that cannot be told from those that wait
LOOK_EVERY = 1.0  # seconds, where nothing could be closed

# struct tcp_info of linux/tcp.h: milliseconds since the last data, bytes received, data segments sent
_INFO_BYTES = 160
_SENT_AGO, _RECEIVED_AGO = 44, 52
_RECEIVED, _SEGMENTS_SENT, _UNSENT = 128, 156, 144


@dataclass(frozen=True)
class _Silent:
    """A connection on which nothing has happened for so long that it may be closed."""

    seconds: float
    descriptor: int


class Connections:
    """Looks after the connections of this process. For one thread."""

    def __init__(self) -> None:
        self._next_look = 0.0

    def make_room(self, waiting: bool) -> None:
        """Close silent connections if hardly any file can be opened. Costs next to nothing otherwise.

        waiting: whether a client may be waiting for a reply of which nothing has been sent.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = min(ROOM, limit // 4)
        if limit == resource.RLIM_INFINITY or _lowest_free(limit) < limit - room or sys.platform != "linux":
            return
        if time.monotonic() < self._next_look:
            return
        silent = sorted(_silent(limit, waiting), key=lambda each: -each.seconds)
        for each in silent[:room]:
            if _silence(each.descriptor, waiting) is not None:  # else another connection has its number now
                _close(each.descriptor)
        self._next_look = time.monotonic() + (0.0 if silent else LOOK_EVERY)


def _lowest_free(limit: int) -> int:
    """The number that the next file gets; all below it are taken."""
    try:
        free = os.dup(0)
    except OSError:
        return limit
    os.close(free)
    return free


def _silent(limit: int, waiting: bool) -> list[_Silent]:
    found = []
    for descriptor in range(3, limit):
        seconds = _silence(descriptor, waiting)
        if seconds is not None:
            found.append(_Silent(seconds, descriptor))
    return found


def _silence(descriptor: int, waiting: bool) -> float | None:
    """Seconds, if it is a connection that has been silent for too long."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:  # no socket, or not open
        return None
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        connection.getpeername()  # fails for the socket that listens
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    finally:
        connection.detach()
    return None if len(info) < _INFO_BYTES else silence(info, waiting)


def silence(info: bytes, waiting: bool) -> float | None:
    """Seconds, if the connection that this tcp_info describes has been silent for too long."""
    sent_ago, received_ago = (
        struct.unpack_from("=I", info, place)[0] / 1000 for place in (_SENT_AGO, _RECEIVED_AGO)
    )
    (received,) = struct.unpack_from("=Q", info, _RECEIVED)
    (segments_sent,) = struct.unpack_from("=I", info, _SEGMENTS_SENT)
    (unsent,) = struct.unpack_from("=I", info, _UNSENT)
    if not received:
        seconds, most = received_ago, ASKED_NOTHING
    elif unsent:  # the client does not read; see Frontend.close_abandoned
        return None
    elif segments_sent and sent_ago <= received_ago:
        seconds, most = sent_ago, SILENT
    else:
        seconds, most = received_ago, WAITING if waiting else SILENT
    return seconds if seconds >= most else None


def _close(descriptor: int) -> None:
    """End it for both sides; the HTTP library closes it when it sees that."""
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()

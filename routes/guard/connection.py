"""A client's connection that Robyn reads, and when what has happened on it."""

import socket
import threading
import time

from routes.guard.inbound import Inbound
from routes.guard.limits import Limits


class Clock:
    """In seconds of `time.monotonic`. `part` is that of Inbound."""

    __slots__ = ("acked", "asked", "began", "due", "gone", "moved", "part", "seen", "soon")

    def __init__(self, soon: float) -> None:
        """soon: seconds after a request in which nothing need be asked of the system."""
        self.soon = soon
        self.part = ""
        self.began = self.seen = time.monotonic()  # of a part that has begun; of its last byte
        self.asked = 0.0  # when the last whole request had come; 0: none has
        self.due = self.began + soon  # when the system is asked next
        self.acked, self.moved = -1, 0.0  # bytes of replies that have arrived, and since when as many
        self.gone = False  # the connection has ended, or is ending

    def asks(self) -> None:
        """A whole request has come."""
        self.asked = time.monotonic()
        self.due = self.asked + self.soon

    def excuse(self, seconds: float, now: float) -> None:
        """What has begun is that much younger: nobody could have read what came."""
        self.began = min(now, self.began + seconds)
        self.seen = min(now, self.seen + seconds)
        self.moved = min(now, self.moved + seconds)

    def goes_on(self, part: str, asks: bool) -> bool:
        """More has come, after which that part of a request is open. Whether it is a body."""
        self.seen = time.monotonic()
        if asks:
            self.asks()
        if asks or part != self.part:
            self.part, self.began = part, self.seen
        return part == "body"


class Connection(Inbound):
    """For the thread of Robyn that reads it; its clock and `expired` are for all."""

    own: socket.socket | None = None  # the same connection, kept while a request of HTTP/1.0 is answered
    taken = False  # Robyn is to let go of it
    lingers = False  # a request was refused, and what still comes is thrown away
    dropped: threading.Event
    expired: tuple[int, str] | None = None  # what has begun is to be answered so

    def __init__(self, limits: Limits, number: int, serial: int) -> None:
        super().__init__(limits, number, serial)
        self.clock = Clock(limits.soon)

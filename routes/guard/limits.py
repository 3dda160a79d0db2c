"""What a connection may do, and for how long."""

import math
from collections.abc import Callable
from dataclasses import dataclass

FORM_ROOM = 1 << 20  # bytes that a form may have beside its file
LEAST_RATE = 500  # bytes a second of a body, from --body-timeout on
LOOKS = 4  # in a time that is watched
EVERY = (0.05, 1.0)  # seconds between two looks, at least and at most
BODIES = 4  # of the largest size, as much as all bodies under way may have together


def no_file(path: str) -> bool:
    """That no path takes a file."""
    return False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds may be infinite."""

    body: int  # bytes of a body
    file: int = 0  # of a body at a path that takes a file, if that is more
    takes_file: Callable[[str], bool] = no_file
    head_seconds: float = math.inf  # for a head, from its first byte on
    body_seconds: float = math.inf  # between two bytes of a body
    idle_seconds: float = math.inf  # between two requests, and before the first
    unread_seconds: float = math.inf  # in which a client takes nothing of a reply
    connections: int = 1 << 30  # of this process

    def most(self, path: str) -> int:
        """Bytes that a body may have there."""
        return self.file if self.file > self.body and self.takes_file(path) else self.body

    @property
    def held(self) -> int:
        """Bytes that all bodies under way may have together."""
        return BODIES * max(self.body, self.file)

    def lasts(self, received: int, seconds: float) -> bool:
        """Whether a body has been under way for too long, after so many bytes."""
        return seconds > self.body_seconds + received / LEAST_RATE

    @property
    def soon(self) -> float:
        """Seconds after which the system is asked whether a reply is being read."""
        return min(self.unread_seconds / LOOKS, self.idle_seconds)

    @property
    def every(self) -> float:
        """Seconds between two looks at all connections."""
        return min(max(min(self.head_seconds, self.body_seconds, self.soon) / LOOKS, EVERY[0]), EVERY[1])

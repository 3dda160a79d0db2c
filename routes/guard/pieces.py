"""Bytes in the pieces in which they have come: a long body is not copied as it grows."""

import ctypes
from collections import deque
from collections.abc import Iterable


class BytePieces:
    """The first to come are the first to go."""

    def __init__(self) -> None:
        self._pieces = deque[bytes]()
        self._gone = 0  # bytes of the first piece that have gone
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)[self._gone :]

    def add(self, *pieces: bytes) -> None:
        self.extend(pieces)

    def extend(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self._pieces.append(piece)
            self._size += len(piece)

    def move(self, address: int, room: int) -> int:
        """Move the first ones, at most `room` bytes, to that place in memory. How many these are."""
        moved = 0
        while self._pieces and moved < room:
            first = self._pieces[0]
            part = first[self._gone : self._gone + room - moved]  # no copy if it is all of it
            ctypes.memmove(address + moved, part, len(part))
            moved += len(part)
            self._gone += len(part)
            if self._gone == len(first):
                self._pieces.popleft()
                self._gone = 0
        self._size -= moved
        return moved

"""Whether an engine goes on: it answers between two steps, and its silence is measured."""

import time
from collections.abc import Callable
from typing import Literal

PINGS = 6  # that an engine gets within the time in which it must answer one
LATE = 3  # by what the limit is divided: after so long an engine does not count as ready
LONGEST_STEPS = 5.0  # that an engine may take, where these are longer than the limit: as on a slow CPU

Look = Literal["fine", "ask", "late", "hung"]


class Pulse:
    """When one engine is asked, and how long it has been silent. Times are seconds of the clock.

    `limit`: until it counts as hung; 0: it never does.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._least, self._clock = limit, clock
        self._limit = limit
        self._answered = self._looked = clock()
        self._serves = self._asked = False
        self.late = False  # whether that has been reported, and it has not gone on since

    @property
    def every(self) -> float | None:
        """The time between two looks; None: it is never asked."""
        return self._least / PINGS or None

    @property
    def silent(self) -> float:
        """For how long it has not answered."""
        return self._clock() - self._answered

    def serve(self, step: float) -> None:
        """It is ready from now on. step: what its longest one takes, about."""
        self._limit = max(self._least, LONGEST_STEPS * step)
        self._serves, self._asked, self.late = True, False, False
        self._answered = self._looked = self._clock()

    def rest(self) -> None:
        """It is not asked: it loads, or has ended."""
        self._serves = self._asked = self.late = False

    def answer(self) -> None:
        """It has answered what it was asked."""
        self._asked, self._answered = False, self._clock()

    def look(self) -> Look:
        """How it is. After "ask" it is asked; "late" and "hung" are said again until it answers."""
        now = self._clock()
        gap, self._looked = now - self._looked, now
        if self.every is None or not self._serves:
            return "fine"
        if (
            gap > 2 * self.every
        ):  # who looks was stopped itself, as by Ctrl-Z, and so may the engine have been
            self._answered += gap
        silent = now - self._answered
        if not self._asked and silent >= self.every:
            self._asked = True
            return "ask"
        if self._asked and silent > self._limit:
            return "hung"
        return "late" if self._asked and self.is_late(silent) else "fine"

    def is_late(self, seconds: float) -> bool:
        """Whether it does not count as ready after so long without a step."""
        return seconds > self._limit / LATE

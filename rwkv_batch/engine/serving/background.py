"""When work is done that only makes later steps faster: between steps, and while no rows run."""

import time
from collections.abc import Callable

LONGEST_GAP = 0.1  # seconds between two tokens of a stream, to which a step may be extended
SHARE = 0.5  # of the time while rows run, at most
FIRST_WORK, LEAST_WORK = 0.04, 0.02  # seconds that one is taken to last: the first, and any
QUIET = 0.05  # seconds after a step: a client that asks again at once does so within them, and finds no piece
QUIET_SHARE = 0.1  # of the time in which nothing runs, at most, while steps come that often
FADES = 0.98  # of the longest piece is left after a step without one, so that an outlier does not end all


class Background:
    """The pieces of one model's work; see Runner.improve. All methods are for the thread that steps.

    `clock`: seconds.
    """

    def __init__(self, improve: Callable[[bool], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._improve, self._clock = improve, clock
        self.pending = True  # whether there may be something to do
        self.ended = 0.0  # when the last step did, by the clock
        self._began: float | None = None
        self._step = 0.0
        self._piece, self._again, self._again_idle = FIRST_WORK, 0.0, 0.0

    def begin_step(self) -> None:
        """The model begins with a step."""
        self._began = self._clock()

    def end_step(self) -> None:
        """The step's draws, or those of the one before, are known; nothing if none has begun."""
        if self._began is not None:
            self.ended = self._clock()
            self._step = self.ended - self._began
            self._began = None

    def between_steps(self) -> bool:
        """Rows run. Whether a piece has come: if their tokens do not wait too long for it, nor too often."""
        began = self._clock()
        if began < self._again:
            return False
        if self._step + self._piece > LONGEST_GAP:
            self._piece = max(LEAST_WORK, FADES * self._piece)
            return False
        if not self._improve(False):
            return False
        took = self._clock() - began
        self._piece = max(took, FADES * self._piece)
        self._again = began + took / SHARE
        return True

    def due(self, ended: float) -> float:
        """Seconds until a piece may come while nothing runs. ended: when the last step of any model did."""
        return max(0.0, min(ended + QUIET, self._again_idle) - self._clock())

    def while_idle(self) -> None:
        """Nothing runs: a piece comes, and when there is none, nothing is pending any more."""
        began = self._clock()
        self.pending = self._improve(True)
        self._again_idle = began + (self._clock() - began) / QUIET_SHARE

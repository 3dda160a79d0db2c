"""When work is done that only makes later steps faster: between steps, and while no rows run."""

import time
from collections.abc import Callable

LONGEST_GAP = 0.1  # seconds between two tokens of a stream, to which a step may be extended
SHARE = 0.5  # of the time while rows run, at most
FIRST_PIECE, LEAST_PIECE = 0.04, 0.02  # seconds that one is taken to last: the first, and any
FADES = 0.98  # of the longest piece is left after a step without one, so that an outlier does not end all


class Background:
    """The pieces of one model's work; see Runner.improve. All methods are for the thread that steps.

    `clock`: seconds.
    """

    def __init__(self, improve: Callable[[bool], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._improve, self._clock = improve, clock
        self.pending = True  # whether there may be something to do
        self._began = self._step = 0.0
        self._piece, self._again = FIRST_PIECE, 0.0

    def begin_step(self) -> None:
        """The model begins with a step."""
        self._began = self._clock()

    def end_step(self) -> None:
        """The step's draws, or those of the one before, are known."""
        self._step = self._clock() - self._began

    def between_steps(self) -> bool:
        """Rows run. Whether a piece has come: if their tokens do not wait too long for it, nor too often."""
        began = self._clock()
        if began < self._again:
            return False
        if self._step + self._piece > LONGEST_GAP:
            self._piece = max(LEAST_PIECE, FADES * self._piece)
            return False
        if not self._improve(False):
            return False
        took = self._clock() - began
        self._piece = max(took, FADES * self._piece)
        self._again = began + took / SHARE
        return True

    def while_idle(self) -> None:
        """Nothing runs: a piece comes, and when there is none, nothing is pending any more."""
        self.pending = self._improve(True)

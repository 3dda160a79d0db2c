"""What makes later steps faster, done behind a running service, a piece at a time.

First come the graphs, those of the sizes that most steps had first; large ones only while no rows run. Then,
while no rows run, GEMMs are timed that have not been on this GPU, and the graphs that are concerned are
captured again.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from rwkv_batch.model.cuda.steps.graphs import GraphLadder

log = logging.getLogger(__name__)

# Tokens of graphs that are captured while rows run, at most. A capture runs the step once, and one of more
# tokens takes the device too long; it gains little by a graph, as launching takes less time than its kernels.
MOST_BESIDE_ROWS = 512


class Tuner(Protocol):
    """Autotuner, or what a test has in its place."""

    def measure(self, sizes: Sequence[int], progress: bool = True) -> None:
        """Measure all that is missing for these numbers of tokens."""

    def unmeasured(self, sizes: Sequence[int]) -> list[int]:
        """Of these numbers of tokens, those for which something is to be measured."""

    def measuring(self, tokens: int) -> Generator[None, None, None]:
        """Measures that, a piece for each `next`; it can be closed at any time, and begun again."""

    def methods(self, tokens: int) -> dict[str, str]:
        """What has been chosen, or guessed."""


class LateWork:
    """Over ladders of graphs, and the numbers of tokens `timed` by a tuner. Pieces come between two steps."""

    def __init__(
        self,
        ladders: Sequence[GraphLadder[Any, Any]],
        tuner: Tuner | None = None,
        timed: Sequence[int] = (),
        changed: Callable[[int], None] = lambda _: None,
    ) -> None:
        """changed: called with a number of tokens whose GEMMs run by other methods from now on."""
        self._ladders, self._tuner, self._timed, self._changed = ladders, tuner, timed, changed
        self._measuring: tuple[int, dict[str, str], Generator[None, None, None]] | None = None
        self._failed = False
        self._captured = {False: False, True: False}  # all that there are, by whether rows run then

    def piece(self, idle: bool) -> bool:
        """Do a piece of what is left; False if there is none that can be done now.

        idle: no rows run.
        """
        if self._failed:
            return False
        try:
            return self._capture(idle) or (idle and self._measure())
        except RuntimeError as error:  # others may have taken the memory that was free at the start
            log.warning("no more graphs are captured, steps go on without them: %s", error)
            self._failed = True
            self.give_up()
            return False

    def give_up(self) -> None:
        """Before a step: what is being measured is begun again later, as it holds memory that steps need."""
        if self._measuring:
            self._measuring[2].close()
            self._measuring = None

    def forget(self, tokens: int) -> None:
        """The graphs of so many are captured again, as their launches are others."""
        self._captured = {False: False, True: False}
        for ladder in self._ladders:
            ladder.forget(tokens)

    def _capture(self, idle: bool) -> bool:
        if self._captured[idle]:
            return False
        missing = [
            (ladder, size)
            for ladder in self._ladders
            for size in ladder.missing
            if idle or size <= MOST_BESIDE_ROWS
        ]
        if not missing:
            self._captured[idle] = True
            log.info("all graphs%s are captured", "" if idle else " of small sizes")
            return False
        ladder, size = max(missing, key=lambda found: found[0].runs[found[1]])  # of equal ones the first
        ladder.capture(size)
        return True

    def _measure(self) -> bool:
        if self._tuner is None:
            return False
        if self._measuring is None:
            missing = self._tuner.unmeasured(self._timed)
            if not missing:
                return False
            tokens = max(missing, key=lambda size: sum(ladder.runs[size] for ladder in self._ladders))
            self._measuring = tokens, self._tuner.methods(tokens), self._tuner.measuring(tokens)
        tokens, before, pieces = self._measuring
        if next(pieces, self) is self:
            self._measuring = None
            if self._tuner.methods(tokens) != before:
                self.forget(tokens)
                self._changed(tokens)
        return True

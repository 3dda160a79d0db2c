"""What makes later steps faster, done behind a running service, a piece at a time.

First come the graphs, those of the sizes that most steps had first. Then, while no rows run, GEMMs are timed
that have not been on this GPU, and the graphs that are concerned are captured again.
"""

import logging
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from rwkv_batch.model.cuda.steps.graphs import GraphLadder

log = logging.getLogger(__name__)


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
        self, ladders: Sequence[GraphLadder[Any, Any]], tuner: Tuner | None = None, timed: Sequence[int] = ()
    ) -> None:
        self._ladders, self._tuner, self._timed = ladders, tuner, timed
        self._measuring: tuple[int, dict[str, str], Generator[None, None, None]] | None = None
        self._captured = self._failed = False

    def piece(self, idle: bool) -> bool:
        """Do a piece of what is left; False if there is none that can be done now.

        idle: no rows run.
        """
        if self._failed:
            return False
        try:
            return self._capture() or (idle and self._measure())
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

    def _capture(self) -> bool:
        if self._captured:
            return False
        missing = [(ladder, size) for ladder in self._ladders for size in ladder.missing]
        if not missing:
            log.info("all graphs are captured")
            self._captured = True
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
                self._captured = False
                for ladder in self._ladders:
                    ladder.forget(tokens)
        return True

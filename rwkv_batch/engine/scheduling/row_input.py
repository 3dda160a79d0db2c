"""What a row is fed before it draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PIECE = 16  # prompts are cut at multiples of this where possible: the chunk of the parallel recurrence


@dataclass(eq=False, slots=True)
class TokenInput:
    """Tokens, of which the state has seen `fed`.

    They begin with those of a session that its stored state lacks, then comes the prompt. At the end of a
    turn's text they are what brings its state there.
    """

    tokens: list[int]
    fed: int = 0
    cuts: Sequence[int] = ()  # where a step must end: the states there are kept
    past: Sequence[int] = ()  # in front of the prompt, where these are kept
    kept: Any = None  # bytes of the state of a row that had to leave its slot, until it has another

    @property
    def left(self) -> int:
        """How many are not fed."""
        return len(self.tokens) - self.fed

    def next(self, count: int) -> list[int]:
        return self.tokens[self.fed : self.fed + count]

    def advance(self, count: int) -> bool:
        """Note that so many more are fed. Returns whether a cut is there."""
        self.fed += count
        if not self.cuts or self.fed < self.cuts[0]:
            return False
        self.cuts = self.cuts[1:]
        return True

    def rounded(self, count: int, most: int) -> int:
        """`count`, but no further than the next cut.

        It is a multiple of PIECE unless it is all that may be fed (`most`), meets a cut or is less than that.
        """
        if self.cuts and self.fed + count >= self.cuts[0]:
            return self.cuts[0] - self.fed
        return count if count == most or count < PIECE else count - count % PIECE

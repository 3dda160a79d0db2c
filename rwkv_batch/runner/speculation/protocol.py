"""What the engine needs of a backend to verify drafts: steps in which a row draws several tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rwkv_batch.runner.protocol import Batch, Draws, KnownDraws
from rwkv_batch.sampling.logprobs import RowLogprobs
from rwkv_batch.sampling.masks import RowMasks

# What a row has drawn behind the first id of a step: further ids, with logprobs where it wants those.
MoreDraws = list[tuple[int, RowLogprobs | None]]


class VerifiedDraws(Draws, Protocol):
    """What a step draws in which rows have drafts. `wait` and `logprobs` are of each row's first id."""

    def more(self) -> dict[int, MoreDraws]:
        """After `wait`: what rows have drawn behind accepted tokens of their drafts, by place in the draws.

        Their states have seen as many of the tokens of the draft, the first ones, as these are.
        """


@dataclass(frozen=True)
class KnownVerified(KnownDraws):
    """Those of a step that is done."""

    behind: dict[int, MoreDraws] = field(default_factory=dict)

    def more(self) -> dict[int, MoreDraws]:
        return self.behind


# By place in the draws, of a row with masks: that behind so many accepted tokens of its draft, `[words]` as
# in RowMasks; None: there is none, and the row draws no more in this step.
MasksBehind = Mapping[int, Callable[[int], np.ndarray | None]]
VerifyUnder = Callable[[RowMasks | None, MasksBehind], VerifiedDraws]  # as DrawUnder; masks: of first ids


class Verifier(Protocol):
    """Runs steps in which rows are fed drafts: what they may draw next, behind the token drawn last.

    A row draws behind each of these tokens, with its own parameters, penalties and random numbers, until it
    draws another one than its draft has there. So it draws what it draws without a draft, whatever that is.
    A token of a draft is accepted with the probability that it has, and in its place comes what is drawn from
    the rest: for a draft that is one text this is the exact rejection of speculative sampling (Leviathan,
    Kalman and Matias 2023).
    """

    @property
    def most_rows(self) -> int:
        """Of a step in which rows have drafts."""

    @property
    def most_drafted(self) -> int:
        """Tokens of all drafts of a step."""

    def takes(self, batch: Batch) -> bool:
        """Whether rows of this step can have drafts. It has none yet."""

    def feed(self, batch: Batch, drafts: Mapping[int, int]) -> VerifyUnder:
        """The first half of a step: the model over the rows.

        drafts: places in `batch.draws` of rows that decode -> how many of their tokens, the last ones, are a
        draft; the one before these was drawn last. No draft has a stop id of its row. Rows of a mixture have
        none.
        """

"""What the engine needs of a second, smaller model, which guesses what rows draw next."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint


class Guess(NamedTuple):
    """What a row may draw next, by its draft model."""

    token: int
    chance: float  # that the draft model gives it


Masks = Mapping[int, np.ndarray]  # of some slots, `[words]` as in RowMasks: what may come there


class DraftModel(Protocol):
    """Guesses for rows in slots, several rows in one pass. For the engine's thread.

    A row has a state behind tokens that are known, and a copy of it that goes on behind guesses. So what is
    refused has to be taken back nowhere, and the tokens that come in its place are read together.
    """

    most_chained: int  # passes that are made before the host knows the guesses of the first one; at least 1

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's, without its numbers where these are elsewhere."""

    @property
    def weight_bytes(self) -> int:
        """What the weights take."""

    def state_bytes(self, slots: int) -> int:
        """What the states for rows in so many slots take."""

    def allocate(self, slots: int) -> None:
        """Make the states for rows in so many slots. Raises RuntimeError when memory runs out here."""

    def holds(self, slot: int) -> bool:
        """Whether the row in the slot has its states still."""

    def begin(self, slot: int) -> None:
        """A row in the slot, of which no token is known yet. Another one that rests may lose its states."""

    def read(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """These are known in these slots."""

    def first(
        self, tokens: Mapping[int, Sequence[int]], masks: Masks | None = None, passes: int = 1
    ) -> dict[int, list[Guess]]:
        """These, at least one, are known in these slots; so many guesses of what comes next in each.

        masks: a token that is left out is none to guess; then there is one pass. passes: `most_chained` at
        most.
        """

    def further(
        self, guessed: Mapping[int, int], masks: Masks | None = None, begin: bool = False
    ) -> dict[int, list[Guess]]:
        """These tokens were guessed last in these slots; one guess of what comes next in each.

        begin: they are the first guesses.
        """


def allowed_rows(mask: np.ndarray, rows: int, vocab: int, ids: Tensor | None) -> Tensor:
    """Of so many rows of a head, whether their tokens may come: `[rows]` bool, on the device of `ids`.

    ids: the token of each row; None: in order, on the CPU.
    """
    count = rows if ids is None else vocab
    bits = np.unpackbits(mask.view(np.uint8), count=count, bitorder="little")
    allowed = torch.from_numpy(bits.view(np.bool_))
    return allowed if ids is None else allowed.to(ids.device)[ids]

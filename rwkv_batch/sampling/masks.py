"""Masks: which ids rows may draw in a step, as a grammar says it."""

from dataclasses import dataclass

import numpy as np

WORD = 32  # ids in a word


def mask_words(vocab: int) -> int:
    """Words of a mask for logits of so many ids."""
    return -(-vocab // WORD)


@dataclass(frozen=True)
class RowMasks:
    """The masks of some rows of a step.

    `bits` `[rows, words]` int32: id t may be drawn if bit t % 32 of word t // 32 is set. A mask leaves at
    least one id that can be drawn.
    """

    places: list[int]  # of these rows among those that draw
    bits: np.ndarray

    def ids(self, vocab: int) -> dict[int, np.ndarray]:
        """The ids below `vocab` that each row may draw, ascending, by place."""
        bits = np.unpackbits(self.bits.view(np.uint8), axis=1, count=vocab, bitorder="little")
        return {place: np.flatnonzero(row) for place, row in zip(self.places, bits, strict=True)}

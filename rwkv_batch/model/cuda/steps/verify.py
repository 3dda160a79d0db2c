"""Steps that verify drafts on a GPU: rows of a few tokens, of which each leaves its state in a slot.

The state behind a row's first token, which is known, goes into the row's own slot, those behind its draft
into spare slots. What is accepted becomes the row's state by one copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.cuda.steps.graphs import DECODE_LAYER_NODES, NODE_BYTES, GraphLadder, decode_sizes
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.ops.cuda.binding import RowBounds
from rwkv_batch.ops.cuda.inputs.packing import NO_SLOT
from rwkv_batch.ops.cuda.inputs.staging import Uploads

MOST_ROWS = 8  # of a step with drafts
MOST_TOKENS = 64  # of such a step, drafts and what they stand behind
MOST_DRAFTED = MOST_TOKENS - MOST_ROWS
SIZES = decode_sizes(MOST_TOKENS)[1:]  # tokens of a step that have a graph: GEMMs are timed for these

Launch = Callable[[Tensor, RowBounds, dict[str, Tensor]], Tensor]


def spare_slots(most: int) -> int:
    """What the drafts of a step need, of up to `most` tokens each."""
    return min(MOST_ROWS * most, MOST_DRAFTED)


def verify_graph_bytes(layers: int) -> int:
    """Driver memory of all graphs of such steps, at most."""
    return len(SIZES) * layers * DECODE_LAYER_NODES * NODE_BYTES


class VerifyInputs:
    """Tokens and rows of a step of at most `size` tokens, at fixed addresses."""

    def __init__(self, size: int, device: torch.device) -> None:
        rows = MOST_ROWS + 1  # the last one is padding
        self.flat = torch.zeros(3 * size + 3 * rows, dtype=torch.int32, device=device)
        self.tokens, row_of, kept, first, last, slots = self.flat.split([size] * 3 + [rows] * 3)
        self.rows = RowBounds(row_of, first, last, slots, kept)
        row_of.fill_(MOST_ROWS)
        kept.fill_(NO_SLOT)
        slots.fill_(NO_SLOT)


@dataclass(frozen=True)
class Laid:
    """Rows of a step one after the other."""

    first: list[int]  # place of each row's first token
    kept: list[list[int]]  # slots with the states behind each row's tokens

    @classmethod
    def of(cls, counts: Sequence[int], slots: Sequence[int], spares: int) -> "Laid":
        """counts: tokens of each row. spares: the first of the slots that are spare."""
        first, kept, place = list[int](), list[list[int]](), 0
        for count, slot in zip(counts, slots, strict=True):
            first.append(place)
            begin = spares + place - len(kept)  # as many as there are drafted tokens before this row
            kept.append([slot, *range(begin, begin + count - 1)])
            place += count
        return cls(first, kept)

    def numbers(self, size: int, tokens: Sequence[int]) -> np.ndarray:
        """What VerifyInputs of this size hold, with these tokens: int32."""
        rows, numbers = MOST_ROWS + 1, np.zeros(3 * size + 3 * (MOST_ROWS + 1), np.int32)
        of_tokens, of_rows = numbers[: 3 * size].reshape(3, size), numbers[3 * size :].reshape(3, rows)
        of_tokens[0, : len(tokens)] = tokens
        of_tokens[1], of_tokens[2], of_rows[2] = MOST_ROWS, NO_SLOT, NO_SLOT
        for row, (first, kept) in enumerate(zip(self.first, self.kept, strict=True)):
            last = first + len(kept) - 1
            of_tokens[1, first : last + 1], of_tokens[2, first : last + 1] = row, kept
            of_rows[:, row] = first, last, kept[0]
        return numbers


class VerifySteps:
    """Queues such steps over states that have spare slots. All calls belong on one stream."""

    def __init__(self, states: CudaStates, launch: Launch) -> None:
        """launch(tokens, rows, arena) launches a step and returns its logits `[T, rows of the head]`."""
        device = states.device
        self._states, self._uploads = states, Uploads(3 * MOST_TOKENS + 3 * (MOST_ROWS + 1))
        self.ladder: GraphLadder[VerifyInputs, Tensor] = GraphLadder(
            "verify", SIZES, partial(VerifyInputs, device=device), partial(_step, launch), {}
        )

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], counts: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Laid]:
        """Queue a step. Returns logits `[T, rows of the head]`, which the next run overwrites."""
        laid = Laid.of(counts, slots, len(self._states))
        self._states.feed.prepare()
        inputs, queue = self.ladder.take(len(tokens))
        size = len(inputs.tokens)
        self._uploads.buffer()[: len(inputs.flat)] = laid.numbers(size, tokens)
        self._uploads.send(inputs.flat)
        return queue()[: len(tokens)], laid

    @torch.inference_mode()
    def accept(self, laid: Laid, accepted: Mapping[int, int]) -> None:
        """Rows have so many tokens of their drafts, the first ones, behind them. The others have none."""
        for row, count in accepted.items():
            if count:
                self._states.keep(laid.kept[row][0], laid.kept[row][count])


def _step(launch: Launch, inputs: VerifyInputs, arena: dict[str, Tensor]) -> Tensor:
    return launch(inputs.tokens, inputs.rows, arena)

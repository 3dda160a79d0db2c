"""Log probabilities of a prompt's tokens, from the logits after the tokens before them.

They come as the prompt is fed, step by step. Logits take far more room than what is kept of them: a model
computes those of some places at a time, and hands them to `PromptScores.take`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rwkv_batch.ops.cuda.inputs.staging import upload
from rwkv_batch.sampling.logprobs import ROWS_AT_ONCE, RowLogprobs, logprobs, row_logprobs

LOGPROBS_COPIES = 8  # fp32 rows of logits that `logprobs` holds for each row that it has at once


@dataclass(frozen=True)
class ScoredRow:
    """Tokens of a row's prompt whose logprobs are wanted, of those that a step makes known."""

    first: int  # place of the token before the first of them, among the row's tokens of the step
    targets: list[int]
    top: int  # how many of the likeliest are wanted in the place of each


class PromptScores:
    """The logprobs of one step. Without rows it is false, and a model does nothing for it."""

    def __init__(self, rows: Mapping[int, ScoredRow], device: torch.device, invariant: bool = False) -> None:
        """rows: by their place in the step. invariant: as in `logprobs.logprobs`."""
        self._rows, self._device, self._taken, self._invariant = rows, device, 0, invariant
        self._found: list[tuple[Tensor, Tensor]] = []
        self._targets: Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._rows)

    def places(self, starts: Sequence[int]) -> list[int]:
        """Where the tokens lie whose logits are wanted. starts: of each row, where its tokens begin."""
        return [
            starts[number] + row.first + i
            for number, row in self._rows.items()
            for i in range(len(row.targets))
        ]

    def take(self, logits: Tensor) -> None:
        """Logits `[n, vocab]` after the next `n` of these tokens; they are free afterwards."""
        if self._targets is None:
            self._targets = upload([t for row in self._rows.values() for t in row.targets], self._device)
        top = max(row.top for row in self._rows.values())
        for piece in logits.split(_rows_at_once(self._device)):
            targets = self._targets[self._taken : self._taken + len(piece)]
            self._taken += len(piece)
            self._found.append(logprobs(piece, targets, top, self._invariant))

    def found(self) -> tuple[Tensor, Tensor]:
        """The logprobs of all of these tokens, which have been taken; see `logprobs.logprobs`."""
        values, ids = zip(*self._found, strict=True)
        return torch.cat(values), torch.cat(ids)


def scored_rows(values: Tensor, ids: Tensor, rows: Collection[ScoredRow]) -> list[list[RowLogprobs]]:
    """What `PromptScores.found` gave, on the host, by row."""
    counts = [row.top for row in rows for _ in row.targets]
    entries = row_logprobs(values, ids, counts)
    ends = list(accumulate(len(row.targets) for row in rows))
    return [entries[end - len(row.targets) : end] for end, row in zip(ends, rows, strict=True)]


def scoring_bytes(vocab: int, width: int, places: int, dtype: torch.dtype, device: torch.device) -> int:
    """The most that a step holds to score prompts, with logits of so many places in memory at once."""
    piece = places * (vocab + 2 * width) * dtype.itemsize
    return piece + _rows_at_once(device) * LOGPROBS_COPIES * 4 * vocab


def _rows_at_once(device: torch.device) -> int:
    """Of `logprobs`: fewer on a CPU, where memory is somebody's, and launches cost nothing."""
    return 8 if device.type == "cpu" else ROWS_AT_ONCE

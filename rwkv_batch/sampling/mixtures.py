"""Mixtures of rows: one distribution for several rows that are fed the same tokens in different states.

The logits of a mixture are the weighted sum of those of its rows, so that its distribution is their weighted
geometric mean (multi recurrent state sampling, as RWKV-Infer has it). Every row gets the mixed logits. As the
rows have the same parameters, penalties and random numbers, they draw the same token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOGETHER = 64  # rows whose logits are copied at once


@dataclass(frozen=True)
class MixedRows:
    """Rows of a step's logits, and their weights, which sum to 1."""

    rows: list[int]
    weights: list[float]


@torch.inference_mode()
def mix_logits(logits: Tensor, mixtures: Sequence[MixedRows]) -> None:
    """Put the mixed logits in place of those of their rows. logits: `[rows, vocab]`, fp32 or fp16.

    Sums are fp32 and in one order, so that the same rows give the same numbers.
    """
    by_size: dict[int, list[MixedRows]] = {}
    for mixture in mixtures:
        by_size.setdefault(len(mixture.rows), []).append(mixture)
    for size, same in by_size.items():
        step = max(1, TOGETHER // size)
        for first in range(0, len(same), step):
            part = same[first : first + step]
            rows = torch.tensor([mixture.rows for mixture in part], device=logits.device)
            weights = torch.tensor([mixture.weights for mixture in part], device=logits.device)
            mixed = torch.bmm(weights.unsqueeze(1), logits[rows].float())  # [mixtures, 1, vocab]
            logits[rows] = mixed.to(logits.dtype).expand(-1, size, -1)

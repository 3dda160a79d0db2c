"""Mixtures of rows: one distribution for several rows that are fed the same tokens in different states.

The logits of a mixture are the weighted sum of those of its rows, so that its distribution is their weighted
geometric mean (multi recurrent state sampling, as RWKV-Infer has it). Every row gets the mixed logits. As the
rows have the same parameters, penalties and random numbers, they draw the same token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.ops.cuda.inputs.staging import upload
from rwkv_batch.ops.torch_ops import as_stored


@dataclass(frozen=True)
class MixedRows:
    """Rows of a step's logits, and their weights, which sum to 1."""

    rows: list[int]
    weights: list[float]


@torch.inference_mode()
def mix_logits(logits: Tensor, mixtures: Sequence[MixedRows]) -> None:
    """Put the mixed logits in place of those of their rows. logits: `[rows, vocab]`, fp32 or fp16.

    Sums are fp32 and in one order, so that the same rows give the same numbers. What fp16 cannot hold becomes
    the largest number that it can.
    """
    by_size: dict[int, list[MixedRows]] = {}
    for mixture in mixtures:
        by_size.setdefault(len(mixture.rows), []).append(mixture)
    for size, same in by_size.items():
        # Uploaded, as torch.tensor on a GPU would wait for the whole step.
        rows = upload([row for mixture in same for row in mixture.rows], logits.device).view(-1, size)
        weights = upload([w for mixture in same for w in mixture.weights], logits.device, torch.float32)
        weights = weights.view(-1, size, 1)
        mixed = weights[:, 0] * logits[rows[:, 0]]  # [mixtures, vocab], fp32
        for i in range(1, size):
            mixed.addcmul_(weights[:, i], logits[rows[:, i]].float())
        logits[rows] = as_stored(mixed, logits.dtype).unsqueeze(1)

"""The least time that a step of RWKV can take on a GPU.

It follows from the bytes that must move and the operations that must be done, with perfect kernels.
"""

import sys
from dataclasses import dataclass

import torch

from rwkv_batch.model.checkpoint import HEAD_SIZE, Checkpoint

HALF = 2  # bytes
# No matrices, or tables of which a token reads one row; s_emb_x is added to such a table beforehand.
NOT_READ_WHOLE = ("r_k", "time_faaaa", "s_emb.weight", "s_emb_x.weight")


@dataclass(frozen=True)
class Work:
    """What one token takes, and what one step reads whatever its size. In numbers, not bytes."""

    dense: (
        int  # weights read whole: all matrices but the value matrices of the channel mix, and the embedding
    )
    value: int  # weights of those value matrices
    state: int  # numbers of a recurrent state
    width: int
    layers: int
    vocab: int
    head: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "Work":
        matrices = {
            name: t.numel()
            for name, t in checkpoint.tensors.items()
            if t.dim() >= 2 and not name.endswith(NOT_READ_WHOLE)
        }
        value = sum(n for name, n in matrices.items() if name.endswith("ffn.value.weight"))
        dense = sum(matrices.values()) - matrices["emb.weight"] - value
        return cls(
            dense,
            value,
            checkpoint.layers * checkpoint.heads * HEAD_SIZE**2,
            checkpoint.width,
            checkpoint.layers,
            checkpoint.vocab,
            matrices["head.weight"],
        )


def decode_floor(
    work: Work, rows: int, bandwidth: float, rate: float, state_bytes: int = HALF, active: float = 1.0
) -> float:
    """Seconds of one decode step.

    bandwidth: bytes/s; rate: operations/s; active: share of hidden units that are not zero in a row.
    GEMMs and states do not overlap: the recurrence of a layer is between its GEMMs. Logits are written and
    read once. So are states, for every token, though the kernels defer some of these writes (cuda/wkv.cuh).
    """
    weights = work.dense + work.value * (1 - (1 - active) ** rows)
    products = max(weights * HALF / bandwidth, 2 * rows * (work.dense + work.value) / rate)
    shift = 2 * work.layers * 2 * work.width * HALF
    return products + rows * (2 * work.state * state_bytes + shift + 2 * work.vocab * HALF) / bandwidth


def prefill_floor(work: Work, tokens: int, rate: float) -> float:
    """Seconds of the GEMMs alone; the head is for the last tokens only."""
    return 2 * tokens * (work.dense + work.value - work.head) / rate


def need_gpu() -> None:
    """End the process with one sentence if torch has no GPU."""
    if not torch.cuda.is_available():
        sys.exit("This measures a GPU, and torch finds none; run it on a machine with one.")

"""Random checkpoints for all tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.files import CheckpointError


def tiny(
    layers: int = 2, width: int = 128, vocab: int = 512, seed: int = 0, ranks: dict[str, int] | None = None
) -> Checkpoint:
    """A checkpoint in memory that loads and runs in milliseconds."""
    return from_tensors(
        f"random-{layers}x{width}", random_checkpoint(layers, width, vocab, seed, ranks=ranks)
    )


def write_pth(path: Path, tensors: dict[str, Tensor]) -> Path:
    """Save the way published checkpoints are saved, and return the path."""
    torch.save(tensors, path)
    return path


def refusal(action: Callable[[], object]) -> str:
    """The sentence with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message

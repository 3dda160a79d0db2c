"""Adapters of requests in files, and the same weights merged by hand, for tests of any layer."""

from collections.abc import Callable
from pathlib import Path

import torch
from adapter_files import FACTOR, Draw, disha, lora, miss
from checkpoints import write_pth
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.ops.low_rank import TARGETS

KINDS: dict[str, Callable[..., dict[str, Tensor]]] = {"lora": lora, "disha": disha, "miss": miss}
SCALED = ("lora", "miss")


def changes(
    weights: Checkpoint, kind: str, seed: int, targets: tuple[str, ...] = TARGETS
) -> dict[str, Tensor]:
    """The tensors of an adapter's file."""
    draw = Draw(seed)
    return {
        f"blocks.{layer}.{name}.{suffix}": tensor
        for layer in range(weights.layers)
        for name in targets
        for suffix, tensor in KINDS[kind](
            draw, *weights.tensors[f"blocks.{layer}.{name}.weight"].shape
        ).items()
    }


def write(folder: Path, weights: Checkpoint, kind: str, seed: int, **options) -> Path:
    return write_pth(folder / f"{kind}-{seed}.pth", changes(weights, kind, seed, **options))


def merged_by_hand(weights: Checkpoint, kind: str, seed: int, **options) -> Checkpoint:
    """The formulas of related systems in fp64: W + factor B A, or W[:, j] + factor D[:, j mod r]."""
    tensors = {name: tensor.double() for name, tensor in weights.tensors.items()}
    change = {name: tensor.double() for name, tensor in changes(weights, kind, seed, **options).items()}
    for name, tensor in change.items():
        prefix, _, suffix = name.rpartition(".")
        if suffix == "lora_A":
            tensors[f"{prefix}.weight"] = (
                tensors[f"{prefix}.weight"] + FACTOR * change[f"{prefix}.lora_B"] @ tensor
            )
        elif suffix in ("disha", "D"):
            target = f"{prefix}.weight" if suffix == "disha" else prefix
            shard, factor = (tensor.T, 1.0) if suffix == "disha" else (tensor, FACTOR)
            columns = torch.arange(tensors[target].shape[1]) % shard.shape[1]
            tensors[target] = tensors[target] + factor * shard[:, columns]
    return from_tensors("merged", {name: tensor.float() for name, tensor in tensors.items()})

"""Merges an adapter into a model: a checkpoint whose tensors are changed as they are read."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from rwkv_batch.model.adapters.parts import Part, Scaling
from rwkv_batch.model.adapters.reader import Adapter
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.files import CheckpointError


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint with those of an adapter in them, merged in fp32.

    A tensor is merged each time that it is read and is not kept, so loading needs no second copy of a model.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], parts: Mapping[str, Part], factors: Mapping[str, float]
    ) -> None:
        self._tensors, self._parts, self._factors = tensors, parts, factors

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts.get(name)
        return part.merged(self._tensors[name].float(), self._factors[name]) if part else self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def merge(checkpoint: Checkpoint, adapter: Adapter, scaling: Scaling | None = None) -> Checkpoint:
    """The model with the adapter, which has a name and a fingerprint of its own.

    scaling: that of the training; None: that of the adapter's adapter.json, if there is one. Raises
    CheckpointError if a scaling is needed and not given, or given and not needed.
    """
    needed = any(part.scaled for part in adapter.parts.values())
    if scaling is not None and not needed:
        raise CheckpointError(
            f"{adapter.where}: nothing in it has a scaling; leave --adapter-alpha and --adapter-scaling out."
        )
    chosen = scaling or adapter.scaling
    if needed and chosen is None:
        raise CheckpointError(
            f"{adapter.where}: its scaling in training is not in the file; give --adapter-alpha, which is "
            "divided by the rank, or --adapter-scaling, or for PiSSA --adapter-init."
        )
    factors = {
        name: chosen.of(part.rank) if part.scaled and chosen else 1.0 for name, part in adapter.parts.items()
    }
    if not all(math.isfinite(factor) for factor in factors.values()):
        raise CheckpointError(f"{adapter.where}: the scaling is no finite number; give that of the training.")
    identity = f"{checkpoint.fingerprint} {adapter.digest} {sorted(factors.items())}"
    return replace(
        checkpoint,
        name=f"{checkpoint.name}+{adapter.name}",
        tensors=MergedTensors(checkpoint.tensors, adapter.parts, factors),
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )

"""Merges an adapter into a model: a checkpoint whose tensors are changed as they are read."""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from rwkv_batch.model.adapters.experts import ExpertPart
from rwkv_batch.model.adapters.parts import BonePart, Part, Scaling
from rwkv_batch.model.adapters.reader import Adapter
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.ops.mole import BoneExpert, LoraExpert, Mole, MoleTensors, RouterRule

log = logging.getLogger(__name__)

FLAGS = (
    "give --adapter-alpha, which is divided by the rank, or --adapter-scaling, or for PiSSA --adapter-init"
)


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


def merge(
    checkpoint: Checkpoint,
    adapter: Adapter,
    scaling: Scaling | None = None,
    router: RouterRule | None = None,
) -> Checkpoint:
    """The model with the adapter, which has a name and a fingerprint of its own.

    scaling: that of the training; None: that of the adapter's adapter.json, if there is one. router: the rule
    of MoLE. Raises CheckpointError if one of these is needed and not given, or given and not needed.
    """
    if router is None and adapter.experts:
        raise CheckpointError(
            f"{adapter.where} has a router, and does not say by which rule it was trained; give "
            "--mole-router topk0, or shared for earlier trainers."
        )
    if router is not None and not adapter.experts:
        raise CheckpointError(f"{adapter.where} has no router; leave --mole-router out.")
    if router is not None:
        _check_rule(adapter, router)
    all_parts = parts_of(adapter)
    if scaling is not None and not any(part.scaled for part in all_parts):
        raise CheckpointError(
            f"{adapter.where}: nothing in it has a scaling; leave --adapter-alpha and --adapter-scaling out."
        )
    factor = factor_of(adapter, all_parts, scaling, FLAGS)
    factors = {name: factor(part) for name, part in adapter.parts.items()}
    of_experts = [factor(part) for part in all_parts[len(adapter.parts) :]]
    identity = f"{checkpoint.fingerprint} {adapter.digest} {sorted(factors.items())} {router} {of_experts}"
    mole = checkpoint.mole
    if router is not None:
        layers = (
            MoleTensors(
                layer.router,
                layer.bias,
                layer.active,
                tuple(
                    (_expert(key, factor(key)), _expert(value, factor(value))) for key, value in layer.changes
                ),
            )
            for layer in adapter.experts
        )
        mole = Mole(router, tuple(layers))
    return replace(
        checkpoint,
        mole=mole,
        name=f"{checkpoint.name}+{adapter.name}",
        tensors=MergedTensors(checkpoint.tensors, adapter.parts, factors),
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )


def parts_of(adapter: Adapter) -> list[Part]:
    """What changes the model, those of experts last."""
    changes = [part for layer in adapter.experts for pair in layer.changes for part in pair]
    return [*adapter.parts.values(), *changes]


def factor_of(
    adapter: Adapter, parts: Sequence[Part], scaling: Scaling | None, way_out: str
) -> Callable[[Part], float]:
    """By what each of these parts is multiplied; scaling None: as the adapter's adapter.json says.

    Raises CheckpointError, with the way out, if one of them has a scaling and nobody says which.
    """
    chosen = scaling or adapter.scaling
    if any(part.scaled for part in parts) and chosen is None:
        raise CheckpointError(f"{adapter.where}: its scaling in training is not in the file; {way_out}.")

    def factor(part: Part) -> float:
        return chosen.of(part.rank) if part.scaled and chosen else 1.0

    if not all(math.isfinite(factor(part)) for part in parts):
        raise CheckpointError(f"{adapter.where}: the scaling is no finite number; give that of the training.")
    return factor


def _check_rule(adapter: Adapter, router: RouterRule) -> None:
    """The trainers with the rule "shared" gave the router a bias, those with "topk0" none."""
    biased = any(layer.bias is not None for layer in adapter.experts)
    if biased and router == "topk0":
        raise CheckpointError(
            f"{adapter.where}: its router has a bias, which topk0 has not; give --mole-router shared."
        )
    if not biased and router == "shared":
        log.warning(
            "%s: its router has no bias, as in files for topk0; if texts are wrong, give that rule.",
            adapter.where,
        )


def _expert(part: ExpertPart, factor: float) -> LoraExpert | BoneExpert:
    if isinstance(part, BonePart):
        return BoneExpert(part.blocks)
    return LoraExpert(part.inner, part.outer.float() * factor)

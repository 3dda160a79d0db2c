"""Adapters of requests, from files: the low-rank pairs of `rwkv_batch.ops.low_rank`.

LoRA is such a pair. So are shards (see `ShardPart`), whose sums over runs of inputs are a fixed A:
`A[j, i] = 1 / s` where i mod r = j, and `B = factor s D`. s is a power of two, no less than the number of
summands, so that A x is no larger than x and fp16 holds it. As a fixed A is read like any other, it costs
what that of a LoRA costs: at rank 16 a quarter of a percent of the bytes of a 7.2B model.
"""

import hashlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rwkv_batch.model.adapters.merge import factor_of
from rwkv_batch.model.adapters.parts import BonePart, DoraPart, LoraPart, Part, Scaling, ShardPart
from rwkv_batch.model.adapters.reader import Adapter
from rwkv_batch.model.checkpoint import TITLES, Checkpoint
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.ops.host_memory import pinned_if_possible
from rwkv_batch.ops.low_rank import ALIGNMENT, ENTRY, MOST_RANK, TARGETS, LowRankAdapter, filled, shapes

MERGE = "merge it into the model, as `adapter_filename` of /loadmodel does"
FIELDS = "give adapter_alpha, which is divided by the rank, or adapter_scaling"


def low_rank(
    adapter: Adapter,
    checkpoint: Checkpoint,
    scaling: Scaling | None,
    most_rank: int,
    dtype: torch.dtype,
    pinned: bool = False,
) -> LowRankAdapter:
    """The adapter for requests. pinned: whether its numbers are copied to a GPU.

    Raises CheckpointError for what cannot be done beside the weights: a sentence that names merging.
    """
    where = adapter.where
    if checkpoint.family == "rwkv6" or checkpoint.mole:
        title = "a model with MoLE" if checkpoint.mole else TITLES[checkpoint.family]
        raise CheckpointError(f"{where}: adapters of requests are not for {title}; {MERGE}.")
    if adapter.experts:
        raise CheckpointError(f"{where} is MoLE, which no request can choose; {MERGE}.")
    factor = factor_of(adapter, list(adapter.parts.values()), scaling, FIELDS)
    shape = shapes(checkpoint.width, 4 * checkpoint.width)
    table = pinned_if_possible(
        torch.zeros, checkpoint.layers, len(TARGETS), ENTRY, dtype=torch.int32, wanted=pinned
    )
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    most = 0
    for name, part in adapter.parts.items():
        layer, target = _target(where, name)
        found[layer, target] = _pair(where, name, part, shape[target][1], factor(part))
        if part.rank > most_rank:
            enough = f"start the server with --max-adapter-rank {part.rank}"
            raise CheckpointError(
                f"{where}: {name} has rank {part.rank}, and slots are for {most_rank}; "
                f"{enough if part.rank <= MOST_RANK else MERGE}."
            )
        most = max(most, part.rank)
    place = 0
    for (layer, target), (inner, _) in sorted(found.items()):
        rank = filled(len(inner))
        table[layer, target] = torch.tensor([rank, place // ALIGNMENT], dtype=torch.int32)
        place += rank * sum(shape[target])
    packed = LowRankAdapter(
        _digest(adapter, factor),
        most,
        pinned_if_possible(torch.zeros, place, dtype=dtype, wanted=pinned),
        table,
    )
    for (layer, target), (inner, outer) in found.items():
        pair = packed.pair(layer, target, *shape[target][::-1])
        assert pair is not None
        pair[0][: len(inner)], pair[1][:, : len(inner)] = inner, outer
    if not packed.numbers.isfinite().all():
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{where} holds numbers that {kind} cannot; {MERGE}.")
    return packed


def _target(where: str, name: str) -> tuple[int, int]:
    """Layer and place in TARGETS of a tensor. Raises CheckpointError for one that requests cannot change."""
    block, _, rest = name.partition(".")
    layer, _, matrix = rest.partition(".")
    target = matrix.removesuffix(".weight")
    if block != "blocks" or target not in TARGETS:
        raise CheckpointError(
            f"{where}: {name} cannot be changed by a request, only {', '.join(TARGETS)} can; {MERGE}."
        )
    return int(layer), TARGETS.index(target)


def _pair(where: str, name: str, part: Part, inputs: int, factor: float) -> tuple[Tensor, Tensor]:
    if isinstance(part, LoraPart):
        return part.inner.float(), part.outer.float() * factor
    if isinstance(part, ShardPart):
        share = 2.0 ** math.ceil(math.log2(max(1, math.ceil(inputs / part.rank))))
        inner = torch.zeros(part.rank, inputs)
        places = torch.arange(inputs)
        inner[places % part.rank, places] = 1 / share
        return inner, part.shard.float() * (factor * share)
    kind = (
        "DoRA" if isinstance(part, DoraPart) else "Bone" if isinstance(part, BonePart) else "a whole tensor"
    )
    raise CheckpointError(f"{where}: {name} is changed by {kind}, which cannot stand beside it; {MERGE}.")


def _digest(adapter: Adapter, factor: Callable[[Part], float]) -> str:
    parts: Mapping[str, Part] = adapter.parts
    factors = [(name, factor(parts[name])) for name in sorted(parts)]
    return hashlib.sha256(f"{adapter.digest} {factors}".encode()).hexdigest()[:32]

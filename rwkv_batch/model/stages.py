"""A model whose layers lie on several devices, one stage after the other.

The first stage has the embedding, the last one the head. What a stage gives the next one is `Activations`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.torch_model import PackedBatch, PackedForward, TorchModel
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.ops.low_rank import LowRankAdapter
from rwkv_batch.ops.torch_ops import PackedRows
from rwkv_batch.state.staged import StagedStates

LAYER_SQUARES = 12  # weights of a layer, in squares of the width


def layers_of_stages(checkpoint: Checkpoint, stages: int) -> list[range]:
    """Consecutive layers for each stage, so that all have about as many weights.

    The first stage has the embedding besides, and the last one the head: each counts as the layers that have
    as many weights. Raises DeviceError if there are fewer layers than stages.
    """
    layers = checkpoint.layers
    if layers < stages:
        raise DeviceError(f"{layers} layers cannot be divided over {stages} devices; name fewer")
    end = checkpoint.vocab / (LAYER_SQUARES * checkpoint.width)
    each, borders = (layers + 2 * end) / stages, [0]
    for stage in range(1, stages):
        border = math.floor(stage * each - end + 0.5)
        borders.append(min(max(border, borders[-1] + 1), layers - stages + stage))
    return [range(first, last) for first, last in pairwise([*borders, layers])]


def stage_of(tensor: str, parts: Sequence[range]) -> int:
    """The stage that a checkpoint's tensor of that name belongs to. parts: the layers of each."""
    if tensor.startswith("blocks."):
        layer = int(tensor.split(".")[1])
        return next(stage for stage, part in enumerate(parts) if layer in part)
    return 0 if tensor.startswith("emb.") else len(parts) - 1


class StagedModel(PackedForward):
    """The model of these stages."""

    def __init__(self, stages: Sequence[TorchModel]) -> None:
        self.stages, self.checkpoint = stages, stages[0].checkpoint

    def new_states(self, slots: int, wkv_dtype: torch.dtype = torch.float32) -> StagedStates:
        return StagedStates([stage.new_states(slots, wkv_dtype) for stage in self.stages])

    def make_room(self, slots: int) -> None:
        for stage in self.stages:
            stage.make_room(slots)

    def load_adapter(self, slot: int, adapter: LowRankAdapter) -> None:
        for stage in self.stages:
            stage.load_adapter(slot, adapter)

    def _hidden(self, tokens: Tensor, states: StagedStates, batch: PackedBatch) -> tuple[Tensor, PackedRows]:
        activations = self.stages[0].embed(tokens)
        for stage, part in zip(self.stages, states.parts, strict=True):
            activations, rows = stage.run(activations.to(stage.device), part, batch)
        return activations.x, rows

    def logits(self, x: Tensor) -> Tensor:
        return self.stages[-1].logits(x)

"""Several decode steps of one row and what they draw, by one CUDA graph.

Kernels of a step then begin beside the end of those of the step before, as within a step. That saves some
microseconds of each, so only small models have these graphs whose layers one launch may run.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.cuda.cuda_model import CudaModel
from rwkv_batch.model.cuda.steps.graphs import DECODE_LAYER_NODES, NODE_BYTES, GraphLadder
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.ops.cuda.inputs.packing import NO_SLOT
from rwkv_batch.runner.protocol import LAST, Batch
from rwkv_batch.sampling.sampler_cuda import CudaSampler, Way

WAYS = 2  # of drawing, at most
WIDEST = 2048  # channels: up to 1.5B


class OneRow:
    """Graphs of `steps` steps over these states; all calls on one stream. `ladders`: of one size each."""

    def __init__(
        self, model: CudaModel[Any, Any], states: CudaStates, sampler: CudaSampler, steps: int
    ) -> None:
        self._model, self._states, self._sampler, self._steps = model, states, sampler, steps
        device, vocab = model.device, model.checkpoint.vocab
        self._all_logits = torch.empty(1, len(model.weights.head), dtype=torch.float16, device=device)
        self._logits = self._all_logits[:, :vocab]
        padding = torch.tensor([[0], [NO_SLOT]], dtype=torch.int32, device=device)
        arena: dict[str, Tensor] = {}  # of both, as they run one after the other
        self._of_way: dict[Way, GraphLadder[Tensor, Tensor]] = {
            way: GraphLadder(
                f"several-step {way}", [1], lambda _: padding.clone(), partial(self._queue, way), arena
            )
            for way in sampler.ways(self._logits)
        }
        self._filled: dict[Way, tuple[Tensor, int]] = {}  # inputs, and which slot they name

    @classmethod
    def for_model(
        cls, model: CudaModel[Any, Any], states: CudaStates, sampler: CudaSampler, steps: int
    ) -> "OneRow | None":
        """None if its steps gain nothing by it."""
        return cls(model, states, sampler, steps) if _gains(model, steps) else None

    @staticmethod
    def bytes_needed(model: CudaModel[Any, Any], steps: int) -> int:
        """Driver memory of its graphs, at most."""
        if not _gains(model, steps):
            return 0
        return WAYS * steps * model.checkpoint.layers * DECODE_LAYER_NODES * NODE_BYTES

    @property
    def ladders(self) -> tuple[GraphLadder[Tensor, Tensor], ...]:
        return tuple(self._of_way.values())

    def takes(self, batch: Batch) -> bool:
        """Whether `run` is for such steps. The sampler's `prepare` comes first.

        It is not while their graph is missing: each of them has its own, and costs the host less by that.
        """
        alone = len(batch.slots) == 1 and not batch.adapters and batch.steps == self._steps
        way = self._sampler.way(self._logits) if alone else None
        return way is not None and self._of_way[way].has(1)

    def run(self, slot: int) -> Tensor:
        """Queue the steps, in which the row is fed what it drew. Returns the ids `[steps]` int32."""
        way = self._sampler.way(self._logits)
        assert way is not None
        self._states.feed.prepare()
        inputs, queue = self._of_way[way].take(1)
        held, named = self._filled.get(way, (None, slot))
        if held is not inputs or named != slot:
            inputs[0], inputs[1] = LAST, slot
            self._filled[way] = inputs, slot
        return queue().clone()  # as the next run overwrites them

    def _queue(self, way: Way, inputs: Tensor, arena: dict[str, Tensor]) -> Tensor:
        ids = torch.empty(self._steps, dtype=torch.int32, device=inputs.device)
        for drawn in ids.split(1):
            slots = self._model.decode(inputs[0], inputs[1], self._states, self._all_logits, arena)
            self._sampler.draw(way, self._logits, slots, drawn, self._states.feed)
        return ids


def _gains(model: CudaModel[Any, Any], steps: int) -> bool:
    return steps > 1 and model.row is not None and model.checkpoint.width <= WIDEST

"""CUDA graphs of a prefill, for a ladder of token counts: launching from Python can take longer than the
kernels.

Tokens and rows are inputs; how many rows there are, and of what length, the device reads from memory.
"""

import logging
from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch.model.autotune import Tuning
from rwkv_batch.model.gemm import Buffers
from rwkv_batch.model.weights_cuda import Weights
from rwkv_batch.ops.cuda.binding import Added
from rwkv_batch.ops.cuda.capture import capture
from rwkv_batch.ops.cuda.feed import Feed
from rwkv_batch.ops.cuda.packing import Described, DeviceRows, Plan
from rwkv_batch.ops.cuda.slots import Slots

log = logging.getLogger(__name__)

SIZES = [
    32,
    64,
    96,
    *range(128, 512, 64),
    *range(512, 2048, 128),
    *range(2048, 5121, 256),
]  # tokens; up to 1024 as for decode batches


class Model(Protocol):
    """What is captured."""

    device: torch.device
    weights: Weights
    tuning: Tuning

    def feed(self, states: Slots) -> Feed:
        """What rows drew last."""

    def run_rows(
        self, tokens: Tensor, rows: DeviceRows, states: Slots, b: Buffers, methods: dict[str, str]
    ) -> Added:
        """All layers."""


@dataclass(frozen=True)
class PrefillGraph:
    graph: torch.cuda.CUDAGraph
    inputs: Described
    buffers: Buffers
    added: Added  # to buffers.x, at the end


class PrefillGraphs:
    """Prefills over one set of states. A size is captured when it is first needed, or all of them at once by
    `capture`.
    """

    def __init__(self, model: Model, states: Slots) -> None:
        self.model, self.states, self.feed = model, states, model.feed(states)
        self._arena: dict[str, Tensor] = {}
        self._graphs: dict[int, PrefillGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def take(plan: Plan) -> bool:
        """Whether there is a graph for it."""
        return plan.tokens <= SIZES[-1] and len(plan.launches) <= 1

    def capture(self, progress: bool = True) -> None:
        """Capture every size, with a progress bar, and log what the graphs cost."""
        before = torch.cuda.mem_get_info(self.model.device)[0]
        for size in tqdm(SIZES[::-1], desc="capturing prefill graphs", unit="graph", disable=not progress):
            self.graph(size)
        used = (before - torch.cuda.mem_get_info(self.model.device)[0]) / 2**20
        log.info(
            "%d prefill graphs for up to %d tokens take %.0f MiB of GPU memory", len(SIZES), SIZES[-1], used
        )

    def graph(self, size: int) -> PrefillGraph:
        """The graph of exactly that size of the ladder."""
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    def run(self, tokens: Tensor, plan: Plan) -> tuple[Buffers, Added, DeviceRows]:
        """Tokens in the plan's order. What is in the buffers and rows afterwards, the next run overwrites."""
        graph = self.graph(SIZES[bisect_left(SIZES, plan.tokens)])
        graph.inputs.fill(tokens, plan)
        graph.graph.replay()
        return graph.buffers, graph.added, graph.inputs.rows

    def _capture(self, size: int) -> PrefillGraph:
        if not self._arena:  # for the largest, so that no graph's buffers ever move
            arena: dict[str, Tensor] = {}
            self._step(
                Described(SIZES[-1], self.model.device),
                Buffers(self.model.weights, SIZES[-1], arena, packed=True),
            )
            self._arena = arena
        inputs = Described(size, self.model.device)
        buffers = Buffers(self.model.weights, size, self._arena, packed=True)
        self.model.tuning.methods(size)
        added = [Added()]

        def run() -> None:
            added[0] = self._step(inputs, buffers)

        return PrefillGraph(capture(run, self._pool), inputs, buffers, added[0])

    def _step(self, inputs: Described, buffers: Buffers) -> Added:
        return self.model.run_rows(
            inputs.tokens, inputs.rows, self.states, buffers, self.model.tuning.methods(len(inputs.tokens))
        )

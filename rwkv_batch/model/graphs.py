"""CUDA graphs of the decode step, for a ladder of batch sizes. Tokens and slots are inputs: rows come and go
without a new capture.

A negative token stands for what the row drew last, which the host need not know yet. A row that this has
ended is padding to the graph.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch.model.rwkv7_cuda import CudaModel
from rwkv_batch.ops.cuda.capture import capture
from rwkv_batch.ops.cuda.slots import NO_SLOT, Slots
from rwkv_batch.ops.cuda.staging import Uploads

log = logging.getLogger(__name__)


def ladder(most: int) -> list[int]:
    """Batch sizes that have a graph, up to `most`: what is padding takes time like any row from some dozens
    on.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 128, 32), *range(128, most, 64)]
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True)
class DecodeGraph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [2, size] int32: tokens, slots; resolved in place
    logits: Tensor  # [size, rows of head] fp16


class DecodeGraphs:
    """Decode steps over one set of states. A size is captured when it is first needed, or all of them at once
    by `capture`.
    """

    def __init__(self, model: CudaModel, states: Slots) -> None:
        self.model, self.states, self.feed = model, states, model.feed(states)
        self.most = len(states.wkv)
        self.sizes = ladder(self.most)
        self._uploads = Uploads(2 * self.most)
        self._arena: dict[str, Tensor] = {}
        self._logits = torch.empty(
            self.most, len(model.weights.head), device=model.device, dtype=torch.float16
        )
        self._graphs: dict[int, DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, progress: bool = True) -> None:
        """Capture every size, with a progress bar, and log what the graphs cost."""
        before = torch.cuda.mem_get_info(self.model.device)[0]
        for size in tqdm(
            self.sizes[::-1], desc="capturing decode graphs", unit="graph", disable=not progress
        ):
            self.graph(size)
        used = (before - torch.cuda.mem_get_info(self.model.device)[0]) / 2**20
        log.info(
            "%d decode graphs for up to %d rows take %.0f MiB of GPU memory", len(self.sizes), self.most, used
        )

    def graph(self, size: int) -> DecodeGraph:
        """The graph of exactly that size of the ladder."""
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    def run(self, tokens: Tensor | Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One token of every row, `[rows]`. Returns logits `[rows, rows of head]` and the slots `[rows]`
        int32 of the rows that ran, negative for those that had ended; the next run overwrites both. Only
        queued, not waited for.
        """
        rows = len(slots)
        graph = self.graph(self.sizes[bisect_left(self.sizes, rows)])
        size = graph.inputs.shape[1]
        host = self._uploads.buffer()
        host[:rows], host[rows:size] = 0 if isinstance(tokens, Tensor) else tokens, 0
        host[size : size + rows], host[size + rows : 2 * size] = slots, NO_SLOT
        self._uploads.send(graph.inputs)
        if isinstance(tokens, Tensor):
            graph.inputs[0, :rows].copy_(tokens, non_blocking=True)
        graph.graph.replay()
        return graph.logits[:rows], graph.inputs[1, :rows]

    def _capture(self, size: int) -> DecodeGraph:
        if not self._arena:  # for the largest, so that no graph's buffers ever move
            arena: dict[str, Tensor] = {}
            self._step(self._padding(self.most), arena)
            self._arena = arena
        inputs = self._padding(size)
        self.model.tuning.methods(size)
        return DecodeGraph(
            capture(lambda: self._step(inputs, self._arena), self._pool), inputs, self._logits[:size]
        )

    def _padding(self, size: int) -> Tensor:
        """The inputs `[2, size]` of rows that are nobody's."""
        return torch.tensor([[0], [NO_SLOT]], device=self.model.device, dtype=torch.int32).repeat(1, size)

    def _step(self, inputs: Tensor, arena: dict[str, Tensor]) -> None:
        self.model.decode(inputs[0], inputs[1], self.states, self._logits[: inputs.shape[1]], arena)

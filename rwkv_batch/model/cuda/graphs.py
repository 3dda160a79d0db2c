"""CUDA graphs of decode and prefill steps, each for a ladder of sizes.

Tokens, slots and rows are inputs: sequences come and go without a new capture. A negative token stands for
what the sequence drew last, which the host need not know yet.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch.ops.cuda.binding import Addend
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.capture import capture
from rwkv_batch.ops.cuda.packing import NO_SLOT, DeviceRows, PrefillPlan, StagedPlan
from rwkv_batch.ops.cuda.staging import Uploads

log = logging.getLogger(__name__)

# Tokens of prefill graphs. Up to 1024 they are sizes for which GEMMs are timed for decode too.
PREFILL_SIZES = [32, 64, 96, *range(128, 512, 64), *range(512, 2048, 128), *range(2048, 5121, 256)]
NODE_BYTES = 4096  # of driver memory for each launch in a graph
DECODE_LAYER_NODES = 16  # launches of a layer, at most
PREFILL_LAYER_NODES = 28

G = TypeVar("G")


def decode_sizes(most: int) -> list[int]:
    """Batch sizes that have a decode graph: from some dozens on, rows of padding cost as much as others."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 128, 32), *range(128, most, 64)]
    return [*(size for size in sizes if size < most), most]


def decode_graph_bytes(layers: int, most: int) -> int:
    """Driver memory of all decode graphs, at most."""
    return len(decode_sizes(most)) * layers * DECODE_LAYER_NODES * NODE_BYTES


def prefill_graph_bytes(layers: int) -> int:
    """Driver memory of all prefill graphs, at most."""
    return len(PREFILL_SIZES) * layers * PREFILL_LAYER_NODES * NODE_BYTES


class GraphLadder(Generic[G]):
    """A graph for each of some sizes, captured when it is first needed, or all of them by `capture_all`."""

    def __init__(
        self, kind: str, sizes: list[int], tune: Callable[[int], object], capture_size: Callable[[int], G]
    ) -> None:
        """sizes: ascending. `tune` chooses the GEMMs of a size, which is not possible during a capture."""
        self._kind, self._sizes, self._tune, self._capture = kind, sizes, tune, capture_size
        self._graphs: dict[int, G] = {}

    def graph(self, size: int) -> G:
        """The smallest graph that holds `size`."""
        size = self._sizes[bisect_left(self._sizes, size)]
        if size not in self._graphs:
            self._tune(size)
            self._graphs[size] = self._capture(size)
        return self._graphs[size]

    def capture_all(self, device: torch.device, progress: bool) -> None:
        """With a progress bar; logs what the graphs cost."""
        free = torch.cuda.mem_get_info(device)[0]
        sizes = tqdm(
            self._sizes[::-1], desc=f"capturing {self._kind} graphs", unit="graph", disable=not progress
        )
        for size in sizes:
            self.graph(size)
        used = (free - torch.cuda.mem_get_info(device)[0]) / 2**20
        count, most = len(self._sizes), self._sizes[-1]
        log.info("%d %s graphs up to size %d take %.0f MiB of GPU memory", count, self._kind, most, used)


@dataclass(frozen=True)
class DecodeGraph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [2, size] int32: tokens, slots; resolved in place
    logits: Tensor  # [size, rows of the head] fp16


DecodeStep = Callable[[Tensor, Tensor, Tensor, dict[str, Tensor]], None]  # tokens, slots, logits, arena


class DecodeGraphs:
    """Graphs of one token of every row, for up to `most` rows."""

    def __init__(
        self,
        most: int,
        head_rows: int,
        device: torch.device,
        tune: Callable[[int], object],
        step: DecodeStep,
    ) -> None:
        """`step` launches a decode step, and keeps all that it writes besides logits in the arena."""
        self._most, self._device, self._step = most, device, step
        self._uploads = Uploads(2 * most)
        self._arena: dict[str, Tensor] = {}
        self._logits = torch.empty(most, head_rows, device=device, dtype=torch.float16)
        self._pool = torch.cuda.graph_pool_handle()
        self.ladder = GraphLadder("decode", decode_sizes(most), tune, self._capture)

    def run(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Queue one token of every row.

        Returns logits `[rows, rows of the head]` and the slots `[rows]` int32 of the rows that ran, negative
        for those that had finished. The next run overwrites both.
        """
        rows = len(slots)
        graph = self.ladder.graph(rows)
        size = graph.inputs.shape[1]
        host = self._uploads.buffer()
        host[:rows], host[rows:size] = tokens, 0
        host[size : size + rows], host[size + rows : 2 * size] = slots, NO_SLOT
        self._uploads.send(graph.inputs)
        graph.graph.replay()
        return graph.logits[:rows], graph.inputs[1, :rows]

    def _capture(self, size: int) -> DecodeGraph:
        if not self._arena:  # for the largest, so that no graph's buffers ever move
            arena: dict[str, Tensor] = {}
            padding = self._padding(self._most)
            self._step(padding[0], padding[1], self._logits, arena)
            self._arena = arena
        inputs, logits = self._padding(size), self._logits[:size]
        graph = capture(lambda: self._step(inputs[0], inputs[1], logits, self._arena), self._pool)
        return DecodeGraph(graph, inputs, logits)

    def _padding(self, size: int) -> Tensor:
        """The inputs `[2, size]` of rows without a slot."""
        return torch.tensor([[0], [NO_SLOT]], device=self._device, dtype=torch.int32).repeat(1, size)


@dataclass(frozen=True)
class PrefillGraph:
    graph: torch.cuda.CUDAGraph
    inputs: StagedPlan
    buffers: Buffers
    added: Addend  # to buffers.x, after the last layer


NewBuffers = Callable[[int, dict[str, Tensor]], Buffers]  # tokens, arena
PrefillStep = Callable[[Tensor, DeviceRows, Buffers], Addend]  # tokens, rows


class PrefillGraphs:
    """Graphs of all layers over packed rows: launching from Python can take longer than the kernels.

    How many rows there are, and of what length, the device reads from memory.
    """

    def __init__(
        self,
        device: torch.device,
        new_buffers: NewBuffers,
        tune: Callable[[int], object],
        step: PrefillStep,
    ) -> None:
        self._device, self._new_buffers, self._step = device, new_buffers, step
        self._arena: dict[str, Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.ladder = GraphLadder("prefill", PREFILL_SIZES, tune, self._capture)

    @staticmethod
    def covers(plan: PrefillPlan) -> bool:
        """Whether there is a graph for it."""
        return plan.tokens <= PREFILL_SIZES[-1] and len(plan.launches) <= 1

    def run(self, tokens: Tensor, plan: PrefillPlan) -> tuple[Buffers, Addend, DeviceRows]:
        """Tokens in the plan's order, on the host. The next run overwrites what is returned."""
        graph = self.ladder.graph(plan.tokens)
        graph.inputs.fill(tokens, plan)
        graph.graph.replay()
        return graph.buffers, graph.added, graph.inputs.rows

    def _capture(self, size: int) -> PrefillGraph:
        if not self._arena:  # for the largest, so that no graph's buffers ever move
            arena: dict[str, Tensor] = {}
            largest = StagedPlan(PREFILL_SIZES[-1], self._device)
            self._step(largest.tokens, largest.rows, self._new_buffers(PREFILL_SIZES[-1], arena))
            self._arena = arena
        inputs, buffers = StagedPlan(size, self._device), self._new_buffers(size, self._arena)
        added = [Addend()]

        def run() -> None:
            added[0] = self._step(inputs.tokens, inputs.rows, buffers)

        return PrefillGraph(capture(run, self._pool), inputs, buffers, added[0])

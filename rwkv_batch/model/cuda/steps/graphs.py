"""CUDA graphs of decode and prefill steps, each for a ladder of sizes.

A graph is the launches of a step without the time that Python takes for them; the results are the same.
Tokens, slots and rows are inputs: sequences come and go without a new capture. A negative token stands for
what the sequence drew last, which the host need not know yet.
"""

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch.model.cuda.steps.capture import capture
from rwkv_batch.ops.cuda.binding import Addend
from rwkv_batch.ops.cuda.inputs.packing import NO_SLOT, DeviceRows, PrefillPlan, StagedPlan
from rwkv_batch.ops.cuda.inputs.staging import Uploads
from rwkv_batch.ops.progress import hidden

log = logging.getLogger(__name__)

# Tokens of prefill graphs. Up to 1024 they are sizes for which GEMMs are timed for decode too. The smallest
# are for turns of a few words: the sparse GEMM takes 8 tokens at most.
PREFILL_SIZES: list[int] = [4, 8, 16, 32, 64, 96, *range(128, 512, 64), *range(512, 2048, 128)]
PREFILL_SIZES += range(2048, 5121, 256)
NODE_BYTES = 4096  # of driver memory for each launch in a graph
DECODE_LAYER_NODES = 20  # launches of a layer, at most
PREFILL_LAYER_NODES = 32

Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


def decode_sizes(most: int) -> list[int]:
    """Batch sizes that have a decode graph.

    From some dozens on, rows of padding cost a GEMM as much as others, which has tiles of 64 rows and more;
    no state is read for them. From 2048 on they are an eighth of the rows at most.
    """
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 128, 32), *range(128, 1024, 64)]
    sizes += [*range(1024, 2048, 128), *range(2048, most, 256)]
    return [*(size for size in sizes if size < most), most]


def prefill_sizes(most: int | None) -> list[int]:
    """Numbers of tokens that have a prefill graph where no step has more than `most` (None: any number)."""
    if most is None:
        return PREFILL_SIZES
    return PREFILL_SIZES[: bisect_left(PREFILL_SIZES, most) + 1]


def prefills_held(most: int) -> list[int]:
    """Tokens of the prefills whose buffers are held together: of graphs, and of a step too large for them."""
    by_graphs = prefill_sizes(most)[-1]
    return [by_graphs, most] if most > by_graphs else [by_graphs]


def graph_bytes(layers: int, most: int, most_tokens: int, more: int = 0) -> int:
    """Driver memory of all graphs of decode steps of up to `most` rows, and of prefills, at most.

    most_tokens: of a step. more: launches of a layer besides those of a step without adapters.
    """
    decodes, prefills = len(decode_sizes(most)), len(prefill_sizes(most_tokens))
    nodes = decodes * (DECODE_LAYER_NODES + more) + prefills * (PREFILL_LAYER_NODES + more)
    return layers * nodes * NODE_BYTES


class GraphLadder(Generic[Inputs, Outputs]):
    """A graph for each of some sizes, captured when it is first needed, or by `capture`.

    After `capture_later` a size that has none runs without a graph, by the same launches.
    """

    def __init__(
        self,
        kind: str,
        sizes: list[int],
        padding: Callable[[int], Inputs],
        step: Callable[[Inputs, dict[str, Tensor]], Outputs],
        arena: dict[str, Tensor],
    ) -> None:
        """sizes: ascending. padding(size): new inputs, which are all padding.

        `step` launches a step over the inputs; what it allocates lies in its second argument, the arena that
        all sizes share, and ladders of the same sizes too.
        """
        self._kind, self.sizes, self._late = kind, sizes, False
        self._padding, self._step = padding, step
        self._arena, self._fits_largest = arena, False
        self._pool: Any = None  # of the graphs that there are
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Inputs, Outputs]] = {}
        self.runs: Counter[int] = Counter()  # by size

    def size(self, count: int) -> int:
        """The smallest that holds so many."""
        return self.sizes[bisect_left(self.sizes, count)]

    def take(self, count: int) -> tuple[Inputs, Callable[[], Outputs]]:
        """Inputs of the smallest size that holds so many, to be filled, and what queues a step over them."""
        size = self.size(count)
        self.runs[size] += 1
        if size not in self._graphs and self._late:
            inputs = self._padding(size)
            return inputs, partial(self._step, inputs, self._arena)
        if size not in self._graphs:
            self.capture(size)
        graph, inputs, outputs = self._graphs[size]

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return inputs, replay

    def has(self, count: int) -> bool:
        """Whether so many have a graph. If not it counts among `runs`, which say what is captured first."""
        there = self.size(count) in self._graphs
        self.runs[self.size(count)] += not there
        return there

    @property
    def missing(self) -> list[int]:
        """Sizes that have no graph."""
        return [size for size in self.sizes if size not in self._graphs]

    def prepare(self) -> None:
        """Run the largest size, so that the arena has room for all of them and never moves."""
        if not self._fits_largest:
            self._step(self._padding(self.sizes[-1]), self._arena)
            self._fits_largest = True

    def arena(self, tokens: int) -> dict[str, Tensor]:
        """For a step that has no graph: what those of the graphs write to, where that is large enough.

        What else it allocates stays out of their arena.
        """
        return dict(self._arena) if self._fits_largest and tokens <= self.sizes[-1] else {}

    def capture(self, size: int) -> None:
        """A graph for that size."""
        self.prepare()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()  # one whose graphs are all gone takes no more
        inputs, outputs = self._padding(size), list[Outputs]()
        graph = capture(lambda: outputs.append(self._step(inputs, self._arena)), self._pool)
        self._graphs[size] = graph, inputs, outputs[-1]

    def forget(self, size: int) -> None:
        """Its graph is another one from now on, as its launches are."""
        if size in self._graphs:
            torch.cuda.current_stream().synchronize()  # it may be running
            del self._graphs[size]

    def capture_later(self) -> None:
        """Leave it to the caller when a size gets its graph."""
        self._late = True
        self.prepare()

    def capture_all(self, progress: bool) -> None:
        """With a progress bar; logs what the graphs cost."""
        free = torch.cuda.mem_get_info()[0]
        sizes = tqdm(
            self.missing[::-1],
            desc=f"capturing {self._kind} graphs",
            unit="graph",
            disable=hidden(not progress),
        )
        for size in sizes:
            self.capture(size)
        used = (free - torch.cuda.mem_get_info()[0]) / 2**20
        count, most = len(self.sizes), self.sizes[-1]
        log.info("%d %s graphs up to size %d take %.0f MiB of GPU memory", count, self._kind, most, used)


Decoded = tuple[Tensor, Tensor]  # logits [size, rows of the head], slots [size] of the rows that ran


class DecodeGraphs(GraphLadder[Tensor, Decoded]):
    """Graphs of one token of every row, for up to `most` rows."""

    def __init__(
        self,
        most: int,
        device: torch.device,
        step: Callable[[Tensor, dict[str, Tensor]], Decoded],
        arena: dict[str, Tensor],
    ) -> None:
        """step: from tokens and slots `[2, size]` int32, which it leaves as they are."""
        padding = torch.tensor([[0], [NO_SLOT]], device=device, dtype=torch.int32)
        super().__init__("decode", decode_sizes(most), lambda size: padding.repeat(1, size), step, arena)
        self._uploads = Uploads(2 * most)
        self._sent: dict[int, tuple[Tensor, np.ndarray]] = {}  # what inputs hold, by size
        self.repeat: Callable[[], object]  # queues what `run` queued last, where rows are fed what they drew

    def run(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Queue one token of every row.

        Returns logits `[rows, rows of the head]` and the slots `[rows]` int32 of the rows that ran, negative
        for those that had finished. The next run overwrites both.
        """
        rows = len(slots)
        inputs, queue = self.take(rows)
        size = inputs.shape[1]
        numbers = np.zeros((2, size), np.int32)
        numbers[0, :rows], numbers[1, :rows], numbers[1, rows:] = tokens, slots, NO_SLOT
        # While the same rows go on, nothing changes: an upload would make the GPU wait between two steps.
        held, sent = self._sent.get(size, (None, numbers))
        if held is not inputs or not np.array_equal(sent, numbers):
            self._uploads.buffer()[: 2 * size] = numbers.ravel()
            self._uploads.send(inputs)
            self._sent[size] = inputs, numbers
        self.repeat = queue
        logits, ran = queue()
        return logits[:rows], ran[:rows]


Prefilled = tuple[Tensor, Addend]  # after the last layer: x [T, C], and what is still to be added to it


class PrefillGraphs(GraphLadder[StagedPlan, Prefilled]):
    """Graphs of all layers over packed rows: launching from Python can take longer than the kernels.

    How many rows there are, and of what length, the device reads from memory.
    """

    def __init__(
        self,
        device: torch.device,
        step: Callable[[StagedPlan, dict[str, Tensor]], Prefilled],
        arena: dict[str, Tensor],
        most_tokens: int | None = None,
    ) -> None:
        """most_tokens: of a step."""
        sizes = prefill_sizes(most_tokens)
        super().__init__("prefill", sizes, partial(StagedPlan, device=device), step, arena)

    def covers(self, plan: PrefillPlan) -> bool:
        """Whether there is a graph for it."""
        return plan.tokens <= self.sizes[-1] and len(plan.launches) <= 1

    def run(self, tokens: Tensor, plan: PrefillPlan) -> tuple[Prefilled, DeviceRows]:
        """Tokens in the plan's order, on the host. The next run overwrites what is returned."""
        inputs, queue = self.take(plan.tokens)
        inputs.fill(tokens, plan)
        return queue(), inputs.rows

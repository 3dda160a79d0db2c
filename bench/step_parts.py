#!/usr/bin/env python3
"""What each launch of a decode step takes of it on a CUDA GPU: the step is timed without it, in turns.

What its neighbours gain or lose without it is part of a figure, so figures do not add up to the step. Of one
row, where one launch runs all layers, that launch is timed alone, by how many tokens are deferred.

    python bench/step_parts.py --size 0.4b --rows 320
    python bench/step_parts.py --size 0.4b --rows 1
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.decode import need_gpu
from bench.make_checkpoint import ALL_SIZES, FAMILIES
from rwkv_batch.model import checkpoint
from rwkv_batch.model.cuda.gemms.gemms import StepGemms
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.cuda.steps.capture import capture, gpu_seconds
from rwkv_batch.ops.cuda.abi import MAX_LAG
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.buffers import MIXED, Buffers
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS

STEPS, RUNS = 6, 15  # of a run: states are written at every third
LAUNCHES = 50


class Steps:
    """Graphs of decode steps of one batch."""

    def __init__(self, size: str, rows: int) -> None:
        weights = checkpoint.from_tensors("random", FAMILIES["rwkv7"](*ALL_SIZES[size], device="cuda"))
        self.model = RWKV7Cuda(weights, "cuda", few_rows=rows <= SPARSE_ROWS[-1])
        self.states = self.model.new_states(rows, torch.float16)
        self.states.wkv.normal_(std=0.1)
        if self.model.tuner:
            self.model.tuner.measure([rows])
        self.tokens = torch.randint(1, 65000, (rows,), device="cuda", dtype=torch.int32)
        self.slots = torch.randperm(rows, device="cuda", dtype=torch.int32)
        self.logits = torch.empty(rows, len(self.model.weights.head), device="cuda", dtype=torch.float16)
        self._held: list[dict[str, torch.Tensor]] = []  # a graph's buffers must live as long as it

    def graph(self) -> torch.cuda.CUDAGraph:
        arena: dict[str, torch.Tensor] = {}
        self._held.append(arena)

        def step() -> None:
            self.model.decode(self.tokens, self.slots, self.states, self.logits, arena)
            self.tokens.copy_(self.logits.argmax(-1))

        return capture(step)

    def without(self, owner: type, name: str, skips: Callable[..., bool]) -> torch.cuda.CUDAGraph:
        """A step without the calls of a method that `skips`; what the first one returned stands for all."""
        real, kept = getattr(owner, name), []

        def run(self: object, *given: object, **named: object) -> object:
            if not skips(*given):
                return real(self, *given, **named)
            if not kept:
                kept.append(real(self, *given, **named))
            return kept[0]

        with patch.object(owner, name, run):
            return self.graph()

    def launch_alone(self) -> None:
        row, b = self.model.row, Buffers(self.model.weights.buffer_shape, 1, {})
        if row is None:
            print("no launch runs all layers of this model on this GPU")
            return
        for lag in range(MAX_LAG + 1):
            b.lag.fill_(lag)
            graph = capture(lambda: row.run(self.tokens, self.slots, self.states, b))
            graph.replay()
            taken = statistics.median(gpu_seconds(graph.replay, LAUNCHES) for _ in range(RUNS))
            print(f"all layers by one launch, {lag} tokens deferred: {taken * 1e6:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=ALL_SIZES, default="0.4b")
    parser.add_argument("--rows", type=int, default=320)
    args = parser.parse_args()
    need_gpu()
    with torch.inference_mode():
        steps = Steps(args.size, args.rows)
        print(f"{args.rows} rows: {steps.model.methods(args.rows)}")
        if args.rows == 1:
            steps.launch_alone()
            return
        graphs = {"all": steps.graph()}
        for name in ("time_mix_in", "output", "key", "value"):
            graphs[name] = steps.without(StepGemms, name, lambda *_: True)
        graphs["head"] = steps.without(RWKV7Cuda, "_head", lambda *_: True)
        norm = "norm_mix_decode"
        graphs["norms of time mixes"] = steps.without(
            Kernels, norm, lambda x, mix, slots: len(mix.mixes) == MIXED
        )
        graphs["norms of channel mixes"] = steps.without(
            Kernels, norm, lambda x, mix, slots: len(mix.mixes) < MIXED
        )
        graphs["wkv"] = steps.without(Kernels, "wkv_decode", lambda *_: True)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for graph in graphs.values():
            graph.replay()
        for _ in range(RUNS):
            for name, graph in graphs.items():
                times[name].append(gpu_seconds(graph.replay, STEPS) * 1e6)
        whole, layers = statistics.median(times["all"]), len(steps.model.weights.layers)
        print(f"a step takes {whole:.1f} us")
        for name, taken in times.items():
            saved = whole - statistics.median(taken)
            if name != "all":
                print(f"without {name}: {saved:.1f} us less, {saved / layers:.2f} for each layer")


if __name__ == "__main__":
    main()

"""Decode and prefill without the engine: the model alone, with greedy draws that stay on the device.

It shows what the kernels take, for work on them.
"""

import statistics
import time

import torch

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.steps.capture import capture, gpu_seconds
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS
from rwkv_batch.runner.cuda_runner import CUDA_MODELS

STEPS = 6  # of a run: states are written at every third


class Graphs:
    """A decode step is one replay of a CUDA graph that feeds its draws back to itself.

    Rows begin with different tokens and random states.
    """

    def __init__(self, weights: Checkpoint, rows: int, wkv: torch.dtype) -> None:
        self.model = CUDA_MODELS[weights.family](weights, few_rows=rows <= SPARSE_ROWS[-1])
        self.states = self.model.new_states(rows, wkv)
        self._buffers: dict[str, torch.Tensor] = {}

    def decode(self, rows: int, runs: int) -> float:
        """Seconds of one step; `step` is that step afterwards."""
        self._buffers = {}  # a graph's must live as long as it
        tokens = torch.randint(1, 65000, (rows,), device="cuda", dtype=torch.int32)
        slots = torch.randperm(len(self.states), device="cuda", dtype=torch.int32)[:rows]
        logits = torch.empty(rows, len(self.model.weights.head), device="cuda", dtype=torch.float16)
        self._buffers |= {"tokens": tokens, "slots": slots, "logits": logits}
        self.states.wkv.normal_(std=0.1)
        if self.model.tuner:
            self.model.tuner.measure([rows])

        def step() -> None:
            self.model.decode(tokens, slots, self.states, logits, self._buffers)
            tokens.copy_(logits.argmax(-1))

        self.step = capture(step).replay
        for _ in range(3):
            self.step()
        return statistics.median(gpu_seconds(self.step, STEPS) for _ in range(runs))

    def prefill(self, rows: int, length: int, runs: int) -> float:
        """Seconds for so many rows of so many tokens, launches included."""
        tokens = torch.randint(1, 65000, (rows * length,)).tolist()
        slots = list(range(rows))

        def run() -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.model.run(tokens, [length] * rows, slots, self.states)
            torch.cuda.synchronize()
            return time.perf_counter() - start

        run()
        return statistics.median(run() for _ in range(runs))

    def about(self, rows: int) -> str:
        """The method of each GEMM."""
        return " ".join(f"{kind}:{method}" for kind, method in self.model.methods(rows).items())

"""Decode and prefill without the engine, and where the time of a step goes, kernel by kernel.

The model alone draws greedily, and its draws stay on the device: that shows what the kernels take, for work
on them. The profiler looks at a replay of a CUDA graph, or at a step of the engine.
"""

import json
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.steps.capture import capture, gpu_seconds
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS
from rwkv_batch.runner.cuda_runner import CUDA_MODELS

REPLAYS = 6
STEPS = 6  # of a run: states are written at every third


class Graphs:
    """A decode step is one replay of a CUDA graph that feeds its draws back to itself.

    Rows begin with different tokens and random states.
    """

    def __init__(self, weights: Checkpoint, rows: int, wkv: torch.dtype, fp8_copies: bool = False) -> None:
        """fp8_copies: as of `pack_weights`."""
        few = rows <= SPARSE_ROWS[-1]
        self.model = CUDA_MODELS[weights.family](weights, few_rows=few, fp8_copies=fp8_copies)
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


def kernels(replay) -> list[dict]:
    """The kernels and copies of some replays, in the order in which they ended.

    Each has name, grid, and start and end in microseconds.
    """
    replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    found = [
        {
            "name": e["name"].split("(")[0].removeprefix("void ")[:48],
            "grid": "x".join(map(str, e["args"].get("grid", []))),
            "start": e["ts"],
            "end": e["ts"] + e["dur"],
        }
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda e: e["end"])


def report(replay) -> str:
    """What each kind of kernel adds to a step, and how long the device was idle.

    A kind is a name, a grid and the kernel before it. Kernels overlap, so the share of a kernel is the time
    from the end of the one before to its own end. The shares add up to the step.
    """
    events = kernels(replay)
    added: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    idle = 0.0
    for before, event in pairwise(events):
        added[event["name"], event["grid"], before["name"][:24]].append(event["end"] - before["end"])
        idle += max(0.0, event["start"] - before["end"])
    span = events[-1]["end"] - events[0]["end"]
    lines = [
        f"{len(events) / REPLAYS:.0f} kernels, {span / REPLAYS / 1e3:.3f} ms a step, {idle / span:.1%} of "
        "it with no kernel running"
    ]
    for (name, grid, before), times in sorted(added.items(), key=lambda item: -sum(item[1])):
        if sum(times) > span / 200:
            lines.append(
                f"{sum(times) / REPLAYS:9.1f} us {len(times) / REPLAYS:6.1f} x "
                f"{statistics.median(times):8.2f} us  "
                f"{name} [{grid}] after {before}"
            )
    return "\n".join(lines)

#!/usr/bin/env python3
"""The kernels for CPUs beside torch's operations, in turns in one process.

Each round measures every way once; a figure is the median over the rounds.

    python bench/cpu_kernels.py [--threads 1] [--rounds 9]
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rwkv_batch.ops import torch_ops as ops  # noqa: E402
from rwkv_batch.ops.cpu.binding import CpuKernels, CpuRows, load  # noqa: E402
from rwkv_batch.ops.cpu.products import int8_linear, packed_linear  # noqa: E402
from rwkv_batch.ops.device import keep_freed_memory  # noqa: E402
from rwkv_batch.ops.linear import prepare  # noqa: E402

# Outputs and inputs: of the bundled model with its head, of 0.1B, and of 1.5B.
SHAPES = [(256, 256), (256, 1024), (65536, 256), (768, 768), (768, 3072), (8192, 2048)]
ROWS = (1, 4, 16, 32, 64, 256)
RECURRENCES = [[1], [1] * 8, [1] * 32, [16], [64], [256], [1000], [12] * 30]
WIDTH = 768
MOST_WORK = 2e10  # multiplications of a product that is measured


def medians(ways: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Milliseconds of each, all measured in every round."""
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for place, way in enumerate(ways):
            start = time.perf_counter()
            way()
            if turn:
                seconds[place].append(time.perf_counter() - start)
    return [median(of_way) * 1e3 for of_way in seconds]


def products(kernels: CpuKernels, rounds: int) -> None:
    """Prints the table of products."""
    print(
        "| outputs x inputs | rows | torch fp32 | own fp32 | torch fp16 | own fp16 | own int8 "
        "| GFLOP/s: fp32 | int8 |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs)
        half, scales = weight.half().float(), weight.abs().amax(1) / 127
        values = (weight / scales.unsqueeze(1)).round().to(torch.int8)
        linears = [
            prepare(weight, device="cpu", dtype=torch.float32),
            packed_linear(kernels, weight, None),
            prepare(half, device="cpu", dtype=torch.float32),
            packed_linear(kernels, half.half(), None),
            int8_linear(kernels, values, scales),
        ]
        for rows in ROWS:
            if rows * outputs * inputs > MOST_WORK:
                continue
            x = torch.randn(rows, inputs)
            found = medians([lambda linear=linear, x=x: linear(x) for linear in linears], rounds)
            rate = [2e-6 * rows * outputs * inputs / ms for ms in (found[1], found[4])]
            cells = " | ".join(f"{ms:.3f}" for ms in found)
            print(f"| {outputs} x {inputs} | {rows} | {cells} | {rate[0]:.0f} | {rate[1]:.0f} |", flush=True)


def by_torch(x: dict[str, Tensor], vectors: Sequence[Tensor], states: Tensor, rows: ops.PackedRows) -> Tensor:
    """What the kernel wkv7 computes, by the operations in torch."""
    k_k, k_a, k_rest, r_k, weight, bias = vectors
    w_log, a, kk = ops.log_decay(x["w"]), x["a"].sigmoid(), ops.removal_key(x["k"], k_k)
    k = x["k"] * torch.addcmul(k_rest, a, k_a)
    v = x["v"].lerp(x["v_first"], x["v_mix"].sigmoid())
    r_, w_, k_, v_, a_ = (y.view(len(y), -1, ops.HEAD_SIZE) for y in (x["r"], w_log, k, v, a))
    y = ops.wkv((r_, w_, k_, v_, kk, a_), states, rows)
    return ops.readout(y, x["r"], k, v, r_k, weight, bias).mul_(x["g"])


def recurrences(kernels: CpuKernels, rounds: int) -> None:
    """Prints the table of the time mix between its products."""
    print(f"| rows of one layer of width {WIDTH} | torch, ms | own, ms | times |\n|---|---|---|---|")
    for lengths in RECURRENCES:
        tokens, slots = sum(lengths), list(range(len(lengths)))
        x = {name: torch.randn(tokens, WIDTH) for name in ("r", "w", "k", "v", "a", "g", "v_mix", "v_first")}
        vectors, states = torch.randn(6, WIDTH).unbind(), torch.randn(len(slots), WIDTH // 64, 64, 64)
        inputs = [x[name] for name in ("r", "w", "k", "v", "a", "g")]

        def torch_way(x=x, vectors=vectors, states=states, lengths=lengths, slots=slots) -> Tensor:
            return by_torch(x, vectors, states, ops.PackedRows(lengths, slots, "cpu"))

        def own_way(
            x=x, inputs=inputs, vectors=vectors, states=states, lengths=lengths, slots=slots
        ) -> Tensor:
            rows = CpuRows.of(lengths, slots)
            return kernels.wkv7(inputs, (x["v_mix"], x["v_first"]), vectors, states, rows)

        slow, fast = medians([torch_way, own_way], rounds)
        name = f"{len(lengths)} of {lengths[0]} token{'s' if lengths[0] > 1 else ''}"
        print(f"| {name} | {slow:.3f} | {fast:.3f} | {slow / fast:.1f} |", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    kernels = load()
    if kernels is None:
        sys.exit("The kernels for this CPU cannot be built; install g++.")
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {platform.machine()}, {options.threads} threads, "
        f"torch {torch.__version__}, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}; milliseconds\n"
    )
    recurrences(kernels, options.rounds)
    print()
    products(kernels, options.rounds)


if __name__ == "__main__":
    main()

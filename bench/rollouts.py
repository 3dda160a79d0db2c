#!/usr/bin/env python3
"""Time and memory of several rows that answer one prompt, to the first token of each.

    python bench/rollouts.py --size 7.2b               random weights on a GPU
    python bench/rollouts.py                           the bundled model on the CPU

The time is that of `Engine.generate` with one token for each row, the median of runs. The memory is what
torch allocated on the GPU beyond the engine at rest, at most; on the CPU it is the process's highest so far.
"""

import argparse
import random
import resource
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.make_checkpoint import ALL_SIZES, FAMILIES
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model import checkpoint

RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=ALL_SIZES, help="random weights on a GPU")
    parser.add_argument("--rows", default="1,256", help="answers to the prompt")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt")
    args = parser.parse_args()
    random.seed(1)
    counts, gpu = [int(rows) for rows in args.rows.split(",")], bool(args.size)
    weights = None
    if gpu:
        tensors = FAMILIES["rwkv7"](*ALL_SIZES[args.size], device="cuda")
        weights = checkpoint.from_tensors(f"random-{args.size}", tensors)
    engine = Engine(weights, device="cuda" if gpu else "cpu", max_rows=max(counts), l1=0, prefix_cache_mb=0)
    for rows in counts:
        times = [first_tokens(engine, rows, args.tokens, gpu) for _ in range(RUNS + 1)][1:]
        most = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) if gpu else peak_bytes()
        print(
            f"{rows:4d} rows of one prompt of {args.tokens} tokens: {statistics.median(times):.3f} s, "
            f"{most / 1e6:.0f} MB {'beyond the engine' if gpu else 'of the process'}",
            flush=True,
        )


def first_tokens(engine: Engine, rows: int, tokens: int, gpu: bool) -> float:
    """Seconds until each row has one token. Every prompt is a new one."""
    prompt = [random.randrange(1, 65000) for _ in range(tokens)]
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    answers = engine.generate([prompt], max_tokens=1, n=rows)
    assert len(answers) == rows
    return time.perf_counter() - began


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()

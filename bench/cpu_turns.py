#!/usr/bin/env python3
"""The model of two checkouts on a CPU, call by call in turns.

Other load on the machine then meets both alike. In bench/compare.py a turn is a whole bench. A ratio above 1
says that the new checkout is faster.

    python bench/cpu_turns.py OLD NEW [--seconds 100]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.make_checkpoint import SIZES, random_checkpoint

CASES = [f"decode {rows}" for rows in (1, 2, 4, 8, 16, 32, 64)] + [
    f"prefill {n}" for n in (16, 64, 256, 1000)
]

# Runs in each checkout: takes a case from a line and answers with its seconds. 0.1.0 had other module names.
WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
try:
    from rwkv_batch.model.checkpoint import load
    from rwkv_batch.model.rwkv7 import RWKV7
except ImportError:
    from rwkv_batch.checkpoint import load
    from rwkv_batch.rwkv7 import RWKV7
try:
    from rwkv_batch.model.cpu.rwkv7 import CpuRWKV7
    from rwkv_batch.ops.cpu import binding
    model = CpuRWKV7(load(sys.argv[2]), kernels=binding.load())
except ImportError:
    model = RWKV7(load(sys.argv[2]))
states = model.new_states(64)
ids = torch.randint(1, 65529, (1000,), generator=torch.Generator().manual_seed(0))
for line in sys.stdin:
    kind, count = line.split()[0], int(line.split()[1])
    start = time.perf_counter()
    if kind == "prefill":
        model.forward(ids[:count], [count], [0], states)
    else:
        for step in range(4):
            model.forward(ids[step : step + count], [1] * count, range(count), states)
    print(time.perf_counter() - start, flush=True)
"""


class Worker:
    """A process with the model of one checkout."""

    def __init__(self, checkout: str, checkpoint: Path) -> None:
        command = [sys.executable, "-B", "-c", WORKER, checkout, str(checkpoint)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, case: str) -> float:
        """Seconds."""
        assert self._process.stdin and self._process.stdout
        print(case, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--seconds", type=float, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "random-0.1b.pth"
        torch.save(random_checkpoint(*SIZES["0.1b"]), checkpoint)
        workers = [Worker(checkout, checkpoint) for checkout in (args.old, args.new)]
        seconds: dict[str, tuple[list[float], list[float]]] = {case: ([], []) for case in CASES}
        for worker in workers:
            for case in CASES:
                worker.measure(case)
        end, turn = time.monotonic() + args.seconds, 0
        while time.monotonic() < end:
            for case in CASES:
                turn += 1
                for side in (0, 1) if turn % 2 else (1, 0):
                    seconds[case][side].append(workers[side].measure(case))
        for worker in workers:
            worker.stop()
    print("| case | turns | old, ms | new, ms | ratio of medians | median ratio of a turn |")
    print("|---|---|---|---|---|---|")
    for case, (old, new) in seconds.items():
        paired = median(a / b for a, b in zip(old, new, strict=True))
        print(
            f"| {case} | {len(old)} | {median(old) * 1e3:.1f} | {median(new) * 1e3:.1f} "
            f"| {median(old) / median(new):.3f} | {paired:.3f} |"
        )


if __name__ == "__main__":
    main()

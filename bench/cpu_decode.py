#!/usr/bin/env python3
"""Speed of the model alone on a CPU, beside the `rwkv` package on the same weights in the same process.

The two take turns, round by round, so that whatever else the machine does meets both. Medians of the rounds are printed.

    OMP_WAIT_POLICY=passive python bench/cpu_decode.py                      # random weights of the published 0.1B shape
    OMP_WAIT_POLICY=passive python bench/cpu_decode.py --model rwkv7-g1-0.1b.pth --rounds 20
"""
import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.make_checkpoint import SIZES, random_checkpoint  # noqa: E402
from rwkv_batch.checkpoint import load  # noqa: E402
from rwkv_batch.rwkv7 import RWKV7  # noqa: E402

STEPS = 8                      # decode steps a round
ROWS = (1, 2, 4, 8, 16, 32, 64)
PIECES = (16, 64, 256, 1000)   # prompt tokens in one call
PACKAGE = "`rwkv`, 1 row"


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def cases(path: Path) -> dict[str, tuple[int, int, Callable[[], object]]]:
    """For each line of the table: tokens and model calls in one round, and the round."""
    os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="1", RWKV_CUDA_ON="0")
    from rwkv.model import RWKV
    model, package = RWKV7(load(path)), RWKV(str(path.with_suffix("")), "cpu fp32")
    states = model.new_states(max(ROWS))
    ids = torch.randint(1, 65529, (max(PIECES),), generator=torch.Generator().manual_seed(0))

    def package_rounds() -> None:
        state = None
        for token in ids[:STEPS].tolist():
            _, state = package.forward([token], state)

    def decode(rows: int) -> Callable[[], None]:
        def steps() -> None:
            for step in range(STEPS):
                model.forward(ids[step:step + rows], [1] * rows, range(rows), states)
        return steps

    def prefill(length: int) -> Callable[[], object]:
        return lambda: model.forward(ids[:length], [length], [0], states)

    return ({PACKAGE: (STEPS, STEPS, package_rounds)}
            | {f"{rows} row{'s' if rows > 1 else ''}": (STEPS * rows, STEPS, decode(rows)) for rows in ROWS}
            | {f"prefill {length}": (length, 1, prefill(length)) for length in PIECES})


def machine() -> str:
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a .pth checkpoint; without it, random weights of the 0.1B shape")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if path is None:
            path = Path(folder) / "random-0.1b.pth"
            torch.save(random_checkpoint(*SIZES["0.1b"]), path)
        rounds = cases(path)
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for _, _, action in rounds.values():
        action()
    for _ in range(args.rounds):
        for name, (_, _, action) in rounds.items():
            seconds[name].append(timed(action))

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    print(f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {machine()}, torch {torch.__version__}, OMP_WAIT_POLICY {policy}, "
          f"{args.rounds} rounds, load {os.getloadavg()[0]:.1f}\n")
    print("| | tokens/s, median | of one row | of `rwkv` | ms a call, median | best |\n|---|---|---|---|---|---|")
    for name, (tokens, calls, _) in rounds.items():
        of_row, of_package = (median(b / a * tokens / STEPS for a, b in zip(seconds[name], seconds[other], strict=True))
                              for other in ("1 row", PACKAGE))
        print(f"| {name} | {tokens / median(seconds[name]):.0f} | {of_row:.2f} | {of_package:.2f} "
              f"| {median(seconds[name]) / calls * 1e3:.1f} | {min(seconds[name]) / calls * 1e3:.1f} |")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The host's share of a decode step: what the engine does in Python, over a device that takes no time.

The runner is replaced by one that knows its random draws at once. Launch is all that comes before the device
begins with a step, land all that comes of its draws, up to the messages for front ends.

    python bench/host_step.py --rows 320 --steps 4
"""

import argparse
import gc
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine_level import ENDLESS, KEY
from bench.make_checkpoint import random_checkpoint
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model import checkpoint
from rwkv_batch.runner.protocol import Batch, Draws, KnownDraws
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.wire.protocol import GenerateRequest

STEPS, RUNS, WARM_UP = 30, 15, 20
DRAWN = 64  # steps whose draws differ
STOPS = 3  # ids that may end a row which is queued ahead, as on a GPU


def engine_without_device(rows: int, steps: int) -> Engine:
    """An engine whose steps cost only what the host does. steps: as of Runner.most_steps."""
    ids = random.Random(1)
    drawn = [[ids.randrange(1, 65000) for _ in range(rows * steps)] for _ in range(DRAWN)]

    def run(self: TorchRunner, batch: Batch) -> Draws:
        drawn.append(drawn.pop(0))
        return KnownDraws(drawn[-1][: batch.steps * len(batch.draws)], [], [])

    TorchRunner.run, TorchRunner.run_ahead_stop_ids, TorchRunner.most_steps = run, STOPS, steps
    weights = checkpoint.from_tensors("tiny", random_checkpoint(1, 64))
    return Engine(weights, device="cpu", max_rows=rows, l1=0, prefix_cache_mb=0)


def measure(rows: int, requests: int, steps: int) -> None:
    engine = engine_without_device(rows, steps)
    for number in range(requests):
        prompts: list[str | list[int]] = [[1, 2, 3, 4]] * (rows // requests)
        name = f"r{number}"
        request = GenerateRequest(
            id=name, prompts=prompts, max_tokens=ENDLESS, stop_ids=[], flush_tokens=1, prefix_cache=False
        )
        engine.add((KEY, name), request)
    for _ in range(WARM_UP):
        engine.step()
    gc.collect()
    gc.freeze()  # as the server does
    found = [_run(engine, rows) for _ in range(RUNS)]
    for place, name in enumerate(("launch", "land")):
        times = [each[place] * 1e6 for each in found]
        least = min(times)
        print(
            f"{rows} rows in {requests} requests, {name}: median {statistics.median(times):.0f} us, "
            f"least {least:.0f} us, {least / rows:.2f} us a row"
        )


def _run(engine: Engine, rows: int) -> tuple[float, float]:
    """Seconds of the two halves of a step, those launched together counted as several."""
    launch = land = 0.0
    before = engine.counts.generation_tokens
    for _ in range(STEPS):
        begin = time.perf_counter()
        engine.launch()
        between = time.perf_counter()
        engine.land()
        launch, land = launch + between - begin, land + time.perf_counter() - between
    steps = (engine.counts.generation_tokens - before) / rows
    return launch / steps, land / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--steps", type=int, default=1, help="launched together, at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for requests in (1, args.rows):
        measure(args.rows, requests, args.steps)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The host's share of a decode step: what the engine does in Python, over a device that takes no time.

The runner is replaced by one that knows its random draws at once. Launch is all that comes before the device
begins with a step, land all that comes of its draws, up to the messages for front ends. With --tokens, rows
end after so many tokens on average and others take their places, over a device that takes --device-us for a
step of any number of rows; what is printed is tokens/s and how long rows wait for their first token.

    python bench/host_step.py --rows 320 --steps 4
    python bench/host_step.py --rows 320 --steps 4 --tokens 100 --device-us 300
"""

import argparse
import gc
import math
import random
import statistics
import sys
import time
from pathlib import Path

import torch
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine_level import ENDLESS, KEY, request_for
from bench.make_checkpoint import random_checkpoint
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model import checkpoint
from rwkv_batch.runner.protocol import Batch, Draws, KnownDraws
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.wire.protocol import Progress

STEPS, RUNS, WARM_UP = 30, 15, 20
LOOP_RUNS, LOOP_SECONDS, PROMPT = 5, 1.0, 16
STOP = 7  # what ends rows
DRAWN = 64  # steps whose draws differ
STOPS = 3  # ids that may end a row which is queued ahead, as on a GPU


class LaterDraws(KnownDraws):
    """Draws of a device that is done with them at `end`, as of time.perf_counter."""

    def __init__(self, ids: list[int], end: float) -> None:
        super().__init__(ids, [], [])
        self._end = end

    def wait(self) -> list[int]:
        while time.perf_counter() < self._end:
            pass
        return super().wait()


def engine_without_device(rows: int, steps: int, tokens: float = math.inf, device: float = 0.0) -> Engine:
    """An engine whose steps cost only what the host does. steps: as of Runner.most_steps.

    tokens: of a row before it draws STOP, on average. device: seconds of a step.
    """
    ids, ends = random.Random(1), 0.0
    drawn = [
        [STOP if ids.random() < 1 / tokens else ids.randrange(STOP + 1, 65000) for _ in range(rows * steps)]
        for _ in range(DRAWN)
    ]

    def run(self: TorchRunner, batch: Batch) -> Draws:
        nonlocal ends
        drawn.append(drawn.pop(0))
        ends = max(ends, time.perf_counter()) + device * batch.steps
        return LaterDraws(drawn[-1][: batch.steps * len(batch.draws)], ends)

    TorchRunner.run, TorchRunner.run_ahead_stop_ids, TorchRunner.most_steps = run, STOPS, steps
    weights = checkpoint.from_tensors("tiny", random_checkpoint(1, 64))
    return Engine(weights, device="cpu", max_rows=rows, l1=0, prefix_cache_mb=0)


def measure(rows: int, requests: int, steps: int) -> None:
    engine = engine_without_device(rows, steps)
    for number in range(requests):
        name = f"r{number}"
        engine.add((KEY, name), request_for(rows // requests, 4, ENDLESS, name))
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


def measure_loop(rows: int, steps: int, tokens: float, device: float) -> None:
    engine = engine_without_device(rows, steps, tokens, device)
    began: dict[str, float] = {}

    def add() -> None:
        name = f"r{time.perf_counter_ns()}"
        began[name] = time.perf_counter()
        engine.add((KEY, name), replace(request_for(1, PROMPT, ENDLESS, name), stop_ids=[STOP]))

    def run() -> tuple[float, float]:
        """Tokens/s, and seconds to the first token, on average."""
        waits, start, before = list[float](), time.perf_counter(), engine.counts.generation_tokens
        while time.perf_counter() < start + LOOP_SECONDS:
            for (_, name), event in engine.step():
                if isinstance(event, Progress):
                    if name in began:
                        waits.append(time.perf_counter() - began.pop(name))
                    for row in event.rows:
                        if row.finish_reason:
                            add()
        drawn = engine.counts.generation_tokens - before
        return drawn / (time.perf_counter() - start), statistics.mean(waits)

    for _ in range(rows):
        add()
    run()
    gc.collect()
    gc.freeze()
    rates, waits = zip(*(run() for _ in range(LOOP_RUNS)), strict=True)
    print(
        f"{rows} rows of {tokens:g} tokens, device {device * 1e6:.0f} us: {statistics.median(rates):.0f} "
        f"tokens/s, first token after {statistics.median(waits) * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--steps", type=int, default=1, help="launched together, at most")
    parser.add_argument("--tokens", type=float, help="of a row, on average; then others take its place")
    parser.add_argument("--device-us", type=float, default=0.0, help="of a step, with --tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.tokens:
        return measure_loop(args.rows, args.steps, args.tokens, args.device_us / 1e6)
    for requests in (1, args.rows):
        measure(args.rows, requests, args.steps)


if __name__ == "__main__":
    main()

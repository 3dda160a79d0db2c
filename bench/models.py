#!/usr/bin/env python3
"""Two models on one GPU: their speed together against each alone, and a swap under streams.

Through the engine, without the socket. Together, both decode endless rows of random prompts; printed is the
part of its own speed that each keeps (wanted: at least 45%). In a swap, a checkpoint takes the place of the
first model while its rows stream (wanted: no failed request, no gap over 500 ms).

    python bench/models.py --sizes 1.5b 7.2b --rows 64
    python bench/models.py --sizes 7.2b --rows 64 --swap /tmp/rwkv7-7.2b.pth

The file for --swap comes from bench/make_checkpoint.py.
"""

import argparse
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.decode import need_gpu
from bench.engine_level import ENDLESS, request_for
from bench.make_checkpoint import SIZES, random_checkpoint
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.memory import MemoryShare
from rwkv_batch.engine.serving.changes import ModelChanges
from rwkv_batch.engine.serving.models import Models
from rwkv_batch.model import checkpoint
from rwkv_batch.runner.loading import load_model
from rwkv_batch.wire.commands import LoadModel
from rwkv_batch.wire.protocol import CommandReply, Event, Failed, GenerateRequest, Progress, Rejected

WARM_UP, MEASURED = 3.0, 10.0  # seconds
PROMPT, STREAM = 32, 400  # tokens of a prompt, and of a stream
DEVICE = "cuda"


class Stepper:
    """Models, stepped by this thread. Counts tokens and gaps by request."""

    def __init__(self, sizes: list[str], rows: int) -> None:
        self.config = EngineConfig(device=DEVICE, max_rows=rows, prefix_cache_mb=0)
        loaded = [load_model(self._weights(size), self.config) for size in sizes]
        engines: list[Engine] = []
        self._woken = threading.Event()
        for model in loaded:
            kept = max((engine.step_bytes for engine in engines), default=0)
            share = MemoryShare(len(loaded) - len(engines), len(loaded), kept)
            engines.append(Engine(model, config=self.config, share=share, wake=self._woken.set))
        self.models = Models(engines)
        self.changes = ModelChanges(
            self.models, tuple(self.config for _ in sizes), lambda _: None, self._woken.set
        )
        self.tokens: dict[str, int] = {}  # by request
        self.last: dict[str, float] = {}  # when its last text came
        self.running: set[str] = set()
        self.gap = 0.0  # the longest between two pieces of text of a request
        self.failed: list[Event] = []
        self.replies: list[CommandReply] = []

    @staticmethod
    def _weights(size: str) -> checkpoint.Checkpoint:
        return checkpoint.from_tensors(f"random-{size}", random_checkpoint(*SIZES[size], device=DEVICE))

    def begin(self, model: str, rows: int, name: str, max_tokens: int = ENDLESS) -> None:
        """Rows of random prompts, as one request."""
        given = request_for(rows, PROMPT, max_tokens)
        request = GenerateRequest(
            id=name,
            prompts=given.prompts,
            max_tokens=max_tokens,
            stop_ids=[],
            flush_tokens=1,
            prefix_cache=False,
            to_model=model,
        )
        self.tokens[name] = 0
        self.running.add(name)
        self.models.add((b"bench", name), request)

    def step(self) -> None:
        now = 0.0
        for _, event in [*self.models.launch(), *self.models.land()]:
            now = now or time.perf_counter()
            if isinstance(event, Progress):
                self.tokens[event.id] += sum(row.tokens for row in event.rows)
                self.gap = max(self.gap, now - self.last.get(event.id, now))
                self.last[event.id] = now
                if any(row.finish_reason for row in event.rows):
                    self.running.discard(event.id)
            elif isinstance(event, CommandReply):
                self.replies.append(event)
            elif isinstance(event, Rejected | Failed):
                self.failed.append(event)

    def run(self, seconds: float) -> dict[str, float]:
        """Tokens a second of each request over that time."""
        for length in (WARM_UP, seconds):
            before, began = dict(self.tokens), time.perf_counter()
            while time.perf_counter() - began < length:
                self.step()
        took = time.perf_counter() - began
        return {name: (count - before[name]) / took for name, count in self.tokens.items()}

    def stop(self) -> None:
        """Forget all requests."""
        self.models.cancel_frontend(b"bench")
        self.tokens.clear()
        self.last.clear()
        self.running.clear()


def together(sizes: list[str], rows: int) -> dict[str, object]:
    """Speed of each alone and beside the other."""
    stepper = Stepper(sizes, rows)
    names = [info.model for info in stepper.models.infos]
    alone: dict[str, float] = {}
    for name in names:
        stepper.begin(name, rows, name)
        alone |= stepper.run(MEASURED)
        stepper.stop()
    for name in names:
        stepper.begin(name, rows, name)
    both = stepper.run(MEASURED)
    for name in names:
        print(
            f"{name}: {alone[name]:9.0f} tokens/s alone, {both[name]:9.0f} together: "
            f"{both[name] / alone[name]:.0%} of its own speed"
        )
    return {"rows": rows, "alone": alone, "together": both}


def swap(size: str, rows: int, path: str) -> dict[str, object]:
    """Streams of one row each, and a checkpoint that takes the place of theirs."""
    stepper = Stepper([size], rows)
    name, number = stepper.models.infos[0].model, 0

    def keep_streams() -> None:
        nonlocal number
        while len(stepper.running) < rows:
            stepper.begin(name, 1, f"stream-{number}", STREAM)
            number += 1

    def run(until) -> float:
        stepper.gap = 0.0
        while not until():
            keep_streams()
            stepper.step()
        return stepper.gap

    began = time.perf_counter()
    usual = run(lambda: time.perf_counter() - began > WARM_UP + MEASURED)
    began = time.perf_counter()
    stepper.changes.run((b"bench", "load"), LoadModel("load", path, name))
    during = run(lambda: stepper.replies or stepper.failed)
    loaded = time.perf_counter() - began
    after = run(lambda: time.perf_counter() - began > loaded + 3 * MEASURED)
    note = stepper.replies[0].note if stepper.replies else ""
    print(
        f"{size}: {rows} streams, {number} requests, {len(stepper.failed)} failed; loaded in {loaded:.1f} s. "
        f"Longest gap: {usual * 1e3:.0f} ms before, {during * 1e3:.0f} ms while loading, "
        f"{after * 1e3:.0f} ms after. {note}"
    )
    for event in stepper.failed[:3]:
        print(event)
    return {"failed": len(stepper.failed), "seconds": loaded, "gaps": [usual, during, after], "note": note}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1.5b", "7.2b"])
    parser.add_argument("--rows", type=int, default=64, help="of each model, or streams of a swap")
    parser.add_argument("--swap", metavar="FILE", help="the checkpoint that takes the place of the first one")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    need_gpu()
    found = swap(args.sizes[0], args.rows, args.swap) if args.swap else together(args.sizes, args.rows)
    if args.json:
        Path(args.json).write_text(json.dumps({"command": sys.argv, **found}), encoding="utf-8")


if __name__ == "__main__":
    main()

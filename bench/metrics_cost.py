#!/usr/bin/env python3
"""What metrics cost a step of the engine: the calls that they add to it, and nothing else, in CPU time.

Rows are those of a decode step that is queued ahead, as on a GPU; some end, and others begin. A GPU's two
timing events are not among it: `--events` adds them where there is a GPU. The share is that of a step of so
many milliseconds.

    python bench/metrics_cost.py [--rows 320] [--step-ms 10.9]
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rwkv_batch.engine.metrics.device_time import DeviceTime
from rwkv_batch.engine.scheduling.counts import EngineCounts
from rwkv_batch.engine.scheduling.sequence import DECODING, LAST, Sequence
from rwkv_batch.ops.device import StepClock
from rwkv_batch.runner.protocol import Batch
from rwkv_batch.wire.protocol import GenerateRequest

STEPS = 2000  # of a run
RUNS = 15


class AddedWork:
    """A step's calls, of Engine and of Models."""

    def __init__(self, rows: int, ending: int, device: torch.device) -> None:
        """ending: rows that end in each step and come anew."""
        request = GenerateRequest("bench", [[1]], 1000, stop_ids=[0, 261])
        self.rows = [Sequence((b"bench", "bench"), row, [1], request, 0) for row in range(rows)]
        for seq in self.rows:
            seq.state, seq.runs_ahead, seq.in_flight = DECODING, True, 1
        self.plan = [(seq, 1) for seq in self.rows]
        self.batch = Batch([LAST] * rows, [1] * rows, list(range(rows)), list(range(rows)))
        self.ids = list(range(300, 300 + rows))
        self.counts, self.clock, self.time = EngineCounts(), StepClock(device), DeviceTime()
        self.ending = self.rows[:ending]

    def step(self) -> None:
        counts = self.counts
        counts.step_kind = None
        self.clock.start()
        marks = counts.launch(self.plan, self.batch, self.rows)
        self.clock.stop(counts.step_kind, counts.steps)
        counts.land(marks, self.rows, self.ids)
        for place, seq in enumerate(self.ending):
            counts.lack(marks, seq, place)
            counts.finish(seq, "stop")
            counts.accept([seq], [[1]], [])
            counts.admit(seq)
            counts.begin(seq)
        spent = 0.0
        for kind, seconds, steps in self.clock.read():
            counts.step_times[kind].observe(seconds / steps, steps)
            spent += seconds
        self.time.add(spent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--ending", type=int, default=3, help="rows that end in a step (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=10.9, help="of the device (default %(default)s)")
    parser.add_argument("--events", action="store_true", help="with the events of the first GPU")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.events else torch.device("cpu")
    for ending in (0, args.ending):
        work, found = AddedWork(args.rows, ending, device), []
        for _ in range(RUNS):
            began = time.thread_time()
            for _ in range(STEPS):
                work.step()
            found.append((time.thread_time() - began) / STEPS * 1e6)
        share = median(found) / 1e3 / args.step_ms
        print(
            f"{args.rows} rows, {ending} end in each step: {median(found):.1f} us a step "
            f"({min(found):.1f} to {max(found):.1f}), {share:.3%} of {args.step_ms} ms"
        )


if __name__ == "__main__":
    main()

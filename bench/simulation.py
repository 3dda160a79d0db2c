#!/usr/bin/env python3
"""Histories of a simulated server: random requests, threads in a random order, and processes that die.

The scheduler, rows, state pool, database and the threads of these are the product's; the model is a hash of
its tokens, and the clock and the order of threads are drawn from a seed (test/helpers/turn_taking.py). Every
answer is compared with what it may be (test/helpers/possible_sessions.py). A history that fails is printed;
`--first SEED --histories 1` plays it again, step by step the same.

    python bench/simulation.py [--seconds 60 | --histories N] [--first SEED] [--plant BUG]
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "helpers")]


def main() -> int:
    import planted

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of playing, about")
    parser.add_argument("--histories", type=int, help="in place of a time")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first; those after it count on")
    bugs = {bug.__name__: bug for bug in planted.BUGS}
    parser.add_argument("--plant", choices=bugs, help="a bug that is to be found: then the exit code is 0")
    options = parser.parse_args()
    failed = play_all(options, bugs.get(options.plant, nullcontext))
    return int(failed if options.plant is None else not failed)


def play_all(options: argparse.Namespace, bug: type[nullcontext]) -> bool:
    """Play histories and report; whether one has failed."""
    from simulation import Counted, play

    counted, began, failed = Counted(), time.perf_counter(), False
    for seed in seeds(options, began):
        try:
            with bug():
                play(seed, counted)
        except (Exception, SystemExit):
            traceback.print_exc()
            print(f"seed {seed} has failed; see it again: bench/simulation.py --first {seed} --histories 1")
            failed = True
            break
    seconds = time.perf_counter() - began
    minutes = seconds / 60
    rates = f"{counted.histories / minutes:.0f} histories and {counted.steps / minutes:.0f} steps a minute"
    print(f"{counted.histories} histories, {counted.steps} steps of threads, {rates}")
    print(", ".join(f"{what}: {number}" for what, number in sorted(counted.events.items())))
    return failed


def seeds(options: argparse.Namespace, began: float) -> Iterator[int]:
    if options.histories is not None:
        yield from range(options.first, options.first + options.histories)
        return
    for seed in itertools.count(options.first):
        if time.perf_counter() - began > options.seconds:
            return
        yield seed


if __name__ == "__main__":
    if (
        os.environ.get("PYTHONHASHSEED") != "0"
    ):  # sets of strings have to be walked in the same order each time
        again = [sys.executable, *sys.argv]
        sys.exit(subprocess.run(again, env=os.environ | {"PYTHONHASHSEED": "0"}, check=False).returncode)
    sys.exit(main())

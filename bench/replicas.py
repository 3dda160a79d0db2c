#!/usr/bin/env python3
"""Engines of one server beside as many servers of one engine: turns of sessions, and requests without one.

    python bench/replicas.py [--engines 2] [--clients 32] [--turns 3] [--tokens 100] [-- APP_FLAGS]

Starts a server with so many engines on the CPU, and so many servers with one, each engine with one thread and
a front end. In each round the clients load the first; then each of the others has its share of them, all at
once; the next round begins with these. Each share has a process of its own. Prints a line for each round and
the median of their ratios: requests a second, and CPU time of a request, the clients' too. Exit code 1 if a
request fails.
"""

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.processes import GeneratorLost
from bench.serve import at_least
from bench.serve_all import Server
from bench.session_load import cpu_seconds, new_ids
from bench.turn_load import LoadFailed, TurnFigures, TurnPlan, plan_for, run_one_by_one

KINDS = {"turns": True, "without sessions": False}


@dataclass(frozen=True)
class SideResult:
    """What servers that were loaded at the same time have done."""

    rates: list[float]  # of each share of the clients, in requests a second
    cpu: float  # seconds of a request


def load(plan: TurnPlan) -> TurnFigures:
    """In a process of its own.  Raises LoadFailed."""
    figures = TurnFigures()
    figures.add(run_one_by_one(plan), plan.output_tokens)
    return figures


def run(pool: ProcessPoolExecutor, plans: Sequence[TurnPlan]) -> SideResult:
    """All at once.  Raises LoadFailed."""
    before = cpu_seconds()
    found = [*pool.map(load, plans)]
    spent = cpu_seconds() - before
    return SideResult(
        [each.turns / each.seconds for each in found], spent / sum(each.turns for each in found)
    )


def commits(server: Server) -> list[int]:
    """Turns that each engine of a server has stored."""
    text = server.get("/metrics").text
    return [*map(round, map(float, re.findall(r"(?m)^rwkv:session_commits_total\{.*\} (\S+)", text)))]


def measure(options: argparse.Namespace, app_flags: list[str]) -> None:
    """Raises LoadFailed."""
    ratios = {kind: list[tuple[float, float]]() for kind in KINDS}
    share = options.clients // options.engines
    with ExitStack() as stack:

        def started(engines: int) -> Server:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            devices, each = ",".join(["cpu"] * engines), str(engines)
            flags = ["--device", devices, "--threads", each, "--frontends", each, *app_flags]
            server = Server(flags, folder)
            stack.callback(server.stop)
            server.wait()
            return server

        def plans(servers: Sequence[Server], turns: int, sessions: bool) -> list[TurnPlan]:
            names = (new_ids(share) if sessions else () for _ in servers)
            requests, tokens = turns * share, options.tokens
            return [
                plan_for(server.url, share, requests, tokens, sessions=each)
                for server, each in zip(servers, names, strict=True)
            ]

        one = started(options.engines)
        sides = [one] * options.engines, [started(1) for _ in range(options.engines)]
        pool = stack.enter_context(ProcessPoolExecutor(options.engines, get_context("spawn")))
        for side in sides:
            run(pool, plans(side, 1, sessions=True))  # not counted
        print("| round | load | one server, a second | stored by its engines | others | ratio | CPU time |")
        print("|---|---|---|---|---|---|---|")
        for number in range(options.rounds):
            for kind, sessions in KINDS.items():
                before, found = commits(one), dict[int, SideResult]()
                for place in (0, 1) if number % 2 == 0 else (1, 0):
                    found[place] = run(pool, plans(sides[place], options.turns, sessions))
                stored = [after - was for after, was in zip(commits(one), before, strict=True)]
                ratio = sum(found[0].rates) / sum(found[1].rates), found[0].cpu / found[1].cpu
                ratios[kind].append(ratio)
                rates = " + ".join(f"{rate:.1f}" for rate in found[1].rates)
                by = " + ".join(map(str, stored)) if sessions else ""
                cells = f"{sum(found[0].rates):.1f} | {by} | {rates} | {ratio[0]:.2f} | {ratio[1]:.2f}"
                print(f"| {number + 1} | {kind} | {cells} |", flush=True)
    for kind, each in ratios.items():
        rate, cpu = (statistics.median(values) for values in zip(*each, strict=True))
        print(f"{kind}: median ratio {rate:.2f}, of CPU time {cpu:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, least, default, about in (
        ("engines", 2, 2, "of the one server, and other servers"),
        ("clients", 2, 32, "at once"),
        ("turns", 1, 3, "requests of each client"),
        ("tokens", 1, 100, "of an answer"),
        ("rounds", 1, 3, "of everything"),
    ):
        about = f"{about} (default %(default)s)"
        parser.add_argument(f"--{name}", type=at_least(least), default=default, help=about)
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:at])
    if options.clients % options.engines:
        parser.error("--clients is not a multiple of --engines")
    try:
        measure(options, argv[at + 1 :])
    except (LoadFailed, GeneratorLost, httpx.HTTPError) as error:
        print(f"bench/replicas.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

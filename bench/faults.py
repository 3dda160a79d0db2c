#!/usr/bin/env python3
"""Calls of the operating system that fail once, one after the other, under a server that is in use.

Clients take the steps of test/helpers/fault_scenario.py. In each step the first call of a kind fails, then
the second, until the step has no more. After every one all requests must have had an answer, what was
acknowledged must be there, and no open file, process or file on the disk may stay. For Linux, with a C
compiler.

With --inside calls inside the processes fail in place of those: allocations, messages between processes, the
starts of threads and processes (test/helpers/inside_faults.py). With --engine one allocation for each place
of an engine in this process does, while it is asked a list of requests (test/helpers/engine_faults.py).

    python bench/faults.py [--engines 1] [--postgres] [--steps chat,turns] [--calls write,sync] [--most N]
                           [--first N] [--only batches/] [--restarts] [--errors N]
"""

import argparse
import errno
import logging
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "helpers")]

import postgres_server  # noqa: E402
import power_cut  # noqa: E402
from fault_scenario import Scenario, Wrong, new_folder  # noqa: E402
from fault_steps import RESTARTS, STEPS  # noqa: E402
from faults import ERRORS, Call, Fault, Faults  # noqa: E402

MOST = 400  # calls of a kind in one step


@dataclass
class Point:
    """A call that has failed in a step. `said`: what a request was refused with; `wrong`: what came of it."""

    step: str
    fault: Fault
    role: str
    said: str
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Calls:
    """Which calls of a kind fail: `numbers` count those whose path holds `only`."""

    numbers: range
    only: str


def points(
    place: Scenario, faults: Faults, step: str, error: tuple[Call, int], calls: Calls
) -> Iterator[Point]:
    """Let each call of this kind fail once that is one of these, until the step has no more."""
    call, code = error
    for number in calls.numbers:
        before = place.server.children()
        arm = partial(faults.arm, call, code, number, calls.only)
        if step in RESTARTS:
            place.before_kill = arm
        else:
            arm()
        said, wrong = "", []
        try:
            said = place.run((STEPS | RESTARTS)[step])
        except (Wrong, AssertionError) as failure:
            wrong.append(str(failure) or repr(failure))
        fault = faults.disarm()
        wrong += place.check(whole=fault is None or bool(wrong))
        if fault is None:
            if said or wrong:
                print(f"{step}, in which no {call.name.lower()} failed: {said} {wrong}", flush=True)
            return
        role = next((name for name, pid in before.items() if pid == fault.process), "started anew")
        yield Point(step, fault, re.sub(r"-\d+$", "", role), said, wrong)


def kind_of(path: str) -> str:
    """Which of the server's files it is."""
    for pattern, kind in (
        (r"batches/file-.*", "file of a batch"),
        (r".*\.images/.*\.state|images/.*/states/.*\.state", "image"),
        (r".*\.images/.*\.part|images/.*/states/.*\.part", "image being written"),
        (r"images/rwkv_states-[^/]*/index\.db.*", "index of images"),
        (r"tmp/rwkv-[^/]*/counts/.*", "counts of requests"),
        (r"tmp/rwkv-[^/]*/upload-.*", "upload"),
    ):
        if re.fullmatch(pattern, path):
            return kind
    return path


def table(found: Sequence[Point]) -> list[str]:
    """A line for each kind of call, role and kind of file."""
    rows = Counter((each.fault.call.name.lower(), each.role, kind_of(each.fault.path)) for each in found)
    refused = Counter(
        (each.fault.call.name.lower(), each.role, kind_of(each.fault.path)) for each in found if each.said
    )
    lines = ["| call | process | file | points | refused |", "|---|---|---|---:|---:|"]
    return lines + [
        f"| {' | '.join(row)} | {number} | {refused[row]} |" for row, number in sorted(rows.items())
    ]


def fail_in_engine() -> None:
    """One allocation for each place of an engine, on the host and as on a GPU."""
    import engine_faults
    import torch
    from failing_memory import device_memory, host_memory
    from fault_points import FaultPoints

    from rwkv_batch.text import tokenizer

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    tokenizer.FEWEST_ROWS = 1  # the tiny model has few ids, which are the vocabulary's first
    for error in (host_memory, device_memory):
        found = [*engine_faults.every_place(FaultPoints(), error)]
        wrong = [f"{place}: {why}" for place, _, why in found if why]
        refused = sum(bool(outcome.errors) for _, outcome, _ in found)
        print(f"{error.__name__}: {len(found)} places, {refused} refused requests, {len(wrong)} wrong")
        print("\n".join(wrong), end="\n" * bool(wrong))


def fail_inside(options: argparse.Namespace) -> None:
    """Calls inside the processes of a server."""
    import inside_faults
    from inside_faults import CALLS, InsideFaults, InsidePoint

    folder, scratch, began = new_folder(), new_folder(), time.monotonic()
    faults, found = InsideFaults(scratch), list[InsidePoint]()
    kinds = [*CALLS] if options.inside == "all" else options.inside.split(",")
    steps = [*options.steps, *(RESTARTS if options.restarts else [])]
    try:
        with Scenario(folder, engines=options.engines, shell=faults.shell) as place:
            for step in [*STEPS, *STEPS]:
                if wrong := [each for each in (place.run(STEPS[step]), *place.check()) if each]:
                    sys.exit(f"{step}: {wrong}")
            place.note()
            for point in inside_faults.points(place, faults, steps, kinds, options.most):
                found.append(point)
                print(f"{point.step}: {point.fault}: {point.said}", *point.wrong, sep="\n    ", flush=True)
            print("after kill -9:", place.restart(kill=True) or "nothing is wrong")
    finally:
        print("\n".join(inside_faults.table(found)))
        wrong_points = sum(bool(each.wrong) for each in found)
        print(f"{len(found)} points in {time.monotonic() - began:.0f} s, {wrong_points} wrong", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(scratch)


def interrupted(number: int, _: object) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # nothing interrupts the end
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--postgres", action="store_true", help="sessions in PostgreSQL")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=[*STEPS])
    parser.add_argument("--calls", type=lambda text: [Call[name.upper()] for name in text.split(",")])
    parser.add_argument("--most", type=int, default=MOST, help="calls of a kind in a step")
    parser.add_argument("--first", type=int, default=0, help="calls of a kind in a step that go well before")
    parser.add_argument("--only", default="", help="calls on paths that hold this")
    parser.add_argument("--restarts", action="store_true", help="processes that are started again, too")
    parser.add_argument("--errors", type=int, default=1, help="errors of each kind of call")
    parser.add_argument("--inside", help="kinds of calls, separated by commas, or all")
    parser.add_argument("--engine", action="store_true", help="allocations of an engine in this process")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # what has been counted is printed then, too
        signal.signal(number, interrupted)
    if options.engine:
        return fail_in_engine()
    if options.inside:
        return fail_inside(options)
    if reason := power_cut.missing():
        sys.exit(reason)
    fail_in_system(options)


def fail_in_system(options: argparse.Namespace) -> None:
    """Calls of the operating system on the files of a server, and on its connections to PostgreSQL."""
    steps = [*options.steps, *(RESTARTS if options.restarts else [])]
    calls = Calls(range(options.first, options.first + options.most), options.only)
    folder, scratch, began = new_folder(), new_folder(), time.monotonic()
    faults, found = Faults(scratch, folder), list[Point]()
    flags, database = [], None
    if options.postgres:
        programs = postgres_server.find()
        assert programs, "there is no PostgreSQL; run test/helpers/postgres_server.py"
        database = postgres_server.PostgresServer(programs)
        flags = ["--state-db", database.url, "--image-store", str(folder / "images")]
    try:
        with Scenario(folder, *flags, engines=options.engines, shell=faults.shell) as place:
            for step in [*STEPS, *STEPS]:  # what is opened when it is first needed stays open
                if wrong := [each for each in (place.run(STEPS[step]), *place.check()) if each]:
                    sys.exit(f"{step}: {wrong}")
            place.note()
            for step in steps:
                for call in options.calls or [*ERRORS]:
                    for error in ERRORS[call][: options.errors]:
                        fail_each(place, faults, step, (call, error), calls, found)
            print("after kill -9:", place.restart(kill=True) or "nothing is wrong")
    finally:
        print("\n".join(table(found)))
        wrong_points = sum(bool(each.wrong) for each in found)
        print(f"{len(found)} points in {time.monotonic() - began:.0f} s, {wrong_points} wrong", flush=True)
        if database:
            database.close()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(scratch)


def fail_each(
    place: Scenario, faults: Faults, step: str, error: tuple[Call, int], calls: Calls, found: list[Point]
) -> None:
    """All points of a step and a kind of calls, each of which is printed if it is wrong."""
    began, before = time.monotonic(), len(found)
    for point in points(place, faults, step, error, calls):
        found.append(point)
        if point.wrong:
            print(f"{step}: {point.fault}: {point.said}", *point.wrong, sep="\n    ", flush=True)
            place.note()
    here = found[before:]
    counts = f"{len(here)} points, {sum(bool(each.said) for each in here)} refused"
    wrong = sum(bool(each.wrong) for each in here)
    name = f"{step}, {error[0].name.lower()} {errno.errorcode[error[1]]}"
    print(f"{name}: {counts}, {wrong} wrong, {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Crashes of a state pool, many of them: kill -9 and power cuts at random moments of recorded runs.

After each crash a pool is opened over what the disk has kept, and every session is checked: it has to be as
it was acknowledged last, or as it was asked for later, with the state of its tokens. For Linux, with a C
compiler.

With --engines, so many pools in processes of their own take turns on the sessions of one database, and a
crash is kill -9 or SIGSTOP of one of them, or of the process that writes for them. After every 50 crashes all
are killed and the database is checked against what each engine was told.

With --servers the same is done to servers of so many engines, under clients that take turns over HTTP; front
ends are killed too, and after every 20 crashes the supervisor, and another server tells the histories.

Both may run in several processes side by side, each with engines and a database of its own. When the time is
over, or at SIGINT or SIGTERM, what runs is checked and counted, and the table has what there was until then.

    python bench/crash_points.py [--points 1000] [--seed 0] [--markdown FILE]
    python bench/crash_points.py --servers 3 | --engines 2,3 [--points 1000] [--jobs 12] [--minutes 7]
"""

import argparse
import multiprocessing
import os
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from multiprocessing.synchronize import Event
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "helpers")]

import host_crash  # noqa: E402
import power_cut  # noqa: E402
import server_crash  # noqa: E402
from host_crash import Tally  # noqa: E402
from pool_truth import Checked  # noqa: E402
from pool_workload import VARIANTS, record  # noqa: E402
from power_cut import Names  # noqa: E402
from serving import Server  # noqa: E402

RUNS = 2  # of every variant, each with two recordings
KINDS: dict[str, Sequence[Names | None]] = {"kill -9": (None,), "power cut": ("synced", "any", "all")}
COLUMNS = ("variant", "kind", "points", "sessions checked", "images passed over", "failures")
TOLD = ("stored", "refused", "unknown")
STOP_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0, 40.0)  # how long an engine is stopped


def crash(points: int, seed: int, operations: int, folder: Path) -> tuple[list[tuple], list[str]]:
    """A row for each variant and kind of crash, and what has failed."""
    sums = {(variant, kind): Checked(0, 0, 0) for variant in VARIANTS for kind in KINDS}
    failures = {row: list[str]() for row in sums}
    runs = []
    for run in tqdm(range(RUNS), desc="recording", unit="run", disable=None):
        (folder / str(run)).mkdir()
        runs += record(folder / str(run), seed + run, operations)
    places = [(recording, kind) for kind in KINDS for recording in runs]
    with tqdm(total=points, unit="crash", disable=None) as bar:
        for number, (recording, kind) in enumerate(places):
            count = points // len(places) + (number < points % len(places))
            cuts = power_cut.cuts(recording.operations, count, KINDS[kind], seed + number)
            its_sum, its_failures = sums[recording.variant, kind], failures[recording.variant, kind]
            for outcome in recording.check(cuts):
                bar.update()
                its_sum.points += 1
                if isinstance(outcome, str):
                    its_failures.append(outcome)
                else:
                    its_sum.sessions += outcome.sessions
                    its_sum.passed_over += outcome.passed_over
    rows = [(*row, *astuple(its_sum), len(failures[row])) for row, its_sum in sums.items()]
    return rows, [failure for found in failures.values() for failure in found]


def lines(rows: list[tuple]) -> list[str]:
    total = ("together", "", *(sum(numbers) for numbers in list(zip(*rows, strict=True))[2:]))
    return [
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|" + "---:|" * (len(COLUMNS) - 2),
        *(f"| {' | '.join(map(str, row))} |" for row in [*rows, total]),
    ]


@dataclass(frozen=True)
class CrashKind:
    """Crashes of a running whole. play: so many of them with so many engines, in a new folder."""

    events: Sequence[str]
    of_a_round: int
    play: Callable[[int, int, int, Path, Tally], None]


def crash_many(kind: str, counts: list[int], options: argparse.Namespace, folder: Path) -> list[str]:
    """Print a table with a row for each number of engines; what has failed."""
    kinds, over = KINDS_OF_MANY[kind], multiprocessing.get_context("spawn").Event()
    tallies = {engines: Tally() for engines in counts}
    with (
        until_over(over, options.minutes),
        ProcessPoolExecutor(
            options.jobs, multiprocessing.get_context("spawn"), begin_job, (over,)
        ) as executor,
        tqdm(total=options.points, unit="crash", disable=None) as bar,
    ):
        rounds = {
            executor.submit(play_round, kind, engines, events, seed, folder / str(seed)): engines
            for engines, events, seed in _rounds(kinds, counts, options.points, options.seed)
        }
        for done in as_completed(rounds):
            found = done.result()
            tallies[rounds[done]].add(found)
            bar.update(found.events.total())
            for sentence in found.failures:
                print(sentence, file=sys.stderr, flush=True)
    columns = ("engines", *kinds.events, *(f"turns {name}" for name in TOLD), "longest wait", "failures")
    print(f"{sum(tally.events.total() for tally in tallies.values()):,} points, {options.jobs} at a time")
    print(f"| {' | '.join(columns)} |", "|" + "---:|" * len(columns), sep="\n")
    for engines, tally in tallies.items():
        numbers = [tally.events[name] for name in kinds.events] + [tally.turns[name] for name in TOLD]
        row = engines, *numbers, f"{tally.longest:.2f} s", len(tally.failures)
        print(f"| {' | '.join(map(str, row))} |", flush=True)
    return [failure for tally in tallies.values() for failure in tally.failures]


def _rounds(kind: CrashKind, counts: list[int], points: int, seed: int) -> Iterator[tuple[int, int, int]]:
    """Of each: how many engines, how many crashes, and its seed."""
    for number, engines in enumerate(counts):
        left = points // len(counts) + (number < points % len(counts))
        while left:
            seed += 1
            yield engines, min(left, kind.of_a_round), seed
            left -= min(left, kind.of_a_round)


@contextmanager
def until_over(over: Event, minutes: float | None) -> Iterator[None]:
    """It is over after so many minutes, or at a signal; the next signal ends this program."""

    def stop(number: int, _: object) -> None:
        over.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    timer = threading.Timer(60 * minutes, over.set) if minutes else None
    if timer:
        timer.daemon = True
        timer.start()
    yield
    if timer:
        timer.cancel()


def begin_job(over: Event) -> None:
    """In a process that plays rounds. Signals to the program, and to its group, are not for its servers."""
    global _over
    _over = over
    os.setsid()


def play_round(kind: str, engines: int, events: int, seed: int, folder: Path) -> Tally:
    """What has happened. An exception is a failure of the round."""
    tally = Tally()
    if not _over.is_set():
        try:
            KINDS_OF_MANY[kind].play(engines, events, seed, folder, tally)
        except Exception:
            tally.failures.append(f"round {seed}: {traceback.format_exc()}")
    return tally


def _crash_engines(engines: int, events: int, seed: int, folder: Path, tally: Tally) -> None:
    """On one database."""
    rounds = host_crash.Rounds(folder, engines, seed, STOP_SECONDS, tally)
    for _ in rounds.run(events):
        if _over.is_set():
            rounds.end()
            break


def _crash_servers(engines: int, events: int, seed: int, folder: Path, tally: Tally) -> None:
    """A server is started twice for them. The last event is the end of its supervisor."""
    database = folder.with_suffix(".db")
    devices = ["--device", ",".join(["cpu"] * engines), "--frontends", "2", "--max-rows", "4"]
    flags = [*devices, "--threads", str(engines), "--hung-seconds", "60", "--state-db", str(database)]
    server = Server(*flags)
    crashes = server_crash.ServerCrashes(server, seed, STOP_SECONDS, tally)
    try:
        for _ in crashes.run(events - 1):
            if _over.is_set():
                break
    finally:
        shutil.copy(Path(server.scratch) / "log", folder.with_suffix(".log"))
        left = server_crash.kill_supervisor(server)
        crashes.stop()
        server_crash.until_ended(left)
    tally.events["kill supervisor"] += 1
    server = Server(*flags)
    try:
        crashes.check(server)
    finally:
        server.stop()


_over: Event  # of a job: no round begins any more, and the one that runs ends
KINDS_OF_MANY = {
    "engines": CrashKind(("kill engine", "kill writer", "stop engine", "stop writer"), 50, _crash_engines),
    "servers": CrashKind((*server_crash.EVENTS, "kill supervisor"), 20, _crash_servers),
}


def page(rows: list[tuple]) -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    text = [
        "# Crashes of the state pool",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {platform.system()} {platform.release()}, "
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}.",
        "",
        f"    python bench/crash_points.py {' '.join(sys.argv[1:])}",
        "",
        "Every operation of a pool on its files is recorded (`test/helpers/disk_trace.c`). At each point",
        "the files are made again as the disk has them after a crash, a pool is opened over them, and all",
        "its sessions are checked. kill -9 keeps everything. A power cut keeps what was synced, and any",
        "part of the rest, with torn writes; of the names of files a third of the cuts keep those that were",
        "synced, a third any, and a third the last. An image that is passed over costs time: tokens are fed",
        "in its place. A failure is a session that is neither what was acknowledged last nor what was asked",
        "for after that, or whose state is not that of its tokens.",
        "",
        *lines(rows),
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=120, help="of each recorded process")
    parser.add_argument("--markdown", type=Path, help="file for the result as a page")
    parser.add_argument("--engines", type=lambda text: [int(n) for n in text.split(",")], help="how many")
    parser.add_argument("--servers", type=lambda text: [int(n) for n in text.split(",")], help="of how many")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at a time, of engines or servers")
    parser.add_argument("--minutes", type=float, help="after which they end early")
    options = parser.parse_args()
    if options.engines or options.servers:
        folder = Path(tempfile.mkdtemp(prefix="crash-points-"))
        kind, counts = ("engines", options.engines) if options.engines else ("servers", options.servers)
        if crash_many(kind, counts, options, folder):
            sys.exit(f"What is left of the rounds lies in {folder}.")
        shutil.rmtree(folder)
        return
    if reason := power_cut.missing():
        sys.exit(reason)
    folder = Path(tempfile.mkdtemp(prefix="crash-points-"))
    rows, failures = crash(options.points, options.seed, options.operations, folder)
    print("\n".join(lines(rows)))
    if options.markdown:
        options.markdown.write_text(page(rows), encoding="utf-8")
    if failures:
        sys.exit("\n".join(failures))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

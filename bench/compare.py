#!/usr/bin/env python3
"""Compare the speed of two checkouts on one machine, in turns: old, new, new, old, old, new, ...

    git worktree add ../old ff572e0
    python bench/compare.py ../old . --rounds 3 --record runs.jsonl --markdown compare.md \\
        --bench "decode.py --size 7.2b --batches 1,32,320,960 --prefill 1x1024,8x512" \\
        --bench "serve_all.py --model-path /tmp/m7.2b.pth"
    python bench/compare.py ../old . --bench "cpu_decode.py --rounds 3"

Each checkout runs its own bench/NAME with this interpreter, so either may have another layout. The ratio of a
figure is the median of the new checkout over the median of the old one, or its inverse for a time: above 1
the new checkout is faster. A row also gives the lowest and the highest ratio of a single round.

--record appends every finished run to a file. The same command later continues from that file, so a long
comparison may be spread over several calls. The exit code is 1 if a bench fails, or if a ratio is below
--at-least.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

SIDES = ("old", "new")
FIRST_TOKEN_ONLY = 2  # max_tokens of the loads whose figure is the time to the first token

Figures = dict[str, float]  # by name; the name ends with the unit


def decode_figures(output: str, written: str) -> Figures:
    """From the JSON object of bench/decode.py."""
    results = json.loads(written)
    return {
        f"{kind} {shape}, tokens/s": figure["tokens_per_s"]
        for kind in ("decode", "prefill")
        for shape, figure in results[kind].items()
    }


def serve_figures(output: str, written: str) -> Figures:
    """From the JSON lines of bench/serve_all.py, one per load."""
    figures = {}
    for load in map(json.loads, written.splitlines()):
        if load["asked_output_tokens"] <= FIRST_TOKEN_ONLY:
            figures[f"{load['note']}, ms"] = load["ttft_ms"]["median"]
        else:
            figures[f"{load['note']}, tokens/s"] = load["output_tokens_per_s"]
    return figures


def cpu_figures(output: str, written: str) -> Figures:
    """From the table that bench/cpu_decode.py prints; the lines of the `rwkv` package are left out."""
    row = r"^\| (\d+ rows?|prefill \d+) \| \d+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|"
    rows = re.findall(row, output, re.MULTILINE)
    figures = {f"{name}, ms": float(milliseconds) for name, _, milliseconds in rows}
    return figures | {f"{name}, times `rwkv`": float(times) for name, times, _ in rows if float(times)}


READERS: dict[str, tuple[Callable[[str, str], Figures], bool]] = {  # and whether the bench takes --json
    "decode.py": (decode_figures, True),
    "serve_all.py": (serve_figures, True),
    "cpu_decode.py": (cpu_figures, False),
}


def measure(checkout: Path, bench: str) -> Figures:
    """Run one bench once in a checkout. Raises RuntimeError with the end of its output if it fails."""
    name, *arguments = shlex.split(bench)
    read, takes_json = READERS[name]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures"
        file.touch()
        done = subprocess.run(
            [sys.executable, f"bench/{name}", *arguments, *([f"--json={file}"] if takes_json else [])],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=False,
        )
        figures = read(done.stdout, file.read_text(encoding="utf-8")) if done.returncode == 0 else {}
    if not figures:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"{bench} in {checkout}: exit code {done.returncode}\n{last}")
    return figures


class RunRecord:
    """The finished runs by (bench, round, side); in a file too, if there is one."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.runs: dict[tuple[str, int, str], Figures] = {}
        if file and file.exists():
            for run in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                self.runs[run["bench"], run["round"], run["side"]] = run["figures"]

    def add(self, bench: str, number: int, side: str, figures: Figures) -> None:
        self.runs[bench, number, side] = figures
        if self._file:
            with self._file.open("a", encoding="utf-8") as file:
                run = {"bench": bench, "round": number, "side": side, "figures": figures}
                file.write(json.dumps(run) + "\n")

    def rounds(self, bench: str) -> list[tuple[Figures, Figures]]:
        """(old, new) of every round of a bench in which both have run."""
        numbers = sorted(number for name, number, side in self.runs if (name, side) == (bench, SIDES[0]))
        return [
            (self.runs[bench, number, "old"], self.runs[bench, number, "new"])
            for number in numbers
            if (bench, number, "new") in self.runs
        ]


def ratio(name: str, old: float, new: float) -> float:
    """How many times as fast the new side is."""
    return old / new if name.endswith(" ms") else new / old


def compared(rounds: list[tuple[Figures, Figures]]) -> dict[str, tuple[float, float, list[float]]]:
    """Medians of old and new, and the ratio of every round, by the names that all rounds have."""
    names = [name for name in rounds[0][0] if all(name in side for pair in rounds for side in pair)]
    return {
        name: (
            median(old[name] for old, _ in rounds),
            median(new[name] for _, new in rounds),
            [ratio(name, old[name], new[name]) for old, new in rounds],
        )
        for name in names
    }


def table(record: RunRecord, benches: list[str], labels: tuple[str, str]) -> str:
    """Markdown: a heading and a table for every bench that has a complete round."""
    lines = [f"{datetime.now(UTC):%Y-%m-%d}, {machine()}. Old: {labels[0]}, new: {labels[1]}, in turns."]
    for bench in benches:
        if not (rounds := record.rounds(bench)):
            continue
        lines += ["", f"`python bench/{bench}`, medians of {len(rounds)}", ""]
        lines += ["| figure | old | new | ratio | of single rounds |", "|---|---|---|---|---|"]
        for name, (old, new, single) in compared(rounds).items():
            spread = f"{min(single):.3f} to {max(single):.3f}"
            lines.append(f"| {name} | {old:.5g} | {new:.5g} | {ratio(name, old, new):.3f} | {spread} |")
    return "\n".join(lines) + "\n"


def slow(record: RunRecord, benches: list[str], least: float) -> list[str]:
    """The figures whose ratio is below `least`."""
    results = {bench: compared(rounds) for bench in benches if (rounds := record.rounds(bench))}
    return [
        f"{bench}: {name}"
        for bench, figures in results.items()
        for name, (old, new, _) in figures.items()
        if ratio(name, old, new) < least
    ]


def label(checkout: Path) -> str:
    """The commit of a checkout; the name of the folder if it is no checkout of its own."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=checkout, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    if git("rev-parse", "--show-toplevel") != str(checkout.resolve()):
        return checkout.resolve().name
    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else "")


def machine() -> str:
    """The GPU and its driver; without one the processor."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        return f"{found[1] if found else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument(
        "--bench", action="append", required=True, help=f"one of {', '.join(READERS)}, with its flags"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each bench in each checkout")
    parser.add_argument("--record", type=Path, help="file of finished runs; continues from what it holds")
    parser.add_argument("--markdown", type=Path, help="write the tables here too")
    parser.add_argument("--at-least", type=float, default=0.0, help="exit code 1 if a ratio is lower")
    options = parser.parse_args()
    for bench in options.bench:
        if (name := shlex.split(bench)[0]) not in READERS:
            parser.error(f"--bench {name} is none of {', '.join(READERS)}")
    checkouts = {"old": options.old, "new": options.new}
    labels = (label(options.old), label(options.new))
    record, failure = RunRecord(options.record), ""
    turns = [
        (number, bench, side)
        for number in range(options.rounds)
        for bench in options.bench
        for side in (SIDES if number % 2 == 0 else reversed(SIDES))
    ]
    for number, bench, side in turns:
        if (bench, number, side) in record.runs:
            continue
        print(f"round {number + 1} of {options.rounds}, {side}: {bench}", file=sys.stderr, flush=True)
        try:
            record.add(bench, number, side, measure(checkouts[side], bench))
        except RuntimeError as error:
            failure = str(error)
            break
        if options.markdown:
            options.markdown.write_text(table(record, options.bench, labels), encoding="utf-8")
    print(table(record, options.bench, labels), end="")
    wrong = slow(record, options.bench, options.at_least)
    sys.exit(failure or (f"below {options.at_least}: {'; '.join(wrong)}" if wrong else 0))


if __name__ == "__main__":
    main()

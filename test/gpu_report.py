#!/usr/bin/env python3
"""The tests that need a GPU, and a report of them to send: gpu-report.md.

    make test-gpu                      all of them
    make test-gpu ARGS="-k wkv"        some; arguments are pytest's

The report names the GPU, the versions of its software and the commit, and has every failure in full. It has
no path of this machine but that of the repository in messages of failures.
"""

import platform
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rwkv_batch.ops.cuda import build

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "gpu-report.md"
MOST_LINES = 60  # of a failure


class Outcomes:
    """A pytest plugin: how the tests of each file ended, and the text of each failure."""

    def __init__(self) -> None:
        self.files: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.skipped: Counter[str] = Counter()  # by reason
        self.failures: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.files[report.nodeid.split("::")[0]][report.outcome] += 1
        if report.failed:
            self.failures.append((report.nodeid, report.longreprtext))
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append((report.nodeid, report.longreprtext))


def gpu() -> dict[str, object]:
    """What the device says of itself, and what drives it."""
    properties = torch.cuda.get_device_properties(0)
    names = ("gcnArchName", "multi_processor_count", "warp_size", "shared_memory_per_block", "total_memory")
    return {
        "GPU": torch.cuda.get_device_name(0),
        "architecture": build.architecture(0),
        **{name: getattr(properties, name) for name in names if hasattr(properties, name)},
        "torch": torch.__version__,
        "HIP": torch.version.hip,
        "CUDA": torch.version.cuda,
        "Python": platform.python_version(),
        "system": platform.platform(),
    }


def commit() -> str:
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def page(outcomes: Outcomes, command: list[str], seconds: float) -> str:
    """The report as markdown."""
    total: Counter[str] = sum(outcomes.files.values(), Counter())
    ended = [f"{count} {outcome}" for outcome, count in sorted(total.items())]
    lines = ["# Tests on a GPU", "", f"Commit {commit()}, {time.strftime('%Y-%m-%d')}, {seconds:.0f} s.", ""]
    lines += [f"    python test/gpu_report.py {' '.join(command)}".rstrip(), "", f"{', '.join(ended)}.", ""]
    lines += [f"- {name}: {value}" for name, value in gpu().items() if value is not None]
    lines += ["", "| file | passed | failed | skipped |", "|---|---|---|---|"]
    for file, counts in sorted(outcomes.files.items()):
        lines.append(f"| {file} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |")
    lines += ["", *(f"- skipped, {count}: {reason}" for reason, count in outcomes.skipped.most_common())]
    for name, text in outcomes.failures:
        lines += ["", f"## {name}", "", "```", *text.splitlines()[-MOST_LINES:], "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; install the torch for its driver (CUDA or ROCm), see README.md.")
    outcomes, began, command = Outcomes(), time.monotonic(), sys.argv[1:]
    code = pytest.main(["-m", "gpu", str(ROOT / "test"), *command], [outcomes])
    REPORT.write_text(page(outcomes, command, time.monotonic() - began), encoding="utf-8")
    print(f"The report is in {REPORT.name}.")
    sys.exit(code)


if __name__ == "__main__":
    main()

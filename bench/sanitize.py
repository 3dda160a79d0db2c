#!/usr/bin/env python3
"""compute-sanitizer over the GPU tests, with a summary line for each run.

memcheck finds bad accesses, racecheck races in shared memory.

    python bench/sanitize.py                       every GPU test in test/kernels
    python bench/sanitize.py --run racecheck -k wkv    one run; unknown flags go to pytest

`--jobs` processes share the tests of a run. A sanitizer slows kernels down 10 to 100 times, so only some
parameter sets of each test run: as few as cover every value of every parameter, and at most as many as RUNS
says. Only the kernels in cuda/ are watched. Tests of whole models, and those marked cublas, run under
memcheck alone: racecheck (CUDA 13.0) stops with an internal error in some kernels of cuBLAS. In place of
timing GEMMs, which takes minutes under it, they run by any of their methods. Tests marked many_launches would
take minutes under racecheck, and those of whole models under either. Exit code 1 if anything was found, or if
a test fails.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = {"memcheck": 8, "racecheck": 4, "memcheck-models": 2}  # with the most cases of a test
MARKS = {
    "memcheck": "gpu",
    "racecheck": "gpu and not many_launches and not cublas",
    "memcheck-models": "gpu and not many_launches",
}
NOT_OURS = ("test_capture.py", "test_blaslt.py")
FOUND = 86  # the exit code that means findings, unlike those of pytest
NO_TESTS = 5  # pytest's, of a job to which no test fell


def kernel_names() -> list[str]:
    """Of all kernels in cuda/."""
    found = (
        re.findall(
            r"__global__\s+void\s+(?:[A-Z_]+\s+)?(?:(?:__launch_bounds__|LAUNCH_BOUNDS)\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\(",
            file.read_text(encoding="utf-8"),
        )
        for file in sorted((ROOT / "cuda").glob("*.cu*"))
    )
    return sorted({name for names in found for name in names})


def tests(models: bool) -> list[str]:
    """The files whose tests run whole models, or the others; not those that run no kernel of ours.

    Those end racecheck with an internal error.
    """
    files = [file for file in sorted((ROOT / "test/kernels").glob("test_*.py")) if file.name not in NOT_OURS]
    return [
        str(file)
        for file in files
        if bool(re.search(r"RWKV7|Engine\(|Driver\(", file.read_text(encoding="utf-8"))) == models
    ]


def check(run: str, sanitizer: str, jobs: int, rest: list[str]) -> str | None:
    """Do one run and print a line about each job; returns what is wrong."""
    models = run.endswith("-models")
    # Threads of many processes that wait for each other would take the CPU from those that work.
    environment = os.environ | {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // jobs, 1))}
    if not models:  # every tensor has ends of its own then; but graphs are slow to capture
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

    def inside(job: int) -> list[str]:
        which = [f"--most-cases={RUNS[run]}", f"--share={job}/{jobs}", "-m", MARKS[run]]
        which += ["--any-method"] if models else []
        return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *which, *tests(models), *rest]

    watched = [option for name in kernel_names() for option in ("--kernel-name", f"kernel_substring={name}")]
    tool = [  # launches that fail raise errors in Python, and some tests want that
        *(sanitizer, "--tool", run.removesuffix("-models"), "--error-exitcode", str(FOUND)),
        *("--print-limit", "20", "--report-api-errors", "no", *watched),
    ]
    with ThreadPoolExecutor(jobs) as pool:
        codes = pool.map(lambda job: watch(run, [*tool, *inside(job)], environment), range(jobs))
        wrong = sorted({code for code in codes if code not in (0, NO_TESTS)})
    return f"{run}: exit codes {', '.join(map(str, wrong))}" if wrong else None


def watch(run: str, command: list[str], environment: dict[str, str]) -> int:
    """Print what a command prints, and a line about it; returns its exit code."""
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.strip())
    code = process.wait()
    outcome = next(
        (line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error).* in ", line)),
        "no test ran",
    )
    findings = next(
        (line.removeprefix("========= ") for line in reversed(lines) if " SUMMARY: " in line), "no summary"
    )
    print(
        f"{run}: {findings}; {outcome}; {time.monotonic() - start:.0f} s with its start, exit code {code}",
        flush=True,
    )
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description="compute-sanitizer over the GPU tests.")
    parser.add_argument("--run", action="append", choices=RUNS, help="only this one")
    parser.add_argument("--jobs", type=int, default=6, help="processes that share the tests (%(default)s)")
    options, rest = parser.parse_known_args()
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        sys.exit("There is no compute-sanitizer here; it comes with the CUDA toolkit.")
    subprocess.run(
        [sys.executable, "-m", "rwkv_batch.ops.cuda.build"], cwd=ROOT, check=True
    )  # without the tool
    wrong = [found for run in options.run or RUNS if (found := check(run, sanitizer, options.jobs, rest))]
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()

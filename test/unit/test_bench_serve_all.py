"""The loads that are measured one after the other, against a server of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.serve import parse_flags
from bench.serve_all import CASES

pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "serve_all.py"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("by", [1, 7, 10_000])
def test_the_load_generator_knows_every_flag(case, by):
    flags = parse_flags(case.divided(by).flags())
    assert (flags.requests, flags.batch) == (max(1, case.requests // by), max(1, case.batch // by))


def test_all_loads_run(tmp_path):
    file = tmp_path / "figures.jsonl"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--divide", "128", "--json", file, "--frontends", "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["note"] for each in figures] == [case.name for case in CASES]
    assert all(each["failed"] == 0 and each["output_tokens"] > 0 for each in figures)


def test_a_server_that_does_not_start_says_why():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--model-path", "/nowhere/model.pth"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "/nowhere/model.pth" in done.stderr

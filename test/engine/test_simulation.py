"""Simulated histories have right answers, and planted bugs are found in them (bench/simulation.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from planted import BUGS

ROOT = Path(__file__).parents[2]
FIRST = {"unlock_left_out": 30}  # the seed from which a bug is looked for; others are found soon


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "bench/simulation.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_answer_is_one_that_may_be() -> None:
    done = simulation("--histories", "25", "--first", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "25 histories" in done.stdout


@pytest.mark.thorough
def test_every_answer_of_a_minute_is_one_that_may_be() -> None:
    done = simulation("--seconds", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deaths of engines" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("bug", [bug.__name__ for bug in BUGS])
def test_a_planted_bug_is_found(bug: str) -> None:
    done = simulation("--plant", bug, "--seconds", "60", "--first", str(FIRST.get(bug, 0)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"seed \d+ has failed", done.stdout)


def test_a_seed_plays_the_same_again() -> None:
    one, two = (simulation("--histories", "4", "--first", "130").stdout for _ in range(2))

    def counted(output: str) -> str:
        return re.sub(r", \d+ histories and .*", "", output)

    assert counted(one) == counted(two)
    assert "steps" in one

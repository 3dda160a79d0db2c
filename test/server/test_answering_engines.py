"""Front ends and supervisor over engines without a model: many requests of all kinds, each checked."""

import subprocess
import sys

import pytest
from serving import ROOT

pytestmark = pytest.mark.thorough


def test_each_of_many_requests_has_its_answer_while_engines_are_killed() -> None:
    command = [sys.executable, "-m", "bench.soak", "--requests", "1500", "--kill-every", "0.7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1,500 requests" in done.stdout and " 0 engines killed" not in done.stdout

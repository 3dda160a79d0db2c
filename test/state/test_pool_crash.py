"""kill -9 while sessions are being saved: what was acknowledged is there."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pool_crash import KEYS, contents
from pools import Bench

HELPER = Path(__file__).parents[1] / "helpers" / "pool_crash.py"


@pytest.mark.parametrize("acknowledged", [2, 300])
def test_acknowledged_sessions_survive_kill_9(tmp_path: Path, acknowledged: int) -> None:
    path = tmp_path / "sessions.db"
    with subprocess.Popen([sys.executable, HELPER, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(acknowledged)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    numbers = [int(line) for line in lines if line.endswith("\n")]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= acknowledged
    bench = Bench(path)
    for key in range(KEYS):
        last = max((number for number in numbers if number % KEYS == key), default=0)
        result, found = bench.load(f"s{key}")
        if result.error is None:
            assert result.value >= last and torch.equal(found, contents(result.value))
        else:
            assert last == 0 and result.error == f"There is no session s{key}."
    bench.close()

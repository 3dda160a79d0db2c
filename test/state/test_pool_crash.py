"""kill -9 while turns are being stored: what was acknowledged is there, and nothing else is served."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pool_crash import KEYS, tokens
from pools import BEGINNING, Bench, after

pytestmark = pytest.mark.thorough

HELPER = Path(__file__).parents[1] / "helpers" / "pool_crash.py"


@pytest.mark.parametrize("acknowledged", [2, 300])
def test_acknowledged_turns_survive_kill_9(tmp_path: Path, acknowledged: int) -> None:
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
        states, state = [BEGINNING], BEGINNING
        for number in range(key or KEYS, len(numbers) + 2 * KEYS, KEYS):
            state = after(state, tokens(number))
            states.append(state)
        known = sum(1 for number in numbers if number % KEYS == key)
        assert (bench.look(f"s{key}") or BEGINNING) in states[known:]
    bench.close()

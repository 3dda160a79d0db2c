"""bench/compare.py: turns, ratios and continuing, with benches that write fixed figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
DECODE = """
import json, sys
from pathlib import Path
log = Path("../log")
runs = log.read_text() if log.exists() else ""
log.write_text(runs + {name!r})
speed = {speeds}[runs.count({name!r})]
file = sys.argv[-1].removeprefix("--json=")
figures = {{"tokens_per_s": speed}}
Path(file).write_text(json.dumps({{"decode": {{"32": figures}}, "prefill": {{"1x1024": figures}}}}))
"""
SERVE = """
import json, sys
from pathlib import Path
loads = [
    {{"note": "32 streams", "asked_output_tokens": 512, "output_tokens_per_s": 100.0, "ttft_ms": None}},
    {{"note": "first token", "asked_output_tokens": 2, "ttft_ms": {{"median": {ms}}}}},
]
file = sys.argv[-1].removeprefix("--json=")
Path(file).write_text("".join(json.dumps(load) + chr(10) for load in loads))
"""
CPU = """
print("| | tokens/s, median | times `rwkv` | times 1 row | ms a call, median | best |")
print("| `rwkv`, 1 row | 34 |  | 0.34 | 29.7 | 29.3 |")
print("| 1 row | 99 | {times} | 1.00 | {ms} | 9.6 |")
"""


@pytest.fixture
def checkouts(tmp_path):
    """Two folders with benches: the new one decodes as fast, answers sooner and runs slower on a CPU."""
    sides = {"old": ([100, 400, 104], 30.0, 2.0, 10.0), "new": ([110, 100, 104], 20.0, 1.5, 12.5)}
    for side, (speeds, first, times, ms) in sides.items():
        bench = tmp_path / side / "bench"
        bench.mkdir(parents=True)
        (bench / "decode.py").write_text(DECODE.format(name=side[0], speeds=speeds))
        (bench / "serve_all.py").write_text(SERVE.format(ms=first))
        (bench / "cpu_decode.py").write_text(CPU.format(times=times, ms=ms))
    return tmp_path


def compare(folder, *flags):
    command = [sys.executable, ROOT / "bench/compare.py", folder / "old", folder / "new", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_takes_turns_and_gives_the_ratio_of_medians(checkouts):
    done = compare(checkouts, "--bench", "decode.py --size 7.2b", "--rounds", "3")
    assert done.returncode == 0, done.stderr
    assert (checkouts / "log").read_text() == "onnoon"
    assert "Old: old, new: new" in done.stdout
    assert "| decode 32, tokens/s | 104 | 104 | 1.000 | 0.250 to 1.100 |" in done.stdout
    assert "| prefill 1x1024, tokens/s | 104 | 104 | 1.000 | 0.250 to 1.100 |" in done.stdout


def test_a_time_counts_as_its_inverse(checkouts):
    done = compare(checkouts, "--bench", "serve_all.py", "--bench", "cpu_decode.py", "--rounds", "1")
    assert "| 32 streams, tokens/s | 100 | 100 | 1.000 | 1.000 to 1.000 |" in done.stdout
    assert "| first token, ms | 30 | 20 | 1.500 | 1.500 to 1.500 |" in done.stdout
    assert "| 1 row, ms | 10 | 12.5 | 0.800 | 0.800 to 0.800 |" in done.stdout
    assert "| 1 row, times `rwkv` | 2 | 1.5 | 0.750 | 0.750 to 0.750 |" in done.stdout
    assert "`rwkv`, 1 row" not in done.stdout


def test_continues_from_the_record(checkouts):
    record, tables = checkouts / "record", checkouts / "tables"
    flags = ("--bench", "decode.py", f"--record={record}", f"--markdown={tables}")
    compare(checkouts, *flags, "--rounds", "1")
    done = compare(checkouts, *flags, "--rounds", "2")
    assert (checkouts / "log").read_text() == "onno"
    assert len(record.read_text().splitlines()) == 4
    assert "medians of 2" in done.stdout and tables.read_text() == done.stdout
    assert {json.loads(line)["side"] for line in record.read_text().splitlines()} == {"old", "new"}


def test_a_ratio_below_the_bound_fails(checkouts):
    done = compare(checkouts, "--bench", "cpu_decode.py", "--rounds", "1", "--at-least", "0.97")
    assert done.returncode == 1
    assert "below 0.97: cpu_decode.py: 1 row, ms; cpu_decode.py: 1 row, times `rwkv`" in done.stderr


def test_a_bench_that_fails_is_named(checkouts):
    (checkouts / "new/bench/decode.py").write_text("raise SystemExit('no GPU here')")
    done = compare(checkouts, "--bench", "decode.py", "--rounds", "1")
    assert done.returncode == 1
    assert "decode.py in" in done.stderr and "no GPU here" in done.stderr


def test_an_unknown_bench_is_refused(checkouts):
    done = compare(checkouts, "--bench", "roofline.py")
    assert done.returncode == 2 and "roofline.py is none of decode.py" in done.stderr

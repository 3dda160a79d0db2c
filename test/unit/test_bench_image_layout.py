"""bench/image_layout.py prints a row for each size and way."""

import sys

import pytest
from bench_modules import modules


def test_it_prints_a_row_for_each_size_and_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["image_layout.py", "--sizes", "0.01", "0.02", "--images", "3"])
    modules("image_layout").main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 0.")]
    assert [row[0] for row in rows] == ["| 0.01"] * 3 + ["| 0.02"] * 3
    assert all(float(rate) > 0 for row in rows for rate in row[2:4])

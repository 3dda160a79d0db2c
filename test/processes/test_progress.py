"""Bars of progress in a process that has no standard error, as a service or a window may have none."""

import pytest

from rwkv_batch.engine.offline import whole_rows
from rwkv_batch.evaluate.report import collect
from rwkv_batch.runner.loading import loading_bar
from rwkv_batch.wire.protocol import Progress, RowDelta


def test_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with loading_bar("a model") as progress:
        progress(1, 2)
        progress(2, 2)


def test_rows_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    rows = [RowDelta(row=1, text="b", tokens=1), RowDelta(row=0, text="a", tokens=1)]
    assert whole_rows([[(("", ""), Progress("id", rows))]], 2, progress=True) == rows[::-1]


def test_answers_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert collect([(1, "b"), (0, "a")], 2, "answers") == ["a", "b"]

"""What the load generator makes of times and texts, and when it sends, without a server."""

import itertools
from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load import LoadPlan, Prompts
from bench.report import Record, allot
from bench.report import summarize as figures_of

pytestmark = pytest.mark.thorough


def summarize(*records) -> dict:
    plan = LoadPlan("", "chat", Prompts(["x"]), len(records), None, 1, output_tokens=1000)
    return figures_of(plan, list(records), 0, 0.5)


def record(index: int, start: float, end: float, moments: list[float], texts: list[str], tokens: int):
    """One streamed row."""
    return Record(
        index,
        start,
        0.001 * index,
        end,
        streamed=True,
        times=array("d", moments),
        rows=array("l", [0] * len(moments)),
        texts={0: texts},
        usage=(10, tokens),
    )


def test_a_bundle_of_tokens_is_spread_over_its_gap_and_the_gap_is_reported_too():
    # one token at 0.1 s, four at 0.3 s, two events read together at 0.4 s with one token each
    figures = summarize(
        record(0, 0.0, 0.5, [0.1, 0.3, 0.4, 0.4], ["The", " cat sat down here", " and", " then"], 7)
    )
    assert figures["ttft_ms"] == {"mean": 100, "median": 100, "p99": 100}
    assert figures["itl_ms"] == {"mean": 50, "median": 50, "p99": 50}  # 200/4 four times, 100/2 twice
    assert figures["event_gap_ms"] == {"mean": 150, "median": 150, "p99": 199}
    assert (figures["output_tokens"], figures["text_events"], figures["tokens_per_event"]) == (7, 4, 1.75)
    assert (
        figures["e2e_ms"]["mean"] == 500
        and figures["duration_s"] == 0.5
        and figures["output_tokens_per_s"] == 14
    )


def test_a_text_event_without_a_token_of_its_own_lengthens_the_next_gap():
    figures = summarize(record(0, 0.0, 0.5, [0.1, 0.2, 0.4], [" and then", "x", " and then"], 2))
    assert figures["itl_ms"] == {"mean": 300, "median": 300, "p99": 300} and figures["usage_disagrees"] == 1
    assert figures["event_gap_ms"]["mean"] == 150


def test_percentiles_are_those_of_all_rows_of_all_requests():
    hundred = [
        record(i, float(i), i + 2.0, [i + 0.001 * (i + 1), i + 1.0], ["a", "b"], 2) for i in range(100)
    ]
    figures = summarize(*hundred)
    assert figures["ttft_ms"] == pytest.approx({"mean": 50.5, "median": 50.5, "p99": 99.01})
    assert figures["send_delay_ms"] == pytest.approx({"mean": 49.5, "median": 49.5, "p99": 98.01})
    assert figures["itl_ms"] == pytest.approx({"mean": 949.5, "median": 949.5, "p99": 998.01})
    assert (figures["duration_s"], figures["requests_per_s"], figures["output_tokens_per_s"]) == (
        101,
        0.99,
        1.98,
    )
    two_rows = Record(
        0,
        0.0,
        0.0,
        1.0,
        streamed=True,
        times=array("d", [0.1, 0.2, 0.5, 0.8]),
        rows=array("l", [0, 1, 0, 1]),
        texts={0: ["a", "b"], 1: ["c", "d"]},
        usage=(10, 4),
    )
    figures = summarize(two_rows)
    assert figures["ttft_ms"] == {"mean": 150, "median": 150, "p99": 199}
    assert figures["itl_ms"] == {"mean": 500, "median": 500, "p99": 598}


@settings(deadline=None)  # the first call imports
@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(0, 500))
def test_allotted_tokens_add_up(weights, total):
    held = allot(total, np.array(weights))
    assert held.sum() == total and held.min() >= (1 if total >= len(weights) else 0)
    if total == sum(weights):
        assert held.tolist() == weights


def test_arrivals_are_poisson_and_seeded():
    plan = LoadPlan("", "chat", None, 20_000, 50.0, 1, 1, seed=3)
    moments = [due for _, due in plan.arrivals()]
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert (
        moments[0] == 0
        and mean == pytest.approx(0.02, rel=0.03)
        and deviation == pytest.approx(mean, rel=0.05)
    )
    assert (
        moments == [due for _, due in plan.arrivals()] != [due for _, due in replace(plan, seed=4).arrivals()]
    )

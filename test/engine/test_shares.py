"""Fairness between models that are busy at the same time, with simulated times of their steps."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from rwkv_batch.engine.serving.shares import Shares


def run(
    shares: Shares[str], steps: int, busy: Callable[[int], Sequence[str]], cost: dict[str, float]
) -> list[str]:
    """Who had each step."""
    turns = []
    for number in range(steps):
        turn = shares.choose(busy(number))
        shares.spent(turn, cost[turn])
        turns.append(turn)
    return turns


def test_a_small_and_a_large_model_get_the_same_time():
    cost = {"small": 0.003, "large": 0.01}
    turns = Counter(run(Shares(), 4000, lambda _: ["small", "large"], cost))
    assert abs(turns["small"] * cost["small"] - turns["large"] * cost["large"]) <= max(cost.values())


def test_nobody_waits_longer_than_the_others_need_for_its_share():
    cost = {"a": 0.02, "b": 0.01, "c": 0.005}
    turns = run(Shares(), 3000, lambda _: list(cost), cost)
    for name in cost:
        at = [i for i, turn in enumerate(turns) if turn == name]
        gaps = [sum(cost[turn] for turn in turns[i + 1 : j]) for i, j in pairwise(at)]
        assert max(gaps) <= 2 * max(cost.values()) * (len(cost) - 1)


def test_one_that_was_idle_has_not_saved_up_time():
    cost = {"a": 0.01, "b": 0.01}
    turns = run(Shares(), 300, lambda n: ["a"] if n < 100 else ["a", "b"], cost)
    assert Counter(turns[100:120]) == {"a": 10, "b": 10}


def test_one_that_comes_back_does_not_pay_for_time_when_it_was_alone():
    shares: Shares[str] = Shares()
    cost = {"a": 0.01, "b": 0.01}
    run(shares, 100, lambda _: ["a"], cost)
    turns = run(shares, 20, lambda _: ["b", "a"], cost)
    assert Counter(turns) == {"a": 10, "b": 10}


def test_a_step_whose_time_is_known_late_is_made_up_for():
    """On a GPU a step's time is known when a later one has been queued."""
    shares: Shares[str] = Shares()
    cost, known, times = {"small": 0.001, "large": 0.02}, [], Counter[str]()
    for _ in range(4000):
        turn = shares.choose(["small", "large"])
        times[turn] += cost[turn]
        known.append(turn)
        if len(known) > 2:
            late = known.pop(0)
            shares.spent(late, cost[late])
    assert abs(times["small"] - times["large"]) <= 4 * max(cost.values())


def test_one_that_is_gone_leaves_nothing_behind():
    shares: Shares[str] = Shares()
    cost = {"old": 5.0, "new": 0.01, "other": 0.01}
    run(shares, 10, lambda _: ["old"], cost)
    shares.forget("old")
    assert Counter(run(shares, 20, lambda _: ["new", "other"], cost)) == {"new": 10, "other": 10}

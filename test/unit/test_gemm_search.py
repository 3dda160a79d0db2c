"""The search for the methods of all GEMMs, against all their combinations, on made-up times."""

import random
import statistics
from itertools import product

import pytest

from rwkv_batch.model.cuda.gemms.search import MOST, Search

pytestmark = pytest.mark.thorough

KINDS = {
    "in": ["stream32", "stream16", "tile"],
    "out": ["tile", "stream32", "blas"],
    "key": ["tile", "blas"],
    "value": ["sparse", "blas"],
    "value_split": ["whole", "tile/2"],
    "in_start": ["late", "early"],
    "key_start": ["late", "early"],
    "layers": ["separate", "together"],
    "head": ["blas", "stream16"],
}


class Times:
    """Seconds of a step: of each method alone, and what each two of them gain or lose together."""

    def __init__(self, seed: int, *, together: float) -> None:
        draw = random.Random(seed)
        named = [(kind, method) for kind, methods in KINDS.items() for method in methods]
        self.alone = {name: draw.uniform(1, 1.1) * 2e-5 for name in named}
        self.pairs = {(a, b): draw.uniform(-together, together) * 2e-5 for a in named for b in named if a < b}
        self.compared: list[dict[str, str]] = []

    def __call__(self, methods):
        used = sorted(methods.items())
        pairs = sum(self.pairs[a, b] for i, a in enumerate(used) for b in used[i + 1 :])
        return sum(self.alone[name] for name in used) + pairs

    def compare(self, options):
        for option in options:
            self.compared.append(option)
            yield
        return [self(option) for option in options]

    def of_all(self) -> list[float]:
        every = (dict(zip(KINDS, methods, strict=True)) for methods in product(*KINDS.values()))
        return sorted(map(self, every))


def run(search: Search) -> None:
    for _ in search.timing():
        pass


@pytest.mark.parametrize("seed", range(20))
def test_without_gains_beside_each_other_the_fastest_of_all_is_found(seed):
    times = Times(seed, together=0)
    search = Search(KINDS, times.compare)
    run(search)
    assert times(search.best) == pytest.approx(times.of_all()[0])


def test_with_them_it_is_close_to_the_fastest_of_all():
    """On average. Deciding kind by kind is twice as far from it."""
    excess = []
    for seed in range(40):
        times = Times(seed, together=0.01)
        search = Search(KINDS, times.compare)
        run(search)
        assert times(search.best) == min(map(times, times.compared))
        excess.append(times(search.best) / times.of_all()[0] - 1)
    assert statistics.mean(excess) < 0.0008 and max(excess) < 0.005


@pytest.mark.parametrize(("early", "both"), [(1.005, 0.98), (0.97, 0.94)])
def test_two_methods_that_are_faster_together_alone_are_found(early, both):
    """Beside a late start the tile is faster, and with the tile it is decided whether the start is early."""
    steps = {
        ("tile", "late"): 1.0,
        ("blas", "late"): 1.001,
        ("tile", "early"): early,
        ("blas", "early"): both,
    }

    def compare(options):
        yield
        return [1e-4 * steps[option["out"], option["key_start"]] for option in options]

    search = Search({"out": ["tile", "blas"], "key_start": ["late", "early"]}, compare)
    run(search)
    assert search.best == {"out": "blas", "key_start": "early"}


def test_methods_that_are_slow_beside_all_neighbours_are_compared_once():
    times = Times(3, together=0)
    times.alone = dict.fromkeys(times.alone, 2e-5) | {("out", "blas"): 6e-5}
    run(Search(KINDS, times.compare))
    assert sum(option["out"] == "blas" for option in times.compared) == 1


def test_the_same_step_is_not_compared_under_two_names():
    """With split-K it does not matter by which method the whole GEMM would be."""
    times = Times(2, together=0)
    times.alone = dict.fromkeys(times.alone, 2e-5) | {("value_split", "tile/2"): 1.9e-5}

    def step_of(methods):
        without = methods if methods["value_split"] == "whole" else methods | {"value": ""}
        return tuple(without.items())

    search = Search(KINDS, times.compare, step_of)
    run(search)
    combined = times.compared[-4 - 32 : -4]  # the last four are the head with and without one launch
    assert search.best["value_split"] == "tile/2"
    assert len(set(map(step_of, combined))) == len(combined)


def test_one_launch_is_compared_with_layers_that_are_final_and_each_head():
    times = Times(0, together=0)
    times.alone["layers", "together"] = 1e-6
    search = Search(KINDS, times.compare)
    run(search)
    assert search.best["layers"] == "together"
    assert all(option["layers"] == "separate" for option in times.compared[:-4])
    last = {(option["head"], option["layers"]) for option in times.compared[-4:]}
    assert last == {*product(KINDS["head"], KINDS["layers"])}
    of_layers = [*KINDS][:-2]
    assert all(option[kind] == search.best[kind] for option in times.compared[-4:] for kind in of_layers)


@pytest.mark.parametrize("seed", range(5))
def test_given_up_at_any_point_it_goes_on_with_what_it_has_found(seed):
    whole = Times(seed, together=0.02)
    at_once = Search(KINDS, whole.compare)
    run(at_once)
    for pieces in range(1, len(whole.compared)):
        times = Times(seed, together=0.02)
        search = Search(KINDS, times.compare)
        begun = search.timing()
        for _ in range(pieces):
            next(begun)
        begun.close()
        run(search)
        assert search.best == at_once.best
        assert len(times.compared) <= len(whole.compared) + MOST  # of the comparison that was given up


def test_of_slow_steps_fewer_combinations_are_compared():
    """Of steps of 0.2 ms as many as of 0.7, of 14 ms none: no comparison takes a second."""
    compared = []
    for factor in (1, 3, 70):
        times = Times(1, together=0.02)
        times.alone = {name: factor * seconds for name, seconds in times.alone.items()}
        times.pairs = {names: factor * seconds for names, seconds in times.pairs.items()}
        run(Search(KINDS, times.compare))
        compared.append(len(times.compared))
    assert compared[0] == compared[1] == compared[2] + MOST


def test_one_method_each_is_not_compared():
    search = Search({kind: methods[:1] for kind, methods in KINDS.items()}, lambda options: pytest.fail())
    run(search)
    assert search.best == {kind: methods[0] for kind, methods in KINDS.items()}

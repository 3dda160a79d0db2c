"""A ladder of graphs: steps run with and without one, with the same results; buffers stay where they are."""

from collections.abc import Callable
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from rwkv_batch.model.cuda.steps import graphs
from rwkv_batch.model.cuda.steps.graphs import PREFILL_SIZES, GraphLadder, prefill_sizes, prefills_held

SIZES = [1, 2, 4, 8]


class Graph:
    replay: Callable[[], None]


class Recorded:
    """Steps that double their inputs. A replay does what the capture has seen, over the same tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured = self.replays = self.launches = 0
        self.pools: list[WeakSet[Graph]] = []
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.new_pool)
        stream = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(graphs, "capture", self.capture)
        self.ladder: GraphLadder[Tensor, Tensor] = GraphLadder(
            "test", SIZES, lambda size: torch.zeros(size), self.step, arena := {}
        )
        self.arena = arena

    def step(self, inputs: Tensor, arena: dict[str, Tensor]) -> Tensor:
        self.launches += 1
        if len(arena.get("out", ())) < len(inputs):
            arena["out"] = torch.empty(len(inputs))
        out = arena["out"][: len(inputs)]
        torch.mul(inputs, 2, out=out)
        return out

    def new_pool(self) -> int:
        self.pools.append(WeakSet())
        return len(self.pools) - 1

    def capture(self, run, pool: int) -> "Graph":
        self.captured += 1
        run()
        run()

        def replay() -> None:
            self.replays += 1
            run()

        graph = Graph()
        graph.replay = replay
        self.pools[pool].add(graph)
        return graph

    def run(self, *numbers: float) -> list[float]:
        inputs, queue = self.ladder.take(len(numbers))
        inputs[: len(numbers)] = torch.tensor(numbers)
        return queue()[: len(numbers)].tolist()


@pytest.fixture
def it(monkeypatch) -> Recorded:
    return Recorded(monkeypatch)


def test_a_size_is_captured_when_a_step_first_needs_it(it):
    assert it.run(1, 2, 3) == [2, 4, 6]
    assert it.captured == 1 and it.ladder.missing == [1, 2, 8]
    assert it.run(5, 6, 7, 8) == [10, 12, 14, 16] and it.captured == 1


def test_later_ones_are_left_to_the_caller_and_steps_do_without(it):
    it.ladder.capture_later()
    assert it.run(1, 2, 3) == [2, 4, 6] and it.captured == it.replays == 0
    it.ladder.capture(4)
    assert it.run(1, 2, 3) == [2, 4, 6] and it.captured == it.replays == 1
    assert it.run(4) == [8] and it.replays == 1
    assert it.ladder.missing == [1, 2, 8] and it.ladder.runs == {4: 2, 1: 1}


def test_a_caller_who_does_otherwise_without_a_graph_is_counted(it):
    it.ladder.capture_later()
    assert not it.ladder.has(3) and not it.ladder.has(4) and it.ladder.runs == {4: 2}
    it.ladder.capture(4)
    assert it.ladder.has(3) and not it.ladder.has(1) and it.ladder.runs == {4: 2, 1: 1}


def test_one_that_is_forgotten_is_done_without_until_it_is_captured_again(it):
    it.ladder.capture_later()
    it.ladder.capture(2)
    it.ladder.forget(2)
    it.ladder.forget(8)
    assert it.run(1, 2) == [2, 4] and it.replays == 0
    it.ladder.capture(2)
    assert it.run(1, 2) == [2, 4] and it.replays == 1


def test_a_pool_whose_graphs_are_gone_is_given_up(it):
    """torch takes no more graphs into it."""
    for size in (2, 4, 2, 4):
        it.ladder.capture(size)
        it.ladder.forget(6 - size)
    assert len(it.pools) == 1
    it.ladder.forget(4)
    it.ladder.capture(4)
    assert [len(pool) for pool in it.pools] == [0, 1]


def test_buffers_of_graphs_never_move(it):
    it.ladder.capture_later()
    place = it.arena["out"].data_ptr()
    for size in SIZES:
        it.ladder.capture(size)
    assert it.run(*range(8)) == [2 * i for i in range(8)]
    assert it.arena["out"].data_ptr() == place


def test_all_of_them_at_once(it, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 31))
    it.run(1)
    it.ladder.capture_all(progress=False)
    assert it.captured == len(SIZES) and not it.ladder.missing


def test_a_step_without_a_graph_writes_where_graphs_do_but_never_moves_that(it):
    assert it.ladder.arena(2) == {}  # nothing is known to be large enough
    it.ladder.capture_later()
    place = it.arena["out"].data_ptr()
    arena = it.ladder.arena(8)
    it.step(torch.zeros(8), arena)
    assert arena["out"].data_ptr() == place
    it.step(torch.zeros(9), arena)
    assert arena["out"].data_ptr() != place == it.arena["out"].data_ptr()
    assert it.ladder.arena(9) == {}


@pytest.mark.parametrize("most", [1, 4, 5, 300, 1088, 5120, 5121, 100_000])
def test_prefills_have_graphs_up_to_what_a_step_can_have(most):
    sizes = prefill_sizes(most)
    assert sizes == PREFILL_SIZES[: len(sizes)]
    assert sizes[-1] >= most or sizes == PREFILL_SIZES
    assert all(size < most for size in sizes[:-1])
    assert prefill_sizes(None) == PREFILL_SIZES
    assert prefills_held(most) == ([sizes[-1]] if most <= sizes[-1] else [5120, most])

"""Several steps of one row in one CUDA graph draw what they draw one by one, and leave the same state."""

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu

from rwkv_batch.engine.scheduling.sequence import LAST
from rwkv_batch.runner.cuda_runner import MOST_STEPS, CudaRunner
from rwkv_batch.runner.protocol import Batch, NewRow
from rwkv_batch.wire.protocol import Sampling

pytestmark = [*needs_gpu, pytest.mark.usefixtures("hopper", "own_tuning")]
VOCAB, SLOTS = 512, 4
PROMPT = list(range(3, 40))
STEPS = 3 * MOST_STEPS
BY_GRAPH = {
    "greedy": Sampling(temperature=0),
    "plain": Sampling(temperature=1.2),
    "limits": Sampling(top_k=20, top_p=0.8),
    "penalties": Sampling(alpha_presence=0.5, alpha_frequency=0.5, alpha_decay=0.99),
}
OTHERS = {"filters": Sampling(min_p=0.05), "repetition": Sampling(repetition_penalty=1.3)}


@pytest.fixture(scope="module", params=[False, True], ids=["at the start", "late"])
def runner(request: pytest.FixtureRequest) -> CudaRunner:
    made = CudaRunner(tiny(5, 256, VOCAB, seed=3), torch.device("cuda", 0), torch.float16, "own")
    made.allocate(SLOTS - 1, 1, 64, late=request.param)
    return made


def graph_runs(runner: CudaRunner) -> int:
    assert runner._one_row is not None
    return sum(ladder.runs[1] for ladder in runner._one_row.ladders)


def drawn(
    runner: CudaRunner, how: Sampling, together: list[int], slot: int = 1, stops: tuple[int, ...] = ()
) -> tuple[list[int], torch.Tensor]:
    """What a row draws in launches of so many steps each, and its state behind them."""
    runner.states.clear(range(SLOTS))
    runner.begin(slot, NewRow(how, 11, 0, stops))
    draws = [runner.run(Batch(PROMPT, [len(PROMPT)], [slot], [0]))]
    draws += [runner.run(Batch([LAST], [1], [slot], [0], steps=steps)) for steps in together]
    return [id_ for draw in draws for id_ in draw.wait()], runner.states.read(slot)


@pytest.mark.parametrize("how", [*BY_GRAPH.values(), *OTHERS.values()], ids=[*BY_GRAPH, *OTHERS])
@pytest.mark.parametrize(
    "together", [[MOST_STEPS] * 3, [1, MOST_STEPS, 2, 1, MOST_STEPS]], ids=["all", "some"]
)
def test_the_same_is_drawn(runner, how, together):
    ids, state = drawn(runner, how, [1] * STEPS)
    before = graph_runs(runner)
    got, kept = drawn(runner, how, together)
    by_graph = together.count(MOST_STEPS) if how in BY_GRAPH.values() else 0
    assert graph_runs(runner) == before + by_graph, "steps that a graph can draw for come from one"
    assert got == ids and len(got) == STEPS + 1
    assert torch.equal(kept, state)


def test_rows_of_other_slots_and_ways_come_in_between(runner):
    wanted = {name: drawn(runner, how, [1] * STEPS)[0] for name, how in BY_GRAPH.items()}
    for slot in (2, 0, 0, 3):
        for name, how in BY_GRAPH.items():
            assert drawn(runner, how, [MOST_STEPS] * 3, slot)[0] == wanted[name]


@pytest.mark.parametrize("after", [1, 2, 6, 9])
def test_a_row_stays_as_it_was_before_its_stop_id(runner, after):
    how = BY_GRAPH["plain"]
    ids, _ = drawn(runner, how, [1] * STEPS)
    stop = ids[after]
    end = ids.index(stop)
    got, state = drawn(runner, how, [MOST_STEPS] * 3, stops=(stop,))
    assert got[: end + 1] == ids[: end + 1]
    assert torch.equal(state, drawn(runner, how, [1] * STEPS, stops=(stop,))[1])


def test_what_was_drawn_stays_while_more_is_queued(runner):
    """The host may read ids long after the graph has run again."""
    how = BY_GRAPH["limits"]
    ids, _ = drawn(runner, how, [1] * 32 * MOST_STEPS)
    assert drawn(runner, how, [MOST_STEPS] * 32)[0] == ids


def test_nothing_changes_when_it_is_captured_behind_the_service(runner):
    wanted = {name: drawn(runner, how, [MOST_STEPS] * 3)[0] for name, how in BY_GRAPH.items()}
    assert runner._one_row is not None
    for ladder in runner._one_row.ladders:
        ladder.forget(1)
        ladder.capture(1)
        assert not ladder.missing
    for name, how in BY_GRAPH.items():
        assert drawn(runner, how, [MOST_STEPS] * 3)[0] == wanted[name]

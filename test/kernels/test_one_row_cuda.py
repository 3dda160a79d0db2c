"""Several steps of one row in one CUDA graph draw what they draw one by one, and leave the same state."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu

from rwkv_batch.model.cuda.gemms.kinds import SEPARATE, TOGETHER
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.runner.cuda_runner import MOST_STEPS, CudaRunner
from rwkv_batch.runner.protocol import LAST, Batch, NewRow
from rwkv_batch.sampling.slots_cuda import FIRST_CAPACITY
from rwkv_batch.wire.protocol import Sampling

pytestmark = [*needs_gpu, pytest.mark.usefixtures("hopper", "own_tuning")]
VOCAB, SLOTS = 512, 4
PROMPT = list(range(3, 40))
STEPS = 3 * MOST_STEPS
BY_GRAPH = {
    "greedy": Sampling(temperature=0),
    "plain": Sampling(temperature=1.2),
    "limits": Sampling(top_k=20, top_p=0.8),
    "bias": Sampling(logit_bias={7: 2.0, 300: -100.0}),
    "penalties": Sampling(alpha_presence=0.5, alpha_frequency=0.5, alpha_decay=0.99),
}
OTHERS = {"filters": Sampling(min_p=0.05), "repetition": Sampling(repetition_penalty=1.3)}


class Model(NamedTuple):
    weights: str = "fp16"
    layers: str = TOGETHER
    wkv: torch.dtype = torch.float16
    late: bool = False


MODELS = {
    "one launch": Model(),
    "separate kernels": Model(layers=SEPARATE),
    "fp32 states": Model(wkv=torch.float32),
    "int8": Model("int8"),
    "int4": Model("int4"),
    "late": Model(late=True),
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def runner(request: pytest.FixtureRequest) -> CudaRunner:
    weights, layers, wkv, late = request.param
    checkpoint = tiny(5, 256, VOCAB, seed=3)
    if weights != "fp16":
        checkpoint = quantize(checkpoint, weights, False)
    made = CudaRunner(RWKV7Cuda(checkpoint, torch.device("cuda", 0)), wkv, "own")
    if layers not in made.model.gemms.candidates("layers", 1):
        pytest.skip("this GPU has no room for one launch of all layers")
    made.model.autotuner.chosen["layers 1"] = layers
    made.allocate(SLOTS - 1, 1, 64, late=late)
    return made


@torch.inference_mode()
def capture_again(runner: CudaRunner) -> None:
    assert runner.one_row is not None
    for ladder in runner.one_row.ladders:
        ladder.forget(1)
        ladder.capture(1)
        assert not ladder.missing


def has_graphs(runner: CudaRunner) -> bool:
    assert runner.one_row is not None
    return not any(ladder.missing for ladder in runner.one_row.ladders)


def count_replays(runner: CudaRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the slot of every launch of several steps by one graph from now on."""
    assert runner.one_row is not None
    slots, real = list[int](), runner.one_row.run

    def run(slot: int) -> torch.Tensor:
        slots.append(slot)
        return real(slot)

    monkeypatch.setattr(runner.one_row, "run", run)
    return slots


def drawn(
    runner: CudaRunner,
    sampling: Sampling,
    together: list[int],
    slot: int = 1,
    stops: tuple[int, ...] = (),
    between: Callable[[], None] = lambda: None,
) -> tuple[list[int], torch.Tensor]:
    """What a row draws in launches of so many steps each, and its state behind them."""
    runner.states.clear(range(SLOTS))
    runner.begin(slot, NewRow(sampling, 11, 0, stops))
    draws = [runner.run(Batch(PROMPT, [len(PROMPT)], [slot], [0]))]
    for steps in together:
        draws.append(runner.run(Batch([LAST], [1], [slot], [0], steps=steps)))
        between()
    return [id_ for draw in draws for id_ in draw.wait()], runner.states.read(slot)


@pytest.mark.parametrize("sampling", [*BY_GRAPH.values(), *OTHERS.values()], ids=[*BY_GRAPH, *OTHERS])
@pytest.mark.parametrize(
    "together", [[MOST_STEPS] * 3, [1, MOST_STEPS, 2, 1, MOST_STEPS]], ids=["all", "some"]
)
def test_the_same_is_drawn(runner, sampling, together, monkeypatch):
    ids, state = drawn(runner, sampling, [1] * STEPS)
    replays = count_replays(runner, monkeypatch)
    got, kept = drawn(runner, sampling, together)
    by_graph = sampling in BY_GRAPH.values() and has_graphs(runner)
    assert len(replays) == by_graph * together.count(MOST_STEPS), "steps that a graph can draw for are its"
    assert got == ids and len(got) == STEPS + 1
    assert torch.equal(kept, state)


def test_rows_of_other_slots_and_ways_come_in_between(runner):
    wanted = {name: drawn(runner, sampling, [1] * STEPS)[0] for name, sampling in BY_GRAPH.items()}
    for slot in (2, 0, 0, 3):
        for name, sampling in BY_GRAPH.items():
            assert drawn(runner, sampling, [MOST_STEPS] * 3, slot)[0] == wanted[name]


@pytest.mark.parametrize("after", [1, 2, 6, 9])
def test_a_row_stays_as_it_was_before_its_stop_id(runner, after):
    sampling = BY_GRAPH["plain"]
    ids, _ = drawn(runner, sampling, [1] * STEPS)
    stop = ids[after]
    end = ids.index(stop)
    got, state = drawn(runner, sampling, [MOST_STEPS] * 3, stops=(stop,))
    assert got[: end + 1] == ids[: end + 1]
    assert torch.equal(state, drawn(runner, sampling, [1] * STEPS, stops=(stop,))[1])


@pytest.mark.parametrize("name", ["limits", "penalties"])
def test_what_was_drawn_stays_while_more_is_queued(runner, name):
    """The host may read ids long after the graph has run again, and lists of penalties grow meanwhile."""
    launches = FIRST_CAPACITY // MOST_STEPS + 2
    ids, _ = drawn(runner, BY_GRAPH[name], [1] * launches * MOST_STEPS)
    assert drawn(runner, BY_GRAPH[name], [MOST_STEPS] * launches)[0] == ids


def test_nothing_changes_when_it_is_captured_behind_the_service(runner):
    for name, sampling in BY_GRAPH.items():
        wanted, state = drawn(runner, sampling, [1] * STEPS)
        got, kept = drawn(runner, sampling, [MOST_STEPS] * 3, between=lambda: capture_again(runner))
        assert got == wanted and torch.equal(kept, state), name
    assert has_graphs(runner)
    for name, sampling in BY_GRAPH.items():
        assert drawn(runner, sampling, [MOST_STEPS] * 3)[0] == drawn(runner, sampling, [1] * STEPS)[0], name

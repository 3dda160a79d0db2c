"""Steps that are queued on a GPU before the draws of the step before are known."""

import threading

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu, off

from bench.make_checkpoint import random_rwkv6
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.model.cuda.cuda_model import CudaModel
from rwkv_batch.model.cuda.rwkv6 import RWKV6Cuda
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.ops.cuda.abi import STOPS
from rwkv_batch.runner.cuda_runner import CudaRunner, QueuedDraws
from rwkv_batch.runner.protocol import LAST, Batch, NewRow
from rwkv_batch.sampling.sampler_cuda import CudaSampler
from rwkv_batch.state.pool.options import PoolOptions, PoolSlots
from rwkv_batch.wire.protocol import Sampling
from state_pool import StatePool

pytestmark = needs_gpu
SLOTS = [4, 0, 3, 1]
PROMPT = torch.randint(1, 500, (60,)).tolist()
LENGTHS = [9, 20, 1, 30]


@pytest.fixture(scope="module", params=["rwkv7", "rwkv6"])
def model(request: pytest.FixtureRequest) -> CudaModel:
    if request.param == "rwkv6":
        return RWKV6Cuda(from_tensors("rwkv6", random_rwkv6(3, 192, 500, seed=5)), "cuda")
    return RWKV7Cuda(tiny(layers=3, width=192, vocab=500, seed=5), "cuda")


class Steps(CudaRunner):
    """A runner of a model that the tests share, with six slots."""

    def __init__(self, model: CudaModel) -> None:
        self.model, self.device = model, model.device
        self.states = model.new_states(6, torch.float16)
        self.sampler = CudaSampler(6, 500, self.device)
        self.invariant = False

    def step(self, tokens, counts, slots, draws, tops=None) -> QueuedDraws:
        return self.run(Batch(tokens, list(counts), list(slots), list(draws), tops or {}))


def begun(model: CudaModel, stops: dict[int, list[int]] | None = None) -> tuple[Steps, list]:
    """Four sequences that have read their prompts, greedy; and what is drawn after these."""
    steps = Steps(model)
    for row, slot in enumerate(SLOTS):
        steps.begin(slot, NewRow(Sampling(temperature=0), 1, row, (stops or {}).get(row, [])))
    return steps, [steps.step(PROMPT, LENGTHS, SLOTS, range(4))]


def flushed(steps: Steps) -> torch.Tensor:
    """The states, with nothing deferred."""
    return torch.stack([steps.states.read(slot) for slot in range(6)])


def one_by_one(model: CudaModel, count: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    """What is drawn at each step when the host knows every token, and the states after each."""
    states = []
    for end in range(count + 1):  # from the beginning each time: steps after a flush add up in another order
        steps, draws = begun(model)
        drawn = [draws[0].wait()]
        for _ in range(end):
            drawn.append(steps.step(drawn[-1], [1] * 4, SLOTS, range(4)).wait())
        states.append(flushed(steps))
    return drawn, states


def test_what_was_drawn_last_is_fed_without_the_host(model: CudaModel):
    want, states = one_by_one(model, 6)
    steps, draws = begun(model)
    draws += [steps.step([LAST] * 4, [1] * 4, SLOTS, range(4)) for _ in range(6)]
    assert [draw.wait() for draw in draws] == want
    assert torch.equal(flushed(steps), states[-1])


@pytest.mark.parametrize("several", [(4, 2), (2, 4), (3, 3)], ids=str)
def test_several_steps_at_once_are_the_same_steps(model: CudaModel, several: tuple[int, ...]):
    """To the bit, also where a row has drawn a stop id."""
    stop = one_by_one(model, 2)[0][2][1]

    def run(together: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
        steps, draws = begun(model, {1: [7, stop]})
        draws += [steps.run(Batch([LAST] * 4, [1] * 4, SLOTS, list(range(4)), steps=n)) for n in together]
        return [id_ for draw in draws for id_ in draw.wait()], flushed(steps)

    want, got = run((1,) * 6), run(several)
    assert want[0] == got[0]
    assert torch.equal(want[1], got[1])


def test_rows_may_come_in_another_order_or_stay_away(model: CudaModel):
    want, _ = one_by_one(model, 3)
    steps, draws = begun(model)
    draws.append(steps.step([LAST] * 2, [1] * 2, [SLOTS[2], SLOTS[0]], range(2)))
    draws.append(steps.step([LAST] * 4, [1] * 4, SLOTS, range(4)))
    draws.append(steps.step([LAST, want[2][1], LAST], [1] * 3, SLOTS[:3], range(3)))
    got = [draw.wait() for draw in draws]
    assert got[1] == [want[1][2], want[1][0]]
    assert got[2] == [want[2][0], want[1][1], want[2][2], want[1][3]]
    assert got[3][0] == want[3][0] and got[3][2] == want[3][2]


def same(state: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two states are the same but for rounding."""
    return off(state.view(torch.float16), other.view(torch.float16)) < 2e-3


@pytest.mark.parametrize("beside", [[], PROMPT[:17]], ids=["alone", "beside a prompt"])
def test_a_row_that_drew_a_stop_id_is_left_out(model: CudaModel, beside: list[int]):
    """Its state is that before the stop id, no matter what is queued after."""
    want, states = one_by_one(model, 2)
    steps, _ = begun(model, {1: [7, want[1][1], 11], 2: [want[0][2]]})
    extra = ([len(beside)], [5]) if beside else ([], [])
    for _ in range(4):
        steps.step([LAST] * 4 + beside, [1] * 4 + extra[0], SLOTS + extra[1], range(4))
    got = flushed(steps)
    first = next(step for step in range(2) if want[step][1] in (7, want[1][1], 11))
    assert torch.equal(got[SLOTS[2]], states[0][SLOTS[2]])
    assert same(got[SLOTS[1]], states[first][SLOTS[1]]), "beside a prompt GEMMs may add up in another order"
    assert not same(got[SLOTS[0]], states[2][SLOTS[0]])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_copy_of_a_state_holds_what_steps_have_deferred(model: CudaModel, count: int):
    _, states = one_by_one(model, count)
    steps, _ = begun(model)
    for _ in range(count):
        steps.step([LAST] * 4, [1] * 4, SLOTS, range(4))
    ready, copies = threading.Event(), list[torch.Tensor]()
    pool = StatePool(
        steps.states,
        ("0123456789abcdef", 512),
        slots=PoolSlots(0, 0, lambda slot: None, lambda: None),
        options=PoolOptions(
            durable=True, token_log=True, replay_tokens=8192, replay_rate=1000.0, replay_on_new_model=False
        ),
        store=None,
        wake=ready.set,
    )
    pool.copies.copy_out(SLOTS[1], copies.append)
    while not copies:
        assert ready.wait(30)
        ready.clear()
        pool.poll()
    pool.close()
    assert torch.equal(copies[0], states[-1][SLOTS[1]].cpu())


@pytest.mark.parametrize(
    "stops", [[], [*range(480, 480 + STOPS + 1)]], ids=["no stops", "more stops than the device knows"]
)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_new_row_in_the_slot_begins_afresh(model: CudaModel, count: int, stops: list[int]):
    """Whether the row before has drawn a stop id (count 0), or its state is behind."""
    want, _ = one_by_one(model, 1)
    steps, _ = begun(model, {} if count else {0: [want[0][0]]})
    for _ in range(max(count, 1)):
        steps.step([LAST] * 4, [1] * 4, SLOTS, range(4))
    steps.states.clear([SLOTS[0]])
    steps.begin(SLOTS[0], NewRow(Sampling(temperature=0), 1, 0, stops))
    assert steps.step(PROMPT[:9], [9], [SLOTS[0]], [0]).wait() == [want[0][0]]
    assert steps.step([want[0][0] if stops else LAST], [1], [SLOTS[0]], [0]).wait() == [want[1][0]]


def test_logprobs_are_those_of_what_each_row_drew(model: CudaModel):
    steps, _ = begun(model)
    steps.states.clear(SLOTS)
    for row, slot in enumerate(SLOTS):
        steps.begin(slot, NewRow(Sampling(temperature=0), 1, row, []))
    draws = steps.step(PROMPT, LENGTHS, SLOTS, range(4), {2: 3, 0: 0})
    drawn, found = draws.wait(), draws.logprobs()
    expected = (
        model.forward(torch.tensor(PROMPT), LENGTHS, SLOTS, model.new_states(6, torch.float16))
        .log_softmax(1)
        .cpu()
    )
    assert [len(top) for _, top in found] == [3, 0]
    for row, (logprob, top) in zip((2, 0), found, strict=True):
        assert (
            logprob
            == pytest.approx(float(expected[row].max()), abs=1e-3)
            == pytest.approx(float(expected[row, drawn[row]]), abs=1e-3)
        )
        assert [p for _, p in top] == pytest.approx(expected[row].topk(len(top)).values.tolist(), abs=1e-3)
    assert found[0][1][0] == (drawn[2], found[0][0])

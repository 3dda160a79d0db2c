"""Steps that verify drafts on a GPU, against steps of one token: logits, states, draws and texts.

Under --emulated most of these tests run on a CPU.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from checkpoints import tiny
from cuda_gpu import DEVICE, needs_gpu, off
from torch import Tensor

from bench.make_checkpoint import random_rwkv7a
from rwkv_batch.bundled import unpack
from rwkv_batch.engine import Engine
from rwkv_batch.engine.speculation import drafting
from rwkv_batch.engine.speculation.cost import DraftCost, draft_cost
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.cuda.steps.verify import MOST_DRAFTED, SIZES
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.runner.cuda_runner import CudaRunner
from rwkv_batch.runner.protocol import LAST, Batch, NewRow
from rwkv_batch.runner.speculation.protocol import Verifier
from rwkv_batch.runner.speculation.verifiers import verifier_of
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.wire.protocol import Grammar, Sampling

pytestmark = [*needs_gpu, pytest.mark.usefixtures("untimed")]
on_gpu = pytest.mark.usefixtures("graphs")
EMULATED = DEVICE == "cpu"
VOCAB, LAYERS, WIDTH = (64, 2, 64) if EMULATED else (512, 4, 256)
PLACE = torch.device("cpu") if EMULATED else torch.device("cuda", 0)
ROWS = 8
LOGITS, STATES = 1e-2, 2e-2  # relative, of sums in another order
MODELS = {
    "rwkv7": lambda: tiny(LAYERS, WIDTH, VOCAB),
    "rwkv7a": lambda: from_tensors("7a", random_rwkv7a(LAYERS, WIDTH, VOCAB)),
}
CODED = {
    "int8": lambda: quantize(tiny(LAYERS, 256, VOCAB), "int8", True),
    "int4": lambda: quantize(tiny(LAYERS, 256, VOCAB), "int4", True),
}
MODELS |= {} if EMULATED else CODED  # whose larger matrices take minutes on a CPU
SAMPLED = Sampling(temperature=0.9, top_p=0.9)
ADJUSTED = Sampling(temperature=0.7, presence_penalty=0.2, frequency_penalty=0.1, repetition_penalty=1.05)
GREEDY = Sampling(temperature=0)


def runner_of(
    checkpoint: Checkpoint, wkv: torch.dtype, invariant: bool = False, speculate: int = 7
) -> tuple[CudaRunner, Verifier]:
    model = RWKV7Cuda(checkpoint, PLACE, None, invariant)
    runner = CudaRunner(model, wkv, "own", speculate=speculate)
    runner.allocate(ROWS, 1, 24, late=EMULATED)
    verifier = verifier_of(runner)
    assert verifier
    return runner, verifier


def begun(runner: CudaRunner, rows: int, sampling: Sampling = GREEDY) -> None:
    """Rows with a past, of which the states of some lag."""
    runner.states.clear(range(ROWS + 1))
    for slot in range(rows):
        runner.begin(slot, NewRow(sampling, 5, slot, ()))
    slots = list(range(rows))
    tokens = [token for slot in slots for token in (slot + 1, 7, slot + 3)]
    runner.run(Batch(tokens, [3] * rows, slots, slots)).wait()
    some = slots[::2]
    runner.run(Batch([LAST] * len(some), [1] * len(some), some, list(range(len(some))))).wait()


def state(runner: CudaRunner, slot: int) -> tuple[Tensor, Tensor]:
    """Token shift and wkv of a slot."""
    runner.states.flush([slot])
    return runner.states.shift[slot].float(), runner.states.wkv[slot].float()


def tokens_of(rows: int, counts: list[int]) -> list[list[int]]:
    return [[(11 * row + 5 * place + 2) % VOCAB for place in range(counts[row])] for row in range(rows)]


def check_step(runner: CudaRunner, counts: list[int], exact: bool) -> None:
    """A step of rows of so many tokens, beside as many steps of one token."""
    rows, slots = len(counts), list(range(len(counts)))[::-1]
    assert runner.verify
    begun(runner, rows)
    start = {slot: runner.states.read(slot) for slot in slots}
    pieces = tokens_of(rows, counts)
    logits, laid = runner.verify.run([token for piece in pieces for token in piece], counts, slots)
    logits = logits[:, : runner.model.checkpoint.vocab].float()
    kept = [
        [(runner.states.shift[at].float(), runner.states.wkv[at].float()) for at in laid.kept[row]]
        for row in range(rows)
    ]
    whole = {row: kept[row][-1] for row in range(rows)}
    runner.verify.accept(laid, {row: counts[row] - 1 for row in range(rows)})
    for row, slot in enumerate(slots):
        assert all(map(torch.equal, state(runner, slot), whole[row]))
    runner.states.replace(start)
    for depth in range(max(counts)):
        here = [row for row in range(rows) if counts[row] > depth]
        one = torch.tensor([pieces[row][depth] for row in here])
        of_rows = [slots[row] for row in here]
        wanted = runner.model.forward(one, [1] * len(here), of_rows, runner.states)
        for place, row in enumerate(here):
            found = logits[laid.first[row] + depth]
            shift, wkv = state(runner, slots[row])
            found_shift, found_wkv = kept[row][depth]
            if exact:
                assert torch.equal(found, wanted[place])
                assert torch.equal(found_shift, shift) and torch.equal(found_wkv, wkv)
            else:
                assert off(found, wanted[place]) < LOGITS
                assert off(found_shift, shift) < STATES and off(found_wkv, wkv) < STATES
    assert not any(each.any() for each in state(runner, ROWS))  # a slot that no row has


@pytest.mark.parametrize("wkv", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_each_token_gives_what_it_gives_in_a_step_of_its_own(model, wkv):
    runner, _ = runner_of(MODELS[model](), wkv)
    for rows in (1, 3) if EMULATED else (1, 2, 3, 4, 8):
        for tokens in (2, 5) if EMULATED else range(1, 9):
            if rows * tokens >= SIZES[0]:
                check_step(runner, [tokens] * rows, exact=False)
    check_step(runner, [1, 8, 3, 1, 2], exact=False)


@pytest.mark.parametrize("wkv", [torch.float32, torch.float16])
@pytest.mark.parametrize("model", MODELS)
def test_where_rows_do_not_depend_on_the_batch_it_gives_the_same_bits(model, wkv):
    runner, _ = runner_of(MODELS[model](), wkv, invariant=True)
    for counts in ([2], [8], [1, 8, 3, 1, 2]) if EMULATED else ([2], [5], [8], [1, 8, 3, 1, 2], [8] * 8):
        check_step(runner, counts, exact=True)


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, ADJUSTED], ids=["greedy", "sampled", "adjusted"])
def test_rows_draw_what_they_draw_without_drafts(sampling, invariant):
    """Drafts are right up to some token; ids, logprobs, penalties and states are those of plain steps."""
    runner, verifier = runner_of(MODELS["rwkv7"](), torch.float32, invariant)
    rows, count, told = 3, 12, list[list[int]]()
    slots = list(range(rows))

    def first() -> list[int]:
        runner.states.clear(range(rows))
        for slot in slots:
            runner.begin(slot, NewRow(sampling, 5, slot, ()))
        return runner.run(Batch([1, 2, 3], [1] * rows, slots, slots)).wait()

    told.append(first())
    for _ in range(count):
        told.append(runner.run(Batch(told[-1], [1] * rows, slots, slots)).wait())
    wanted = [[ids[row] for ids in told] for row in slots]
    plain = [state(runner, slot) for slot in slots]

    drawn, steps = [[id_] for id_ in first()], 0
    while going := [row for row in slots if len(drawn[row]) < count + 1]:
        tokens, counts, drafts = list[int](), list[int](), dict[int, int]()
        for place, row in enumerate(going):
            left = count + 1 - len(drawn[row])
            draft = wanted[row][len(drawn[row]) :][: max(min(3 + row, left - 1), 0)]
            if draft and (steps + row) % 2:
                draft[-1] = (draft[-1] + 1) % VOCAB
            if draft:
                drafts[place] = len(draft)
            tokens += [drawn[row][-1], *draft]
            counts.append(1 + len(draft))
        batch = Batch(tokens, counts, going, list(range(len(going))), {0: 2})
        if not drafts:
            ids, more = runner.run(batch).wait(), {}
        else:
            verified = verifier.feed(batch, drafts)(None, {})
            ids, more = verified.wait(), verified.more()
            entries = [verified.logprobs()[0], *(entry for _, entry in more.get(0, ()))]
            assert all(len(entry[1]) == 2 and entry[0] <= 0 for entry in entries)
        for place, row in enumerate(going):
            drawn[row] += [ids[place], *(token for token, _ in more.get(place, ()))]
        steps += 1
    assert drawn == wanted or not invariant
    # Of other kinds of sums two tokens may change places that are about as likely.
    same = sum(a == b for x, y in zip(drawn, wanted, strict=True) for a, b in zip(x, y, strict=False))
    assert same > rows and steps < count
    if invariant:
        assert all(all(map(torch.equal, state(runner, slot), plain[slot])) for slot in slots)


def test_masks_bind_what_is_drawn_behind_a_draft():
    runner, verifier = runner_of(MODELS["rwkv7"](), torch.float32, True)
    runner.begin(0, NewRow(GREEDY, 5, 0, ()))
    only = [9, 14, 21]
    bits = np.zeros((3, (VOCAB + 31) // 32), np.int32)
    for mask, token in zip(bits, only, strict=True):
        mask[token // 32] = 1 << token % 32
    batch = Batch([3, 9, 14], [3], [0], [0])
    for behind, wanted in ((lambda depth: bits[depth], only), (lambda depth: None, only[:1])):
        verified = verifier.feed(batch, {0: 2})(RowMasks([0], bits[:1]), {0: behind})
        assert verified.wait() + [token for token, _ in verified.more()[0]] == wanted


def test_a_step_of_other_rows_than_those_that_decode_has_no_drafts():
    runner, verifier = runner_of(MODELS["rwkv7"](), torch.float16)
    assert verifier.takes(Batch([3, 4], [1, 1], [0, 1], [0, 1]))
    assert not verifier.takes(Batch([3, 4, 5], [1, 2], [0, 1], [0, 1]))
    assert not verifier.takes(Batch([LAST, 4], [1, 1], [0, 1], [0, 1]))
    assert not verifier.takes(Batch([3] * 9, [1] * 9, list(range(9)), list(range(9))))
    assert verifier.most_drafted == MOST_DRAFTED == runner.spare
    assert len(runner.states) == ROWS + 1  # spare slots belong to nobody


@pytest.mark.parametrize("invariant", [True, False])
def test_measuring_what_drafts_cost_leaves_states_as_before_any_token(invariant):
    runner, verifier = runner_of(MODELS["rwkv7"](), torch.float32, invariant)
    cost = draft_cost(runner, verifier, 7)
    assert 0 <= cost.fixed < math.inf and 0 <= cost.each < math.inf
    assert not any(each.any() for slot in range(ROWS + 1) for each in state(runner, slot))


def test_without_drafts_there_are_no_spare_slots():
    model = RWKV7Cuda(MODELS["rwkv7"](), PLACE)
    none, some = (CudaRunner(model, torch.float16, "own", speculate=most) for most in (0, 7))
    spare = MOST_DRAFTED * model.new_states(1).memory.nbytes
    assert some.bytes_needed(4, 1, 24) - none.bytes_needed(4, 1, 24) > spare
    none.allocate(4, 1, 24, late=EMULATED)
    assert len(none.states.memory) == 5 and verifier_of(none) is None


TALE = "User: Tell me a story about a dog.\n\nAssistant:"


@pytest.fixture
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts that are found are verified, and worth waiting for."""
    monkeypatch.setattr(drafting, "draft_cost", lambda *of: DraftCost(0.0, 0.0))
    monkeypatch.setattr(drafting, "WAIT", 0.0)


@on_gpu
@pytest.mark.usefixtures("free_drafts")
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3, temperature=0.9, top_p=0.9)], ids=str)
def test_texts_of_an_engine_are_those_without_drafts(sampling):
    make = partial(
        Engine, from_tensors("demo", unpack.tensors()), device="cuda", max_rows=4, batch_invariant=True, l1=2
    )
    plain, drafted = make(), make(speculate=7)
    given = {"sampling": sampling, "max_tokens": 40}
    want = plain.generate([TALE, "1, 2, 3,"], **given)
    expected = want[0].text.replace("dog", "cat")
    found = drafted.generate([TALE, "1, 2, 3,"], **given, prediction=expected)
    assert [row.text for row in found] == [row.text for row in want]
    assert sum(row.accepted for row in found) > 15
    number = Grammar("regex", "[0-9]{3}-abc-[0-9]{3}")
    want, found = (e.generate([TALE], **given, grammar=number) for e in (plain, drafted))
    assert [row.text for row in found] == [row.text for row in want]
    plain.close()
    drafted.close()


@on_gpu
@pytest.mark.usefixtures("free_drafts")
def test_a_text_that_comes_back_takes_fewer_steps():
    engine = Engine(from_tensors("demo", unpack.tensors()), device="cuda", max_rows=4, speculate=7)
    told = engine.generate([TALE], sampling=GREEDY, max_tokens=40)[0]
    found = engine.generate([TALE], sampling=GREEDY, max_tokens=40, prediction=told.text)[0]
    assert found.accepted > 20 and found.tokens == told.tokens
    engine.close()

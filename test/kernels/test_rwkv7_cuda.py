"""The whole model on a CUDA GPU in fp16 against the reference in fp32, through prefill, graphs and every way
to mix them.
"""

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import ROWS, needs_gpu, off, unflushed

from rwkv_batch.model.cuda.gemms.kinds import WHOLE
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.ops.cuda.buffers import Buffers

pytestmark = needs_gpu
LOGITS, STATES = 1e-2, 2e-2
SHAPES = [
    pytest.param({"layers": 3, "width": 192, "vocab": 500}, id="3x192"),
    pytest.param(
        {"layers": 1, "width": 64, "vocab": 300, "ranks": {"w": 8, "a": 24, "v": 1, "g": 40}},
        id="1x64-odd-ranks",
    ),
    pytest.param(
        {"layers": 4, "width": 320, "vocab": 1000, "ranks": {"w": 96, "a": 32, "v": 17, "g": 200}},
        id="4x320-wide-ranks",
    ),
    pytest.param({"layers": 6, "width": 1024, "vocab": 2000}, id="6x1024"),
]


def ids(count, vocab=500):
    return torch.randint(1, vocab, (count,))


@pytest.fixture(scope="module")
def model():
    return RWKV7Cuda(tiny(layers=3, width=192, vocab=500, seed=1), "cuda")


def reference(model):
    return RWKV7(model.checkpoint, "cuda")  # fp32, plain torch


def copied(states, model, wkv=torch.float32):
    """A copy of states for another model."""
    other = model.new_states(len(states), wkv)
    other.shift.copy_(states.shift)
    other.wkv.copy_(states.wkv)
    return other


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wkv", [torch.float16, torch.float32])
def test_logits_and_states_are_those_of_the_reference(shape, wkv):
    model = RWKV7Cuda(tiny(**shape, seed=int(torch.randint(1000, ()))), "cuda")
    truth = reference(model)
    states, wanted = model.new_states(9, wkv), truth.new_states(9)
    for lengths, slots in (
        ([17, 1, 15, 16], [2, 0, 3, 8]),
        ([1, 1, 1], [3, 2, 0]),
        ([63, 1], [5, 2]),
        ([1] * 5, [5, 8, 2, 0, 3]),
        ([1], [2]),
    ):
        tokens = ids(sum(lengths), shape["vocab"])
        logits, want = (
            model.forward(tokens, lengths, slots, states),
            truth.forward(tokens, lengths, slots, wanted),
        )
        assert logits.shape == want.shape and logits.dtype == torch.float32 and off(logits, want) < LOGITS
        assert off(states.wkv, wanted.wkv) < STATES and off(states.shift, wanted.shift) < STATES
    assert not states.memory[[1, 4, 6, 7]].any()


@pytest.mark.parametrize("rows", ROWS)
def test_decode_of_any_number_of_rows(model, rows):
    truth = reference(model)
    wanted = truth.new_states(rows + 5)
    wanted.wkv.normal_(std=0.3)
    wanted.shift.normal_()
    states = copied(wanted, model, torch.float16)
    slots = torch.randperm(rows + 5)[:rows].tolist()
    for _ in range(3):
        tokens = ids(rows)
        logits = unflushed(model, tokens, [1] * rows, slots, states)
        assert off(logits, truth.forward(tokens, [1] * rows, slots, wanted)) < LOGITS
    states.flush(slots)
    assert off(states.wkv, wanted.wkv) < STATES


@pytest.mark.parametrize("rows", [1, 8, 64, 129, 321, 512, 960])
@pytest.mark.parametrize("kind", ["out", "value"])
def test_what_is_added_to_the_stream_is_the_same_by_every_method(rows, kind):
    cuda = RWKV7Cuda(tiny(layers=2, width=256, vocab=300), "cuda")
    layer, b = cuda.weights.layers[-1], Buffers(cuda.weights.buffer_shape, rows, {})
    b.y.normal_()
    b.hidden.normal_().relu_()
    want = (
        b.y.double() @ layer.output.double().T if kind == "out" else b.hidden.double() @ layer.value.double()
    )
    methods = [
        method
        for of in (kind, f"{kind}_split")
        for method in cuda.gemms.candidates(of, rows)
        if method != WHOLE
    ]
    assert any(method in ("lt0/2", "many/2") for method in methods) == (64 <= rows <= 512)
    for method in methods:
        for buffer in (b.out, b.sparse_partials, b.split_partials):
            buffer.fill_(float("nan"))
        sums = cuda.gemms.find(kind, method).run(cuda.gemms.call(kind, layer, b))
        assert off(b.out if sums is None else sums.sum(0), want) < 1e-3


@pytest.mark.parametrize("method", ["lt0/2", "lt0/4", "many/2", "many/4"])
def test_decode_with_a_product_in_shares_and_prefill_without(model, method, monkeypatch):
    rows, tuning = 129, model.autotuner
    truth, states = reference(model), model.new_states(rows, torch.float16)
    wanted = truth.new_states(rows)
    monkeypatch.setattr(
        tuning, "chosen", tuning.chosen | {f"value_split {size}": method for size in (rows, 192)}
    )
    for lengths, slots in (([1] * rows, range(rows)), ([100, 50], [3, 7]), ([1] * rows, range(rows))):
        tokens = ids(sum(lengths))
        assert (
            off(model.forward(tokens, lengths, slots, states), truth.forward(tokens, lengths, slots, wanted))
            < LOGITS
        )
    assert off(states.wkv, wanted.wkv) < STATES and off(states.shift, wanted.shift) < STATES


@pytest.mark.many_launches
def test_long_texts_stay_close(model):
    truth, states = reference(model), model.new_states(1, torch.float16)
    wanted, tokens = truth.new_states(1), ids(4096)
    model.forward(tokens[:3000], [3000], [0], states, [])
    for token in tokens[3000:]:
        logits = unflushed(model, token[None], [1], [0], states)
    states.flush([0])
    want = truth.forward(tokens, [4096], [0], wanted)
    assert off(logits, want) < LOGITS and off(states.wkv, wanted.wkv) < STATES


@pytest.mark.parametrize("lengths", [[2, 40], [3000, 3000]], ids=["graph", "launches"])
def test_a_prompt_goes_on_from_states_that_are_behind(model, lengths):
    truth, states = reference(model), model.new_states(3, torch.float16)
    wanted = truth.new_states(3)
    for rows, counts in (([0, 2], [5, 9]), ([0, 2], [1, 1]), ([2], [1]), ([0, 2], lengths)):
        tokens = ids(sum(counts))
        logits = unflushed(model, tokens, counts, rows, states)
        assert off(logits, truth.forward(tokens, counts, rows, wanted)) < LOGITS
    assert off(states.wkv, wanted.wkv) < STATES


def test_greedy_text_does_not_depend_on_slot_split_or_neighbours(model):
    prompt, states = ids(70), model.new_states(40, torch.float16)

    def text(slot, cuts, neighbours):
        others = [n for n in range(neighbours + 1) if n != slot][:neighbours]
        start, drawn = 0, []
        for end in (*cuts, len(prompt)):
            logits = unflushed(model, prompt[start:end], [end - start], [slot], states)
            start = end
        for _ in range(20):
            drawn.append(int(logits[0].argmax()))
            tokens = torch.cat((torch.tensor(drawn[-1:]), ids(len(others))))
            logits = unflushed(model, tokens, [1] * len(tokens), [slot, *others], states)
        states.clear(range(40))
        return drawn

    want = text(0, (), 0)
    assert (
        text(33, (1, 17, 33), 0) == want
        and text(7, (16, 69), 12) == want
        and text(2, range(1, 70), 38) == want
    )


def test_only_the_slots_named_change_and_only_logits_asked_for_come(model):
    states = model.new_states(8, torch.float16)
    states.wkv.normal_(std=0.3)
    states.shift.normal_()
    before = states.memory.clone()
    for lengths in ([1, 1, 1], [5, 1, 9]):
        again = copied(states, model, torch.float16)
        tokens = ids(sum(lengths))
        every = model.forward(tokens, lengths, [6, 1, 3], states)
        some = model.forward(tokens, lengths, [6, 1, 3], again, [2, 0])
        assert off(some, every[[2, 0]]) < 1e-3 and torch.equal(states.memory, again.memory)
        assert model.forward(tokens, lengths, [6, 1, 3], again, []).shape == (0, 500)
    for slot in range(8):
        assert torch.equal(states.memory[slot], before[slot]) == (slot not in (6, 1, 3))


def test_captured_ahead_and_captured_when_needed_are_the_same(model):
    tokens, ahead, late = ids(6), model.new_states(6, torch.float16), model.new_states(6, torch.float16)
    model.capture(ahead, progress=False)
    assert not ahead.memory.any()  # capturing leaves no trace
    want = [model.forward(tokens, [1] * 6, range(6), ahead) for _ in range(3)]
    assert all(torch.equal(model.forward(tokens, [1] * 6, range(6), late), logits) for logits in want)


def test_ids_beyond_the_vocabulary_are_refused(model):
    states = model.new_states(1)
    with pytest.raises(IndexError, match="vocabulary of 500"):
        model.forward(torch.tensor([500]), [1], [0], states)

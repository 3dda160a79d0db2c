"""The forward pass against the `rwkv` package, and what packing must never change."""

from itertools import pairwise

import pytest
import torch
from checkpoints import tiny, write_pth
from cpu_models import WAYS, maker
from rwkv_package import RWKV
from safetensors.torch import save_file

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.model.checkpoint import from_tensors, load
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.state.slots import DeviceStates

SHAPES = [
    pytest.param({"layers": 12, "width": 768, "vocab": 65536}, id="0.1b"),
    pytest.param({"layers": 3, "width": 192, "vocab": 500}, id="3x192"),
    pytest.param(
        {"layers": 1, "width": 64, "vocab": 300, "ranks": {"w": 8, "a": 24, "v": 1, "g": 40}},
        id="1x64-odd-ranks",
    ),
    pytest.param(
        {"layers": 4, "width": 320, "vocab": 1000, "ranks": {"w": 96, "a": 32, "v": 17, "g": 200}},
        id="4x320-wide-ranks",
    ),
]
PIECES = [(0, 17), (17, 18), (18, 19), (19, 20)]  # a prompt, then one token at a time
TOLERANCE = 1e-4  # against the package, relative to the size of the whole tensor
PIECES_TOLERANCE = 1e-5  # between ways to cut a prompt, which order the same sums differently


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small to share out
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=WAYS)
def make(request):
    return maker(request.param)


@pytest.fixture(scope="module")
def model(make):
    return make(tiny(layers=3, width=192, vocab=500, seed=1))


def ids(count, vocab=500, seed=0):
    return torch.randint(1, vocab, (count,), generator=torch.Generator().manual_seed(seed))


def off(x, reference):
    return float((x - reference).norm() / reference.norm())


def run(model, states, slot, tokens, *cuts):
    """Logits after the tokens, read in pieces that end at the cuts."""
    for start, end in pairwise((0, *cuts, len(tokens))):
        logits = model.forward(tokens[start:end], [end - start], [slot], states)
    return logits[0]


def assert_same_state(states, slot, others, other, tolerance=0.0):
    for x, y in ((states.shift[slot], others.shift[other]), (states.wkv[slot], others.wkv[other])):
        assert torch.equal(x, y) if tolerance == 0 else off(x, y) < tolerance


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Of a shape a checkpoint, and what the package says after each of PIECES of 20 ids: logits and state."""
    found = {}

    def read(shape):
        if str(shape) not in found:
            file = write_pth(tmp_path_factory.mktemp("truth") / "model.pth", random_checkpoint(**shape))
            reference, state, after = RWKV(str(file.with_suffix("")), "cpu fp32"), None, []
            for start, end in PIECES:
                logits, state = reference.forward(ids(20, shape["vocab"])[start:end].tolist(), state)
                after.append((logits, [tensor.clone() for tensor in state]))
            found[str(shape)] = load(file), after
        return found[str(shape)]

    return read


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_states_equal_those_of_the_rwkv_package(make, shape, truth):
    checkpoint, after = truth(shape)
    model, tokens = make(checkpoint), ids(20, shape["vocab"])
    states = model.new_states(3)
    for (start, end), (want, want_state) in zip(PIECES, after, strict=True):
        logits = model.forward(tokens[start:end], [end - start], [1], states)
        assert logits.shape == (1, shape["vocab"]) and logits.dtype == torch.float32
        assert off(logits[0], want) < TOLERANCE and int(logits.argmax()) == int(want.argmax())
        for layer in range(shape["layers"]):
            assert off(states.shift[1, layer, 0], want_state[3 * layer]) < TOLERANCE
            assert off(states.wkv[1, layer], want_state[3 * layer + 1]) < TOLERANCE
            assert off(states.shift[1, layer, 1], want_state[3 * layer + 2]) < TOLERANCE
    assert not states.wkv[[0, 2]].any() and not states.shift[[0, 2]].any()


@pytest.mark.parametrize("piece", [1, 2, 7, 16, 37])
def test_a_prompt_in_pieces_leaves_the_same_state(model, piece):
    tokens, states = ids(100), model.new_states(2)
    whole = run(model, states, 0, tokens)
    logits = run(model, states, 1, tokens, *range(piece, 100, piece))
    assert off(logits, whole) < PIECES_TOLERANCE
    assert_same_state(states, 1, states, 0, PIECES_TOLERANCE)


def test_rows_of_every_length_in_one_call_are_exactly_what_they_are_alone(model):
    lengths, slots = [1, 20, 1, 3, 16, 1, 2, 1], [5, 0, 9, 3, 8, 4, 1, 7]
    before = {slot: ids(5 + slot, seed=slot) for slot in slots}
    after = {slot: ids(length, seed=100 + slot) for slot, length in zip(slots, lengths, strict=True)}
    together, alone = model.new_states(10), model.new_states(10)
    for slot in slots:
        for states in (together, alone):
            model.forward(before[slot], [len(before[slot])], [slot], states, [])
    logits = model.forward(torch.cat([after[slot] for slot in slots]), lengths, slots, together)
    for row, slot in enumerate(slots):
        assert torch.equal(logits[row], run(model, alone, slot, after[slot]))
        assert_same_state(together, slot, alone, slot)


@pytest.mark.parametrize("rows", [2, 5, 16, 33])
def test_decode_is_exactly_the_same_in_any_batch_and_any_slot(model, rows):
    prompt, tokens = ids(9), ids(6, seed=3)
    alone = model.new_states(1)
    model.forward(prompt, [9], [0], alone, [])
    want = [model.forward(token[None], [1], [0], alone)[0] for token in tokens]
    scattered = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(1))[:rows].tolist()
    for slots in (list(range(rows)), list(range(rows))[::-1], scattered):
        states = model.new_states(2 * rows)
        for other in range(2 * rows):
            model.forward(ids(1, seed=other), [1], [other], states, [])
        row = rows // 2
        states.clear([slots[row]])
        model.forward(prompt, [9], [slots[row]], states, [])
        for step, token in enumerate(tokens):
            batch = ids(rows, seed=50 + step)
            batch[row] = token
            assert torch.equal(model.forward(batch, [1] * rows, slots, states)[row], want[step])
        assert_same_state(states, slots[row], alone, 0)


def test_slots_that_are_not_named_stay_untouched(model):
    states = model.new_states(6)
    states.shift.uniform_()
    states.wkv.uniform_()
    shift, wkv = states.shift.clone(), states.wkv.clone()
    model.forward(ids(19), [1, 17, 1], [4, 2, 0], states)
    for slot in (1, 3, 5):
        assert torch.equal(states.shift[slot], shift[slot]) and torch.equal(states.wkv[slot], wkv[slot])
    for slot in (0, 2, 4):
        assert not torch.equal(states.shift[slot], shift[slot]) and not torch.equal(
            states.wkv[slot], wkv[slot]
        )


def test_logits_only_of_the_rows_asked_for_in_the_order_asked(model):
    tokens, lengths, slots = ids(25), [4, 1, 19, 1], [3, 2, 1, 0]
    every = model.forward(tokens, lengths, slots, model.new_states(4))
    some = model.forward(tokens, lengths, slots, model.new_states(4), [2, 0, 3])
    assert every.shape == (4, 500) and torch.equal(some, every[[2, 0, 3]])
    states = model.new_states(4)
    assert model.forward(tokens, lengths, slots, states, []).shape == (0, 500)
    assert states.wkv.any(dim=(1, 2, 3, 4)).all()


def test_a_cleared_slot_starts_anew(model):
    states = model.new_states(3)
    first = run(model, states, 1, ids(20))
    kept = states.wkv[2].clone()
    run(model, states, 1, ids(5, seed=9))
    states.clear([1])
    assert torch.equal(run(model, states, 1, ids(20)), first) and torch.equal(states.wkv[2], kept)


@pytest.mark.parametrize("slots", [[], [4], [2, 4, 3], [4, 0, 1], [5, 1, 1, 3], range(6)], ids=str)
def test_many_slots_are_cleared_at_once(slots):
    states = DeviceStates(6, 2, 64, torch.float16, torch.float16)
    states.memory.fill_(1)
    states.clear(slots)
    assert [bool(states.memory[slot].any()) for slot in range(6)] == [slot not in slots for slot in range(6)]
    assert states.memory[[slot for slot in range(6) if slot not in slots]].all()


def test_a_copied_slot_continues_the_same_text(model):
    states = model.new_states(4)
    run(model, states, 0, ids(30))
    states.shift[3], states.wkv[3] = states.shift[0], states.wkv[0]
    assert torch.equal(run(model, states, 3, ids(4, seed=2)), run(model, states, 0, ids(4, seed=2)))


def test_pth_and_safetensors_give_the_same_logits(make, tmp_path):
    tensors = random_checkpoint(layers=2, width=128, vocab=300)
    write_pth(tmp_path / "a.pth", tensors)
    save_file(tensors, tmp_path / "b.safetensors")
    a, b = make(load(tmp_path / "a")), make(load(tmp_path / "b"))
    tokens = ids(20, 300)
    assert torch.equal(run(a, a.new_states(1), 0, tokens), run(b, b.new_states(1), 0, tokens))


def test_fp32_weights_keep_all_their_bits(make, tmp_path):
    """Weights that fp16 cannot hold must not be stored in it."""
    torch.manual_seed(0)
    tensors = {
        key: t.float() * (1 + 1e-3 * torch.rand_like(t.float()))
        for key, t in random_checkpoint(2, 128, 300).items()
    }
    tensors["blocks.1.ffn.key.weight"] *= 1e6  # beyond the range of fp16 too
    tensors["blocks.1.ffn.value.weight"] /= 1e12
    file = write_pth(tmp_path / "model.pth", tensors)
    model, reference = make(load(file)), RWKV(str(file.with_suffix("")), "cpu fp32")
    tokens, states = ids(40, 300), model.new_states(5)
    want, _ = reference.forward(tokens.tolist(), None)
    logits = run(model, states, 0, tokens)
    assert off(logits, want) < 1e-5
    one_by_one = run(model, states, 1, tokens, *range(1, 40))
    assert off(one_by_one, want) < 1e-5
    states.clear([3])
    for token in tokens:
        batched = model.forward(token.expand(3), [1] * 3, [4, 2, 3], states)
    assert torch.equal(batched[2], one_by_one)


def test_half_precision_states_stay_close(model):
    full, half = model.new_states(1), model.new_states(1, wkv_dtype=torch.float16)
    assert half.wkv.dtype == torch.float16
    tokens = ids(60)
    want = run(model, full, 0, tokens, 20, 21, 22, 40)
    logits = run(model, half, 0, tokens, 20, 21, 22, 40)
    assert 0 < off(logits, want) < 5e-3


@pytest.mark.parametrize(
    ("count", "lengths", "slots", "named"),
    [
        (3, [1, 1], [0, 1], "sum 2"),
        (2, [2], [0, 1], "1 lengths"),
        (2, [2, 0], [0, 1], "at least 1"),
        (0, [], [], "0 lengths"),
        (2, [1, 1], [1, 1], "slot of its own"),
        (1, [1], [4], "below 4"),
        (1, [1], [-1], "below 4"),
    ],
)
def test_rows_that_do_not_fit_are_refused(model, count, lengths, slots, named):
    with pytest.raises(ValueError, match=named):
        model.forward(ids(count), lengths, slots, model.new_states(4))


def test_a_checkpoint_in_memory_needs_no_file(make, model):
    again = make(from_tensors("again", tiny(layers=3, width=192, vocab=500, seed=1).tensors))
    assert torch.equal(
        run(again, again.new_states(1), 0, ids(10)), run(model, model.new_states(1), 0, ids(10))
    )


def test_a_model_runs_on_when_its_file_is_written_over(make, tmp_path):
    file = write_pth(tmp_path / "model.pth", random_checkpoint(2, 128, 300))
    model = make(load(file))
    before = run(model, model.new_states(1), 0, ids(20, 300))
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    assert torch.equal(run(model, model.new_states(1), 0, ids(20, 300)), before)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2)])
def test_a_gpu_computes_the_same(model, dtype, tolerance):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    on_gpu = RWKV7(model.checkpoint, "cuda", dtype)
    states, wanted = on_gpu.new_states(4), model.new_states(4)
    for lengths, slots in (([30, 9, 1], [2, 0, 3]), ([1, 1, 1], [3, 2, 0]), ([1, 3], [0, 3])):
        tokens = ids(sum(lengths), seed=len(slots))
        logits, want = (
            on_gpu.forward(tokens, lengths, slots, states),
            model.forward(tokens, lengths, slots, wanted),
        )
        assert off(logits.cpu(), want) < tolerance
    assert (
        off(states.wkv.cpu(), wanted.wkv) < tolerance
        and off(states.shift.cpu().float(), wanted.shift) < tolerance
    )
    assert not states.wkv[1].any()

"""RWKV-6, RWKV-7a and merged start states against the `rwkv` package, and what packing must never change."""

import importlib.util
import sys
from functools import cache
from itertools import pairwise

import pytest
import torch
from checkpoints import write_pth
from cpu_models import WAYS, maker
from rwkv_package import precision_kept

from bench.make_checkpoint import random_checkpoint, random_rwkv6, random_rwkv7a
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.checkpoint import load
from rwkv_batch.ops.wkv6 import wkv6_prefill, wkv6_step
from rwkv_batch.ops.wkv_prefill import CHUNK, cut
from rwkv_batch.wire.protocol import Sampling

pytestmark = pytest.mark.thorough

TOLERANCE = 1e-4  # against the package, relative to the size of the whole tensor
PIECES_TOLERANCE = 1e-5  # between ways to cut a prompt, which order the same sums differently
FAMILIES = {"rwkv6": random_rwkv6, "rwkv7a": random_rwkv7a}
SHAPES = [(3, 192, 500), (1, 64, 300), (6, 768, 2000)]
PIECES = [(0, 1), (1, 40), (40, 41), (41, 50)]  # in which a prompt is read


def load_package(family, patch):
    """The package's class for a family: which it defines, it decides when it is imported."""
    patch.setenv("RWKV_JIT_ON", "0")
    patch.setenv("RWKV_CUDA_ON", "0")
    patch.setenv("RWKV_V7_ON", "0" if family == "rwkv6" else "1")
    if family == "rwkv7a":
        patch.setenv("RWKV_DE_VERSION", "1")
    name = f"rwkv_package_for_{family}"
    spec = importlib.util.spec_from_file_location(name, importlib.util.find_spec("rwkv.model").origin)
    patch.setitem(sys.modules, name, module := importlib.util.module_from_spec(spec))
    with precision_kept():
        spec.loader.exec_module(module)
    return module.RWKV


@pytest.fixture
def package(monkeypatch):
    return lambda family: load_package(family, monkeypatch)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """By family and shape: a checkpoint, and the package's logits and state after PIECES of 50 ids."""

    @cache
    def read(family, layers, width, vocab):
        file = written(family, tmp_path_factory.mktemp(family), layers, width, vocab)
        with pytest.MonkeyPatch.context() as patch:
            given = file if family == "rwkv6" else file.with_suffix("")
            reference, state, logits = load_package(family, patch)(str(given), "cpu fp32"), None, []
            for start, end in PIECES:
                found, state = reference.forward(ids(50, vocab)[start:end].tolist(), state)
                logits.append(found)
        return load(file), logits, state

    return read


def off(x, reference):
    return float((x - reference).norm() / reference.norm())


def ids(count, vocab, seed=0):
    return torch.randint(1, vocab, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=WAYS)
def make(request):
    return maker(request.param)


def written(family, folder, layers=2, width=128, vocab=400):
    # in fp32, as the package norms RWKV-6's embedding in the dtype of the file
    tensors = {key: tensor.float() for key, tensor in FAMILIES[family](layers, width, vocab).items()}
    return write_pth(folder / "model.pth", tensors)


def made(make, family, tmp_path):
    return make(load(written(family, tmp_path)))


def run(model, tokens, *cuts):
    """Logits after the tokens, read in pieces that end at the cuts, and the states."""
    states = model.new_states(1)
    for start, end in pairwise((0, *cuts, len(tokens))):
        logits = model.forward(tokens[start:end], [end - start], [0], states)
    return logits[0], states


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layers", "width", "vocab"), SHAPES)
def test_logits_and_states_equal_those_of_the_rwkv_package(make, family, layers, width, vocab, truth):
    checkpoint, expected_logits, state = truth(family, layers, width, vocab)
    model, tokens = make(checkpoint), ids(50, vocab)
    states = model.new_states(2)
    for (start, end), expected in zip(PIECES, expected_logits, strict=True):
        logits = model.forward(tokens[start:end], [end - start], [1], states)
        assert off(logits[0], expected) < TOLERANCE
    for layer in range(layers):
        wkv = state[3 * layer + 1].view(-1, 64, 64)
        expected = wkv.mT if family == "rwkv6" else wkv  # the package keeps RWKV-6's as [key, value]
        assert off(states.wkv[1, layer], expected) < TOLERANCE
        assert off(states.shift[1, layer, 0], state[3 * layer]) < TOLERANCE
        assert off(states.shift[1, layer, 1], state[3 * layer + 2]) < TOLERANCE
    assert not states.wkv[0].any()


def test_a_merged_start_state_is_that_of_the_package(make, package, tmp_path):
    """The package loads such a state for RWKV-6, and transposes it."""
    tensors = {key: tensor.float() for key, tensor in random_rwkv6(2, 128, 400).items()}
    tensors |= {f"blocks.{i}.att.time_state": torch.randn(2, 64, 64) for i in range(2)}
    file = write_pth(tmp_path / "model.pth", tensors)
    model, reference = make(load(file)), package("rwkv6")(str(file), "cpu fp32")
    tokens, states = ids(30, 400), model.new_states(4)
    expected, _ = reference.forward(tokens.tolist(), None)
    assert off(model.forward(tokens, [30], [2], states)[0], expected) < TOLERANCE
    states.clear([2, 3])
    for slot in (1, 2, 3):  # as made, after a sequence, and never used
        assert off(model.forward(tokens, [30], [slot], states)[0], expected) < TOLERANCE


def test_a_merged_start_state_of_rwkv7(make, package, tmp_path):
    """The package has none: it is given the state."""
    tensors = random_checkpoint(2, 128, 400)
    start = torch.randn(2, 2, 64, 64)
    reference = package("rwkv7")(str(write_pth(tmp_path / "m.pth", tensors).with_suffix("")), "cpu fp32")
    state = reference.generate_zero_state()
    for layer in range(2):
        state[3 * layer + 1] = start[layer].clone()
    merged = tensors | {f"blocks.{i}.att.time_state": start[i] for i in range(2)}
    model, tokens = make(load(write_pth(tmp_path / "merged.pth", merged))), ids(30, 400)
    expected, _ = reference.forward(tokens.tolist(), state)
    assert off(model.forward(tokens, [30], [0], model.new_states(1))[0], expected) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_through_the_engine_is_that_of_the_package(family, package, tmp_path):
    tensors = {key: tensor.float() for key, tensor in FAMILIES[family](2, 128, 65536).items()}
    file = write_pth(tmp_path / "model.pth", tensors)
    engine = Engine(file, device="cpu", max_rows=2, prefill_tokens=32, l1=0, prefix_cache_mb=0)
    prompts = ["hello", "one two three " * 20, "x"]
    results = engine.generate(prompts, max_tokens=12, stop_ids=[], sampling=Sampling(temperature=0))
    engine.close()
    reference = package(family)(str(file if family == "rwkv6" else file.with_suffix("")), "cpu fp32")
    for prompt, result in zip(prompts, results, strict=True):
        (logits, state), drawn = reference.forward(engine.tokenizer.encode(prompt), None), []
        for _ in range(12):
            drawn.append(int(logits.argmax()))
            logits, state = reference.forward([drawn[-1]], state)
        text = b"".join(engine.tokenizer.token_bytes(token) for token in drawn)
        assert result.text == text.decode(errors="replace")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cuts", [(1,), (CHUNK,), (7, 8, 30), (CHUNK - 1, 3 * CHUNK)])
def test_how_a_prompt_is_cut_does_not_matter(make, family, cuts, tmp_path):
    model, tokens = made(make, family, tmp_path), ids(60, 400)
    (whole, states), (pieces, others) = run(model, tokens), run(model, tokens, *cuts)
    assert off(pieces, whole) < PIECES_TOLERANCE
    assert off(others.wkv, states.wkv) < PIECES_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_do_not_see_each_other(make, family, tmp_path):
    model = made(make, family, tmp_path)
    lengths, slots = [1, 33, 1, 5, 17], [4, 0, 2, 5, 1]
    tokens = ids(sum(lengths), 400)
    together, states = model.new_states(6), model.new_states(6)
    logits = model.forward(tokens, lengths, slots, together)
    for row, part in enumerate(tokens.split(lengths)):
        alone = model.forward(part, [lengths[row]], [slots[row]], states)
        assert torch.equal(alone[0], logits[row])
        assert torch.equal(states.wkv[slots[row]], together.wkv[slots[row]])


@pytest.mark.parametrize("lengths", [[1], [CHUNK], [50], [20, 3, 90, 16]])
def test_the_chunked_recurrence_is_the_sequential_one(lengths):
    """The decay may be so fast that what is before it cannot be divided out."""
    draw, heads = torch.Generator().manual_seed(2), 2
    r, k, v = (torch.randn(sum(lengths), heads, 64, generator=draw) for _ in range(3))
    w_log = -torch.empty(sum(lengths), heads, 64).uniform_(-6, 4.5, generator=draw).exp()
    u, before = torch.randn(heads, 64, generator=draw), torch.randn(4, heads, 64, 64, generator=draw)
    chunks = cut(lengths, "cpu")
    states = before[: len(lengths)][chunks.order]
    y, after = wkv6_prefill((r, w_log, k, v), states, chunks, u=u)
    start = 0
    for piece, length in enumerate(lengths):
        state, expected = before[piece : piece + 1].double(), []
        for t in range(start, start + length):
            inputs = [x[t : t + 1].double() for x in (r, w_log, k, v)]
            out, state = wkv6_step(*inputs, state, u=u.double())
            expected.append(out)
        place = chunks.order.tolist().index(piece)
        assert off(y[start : start + length].double(), torch.cat(expected)) < 1e-5
        assert off(after[place].double(), state[0]) < 1e-5
        start += length

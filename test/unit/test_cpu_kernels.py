"""The kernels for CPUs against fp64, what no cut or batch may change, and a machine without a compiler."""

import ctypes
import logging
from ctypes import byref, c_bool, c_int, c_int64, c_void_p
from typing import Any

import pytest
import torch
from checkpoints import tiny
from cpu_models import TARGETS, kernels, kernels_for, library_for, maker, poisoned_outputs, torch_threads
from torch.nn.functional import group_norm, layer_norm, normalize

from rwkv_batch.engine import Engine
from rwkv_batch.ops.cpu import binding
from rwkv_batch.ops.cpu.binding import CpuRows
from rwkv_batch.ops.cpu.records import KINDS, LayerRecord, MatrixRecord
from rwkv_batch.wire.protocol import Sampling

pytestmark = pytest.mark.thorough

HEADS, WIDTH = 3, 192
PER_TOKEN = ("r", "w", "k", "v", "a", "g", "v_mix", "v_first")
VECTORS = ("k_k", "k_a", "k_rest", "r_k", "weight", "bias")
ROWS = [([1], [2]), ([1] * 9, [8, 0, 3, 11, 5, 7, 1, 2, 10]), ([1, 1, 2, 7, 40], [4, 9, 0, 7, 3])]
SLOTS = 12


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request):
    return kernels_for(request.param)


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_outputs():
        yield


@pytest.fixture
def two_threads():
    with torch_threads(2):
        yield


def inputs(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(tokens, WIDTH, generator=generator) for name in PER_TOKEN}
    return made | {name: torch.randn(WIDTH, generator=generator) for name in VECTORS}


def slots(seed=1):
    """States as they lie in slots, with room between these."""
    memory = torch.randn(SLOTS, 2 * HEADS * 4096 + 64, generator=torch.Generator().manual_seed(seed))
    return memory[:, 64 : 64 + HEADS * 4096].view(SLOTS, HEADS, 64, 64)


def wkv7(compiled, given, states, lengths, numbers, mixes_values=True, rows=None, **options):
    return compiled.wkv7(
        [given[name] for name in PER_TOKEN[:6]],
        (given["v_mix"], given["v_first"]) if mixes_values else None,
        [given[name] for name in VECTORS],
        states,
        rows or CpuRows.of(lengths, numbers),
        **options,
    )


def plain_wkv7(given, states, lengths, numbers, mixes_values=True):
    """The formulas of the paper in fp64, one token after the other."""
    x = {name: tensor.double() for name, tensor in given.items()}
    by_head = {name: tensor.view(-1, HEADS, 64) for name, tensor in x.items() if name in PER_TOKEN}
    decay, a = torch.exp(-0.6065306597126334 * by_head["w"].sigmoid()), by_head["a"].sigmoid()
    v = by_head["v"]
    if mixes_values:
        v = v + (by_head["v_first"] - v) * by_head["v_mix"].sigmoid()
    kk = normalize((x["k"] * x["k_k"]).view(-1, HEADS, 64), dim=-1)
    k = by_head["k"] * (x["k_rest"] + x["a"].sigmoid() * x["k_a"]).view(-1, HEADS, 64)
    states, read, token = states.double(), [], 0
    for length, slot in zip(lengths, numbers, strict=True):
        for t in range(token, token + length):
            S = states[slot]
            removed = (S @ kk[t].unsqueeze(-1)) * (kk[t] * a[t]).unsqueeze(-2)
            states[slot] = S * decay[t].unsqueeze(-2) - removed + v[t].unsqueeze(-1) * k[t].unsqueeze(-2)
            read.append((states[slot] @ by_head["r"][t].unsqueeze(-1)).flatten())
        token += length
    y = group_norm(torch.stack(read), HEADS, x["weight"], x["bias"], 64e-5)
    own = (by_head["r"] * k * x["r_k"].view(HEADS, 64)).sum(-1, keepdim=True) * v
    return (y + own.flatten(1)) * x["g"], states


def off(x, reference):
    return float((x - reference).norm() / reference.norm())


@pytest.mark.parametrize(("lengths", "numbers"), ROWS)
@pytest.mark.parametrize("mixes_values", [True, False])
def test_a_time_mix_is_that_of_fp64(compiled, lengths, numbers, mixes_values):
    given, states = inputs(sum(lengths)), slots()
    want, want_states = plain_wkv7(given, states, lengths, numbers, mixes_values)
    untouched = [slot for slot in range(SLOTS) if slot not in numbers]
    before = states[untouched].clone()
    got = wkv7(compiled, given, states, lengths, numbers, mixes_values)
    assert off(got, want) < 1e-6 and off(states, want_states) < 1e-6
    assert torch.equal(states[untouched], before)


def test_keys_of_zero_and_decays_at_their_ends_are_exact(compiled):
    given, states = inputs(4), slots()
    given["k"][1] = 0
    given["w"][2], given["w"][3] = 200, -200  # the fastest decay, and none
    want, want_states = plain_wkv7(given, states, [4], [5])
    assert off(wkv7(compiled, given, states, [4], [5]), want) < 1e-6
    assert off(states[5], want_states[5]) < 1e-6


@pytest.mark.parametrize("cuts", [(1,), (16, 17), tuple(range(1, 40))], ids=len)
def test_a_time_mix_is_the_same_wherever_it_is_cut_and_whoever_is_beside_it(compiled, cuts, two_threads):
    lengths, numbers = ROWS[-1]
    given, states, others = inputs(sum(lengths)), slots(), slots()
    together = wkv7(compiled, given, states, lengths, numbers)
    first = sum(lengths) - 40  # of the last row
    parts = []
    for begin, end in zip((0, *cuts), (*cuts, 40), strict=True):
        piece = {name: given[name][first + begin : first + end] for name in PER_TOKEN}
        parts.append(wkv7(compiled, given | piece, others, [end - begin], numbers[-1:]))
    assert torch.equal(torch.cat(parts), together[first:])
    assert torch.equal(others[numbers[-1]], states[numbers[-1]])


def test_drafts_leave_states_as_they_are_until_they_are_accepted(compiled, two_threads):
    lengths, numbers, drafted, accepted = [1, 5, 3, 6, 4], [2, 7, 4, 0, 9], [0, 4, 2, 5, 0], [0, 2, 0, 5, 0]
    ends = torch.tensor(lengths).cumsum(0)
    known = ends - torch.tensor(drafted)
    given, states, others = inputs(sum(lengths)), slots(), slots()
    want = wkv7(compiled, given, slots(), lengths, numbers)
    rows = CpuRows.of(lengths, numbers, drafted)
    assert torch.equal(wkv7(compiled, given, states, lengths, numbers, rows=rows), want)

    def run_as_far_as(counts):
        """Each row alone, from its beginning."""
        others.copy_(slots())
        for i, count in enumerate(counts):
            begin = int(ends[i]) - lengths[i]
            piece = {name: given[name][begin : begin + count] for name in PER_TOKEN}
            wkv7(compiled, given | piece, others, [count], numbers[i : i + 1])

    counts = [length - draft for length, draft in zip(lengths, drafted, strict=True)]
    run_as_far_as(counts)
    assert torch.equal(states, others)
    more = [i for i, count in enumerate(accepted) if count]
    begins, took = known[more], torch.tensor(accepted)[more]
    rows = CpuRows(begins + took, torch.tensor(numbers)[more], begins + took, begins)
    wkv7(compiled, given, states, lengths, numbers, rows=rows, reads=False)
    run_as_far_as([count + more for count, more in zip(counts, accepted, strict=True)])
    assert torch.equal(states, others)

    norm, amounts = (given["weight"][:WIDTH], given["bias"][:WIDTH]), torch.rand(2, 1, WIDTH)
    shift = torch.zeros(SLOTS, WIDTH)
    rows = CpuRows.of(lengths, numbers, drafted)
    _, _, normed = compiled.mix(given["r"], None, norm, amounts, shift, rows, True)
    assert torch.equal(shift[numbers], normed[known - 1])


@pytest.mark.parametrize(("lengths", "numbers"), ROWS)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("mixes", [1, 6])
def test_norm_and_token_shift_are_those_of_fp64(compiled, lengths, numbers, adds, mixes, two_threads):
    tokens = sum(lengths)
    x, added = inputs(tokens)["r"] * 5, inputs(tokens)["k"] if adds else None
    weight, bias = inputs(1)["weight"], inputs(1)["bias"]
    amounts = torch.randn(mixes, 1, WIDTH, generator=torch.Generator().manual_seed(4))
    shift = torch.randn(SLOTS, 3 * WIDTH, generator=torch.Generator().manual_seed(5))[:, WIDTH : 2 * WIDTH]
    want_shift = shift.double()
    total = x.double() + added if adds else x.double()
    normed = layer_norm(total, (WIDTH,), weight.double(), bias.double())
    before, token = torch.empty_like(normed), 0
    for length, slot in zip(lengths, numbers, strict=True):
        before[token : token + length] = torch.cat((want_shift[[slot]], normed[token : token + length - 1]))
        want_shift[slot] = normed[token + length - 1]
        token += length
    rows = CpuRows.of(lengths, numbers)
    got, mixed, kept = compiled.mix(x, added, (weight, bias), amounts, shift, rows, True)
    assert torch.equal(got, x + added if adds else x)
    assert off(mixed, normed + (before - normed) * amounts) < 1e-6
    assert off(kept, normed) < 1e-6 and off(shift, want_shift) < 1e-6


def test_a_prompt_gives_the_same_bits_wherever_it_is_cut():
    model = maker("kernels")(tiny(layers=3, width=192, vocab=500, seed=1))
    tokens = torch.randint(1, 500, (80,), generator=torch.Generator().manual_seed(0))
    states = model.new_states(3)
    whole = model.forward(tokens, [80], [0], states)
    for slot, piece in ((1, 1), (2, 33)):
        for part in tokens.split(piece):
            last = model.forward(part, [len(part)], [slot], states)
        assert torch.equal(last, whole)
        assert torch.equal(states.wkv[slot], states.wkv[0])


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Libraries are kept where none is yet."""
    monkeypatch.setenv("RWKV_BATCH_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    binding.load.cache_clear()
    yield tmp_path / "kernels"
    binding.load.cache_clear()


def text(**options):
    engine = Engine(tiny(vocab=65536), device="cpu", max_rows=1, l1=0, prefix_cache_mb=0, **options)
    (result,) = engine.generate(["Hello"], max_tokens=8, stop_ids=[], sampling=Sampling(temperature=0))
    engine.close()
    return result.text


@pytest.mark.parametrize("compiler", [None, "false", "/no/such/compiler"])
def test_without_a_compiler_the_model_runs_by_torch_and_a_sentence_says_so(
    elsewhere, monkeypatch, caplog, compiler
):
    monkeypatch.setenv("PATH", "" if compiler is None else "/usr/bin:/bin")
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO, "rwkv_batch.ops.cpu"):
        assert text() == text(backend="torch")
    (record,) = [record for record in caplog.records if record.name.startswith("rwkv_batch.ops.cpu")]
    assert record.levelno == logging.INFO and "slower torch operations run" in record.message
    assert compiler is None or compiler in record.message
    assert "g++" in record.message or "CXX" in record.message
    assert not list(elsewhere.glob("*/*.so"))


def test_the_torch_backend_builds_no_kernels(elsewhere):
    text(backend="torch")
    assert not list(elsewhere.glob("cpu-*"))


def test_a_library_is_built_once(elsewhere, monkeypatch):
    kernels()
    (library,) = elsewhere.glob("cpu-*/kernels.so")
    binding.load.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert binding.load() is not None and list(elsewhere.iterdir()) == [library.parent]


TOO_MANY = 1 << 44  # rows: no machine has an address for what they need


def test_a_mix_for_which_there_is_no_memory_raises_and_leaves_its_slots(compiled):
    shift = torch.zeros(1, WIDTH)
    rows = CpuRows(torch.ones(1).long(), torch.zeros(1).long().expand(TOO_MANY), torch.ones(1).long())
    norm = torch.ones(WIDTH), torch.zeros(WIDTH)
    with pytest.raises(MemoryError, match="no memory for a step"):
        compiled.mix(torch.ones(1, WIDTH), None, norm, torch.ones(1, 1, WIDTH), shift, rows)
    assert not shift.any()


def test_layers_for_which_there_is_no_memory_raise(compiled):
    ends = torch.tensor([TOO_MANY])
    rows = CpuRows(ends, torch.zeros(1).long(), ends)
    states = torch.zeros(1, 1, 2, WIDTH), torch.zeros(1, 1, HEADS, 64, 64)
    with pytest.raises(MemoryError, match="no memory for a step"):
        compiled.rwkv7_layers((LayerRecord * 1)(), torch.ones(1, WIDTH), None, *states, rows)
    assert not any(state.any() for state in states)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_a_product_for_which_there_is_no_memory_says_so(target, kind):
    library: Any = library_for(target)
    if kind == "int8" and library.int8_group() == 1:
        return  # it takes none
    library.product.restype = c_bool
    library.product.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int]
    x = (ctypes.c_float * 64)()
    matrix = MatrixRecord(inputs=64, outputs=64, group=64, kind=KINDS.index(kind))
    assert library.product(byref(matrix), x, None, TOO_MANY, 0, 1) is False

"""The recurrence token after token over packed rows, against that of decode steps and torch in fp32."""

from dataclasses import replace

import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu, normal, off, poisoned

from rwkv_batch.ops import torch_ops
from rwkv_batch.ops.cuda.abi import TimeMixInput
from rwkv_batch.ops.cuda.inputs.packing import NO_SLOT, PrefillPlan, upload_plan

pytestmark = needs_gpu
HEADS = 3
WIDTH = HEADS * 64
VECTORS = ("r", "k", "v", "w", "a", "mix", "g", "v_first")


def constants() -> dict[str, torch.Tensor]:
    spread = {"w0": (-2, 2), "a0": (0, 1), "v0": (0, 1), "k_k": (0.85, 0.1), "k_a": (1, 0.1)}
    spread |= {"r_k": (0, 0.1), "norm_weight": (1, 0.1), "norm_bias": (0, 0.1)}
    return {name: normal(WIDTH, mean=mean, std=std) for name, (mean, std) in spread.items()}


@pytest.fixture(params=[torch.float32, torch.float16], ids=["fp32", "fp16"])
def numbers(request, kernels, monkeypatch) -> torch.dtype:
    """How states are stored where no bit may depend on cuts or neighbours."""
    monkeypatch.setattr(kernels, "invariant", True)
    return request.param


def run(
    kernels, x, c, lengths, slots, states, first_layer=False, kept=None, decoded=False, counted=None
) -> torch.Tensor:
    """Output `[T, C]` of rows one after the other, in the order of the plan; moves `states` on.

    kept: as of RowBounds, on the host. decoded: rows of one token run by the kernel for these.
    counted: so many of the first rows do not run, by a number on the device.
    """
    plan = PrefillPlan.from_lengths(lengths, slots)
    assert plan.order == sorted(plan.order), "give rows of one token first"
    rows, out = upload_plan(plan, torch.device(DEVICE)).rows, poisoned(sum(lengths), WIDTH)
    counter = torch.zeros(1, device=DEVICE, dtype=torch.int32)
    pointers = {name: tensor.data_ptr() for name, tensor in (x | c).items()}
    if first_layer:
        pointers["mix"] = pointers["v0"] = None
    places = {"state": states.data_ptr(), "slot_stride": states.stride(0), "width": WIDTH}
    inputs = TimeMixInput(**pointers, out=out.data_ptr(), tile_counter=counter.data_ptr(), **places)
    if kept is not None:
        rows = replace(rows, kept=torch.tensor(kept, device=DEVICE, dtype=torch.int32))
    fp32, single = states.dtype == torch.float32, plan.single if decoded else 0
    if single:
        kernels.wkv_decode(inputs, rows.slots[:single], fp32)
    kernels.wkv_sequence(inputs, sum(lengths), rows, fp32, single, counted)
    return out


def expected(x, c, lengths, slots, states, first_layer) -> torch.Tensor:
    f = {name: tensor.float() for name, tensor in (x | c).items()}
    v = f["v"] if first_layer else f["v"].lerp(f["v_first"], (f["v0"] + f["mix"]).sigmoid())
    a = (f["a0"] + f["a"]).sigmoid()
    k = f["k"] * (1 + (a - 1) * f["k_a"])
    shape = (-1, HEADS, 64)
    w_log = torch_ops.log_decay(f["w0"] + f["w"]).view(shape)
    kk, rows = (
        torch_ops.removal_key(f["k"], f["k_k"]),
        torch_ops.PackedRows(lengths, slots, DEVICE, by_token=True),
    )
    y = torch_ops.wkv(
        (f["r"].view(shape), w_log, k.view(shape), v.view(shape), kk, a.view(shape)), states, rows
    )
    return torch_ops.readout(y, f["r"], k, v, f["r_k"], f["norm_weight"], f["norm_bias"]) * f["g"]


def random_inputs(tokens: int) -> dict[str, torch.Tensor]:
    return {name: normal(tokens, WIDTH) for name in VECTORS}


@pytest.mark.parametrize("lengths", [[1], [2], [16], [17], [1, 1, 1], [1, 1, 15, 33, 16, 2]])
@pytest.mark.parametrize("first_layer", [False, True])
def test_rows_of_any_length(kernels, lengths, first_layer):
    tokens, slots, c = sum(lengths), torch.randperm(len(lengths) + 2).tolist(), constants()
    states = torch.randn(len(slots), HEADS, 64, 64, device=DEVICE) * 0.3
    x, before, want_states = random_inputs(tokens), states.clone(), states.clone()
    out = run(kernels, x, c, lengths, slots[: len(lengths)], states, first_layer)
    assert off(out, expected(x, c, lengths, slots[: len(lengths)], want_states, first_layer)) < 2e-3
    assert off(states, want_states) < 1e-5
    assert torch.equal(states[slots[len(lengths) :]], before[slots[len(lengths) :]])


@pytest.mark.parametrize("decoded", [False, True])
def test_where_rows_are_cut_and_what_is_beside_them_changes_no_bit(kernels, numbers, decoded):
    c, x = constants(), random_inputs(70)
    states = (torch.randn(4, HEADS, 64, 64, device=DEVICE) * 0.3).to(numbers)
    whole_states, parts = states.clone(), []
    whole = run(kernels, x, c, [70], [2], whole_states)
    begin = 0
    for length in (1, 18, 1, 1, 16, 33):
        here = {name: tensor[begin : begin + length] for name, tensor in x.items()}
        other = random_inputs(20)
        if length == 1:  # rows of one token come first
            both = {name: torch.cat((here[name], other[name])) for name in x}
            parts.append(run(kernels, both, c, [1, 20], [2, 0], states, decoded=decoded)[:1])
        else:
            both = {name: torch.cat((other[name][:1], here[name])) for name in x}
            parts.append(run(kernels, both, c, [1, length], [0, 2], states, decoded=decoded)[1:])
        begin += length
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(states[2], whole_states[2])


@pytest.mark.parametrize("first_layer", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_the_kernel_for_rows_of_one_token_gives_the_same_bits(kernels, numbers, rows, first_layer):
    c, slots = constants(), torch.randperm(rows).tolist()
    states = (torch.randn(rows, HEADS, 64, 64, device=DEVICE) * 0.3).to(numbers)
    others = states.clone()
    for _ in range(3):
        x = random_inputs(rows)
        one_way = run(kernels, x, c, [1] * rows, slots, states, first_layer)
        other_way = run(kernels, x, c, [1] * rows, slots, others, first_layer, decoded=True)
        assert torch.equal(one_way, other_way)
        assert torch.equal(states, others)


def test_each_token_rounds_states_in_fp16(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "invariant", True)
    c, x = constants(), random_inputs(40)
    states = (torch.randn(1, HEADS, 64, 64, device=DEVICE) * 0.3).half()
    exact = states.float()
    for token in range(40):
        here = {name: tensor[token : token + 1] for name, tensor in x.items()}
        run(kernels, here, c, [1], [0], exact)
        exact = exact.half().float()
    run(kernels, x, c, [40], [0], states)
    assert torch.equal(states.float(), exact)


def test_rows_that_have_had_their_turn_are_left_out(kernels):
    c, x = constants(), random_inputs(12)
    states = torch.randn(3, HEADS, 64, 64, device=DEVICE)
    before, out = states.clone(), run(kernels, x, c, [1, 1, 10], [2, 0, 1], states, decoded=True)
    again, wanted = before.clone(), run(kernels, x, c, [1, 1, 10], [2, 0, 1], before)
    assert torch.equal(states, before) and torch.equal(out, wanted)
    counted = torch.tensor([2], device=DEVICE, dtype=torch.int32)
    some = run(kernels, x, c, [1, 1, 10], [2, 0, 1], again, counted=counted)
    assert some[:2].isnan().all() and torch.equal(some[2:], wanted[2:])
    assert torch.equal(again[1], before[1]) and not torch.equal(again[0], before[0])


def test_a_row_without_a_slot_is_padding(kernels):
    c, x = constants(), random_inputs(12)
    states = torch.randn(3, HEADS, 64, 64, device=DEVICE)
    before = states.clone()
    out = run(kernels, x, c, [1, 4, 7], [1, NO_SLOT, 0], states)
    assert out[1:5].isnan().all() and not out[:1].isnan().any() and not out[5:].isnan().any()
    assert torch.equal(states[2], before[2]) and not torch.equal(states[0], before[0])


@pytest.mark.parametrize("lengths", [[2], [8], [1, 2, 8, 5], [1, 17, 33]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_state_behind_each_token_is_kept(kernels, lengths, dtype):
    c, tokens, count = constants(), sum(lengths), len(lengths)
    x, slots = random_inputs(tokens), torch.randperm(count).tolist()
    states = (torch.randn(count + tokens, HEADS, 64, 64, device=DEVICE) * 0.3).to(dtype)
    wanted, before = states.float().clone(), states.clone()
    kept, spare = list[int](), count + 1
    for length, slot in zip(lengths, slots, strict=True):  # a row's first token changes its own slot
        kept += [slot, *range(spare, spare + length - 1)]
        spare += length - 1
    kept[-1] = NO_SLOT
    out = run(kernels, x, c, lengths, slots, states, kept=kept)
    begin = 0
    for length, slot in zip(lengths, slots, strict=True):
        parts = []
        for token in range(begin, begin + length):
            here = {name: tensor[token : token + 1] for name, tensor in x.items()}
            parts.append(run(kernels, here, c, [1], [slot], wanted))
            if kept[token] != NO_SLOT:
                state = states[kept[token]]
                same = torch.equal(state, wanted[slot])
                assert same if dtype == torch.float32 else off(state, wanted[slot]) < 1e-3
        whole, one_by_one = out[begin : begin + length], torch.cat(parts)
        assert torch.equal(whole, one_by_one)
        begin += length
    untouched = sorted({*range(len(states))} - {*kept})
    assert torch.equal(states[untouched], before[untouched])

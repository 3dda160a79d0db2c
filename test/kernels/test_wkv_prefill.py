"""The chunked recurrence of a prefill against one in fp64 that goes token by token."""

from itertools import pairwise

import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu, normal, off, poisoned

from rwkv_batch.ops.cuda.abi import ReadoutInput, TimeMixInput
from rwkv_batch.ops.cuda.inputs.packing import PrefillPlan, upload_plan

pytestmark = needs_gpu
HEADS = 3
WIDTH = HEADS * 64
TOKEN_INPUTS = ("r", "k", "v", "w", "a", "mix", "g", "v_first")


def numbers(tokens, kind="plain"):
    """Inputs of a time mix. The kinds put the decays at their ends, make keys large, or point them all the
    same way.
    """
    t = {name: normal(tokens, WIDTH) for name in TOKEN_INPUTS}
    c = {
        "w0": normal(WIDTH, mean=-2, std=2),
        "a0": normal(WIDTH),
        "v0": normal(WIDTH),
        "k_k": normal(WIDTH, std=0.1, mean=0.85),
        "k_a": normal(WIDTH, std=0.1, mean=1),
        "r_k": normal(WIDTH, std=0.1),
        "norm_weight": normal(WIDTH, mean=1, std=0.1),
        "norm_bias": normal(WIDTH, std=0.1),
    }
    if kind in ("fast", "slow", "both"):
        t["w"] = {
            "fast": torch.full_like(t["w"], 30),
            "slow": torch.full_like(t["w"], -30),
            "both": torch.where(t["w"] > 0, 30.0, -30.0).half(),
        }[kind]
    if kind == "large":
        t["k"] *= 50
    if kind.startswith("aligned"):
        t["k"] = ((normal(1, WIDTH) + 0.02 * normal(tokens, WIDTH)) * 8).half()
        t["a"].fill_(8)
        t["w"] = normal(tokens, WIDTH, mean=-20 if kind == "aligned, lasting" else -3)
    return t, c


def run(kernels, lengths, slots, states, t, c, first_layer=False, readout=None):
    """What comes out `[T, C]`; the states `[slots, HEADS, 64, 64]` move on."""
    rows = upload_plan(PrefillPlan.from_lengths(lengths, slots), torch.device(DEVICE))
    assert not rows.single
    pointers = {name: x.data_ptr() for name, x in (t | c).items()}
    if first_layer:
        pointers["mix"] = pointers["v0"] = None
    out = poisoned(sum(lengths), WIDTH)
    scratch = poisoned(max(pieces.chunks for pieces in rows.pieces) * HEADS * kernels.chunk_bytes // 2)
    inputs = TimeMixInput(
        **pointers, out=out.data_ptr(), state=states.data_ptr(), slot_stride=states.stride(0), width=WIDTH
    )
    for pieces in rows.pieces:
        kernels.wkv_prefill(inputs, pieces, scratch, states.dtype == torch.float32, readout)
    return out


def token_by_token(lengths, slots, states, t, c, first_layer=False, scales=None):
    """The recurrence in fp64, which moves states of fp64 on. scales `[T, C]`: of what is read out of them."""
    f = {name: x.double().view(-1, HEADS, 64) for name, x in t.items()}
    g = {name: x.double().view(HEADS, 64) for name, x in c.items()}
    v = f["v"] if first_layer else f["v"].lerp(f["v_first"], (g["v0"] + f["mix"]).sigmoid())
    a = (g["a0"] + f["a"]).sigmoid()
    kk = torch.nn.functional.normalize(f["k"] * g["k_k"], dim=-1)
    k = f["k"] * (1 + (a - 1) * g["k_a"])
    w = (-(torch.tensor(-0.5).double().exp()) * (g["w0"] + f["w"]).sigmoid()).exp()
    y, start = torch.empty_like(v), 0
    for length, slot in zip(lengths, slots, strict=True):
        s = states[slot]
        for i in range(start, start + length):
            s = (
                s * w[i].unsqueeze(-2)
                - (s @ kk[i].unsqueeze(-1)) * (kk[i] * a[i]).unsqueeze(-2)
                + v[i].unsqueeze(-1) * k[i].unsqueeze(-2)
            )
            y[i] = (s @ f["r"][i].unsqueeze(-1)).squeeze(-1)
        states[slot] = s
        start += length
    if scales is not None:
        y = y * scales.double().view_as(y)
    normed = (y - y.mean(-1, keepdim=True)) * (y.var(-1, unbiased=False, keepdim=True) + 64e-5).rsqrt()
    return (
        (normed * g["norm_weight"] + g["norm_bias"] + (f["r"] * k * g["r_k"]).sum(-1, keepdim=True) * v)
        * f["g"]
    ).flatten(1)


def check(kernels, lengths, kind="plain", dtype=torch.float32, first_layer=False):
    rows = len(lengths)
    t, c = numbers(sum(lengths), kind)
    memory = (torch.randn(rows + 2, 2, HEADS, 64, 64, device=DEVICE) * 0.3).to(
        dtype
    )  # of two layers, of which one runs
    slots = torch.randperm(rows + 2)[:rows].tolist()
    before, wanted = memory.clone(), memory[:, 1].double()
    want = token_by_token(lengths, slots, wanted, t, c, first_layer)
    out = run(kernels, lengths, slots, memory[:, 1], t, c, first_layer)
    others = [slot for slot in range(rows + 2) if slot not in slots]
    assert off(out, want) < 2e-3 and max(off(memory[slot, 1], wanted[slot]) for slot in slots) < 2e-3
    assert torch.equal(memory[:, 0], before[:, 0]) and torch.equal(memory[others], before[others])


@pytest.mark.parametrize(
    "lengths",
    [
        [2],
        [3],
        [7],
        [15],
        [16],
        [17],
        [33],
        [63],
        [129],
        [321],
        [9000],
        [1000],
        [17, 2, 64, 1000, 16],
        list(range(2, 40)),
        [2] * 330,
    ],
)
@pytest.mark.parametrize(("dtype", "first_layer"), [(torch.float16, False), (torch.float32, True)])
def test_out_and_states(kernels, lengths, dtype, first_layer):
    check(kernels, lengths, dtype=dtype, first_layer=first_layer)


@pytest.mark.many_launches
@pytest.mark.parametrize("lengths", [[2000], [300] * 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_run_gives_the_same(kernels, lengths, dtype):
    """Chunks replace others in shared memory, which some lanes have just read."""
    t, c = numbers(sum(lengths))
    slots = list(range(len(lengths)))
    before = (torch.randn(len(lengths), HEADS, 64, 64, device=DEVICE) * 0.3).to(dtype)
    states = before.clone()
    out = run(kernels, lengths, slots, states, t, c)
    for _ in range(20):
        again = before.clone()
        assert torch.equal(run(kernels, lengths, slots, again, t, c), out) and torch.equal(again, states)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_whose_output_is_scaled_before_the_group_norm(kernels, dtype):
    lengths, slots = [1000, 2, 17, 33, 16, 64], [3, 1, 4, 0, 2, 5]
    t, c = numbers(sum(lengths))
    states = (torch.randn(6, HEADS, 64, 64, device=DEVICE) * 0.3).to(dtype)
    offsets = normal(2, 2, WIDTH, std=0.5)[:, 1]
    vector_of = torch.tensor([0, 1, -1, 1, 0, -1]).repeat_interleave(torch.tensor(lengths)).int().to(DEVICE)
    readout = ReadoutInput(offsets.data_ptr(), offsets.stride(0), vector_of.data_ptr())
    scales = torch.cat((offsets.float() + 1, torch.ones(1, WIDTH, device=DEVICE)))[vector_of.long()]
    wanted = states.double()
    want = token_by_token(lengths, slots, wanted, t, c, scales=scales)
    out = run(kernels, lengths, slots, states, t, c, readout=readout)
    assert off(out, want) < 2e-3 and off(states, wanted) < 2e-3


@pytest.mark.parametrize("kind", ["fast", "slow", "both", "large", "aligned", "aligned, lasting"])
def test_extremes(kernels, kind):
    check(kernels, [1000, 40], kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_largest_numbers_leave_nothing_infinite(kernels, dtype):
    most = torch.finfo(torch.float16).max
    t, c = numbers(100, "slow")
    for name in ("r", "k", "v", "g"):
        t[name] = torch.where(t[name] > 0, most, -most).half()
    t["g"][::2] = 0  # infinity times zero would not be a number
    for name, value in (("k_a", -1), ("a0", -30), ("r_k", most)):  # keys of twice `most`
        c[name].fill_(value)
    states = torch.full((2, HEADS, 64, 64), most, device=DEVICE, dtype=dtype)
    out = run(kernels, [60, 40], [0, 1], states, t, c)
    assert (
        out.isfinite().all() and states.isfinite().all() and not out[::2].any() and states.abs().max() >= most
    )


def test_a_row_has_the_same_bits_alone_among_others_and_in_any_slot(kernels):
    lengths = [100, 37, 5120, 16, 2]
    t, c = numbers(sum(lengths))
    states = torch.randn(9, HEADS, 64, 64, device=DEVICE).half()
    together = states.clone()
    out = run(kernels, lengths, [8, 2, 5, 0, 3], together, t, c)
    start = 0
    for length, slot in zip(lengths, [8, 2, 5, 0, 3], strict=True):
        mine = {name: x[start : start + length].contiguous() for name, x in t.items()}
        alone = states.clone()
        alone[7] = states[slot]
        assert torch.equal(run(kernels, [length], [7], alone, mine, c), out[start : start + length])
        assert torch.equal(alone[7], together[slot])
        start += length


@pytest.mark.parametrize("cuts", [[2, 40], [16, 32], [33], [98]])
def test_a_row_may_come_in_pieces(kernels, cuts):
    t, c = numbers(100)
    states = torch.randn(1, HEADS, 64, 64, device=DEVICE)
    whole, bounds = states.clone(), [0, *cuts, 100]
    want = run(kernels, [100], [0], whole, t, c)
    for start, end in pairwise(bounds):
        piece = {name: x[start:end].contiguous() for name, x in t.items()}
        assert off(run(kernels, [end - start], [0], states, piece, c), want[start:end]) < 2e-3
    assert off(states, whole) < 2e-3

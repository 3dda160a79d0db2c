"""States in fp16 that pass 65,504: every kernel that stores them keeps the largest number of fp16.

An infinity would turn the state, and all that follows, into NaN for good.
"""

import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu, normal, off, poisoned
from torch.nn.functional import layer_norm

from rwkv_batch.ops import torch_ops
from rwkv_batch.ops.cuda.abi import DEFERRED_VECTORS, MAX_LAG, TimeMixInput, Wkv6Input
from rwkv_batch.ops.cuda.binding import Addend, NormMix
from rwkv_batch.ops.cuda.inputs.feed import RECORD
from rwkv_batch.ops.cuda.inputs.packing import PrefillPlan, upload_plan

pytestmark = needs_gpu
LARGEST, HEADS = 65504, 3
WIDTH = HEADS * 64
SIGNS = torch.randint(0, 2, (2, HEADS, 64), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
LASTING, NONE = -30.0, -30.0  # of w, a decay of 1; of a, nothing is removed
CHANGES = [pytest.param(400.0, id="past the limit"), pytest.param(-400.0, id="back from it")]


def vectors(signs: torch.Tensor, number: float, tokens: int = 1) -> torch.Tensor:
    """`[tokens, WIDTH]` of a number and its negative."""
    return (signs.flatten() * number).expand(tokens, -1).half().to(DEVICE).contiguous()


def full(rows: int, number: float) -> torch.Tensor:
    return torch.full((rows, WIDTH), number, device=DEVICE, dtype=torch.float16)


def states_of(slots: int, number: float) -> torch.Tensor:
    """`[slots, HEADS, 64, 64]` fp16 of a number and its negative."""
    values, keys = SIGNS
    pattern = (values.unsqueeze(-1) * keys.unsqueeze(-2) * number).half().to(DEVICE)
    return pattern.expand(slots, -1, -1, -1).contiguous()


def tokens_of(tokens: int, change: float) -> dict[str, torch.Tensor]:
    """Tokens that add `change` to the size of every number of a state."""
    size = abs(change) ** 0.5
    values, keys = SIGNS
    return {
        "r": normal(tokens, WIDTH),
        "k": vectors(keys, size, tokens),
        "v": vectors(values, change / size, tokens),
        "w": full(tokens, LASTING),
        "g": full(tokens, 1),
    }


def plain(
    x: dict[str, torch.Tensor], states: torch.Tensor, lengths: list[int], slots: list[int]
) -> torch.Tensor:
    """What comes out of these rows, in torch; states `[slots, HEADS, 64, 64]`, fp16, move on."""
    f = {name: tensor.float() for name, tensor in x.items()}
    r, k, v = (f[name].view(-1, HEADS, 64) for name in "rkv")
    kk, nothing = torch_ops.removal_key(f["k"], torch.ones(WIDTH, device=DEVICE)), torch.zeros_like(r)
    rows = torch_ops.PackedRows(lengths, slots, DEVICE)
    y = torch_ops.wkv((r, torch_ops.log_decay(f["w"]).view_as(r), k, v, kk, nothing), states, rows)
    one, zero = torch.ones(WIDTH, device=DEVICE), torch.zeros(WIDTH, device=DEVICE)
    return torch_ops.readout(y, f["r"], f["k"], f["v"], zero, one, zero)


def time_mix(
    x: dict[str, torch.Tensor], out: torch.Tensor, states: torch.Tensor, **more: object
) -> TimeMixInput:
    """Of a first layer; `x` keeps what it points to."""
    x["a"] = full(len(out), NONE)
    for name in ("w0", "a0", "k_a", "r_k", "norm_bias"):
        x[name] = full(1, 0)
    x["k_k"], x["norm_weight"] = full(1, 1), full(1, 1)
    pointers = {name: tensor.data_ptr() for name, tensor in x.items()}
    return TimeMixInput(
        **pointers,
        out=out.data_ptr(),
        state=states.data_ptr(),
        slot_stride=states.stride(0),
        width=WIDTH,
        **more,
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 40])
def test_decode_and_the_flush_of_what_it_defers(kernels, rows, steps, change):
    """All three tokens between two writes, the write itself, and a flush after each of them."""
    start = 65000 if change > 0 else LARGEST
    states, wanted = states_of(rows, start), states_of(rows, start)
    counter = torch.zeros(1, device=DEVICE, dtype=torch.int32)
    deferred = poisoned(rows, 1, HEADS, MAX_LAG, DEFERRED_VECTORS, 64)
    slots = torch.randperm(rows, dtype=torch.int32)
    for step in range(steps):
        x, out = tokens_of(rows, change), poisoned(rows, WIDTH)
        want = plain(x, wanted, [1] * rows, slots.tolist())
        lag = torch.full((rows,), step % (MAX_LAG + 1), device=DEVICE, dtype=torch.int32)
        more = {
            "tile_counter": counter.data_ptr(),
            "deferred": deferred.data_ptr(),
            "deferred_stride": deferred.stride(0),
            "lag": lag.data_ptr(),
        }
        kernels.wkv_decode(time_mix(x, out, states, **more), slots.to(DEVICE), False)
        assert off(out, want) < 1e-2
    records = torch.zeros(rows, RECORD.itemsize // 4, device=DEVICE, dtype=torch.int32)
    records[:, RECORD.names.index("lag")] = steps % (MAX_LAG + 1)
    everyone = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    kernels.wkv_flush(everyone.data_ptr(), None, rows, records, states.unsqueeze(1), deferred)
    assert off(states, wanted) < 2e-3  # seven roundings to multiples of 32 here, one or two there
    if change > 0 and steps > 1:
        assert torch.equal(states, states_of(rows, LARGEST))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lengths", [[2], [16], [5, 17, 40]])
def test_prefill(kernels, lengths, change):
    start, slots = 65000 if change > 0 else LARGEST, list(range(len(lengths)))[::-1]
    states, wanted = states_of(len(lengths), start), states_of(len(lengths), start)
    x, out = tokens_of(sum(lengths), change), poisoned(sum(lengths), WIDTH)
    want = plain(x, wanted, lengths, slots)
    rows = upload_plan(PrefillPlan.from_lengths(lengths, slots), torch.device(DEVICE))
    scratch = poisoned(max(pieces.chunks for pieces in rows.pieces) * HEADS * kernels.chunk_bytes // 2)
    inputs = time_mix(x, out, states)
    for pieces in rows.pieces:
        kernels.wkv_prefill(inputs, pieces, scratch, False)
    assert off(out, want) < 1e-2 and off(states, wanted) < 2e-3 and states.isfinite().all()
    if change > 0:
        assert torch.equal(states, states_of(len(lengths), LARGEST))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [2], [5, 17, 40]], ids=["tokens", "two", "prompts"])
def test_rwkv6(kernels, lengths, change):
    start, slots, tokens = 65000 if change > 0 else LARGEST, list(range(len(lengths)))[::-1], sum(lengths)
    states = states_of(len(lengths), start)
    x, c = tokens_of(tokens, change), {"decay": full(1, 0), "bonus": full(1, 0)}
    c |= {"norm_weight": full(1, 1), "norm_bias": full(1, 0)}
    out = poisoned(tokens, WIDTH)
    given = Wkv6Input(
        **{name: tensor.data_ptr() for name, tensor in (x | c).items()},
        out=out.data_ptr(),
        state=states.data_ptr(),
        slot_stride=states.stride(0),
        width=WIDTH,
    )
    if tokens == len(lengths):
        kernels.wkv6(given, tokens, torch.tensor(slots, device=DEVICE, dtype=torch.int32), False)
    else:
        rows = upload_plan(PrefillPlan.from_lengths(lengths, slots), torch.device(DEVICE)).rows
        kernels.wkv6_packed(given, tokens, rows, False)
    assert out.isfinite().all()
    for length, slot in zip(lengths, slots, strict=True):
        assert off(states[slot], states_of(1, min(start + change * length, LARGEST))[0]) < 1e-3


@pytest.mark.parametrize("width", [64, 2048])
@pytest.mark.parametrize("lengths", [[1], [1] * 40, [1] * 321, [3, 40, 1]], ids=["1", "40", "321", "prompts"])
def test_token_shift(kernels, lengths, width):
    tokens, slots = sum(lengths), torch.randperm(len(lengths), dtype=torch.int32)
    lengths = sorted(lengths, key=lambda length: length > 1)
    x, weight, bias = torch.randn(tokens, width, device=DEVICE), normal(width, mean=60000), normal(width)
    shift, amounts = normal(len(lengths), 1, width), torch.full((1, width), 0.5, device=DEVICE).half()
    out = poisoned(1, tokens, width)
    mix = NormMix(Addend(), (weight, bias), shift[:, 0], amounts, out)
    if tokens == len(lengths):
        kernels.norm_mix_decode(x.clone(), mix, slots.to(DEVICE))
    else:
        rows = upload_plan(PrefillPlan.from_lengths(lengths, slots.tolist()), torch.device(DEVICE)).rows
        to = poisoned(tokens, width, dtype=torch.float32)
        kernels.norm_mix_prefill(x, to, mix, rows)
    ends = torch.tensor(lengths, device=DEVICE).cumsum(0) - 1
    want = layer_norm(x, (width,), weight.float(), bias.float())[ends].clamp(-LARGEST, LARGEST)
    assert out.isfinite().all() and shift.abs().max() == LARGEST
    assert off(shift[slots.long(), 0], want) < 1e-3

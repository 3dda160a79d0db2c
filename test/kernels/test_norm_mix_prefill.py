"""Norm, token shift and mix of packed rows against torch."""

from dataclasses import replace

import pytest
import torch
from cuda_gpu import DEVICE, CodedRows, as_fp8, needs_gpu, normal, off, poisoned, poisoned_codes, same_codes
from torch.nn.functional import layer_norm

from rwkv_batch.ops import torch_ops
from rwkv_batch.ops.cuda.binding import Addend, NormMix, RowBounds

pytestmark = needs_gpu


PACKED = [
    [1],
    [63],
    [1, 15, 1, 16, 17],
    [2] * 129 + [1] * 40,
    [3, 1500, 2, 4000, 1, 9],
]  # two tokens a block and more with the last


@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("width", [64, 320, 2048, 4096, 4160])
@pytest.mark.parametrize(
    ("source", "mixes"), [("y", 6), ("y", 1), ("table", 6), (None, 6), ("partials", 6), ("partials", 1)]
)
def test_norm_with_shift_and_mix_of_packed_rows(kernels, lengths, width, source, mixes):
    lengths, rows, tokens = sorted(lengths, key=lambda length: length > 1), len(lengths), sum(lengths)
    x, weight, bias = (
        torch.randn(tokens, width, device=DEVICE),
        normal(width, std=0.1, mean=1),
        normal(width, std=0.1),
    )
    shift, amounts = normal(rows + 2, 3, width), normal(mixes, width)
    slots = torch.randperm(rows + 2, dtype=torch.int32)[:rows]
    added, total = Addend(), x.clone()
    if source == "y":
        added = Addend(y=normal(tokens, width))
        total += added.y.float()
    elif source == "partials":
        added = Addend(partials=torch.randn(3, tokens, width, device=DEVICE))
        for part in added.partials:
            total += part
    elif source == "table":
        added = Addend(
            tokens=torch.randint(0, 50, (tokens,), device=DEVICE, dtype=torch.int32), table=normal(50, width)
        )
        total = added.table[added.tokens.long()].float()
    normed = layer_norm(total, (width,), weight.float(), bias.float())
    want_shift = shift.float()
    rows = torch_ops.PackedRows(lengths, slots.tolist(), DEVICE)
    want = torch_ops.mix(
        normed,
        torch_ops.token_shift(
            normed, want_shift[:, 1], torch_ops.PackedRows(lengths, slots.tolist(), DEVICE)
        ),
        amounts.float().unsqueeze(1),
    )
    before, out, to = x.clone(), poisoned(mixes, tokens, width), poisoned(tokens, width, dtype=torch.float32)
    mix = NormMix(added, (weight, bias), shift[:, 1], amounts, out)
    kernels.norm_mix_prefill(x, to, mix, rows_of(lengths, slots))
    assert (
        off(out, want) < 1e-3
        and off(shift, want_shift) < 1e-3
        and torch.equal(to, total)
        and torch.equal(x, before)
    )
    untouched = torch.ones_like(shift, dtype=torch.bool)
    untouched[slots.long().to(DEVICE), 1] = False
    assert torch.equal(shift[untouched].float(), want_shift[untouched])


@pytest.mark.parametrize("lengths", [[2], [5], [1, 8, 2, 3], [1, 1, 30, 32], [700, 900]])
@pytest.mark.parametrize("width", [64, 320, 4096])
@pytest.mark.parametrize("mixes", [1, 6])
def test_the_shift_behind_each_token_is_kept(kernels, lengths, width, mixes):
    tokens, count = sum(lengths), len(lengths)
    x, weight, bias, amounts = (
        torch.randn(tokens, width, device=DEVICE),
        normal(width),
        normal(width),
        normal(mixes, width),
    )
    slots, shift = torch.randperm(count, dtype=torch.int32), normal(count + tokens, width)
    plain, kept_shift, kept, spare = shift.clone(), shift.clone(), list[int](), count
    for length, slot in zip(lengths, slots.tolist(), strict=True):
        kept += [slot, *range(spare, spare + length - 1)]
        spare += length - 1
    kept[-1] = -1
    if count > 2:  # padding
        slots[-1], kept[-lengths[-1] :] = -1, [-1] * lengths[-1]
    found, rows = list[torch.Tensor](), rows_of(lengths, slots)
    at = torch.tensor(kept, device=DEVICE, dtype=torch.int32)
    for where, bounds in ((plain, rows), (kept_shift, replace(rows, kept=at))):
        out, to = poisoned(mixes, tokens, width), torch.empty_like(x)
        mix = NormMix(Addend(), (weight, bias), where, amounts, out)
        kernels.norm_mix_prefill(x, to, mix, bounds)
        found.append(out)
    written = tokens - lengths[-1] * (count > 2)
    assert torch.equal(*(out[:, :written] for out in found))
    assert found[0][:, written:].isnan().all() and not found[1][:, written:].any()
    normed, some = layer_norm(x, (width,), weight.float(), bias.float()), at >= 0
    assert off(kept_shift[at[some].long()], normed[some]) < 1e-3
    untouched = sorted({*range(len(shift))} - {*kept})
    assert torch.equal(kept_shift[untouched], shift[untouched])


@pytest.mark.parametrize("width", [320, 4096])
def test_a_normed_row_has_the_same_bits_alone_and_beside_one_that_has_ended(kernels, width):
    x, weight, bias, amounts = (
        torch.randn(3000, width, device=DEVICE),
        normal(width),
        normal(width),
        normal(6, width),
    )
    shift = normal(3, width)
    kept, together, to = shift.clone(), poisoned(6, 3000, width), torch.empty_like(x)
    mix = NormMix(Addend(), (weight, bias), kept, amounts, together)
    kernels.norm_mix_prefill(x, to, mix, rows_of([1, 2899, 100], torch.tensor([2, 0, -1])))
    assert together[:, 2900:].isnan().all() and torch.equal(kept[1], shift[1])
    for start, end, slot in ((1, 2900, 0), (0, 1, 2)):
        alone, mine = shift.clone(), poisoned(6, end - start, width)
        mix = NormMix(Addend(), (weight, bias), alone, amounts, mine)
        kernels.norm_mix_prefill(x[start:end], to, mix, rows_of([end - start], torch.tensor([slot])))
        if end - start > 1:  # other kinds of sums below 64 tokens
            assert torch.equal(mine, together[:, start:end]) and torch.equal(alone[slot], kept[slot])
        assert off(mine, together[:, start:end]) < 1e-3 and off(alone[slot], kept[slot]) < 1e-3


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("width", [64, 320, 4096, 4160])
@pytest.mark.parametrize("source", ["y", "table"])
@pytest.mark.parametrize("mixes", [1, 6])
def test_first_mixes_as_fp8_have_the_bits_of_a_kernel_of_its_own(kernels, lengths, width, source, mixes):
    """Nothing is written of a row of padding, here the last if there are some."""
    tokens, more = sum(lengths), [*lengths, 64]  # of fewer tokens other norms have sums in another order
    x, weight, bias = torch.randn(tokens + 64, width, device=DEVICE), normal(width, mean=1), normal(width)
    shift, amounts, y = normal(len(more), 3, width), normal(mixes, width), normal(tokens + 64, width)
    ids, table = torch.arange(tokens + 64, device=DEVICE, dtype=torch.int32), normal(tokens + 64, width)
    slots = torch.randperm(len(more), dtype=torch.int32)
    padding = lengths[-1] if len(lengths) > 1 else 0
    if padding:
        slots[len(lengths) - 1] = -1

    def run(some, coded):
        count = sum(some)
        added = Addend(y=y[:count]) if source == "y" else Addend(tokens=ids[:count], table=table)
        kept, out = shift.clone(), poisoned(mixes, count, width)
        to = poisoned(count, width, dtype=torch.float32)
        rows = rows_of(some, slots[: len(some)])
        mix = NormMix(added, (weight, bias), kept[:, 1], amounts, out, coded=coded)
        kernels.norm_mix_prefill(x[:count], to, mix, rows)
        return to, kept, out

    (to, kept, out), (first, half) = run(more, None), (3, 2) if mixes == 6 else (1, 1)
    written = tokens - padding
    wanted, found = as_fp8(kernels, out[:first, :written].contiguous()), poisoned_codes(first, tokens, width)
    again, kept_again, rest = run(lengths, found)
    parts = CodedRows(found.codes[:, :written].contiguous(), found.scales[:, :written].contiguous())
    assert same_codes(parts, wanted)
    assert found.codes[:, written:].eq(0x7F).all() and found.scales[:, written:].isnan().all()
    assert rest[:half].isnan().all() and torch.equal(rest[half:, :written], out[half:, :written])
    of_rows = slots[: len(lengths)][slots[: len(lengths)] >= 0].long()
    assert torch.equal(again, to[:tokens]) and torch.equal(kept_again[of_rows], kept[of_rows])


def rows_of(lengths, slots):
    ends = torch.tensor(lengths).cumsum(0)
    row_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return RowBounds(
        *(t.to(DEVICE, torch.int32) for t in (row_of, ends - torch.tensor(lengths), ends - 1, slots))
    )

"""Every CUDA kernel against plain torch in fp32 or fp64, on fresh random numbers, odd sizes and poisoned
outputs.
"""

import pytest
import torch
from cuda_gpu import ROWS, needs_gpu, off, poisoned
from torch.nn.functional import layer_norm

from rwkv_batch.ops import torch_ops
from rwkv_batch.ops.cuda.binding import (
    IDENTITY,
    LATE,
    PENDING,
    RELU_SQUARE,
    SIGMOID,
    SPARSE_ROWS,
    SPARSE_SLICES,
    TANH,
    Added,
    Kernels,
    Rows,
    TimeMixInput,
)
from rwkv_batch.ops.cuda.feed import ROW

pytestmark = needs_gpu
FUNCTIONS = {
    IDENTITY: lambda x: x,
    TANH: torch.tanh,
    SIGMOID: torch.sigmoid,
    RELU_SQUARE: lambda x: x.relu().square(),
}


@pytest.fixture(scope="module")
def kernels():
    return Kernels(torch.device("cuda"))


def normal(*shape, std=1.0, mean=0.0):
    return (torch.randn(shape, device="cuda") * std + mean).half()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("rows_of_w", "shares"), [(16, 8), (32, 8), (16, 2)])
@pytest.mark.parametrize(("n", "k"), [(32, 32), (64, 64), (208, 96), (1024, 4096), (2048, 480), (9008, 320)])
def test_products(kernels, rows, rows_of_w, shares, n, k):
    parts, wants = [], []
    for function, extra in ((IDENTITY, 0), (TANH, 16), (SIGMOID, 48), (RELU_SQUARE, 32)):
        w, x = normal(n + extra, k, std=k**-0.5), normal(rows, k)
        parts.append((w, x, poisoned(rows, n + extra), function))
        wants.append(FUNCTIONS[function](x.double() @ w.double().T))
    kernels.products(parts, rows_of_w, shares)
    for (_, _, y, _), want in zip(parts, wants, strict=True):
        assert off(y, want) < 1e-3


@pytest.mark.parametrize("rows", [1, 64])
def test_weights_brought_ahead_change_nothing(kernels, rows):
    w, x, y, again, ahead = (
        normal(4096, 64),
        normal(rows, 64),
        poisoned(rows, 4096),
        poisoned(rows, 4096),
        normal(2048, 4104),
    )
    kernels.products([(w, x, y, IDENTITY)])
    for size in (1, 1000, 2048):  # rows: less than a piece, some, more than is ever asked for
        kernels.products([(w, x, again.fill_(float("nan")), IDENTITY)], ahead=ahead[:size])
        assert torch.equal(y, again)


def test_relu_squared_never_overflows(kernels):
    y = poisoned(1, 16)
    kernels.products([(normal(16, 32).abs() * 100, normal(1, 32).abs() * 100, y, RELU_SQUARE)])
    assert y.isfinite().all() and y.max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize("rows", SPARSE_ROWS)
@pytest.mark.parametrize(
    ("n", "k"), [(64, 8), (64, 256), (192, 768), (64, 20480), (2048, 8192), (2624, 1032), (4096, 16384)]
)
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_sparse_product(kernels, rows, n, k, share):
    w, h = normal(k, n, std=k**-0.5), normal(rows, k) * (torch.rand(rows, k, device="cuda") < share)
    room = poisoned(SPARSE_SLICES, rows, n, dtype=torch.float32)
    parts = kernels.product_sparse(h, w, room)
    want = h.double() @ w.double()
    assert parts.isfinite().all() and room[len(parts) :].isnan().all()
    assert (
        off(parts.sum(0), want) < 2e-5 if want.any() else not parts.any()
    )  # tensor cores cut off what they add


def test_sparse_product_skips_weights_of_idle_units_alone(kernels):
    w, h = normal(1024, 192), normal(4, 1024).relu()
    h[:, 5:900:7] = 0
    idle = ~h.any(0)
    idle[::128] = False  # the first of a slice may stand in for units that a product lacks
    want = h.double() @ w.double()
    w[idle] = float("nan")
    assert (
        off(kernels.product_sparse(h, w, poisoned(SPARSE_SLICES, 4, 192, dtype=torch.float32)).sum(0), want)
        < 2e-5
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [64, 320, 2048, 3072, 4096])
@pytest.mark.parametrize("source", ["y", "parts", "table"])
@pytest.mark.parametrize("mixes", [1, 6])
def test_norm_with_shift_and_mix_of_one_token_a_row(kernels, rows, width, source, mixes):
    x, weight, bias = (
        torch.randn(rows, width, device="cuda"),
        normal(width, std=0.1, mean=1),
        normal(width, std=0.1),
    )
    shift, amounts = normal(rows + 3, 5, width), normal(mixes, width)
    slots = torch.randperm(rows + 3, device="cuda", dtype=torch.int32)[:rows]
    padding = rows // 2 if rows > 2 else -1
    if padding >= 0:
        slots[padding] = -1
    if source == "y":
        added = Added(y=normal(rows, width))
        total = x + added.y.float()
    elif source == "parts":
        added = Added(parts=torch.randn(5, rows, width, device="cuda"))
        total = x + added.parts.sum(0)
    else:
        added = Added(
            tokens=torch.randint(0, 50, (rows,), device="cuda", dtype=torch.int32), table=normal(50, width)
        )
        total = added.table[added.tokens.long()].float()
    normed = layer_norm(total, (width,), weight.float(), bias.float())
    before = shift[slots.long().clamp(min=0), 2].float() * (slots >= 0).unsqueeze(1)
    want_shift = shift.float()
    real = slots >= 0
    want_shift[slots[real].long(), 2] = normed[real]
    want = normed + (before - normed) * amounts.float().unsqueeze(1)
    out = poisoned(mixes, rows, width)
    kernels.norm_mix(x, added, weight, bias, slots, shift[:, 2], amounts, out)
    assert off(out, want) < 1e-3 and off(x, total) < 1e-6 and off(shift, want_shift) < 1e-3
    untouched = torch.ones(rows + 3, dtype=torch.bool, device="cuda")
    untouched[slots[real].long()] = False
    assert torch.equal(shift[untouched].float(), want_shift[untouched])


@pytest.mark.parametrize(
    ("rows", "width"), [(7, 1024), (961, 1024), (64, 4096), (482, 2048), (260, 4160), (323, 4096)]
)
def test_norm_of_rows_far_from_zero_and_with_columns_that_stand_out(kernels, rows, width):
    x, weight, bias = (
        torch.randn(rows, width, device="cuda") + 100,
        normal(width, std=0.1, mean=1),
        normal(width, std=0.1),
    )
    x[1::2] -= 100
    x[1::2, :3] *= 1000
    y, shift, amounts = normal(rows, width), normal(rows, width), normal(6, width)
    slots = torch.randperm(rows, device="cuda", dtype=torch.int32)
    normed = layer_norm(x.double() + y.double(), (width,), weight.double(), bias.double())
    want = normed + (shift[slots.long()].double() - normed) * amounts.double().unsqueeze(1)
    out = poisoned(6, rows, width)
    kernels.norm_mix(x, Added(y=y), weight, bias, slots, shift, amounts, out)
    assert (
        off(out[:, ::2], want[:, ::2]) < 1e-3
        and off(out[:, 1::2], want[:, 1::2]) < 1e-3
        and off(shift[slots.long()], normed) < 1e-3
    )


@pytest.mark.parametrize("rows", [64, 128, 321, 960])
@pytest.mark.parametrize("width", [1024, 2048, 4096])
@pytest.mark.parametrize(("count", "mixes"), [(2, 6), (4, 1)])
def test_norm_of_many_rows_adds_partial_sums_in_their_order(kernels, rows, width, count, mixes):
    x, weight, bias = (
        torch.randn(rows, width, device="cuda"),
        normal(width, std=0.1, mean=1),
        normal(width, std=0.1),
    )
    room, shift, amounts = (
        poisoned(count + 1, rows, width, dtype=torch.float32),
        normal(rows + 1, width),
        normal(mixes, width),
    )
    added = Added(parts=room[:count].normal_())
    slots = torch.randperm(rows + 1, device="cuda", dtype=torch.int32)[:rows]
    slots[rows // 2] = -1
    real, total, again = slots >= 0, x.clone(), x.clone()
    for part in added.parts:
        total += part
    normed = layer_norm(total.double(), (width,), weight.double(), bias.double())
    before = shift[slots.long().clamp(min=0)].double() * real.unsqueeze(1)
    want = normed + (before - normed) * amounts.double().unsqueeze(1)
    out, plain = poisoned(mixes, rows, width), poisoned(rows, width)
    kernels.norm_mix(x, added, weight, bias, slots, shift, amounts, out)
    kernels.norm(again, added, weight, bias, plain)
    assert (
        off(out, want) < 1e-3
        and off(shift[slots[real].long()], normed[real]) < 1e-3
        and off(plain, normed) < 1e-3
    )
    assert torch.equal(x, total) and torch.equal(again, total) and room[count].isnan().all()


@pytest.mark.parametrize(("some", "rows"), [(64, 128), (129, 200), (240, 512)])  # each pair by one kernel
def test_a_norm_of_partial_sums_has_the_same_bits_among_more_rows(kernels, some, rows):
    x, weight, bias, parts = (
        torch.randn(rows, 4096, device="cuda"),
        normal(4096),
        normal(4096),
        torch.randn(2, rows, 4096, device="cuda"),
    )
    shift, amounts, slots = (
        normal(rows, 4096),
        normal(6, 4096),
        torch.randperm(rows, device="cuda", dtype=torch.int32),
    )
    few, kept, out, fewer = x[:some].clone(), shift.clone(), poisoned(6, rows, 4096), poisoned(6, some, 4096)
    kernels.norm_mix(
        few, Added(parts=parts[:, :some].contiguous()), weight, bias, slots[:some], kept, amounts, fewer
    )
    kernels.norm_mix(x, Added(parts=parts), weight, bias, slots, shift, amounts, out)
    assert torch.equal(fewer, out[:, :some]) and torch.equal(few, x[:some])
    assert torch.equal(kept[slots[:some].long()], shift[slots[:some].long()])


PACKED = [
    [1],
    [63],
    [1, 15, 1, 16, 17],
    [2] * 129 + [1] * 40,
    [3, 1500, 2, 4000, 1, 9],
]  # two tokens a block and more with the last


@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("width", [64, 320, 2048, 4096, 4160])
@pytest.mark.parametrize(("source", "mixes"), [("y", 6), ("y", 1), ("table", 6), (None, 6)])
def test_norm_with_shift_and_mix_of_packed_rows(kernels, lengths, width, source, mixes):
    lengths, rows, tokens = sorted(lengths, key=lambda length: length > 1), len(lengths), sum(lengths)
    x, weight, bias = (
        torch.randn(tokens, width, device="cuda"),
        normal(width, std=0.1, mean=1),
        normal(width, std=0.1),
    )
    shift, amounts = normal(rows + 2, 3, width), normal(mixes, width)
    slots = torch.randperm(rows + 2, dtype=torch.int32)[:rows]
    added, total = Added(), x.clone()
    if source == "y":
        added = Added(y=normal(tokens, width))
        total += added.y.float()
    elif source == "table":
        added = Added(
            tokens=torch.randint(0, 50, (tokens,), device="cuda", dtype=torch.int32), table=normal(50, width)
        )
        total = added.table[added.tokens.long()].float()
    normed = layer_norm(total, (width,), weight.float(), bias.float())
    want_shift = shift.float()
    want = torch_ops.mix(
        normed,
        torch_ops.token_shift(normed, want_shift[:, 1], torch_ops.pack(lengths, slots.tolist(), "cuda")),
        amounts.float().unsqueeze(1),
    )
    before, out, to = x.clone(), poisoned(mixes, tokens, width), poisoned(tokens, width, dtype=torch.float32)
    kernels.norm_mix_run(x, to, added, weight, bias, rows_of(lengths, slots), shift[:, 1], amounts, out)
    assert (
        off(out, want) < 1e-3
        and off(shift, want_shift) < 1e-3
        and torch.equal(to, total)
        and torch.equal(x, before)
    )
    untouched = torch.ones_like(shift, dtype=torch.bool)
    untouched[slots.long().cuda(), 1] = False
    assert torch.equal(shift[untouched].float(), want_shift[untouched])


@pytest.mark.parametrize("width", [320, 4096])
def test_a_normed_row_has_the_same_bits_alone_and_beside_one_that_has_ended(kernels, width):
    x, weight, bias, amounts = (
        torch.randn(3000, width, device="cuda"),
        normal(width),
        normal(width),
        normal(6, width),
    )
    shift = normal(3, width)
    kept, together, to = shift.clone(), poisoned(6, 3000, width), torch.empty_like(x)
    kernels.norm_mix_run(
        x,
        to,
        Added(),
        weight,
        bias,
        rows_of([1, 2899, 100], torch.tensor([2, 0, -1])),
        kept,
        amounts,
        together,
    )
    assert together[:, 2900:].isnan().all() and torch.equal(kept[1], shift[1])
    for start, end, slot in ((1, 2900, 0), (0, 1, 2)):
        alone, mine = shift.clone(), poisoned(6, end - start, width)
        kernels.norm_mix_run(
            x[start:end],
            to,
            Added(),
            weight,
            bias,
            rows_of([end - start], torch.tensor([slot])),
            alone,
            amounts,
            mine,
        )
        if end - start > 1:  # other kinds of sums below 64 tokens
            assert torch.equal(mine, together[:, start:end]) and torch.equal(alone[slot], kept[slot])
        assert off(mine, together[:, start:end]) < 1e-3 and off(alone[slot], kept[slot]) < 1e-3


def rows_of(lengths, slots):
    ends = torch.tensor(lengths).cumsum(0)
    row_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Rows(*(t.to("cuda", torch.int32) for t in (row_of, ends - torch.tensor(lengths), ends - 1, slots)))


def test_norm_of_some_rows(kernels):
    x, weight, bias = torch.randn(40, 128, device="cuda"), normal(128), normal(128)
    gather = torch.tensor([39, 0, 17], device="cuda", dtype=torch.int32)
    out = poisoned(3, 128)
    kernels.norm(x, Added(), weight, bias, out, gather)
    assert off(out, layer_norm(x, (128,), weight.float(), bias.float())[gather.long()]) < 1e-3


@pytest.mark.parametrize(
    ("rows", "heads"), [*((rows, 3) for rows in ROWS), (9, 64), (33, 64), (321, 64)]
)  # many heads: tiles of more rows
@pytest.mark.parametrize("state", [torch.float16, torch.float32])
@pytest.mark.parametrize("first_layer", [False, True])
def test_wkv_of_one_token_a_row(kernels, rows, heads, state, first_layer):
    """Some rows begin a step later than the others, some miss one: states are behind by as many tokens as
    they may.
    """
    padding, width = rows > 2, heads * 64
    names = ("r", "k", "v", "w", "a", "mix", "g", "v_first")
    c = {
        "w0": normal(width, mean=-2, std=2),
        "a0": normal(width),
        "v0": normal(width),
        "k_k": normal(width, std=0.1, mean=0.85),
        "k_a": normal(width, std=0.1, mean=1),
        "r_k": normal(width, std=0.1),
        "norm_weight": normal(width, mean=1, std=0.1),
        "norm_bias": normal(width, std=0.1),
    }
    states = (torch.randn(rows + 2, 2, heads, 64, 64, device="cuda") * 0.3).to(state)
    before, want_states, work = (
        states.clone(),
        states.float().clone(),
        torch.zeros(1, device="cuda", dtype=torch.int32),
    )
    pending = torch.zeros(rows + 2, 2, heads, LATE, PENDING, 64, device="cuda", dtype=torch.float16)
    pending[:, 1] = float("nan")
    everyone, behind = (
        torch.randperm(rows + 2, dtype=torch.int32)[:rows],
        torch.zeros(rows + 2, dtype=torch.int32),
    )
    layer, late = states[:, 1], pending[:, 1]
    for absent in ([slice(1, None, 2)], [], [slice(0, None, 3)], [], [slice(0, None, 5)]):
        slots = everyone.clone()
        for some in (*absent, *([-1, rows // 2] if padding else [])):
            slots[some] = -1
        live = slots >= 0
        t = {name: normal(rows, width) for name in names}
        f = {name: x[live].float() for name, x in t.items()} | {name: x.float() for name, x in c.items()}
        v = f["v"] if first_layer else f["v"].lerp(f["v_first"], (f["v0"] + f["mix"]).sigmoid())
        a = (f["a0"] + f["a"]).sigmoid()
        k = f["k"] * (1 + (a - 1) * f["k_a"])
        shape, out = (-1, heads, 64), poisoned(rows, width)
        if live.any():
            packing = torch_ops.pack([1] * int(live.sum()), slots[live].tolist(), "cuda")
            y = torch_ops.wkv(
                f["r"].view(shape),
                torch_ops.log_decay(f["w0"] + f["w"]).view(shape),
                k.view(shape),
                v.view(shape),
                torch_ops.removal_key(f["k"], f["k_k"]),
                a.view(shape),
                want_states[:, 1],
                packing,
            )
            want = torch_ops.readout(y, f["r"], k, v, f["r_k"], f["norm_weight"], f["norm_bias"]) * f["g"]
        pointers = {name: x.data_ptr() for name, x in (t | c).items()}
        if first_layer:
            pointers["mix"] = pointers["v0"] = None
        now = torch.where(live, behind[slots.clamp(min=0).long()], 0).to(torch.int32).cuda()
        inputs = TimeMixInput(
            **pointers,
            out=out.data_ptr(),
            state=layer.data_ptr(),
            slot_stride=layer.stride(0),
            width=width,
            work=work.data_ptr(),
            pending=late.data_ptr(),
            pending_stride=late.stride(0),
            behind=now.data_ptr(),
        )
        kernels.wkv_step(inputs, slots.cuda(), state == torch.float32)
        assert not work.any() and not out[~live].any()
        if live.any():
            assert off(out[live], want) < 2e-3
        behind[slots[live].long()] = (behind[slots[live].long()] + 1) % (LATE + 1)
    if state == torch.float16:
        records = torch.zeros(rows + 2, ROW.itemsize // 4, device="cuda", dtype=torch.int32)
        records[:, ROW.names.index("behind")] = behind.cuda()
        index = torch.cat((everyone, torch.tensor([-1]))).int().cuda()
        kernels.settle(index.data_ptr(), None, len(index), records, states, pending)
        assert not records.any()
    assert off(states, want_states) < (1e-3 if state == torch.float16 else 1e-4)
    assert torch.equal(states[:, 0], before[:, 0])


@pytest.mark.parametrize(
    ("counted", "dtype"),
    [
        (0, torch.float16),
        (400, torch.float32),
        (1, torch.float16),
        (40, torch.float32),
        (130, torch.float16),
        (130, torch.float32),
        (40, torch.float16),
        (400, torch.float16),
    ],
)
def test_wkv_of_rows_that_the_device_counts(kernels, counted, dtype):
    rows, heads = 400, 32
    names = (
        "r",
        "k",
        "v",
        "w",
        "a",
        "mix",
        "g",
        "v_first",
        "w0",
        "a0",
        "v0",
        "k_k",
        "k_a",
        "r_k",
        "norm_weight",
        "norm_bias",
    )
    t = {name: normal(rows, heads * 64) for name in names}
    states, work = normal(rows, heads, 64, 64).to(dtype), torch.zeros(1, device="cuda", dtype=torch.int32)
    slots, count = (
        torch.randperm(rows, device="cuda").int(),
        torch.tensor(counted, device="cuda", dtype=torch.int32),
    )
    pending, behind = (
        poisoned(rows, heads, LATE, PENDING, 64),
        torch.arange(LATE + 1, device="cuda", dtype=torch.int32),
    )
    behind = behind[:, None].repeat(1, rows)

    def step(states, rows, counted):
        out = poisoned(len(slots), heads * 64)
        inputs = TimeMixInput(
            **{name: x.data_ptr() for name, x in t.items()},
            out=out.data_ptr(),
            state=states.data_ptr(),
            slot_stride=states.stride(0),
            width=heads * 64,
            work=work.data_ptr(),
            pending=pending.data_ptr(),
            pending_stride=pending.stride(0),
        )
        for number in range(4):
            inputs.behind = behind[number % (LATE + 1)].data_ptr()
            kernels.wkv_step(inputs, slots[:rows], dtype == torch.float32, counted)
            torch.cuda.synchronize()  # a step fetches states while the kernel before still runs
        return out

    alone, together = states.clone(), states.clone()
    got, want = (
        step(together, rows, count),
        step(alone, counted, None) if counted else poisoned(rows, heads * 64),
    )
    assert torch.equal(got[:counted], want[:counted]) and got[counted:].isnan().all()
    assert torch.equal(together, alone) and not work.any()


def test_relu_square(kernels):
    h = normal(7, 64)
    want = h.float().relu().square()
    kernels.relu_square(h)
    assert off(h, want) < 1e-3

"""The time mix of rows of one token each, and the flush of what it defers, against torch in fp32."""

import pytest
import torch
from cuda_gpu import DEVICE, ROWS, needs_gpu, normal, off, poisoned

from rwkv_batch.ops import torch_ops
from rwkv_batch.ops.cuda.abi import DEFERRED_VECTORS, MAX_LAG, ReadoutInput, TimeMixInput
from rwkv_batch.ops.cuda.inputs.feed import RECORD

pytestmark = needs_gpu


SHAPES = [*((rows, 3) for rows in ROWS), (9, 64), (33, 64), (321, 64)]  # many heads: tiles of more rows


@pytest.mark.parametrize(("rows", "heads"), SHAPES)
@pytest.mark.parametrize("state", [torch.float16, torch.float32])
@pytest.mark.parametrize("first_layer", [False, True])
def test_rows_of_one_token(kernels, rows, heads, state, first_layer):
    check(kernels, rows, heads, state, first_layer, scaled=False)


@pytest.mark.parametrize(("rows", "heads"), [(1, 3), (5, 3), (33, 3), (33, 64)])
@pytest.mark.parametrize("state", [torch.float16, torch.float32])
def test_rows_whose_output_is_scaled_before_the_group_norm(kernels, rows, heads, state):
    check(kernels, rows, heads, state, False, scaled=True)


def check(kernels, rows, heads, state, first_layer, scaled):
    """Some rows begin a step later than the others, some miss one: states lag by every number of tokens that
    they may. scaled: most rows, by one of three vectors.
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
    states = (torch.randn(rows + 2, 2, heads, 64, 64, device=DEVICE) * 0.3).to(state)
    before, want_states, counter = (
        states.clone(),
        states.float().clone(),
        torch.zeros(1, device=DEVICE, dtype=torch.int32),
    )
    deferred = torch.zeros(
        rows + 2, 2, heads, MAX_LAG, DEFERRED_VECTORS, 64, device=DEVICE, dtype=torch.float16
    )
    deferred[:, 1] = float("nan")
    everyone, lag = (
        torch.randperm(rows + 2, dtype=torch.int32)[:rows],
        torch.zeros(rows + 2, dtype=torch.int32),
    )
    layer, layer_deferred = states[:, 1], deferred[:, 1]
    offsets, vector_of = normal(3, 2, width, std=0.5)[:, 1], torch.arange(rows, dtype=torch.int32) % 4 - 1
    vector_of = vector_of.flip(0).contiguous().to(DEVICE)  # so that a row alone has one
    readout = ReadoutInput(offsets.data_ptr(), offsets.stride(0), vector_of.data_ptr()) if scaled else None
    scales = torch.cat((offsets.float() + 1, torch.ones(1, width, device=DEVICE)))[vector_of.long()]
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
            packing = torch_ops.PackedRows([1] * int(live.sum()), slots[live].tolist(), DEVICE)
            wkv_inputs = (
                f["r"].view(shape),
                torch_ops.log_decay(f["w0"] + f["w"]).view(shape),
                k.view(shape),
                v.view(shape),
                torch_ops.removal_key(f["k"], f["k_k"]),
                a.view(shape),
            )
            y = torch_ops.wkv(wkv_inputs, want_states[:, 1], packing)
            if scaled:
                y *= scales[live].view_as(y)
            want = torch_ops.readout(y, f["r"], k, v, f["r_k"], f["norm_weight"], f["norm_bias"]) * f["g"]
        pointers = {name: x.data_ptr() for name, x in (t | c).items()}
        if first_layer:
            pointers["mix"] = pointers["v0"] = None
        now = torch.where(live, lag[slots.clamp(min=0).long()], 0).to(torch.int32).to(DEVICE)
        inputs = TimeMixInput(
            **pointers,
            out=out.data_ptr(),
            state=layer.data_ptr(),
            slot_stride=layer.stride(0),
            width=width,
            tile_counter=counter.data_ptr(),
            deferred=layer_deferred.data_ptr(),
            deferred_stride=layer_deferred.stride(0),
            lag=now.data_ptr(),
        )
        kernels.wkv_decode(inputs, slots.to(DEVICE), state == torch.float32, readout=readout)
        assert not counter.any() and not out[~live].any()
        if live.any():
            assert off(out[live], want) < 2e-3
        lag[slots[live].long()] = (lag[slots[live].long()] + 1) % (MAX_LAG + 1)
    if state == torch.float16:
        records = torch.zeros(rows + 2, RECORD.itemsize // 4, device=DEVICE, dtype=torch.int32)
        records[:, RECORD.names.index("lag")] = lag.to(DEVICE)
        index = torch.cat((everyone, torch.tensor([-1]))).int().to(DEVICE)
        kernels.wkv_flush(index.data_ptr(), None, len(index), records, states, deferred)
        assert not records.any()
    assert off(states, want_states) < (1e-3 if state == torch.float16 else 1e-4)
    assert torch.equal(states[:, 0], before[:, 0])


@pytest.mark.usefixtures("graphs")
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
def test_rows_that_the_device_counts(kernels, counted, dtype):
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
    states, counter = normal(rows, heads, 64, 64).to(dtype), torch.zeros(1, device=DEVICE, dtype=torch.int32)
    slots, count = (
        torch.randperm(rows, device=DEVICE).int(),
        torch.tensor(counted, device=DEVICE, dtype=torch.int32),
    )
    deferred, lag = (
        poisoned(rows, heads, MAX_LAG, DEFERRED_VECTORS, 64),
        torch.arange(MAX_LAG + 1, device=DEVICE, dtype=torch.int32),
    )
    lag = lag[:, None].repeat(1, rows)

    def step(states, rows, counted):
        out = poisoned(len(slots), heads * 64)
        inputs = TimeMixInput(
            **{name: x.data_ptr() for name, x in t.items()},
            out=out.data_ptr(),
            state=states.data_ptr(),
            slot_stride=states.stride(0),
            width=heads * 64,
            tile_counter=counter.data_ptr(),
            deferred=deferred.data_ptr(),
            deferred_stride=deferred.stride(0),
        )
        for number in range(4):
            inputs.lag = lag[number % (MAX_LAG + 1)].data_ptr()
            kernels.wkv_decode(inputs, slots[:rows], dtype == torch.float32, counted)
            torch.cuda.synchronize()  # a step fetches states while the kernel before still runs
        return out

    alone, together = states.clone(), states.clone()
    got, want = (
        step(together, rows, count),
        step(alone, counted, None) if counted else poisoned(rows, heads * 64),
    )
    assert torch.equal(got[:counted], want[:counted]) and got[counted:].isnan().all()
    assert torch.equal(together, alone) and not counter.any()

"""The time mix of RWKV-6 for rows of any number of tokens, against the recurrence in torch in fp64."""

import pytest
import torch
from cuda_gpu import DEVICE, ROWS, needs_gpu, normal, off, poisoned
from torch.nn.functional import group_norm, silu

from rwkv_batch.ops.cuda.abi import Wkv6Input
from rwkv_batch.ops.cuda.inputs.packing import NO_SLOT, PrefillPlan, StagedPlan, upload_plan
from rwkv_batch.ops.torch_ops import GROUP_NORM_EPS
from rwkv_batch.ops.wkv6 import wkv6_step

pytestmark = needs_gpu
OUT, STATE = 2e-3, {torch.float16: 1e-3, torch.float32: 1e-5}  # relative errors


def constants(width):
    return {
        "decay": normal(width, mean=-3, std=2),
        "bonus": normal(width, std=0.5),
        "norm_weight": normal(width, mean=1, std=0.1),
        "norm_bias": normal(width, std=0.1),
    }


def inputs_of(tokens, width):
    return {name: normal(tokens, width) for name in "rkvwg"}


def input_of(x, c, out, layer):
    pointers = {name: tensor.data_ptr() for name, tensor in (x | c).items()}
    return Wkv6Input(
        **pointers,
        out=out.data_ptr(),
        state=layer.data_ptr(),
        slot_stride=layer.stride(0),
        width=out.shape[1],
    )


def expected(x, c, lengths, slots, states):
    """Output `[T, C]` of rows one after the other; moves states `[slots, heads, 64, 64]` on, both in fp64."""
    heads, outs = states.shape[1], []
    x, c = ({name: tensor.double() for name, tensor in group.items()} for group in (x, c))
    w_log, u = -(x["w"] + c["decay"]).exp(), c["bonus"].view(heads, 64)
    begin = 0
    for length, slot in zip(lengths, slots, strict=True):
        for token in range(begin, begin + length):
            parts = (part[token].view(1, heads, 64) for part in (x["r"], w_log, x["k"], x["v"]))
            y, state = wkv6_step(*parts, states[slot : slot + 1], u=u)
            states[slot] = state[0]
            outs.append(y.view(1, -1))
        begin += length
    y = group_norm(torch.cat(outs), heads, c["norm_weight"], c["norm_bias"], GROUP_NORM_EPS)
    return y * silu(x["g"][:begin])


def random_states(slots, heads, dtype):
    return (torch.randn(slots, 2, heads, 64, 64, device=DEVICE) * 0.3).to(dtype)


@pytest.mark.parametrize(("rows", "heads"), [*((rows, 3) for rows in ROWS), (33, 32)])
@pytest.mark.parametrize("dtype", STATE)
def test_rows_of_one_token(kernels, rows, heads, dtype):
    width, c = heads * 64, constants(heads * 64)
    states = random_states(rows + 2, heads, dtype)
    before, want_states = states.clone(), states[:, 1].double()
    slots = torch.randperm(rows + 2, dtype=torch.int32)[:rows]
    if rows > 2:
        slots[rows // 2] = -1
    live = slots >= 0
    for _ in range(3):
        x, out = inputs_of(rows, width), poisoned(rows, width)
        kernels.wkv6(input_of(x, c, out, states[:, 1]), rows, slots.to(DEVICE), dtype == torch.float32)
        own = {name: tensor[live.to(DEVICE)] for name, tensor in x.items()}
        want = expected(own, c, [1] * int(live.sum()), slots[live].tolist(), want_states)
        assert off(out[live.to(DEVICE)], want) < OUT
        assert not out[~live.to(DEVICE)].any()
    assert off(states[:, 1], want_states) < STATE[dtype]
    assert torch.equal(states[:, 0], before[:, 0])
    untouched = torch.ones(rows + 2, dtype=torch.bool)
    untouched[slots[live].long()] = False
    assert torch.equal(states[untouched.to(DEVICE)], before[untouched.to(DEVICE)])


@pytest.mark.parametrize("lengths", [[17], [1, 15, 16, 1, 33], [2], [40, 1, 64, 3, 18]])
@pytest.mark.parametrize("room", [0, 7], ids=["exact", "staged"])
@pytest.mark.parametrize("dtype", STATE)
def test_rows_of_many_tokens(kernels, lengths, room, dtype):
    """room: tokens of padding behind the rows, in a plan whose number of rows is on the device only."""
    if room and DEVICE == "cpu":
        pytest.skip("pinned memory needs a GPU")
    heads, tokens, device = 3, sum(lengths), torch.device(DEVICE)
    width, c = heads * 64, constants(heads * 64)
    slots = torch.randperm(len(lengths) + 2)[: len(lengths)].tolist()
    slots[len(lengths) // 2] = slots[len(lengths) // 2] if len(lengths) < 3 else NO_SLOT
    plan = PrefillPlan.from_lengths(lengths, slots)
    if room:
        staged = StagedPlan(tokens + room, device)
        staged.fill(torch.ones(tokens, dtype=torch.int32), plan)
        rows = staged.rows.rows
    else:
        rows = upload_plan(plan, device).rows
    x, out = inputs_of(tokens + room, width), poisoned(tokens + room, width)
    states = random_states(len(lengths) + 2, heads, dtype)
    before, want_states = states.clone(), states[:, 1].double()
    kernels.wkv6_packed(input_of(x, c, out, states[:, 1]), tokens + room, rows, dtype == torch.float32)
    begin = 0
    for row in plan.order:
        here = slice(begin, begin := begin + lengths[row])
        if slots[row] == NO_SLOT:
            assert out[here].isnan().all()
            continue
        own = {name: tensor[here] for name, tensor in x.items()}
        assert off(out[here], expected(own, c, [lengths[row]], [slots[row]], want_states)) < OUT
    assert out[tokens:].isnan().all()
    assert off(states[:, 1], want_states) < STATE[dtype]
    assert torch.equal(states[:, 0], before[:, 0])


def test_how_a_prompt_is_cut_does_not_matter(kernels):
    """To the last bit, with states in fp32: also by one token at a time."""
    heads, tokens, device = 2, 50, torch.device(DEVICE)
    width, c = heads * 64, constants(heads * 64)
    x = inputs_of(tokens, width)
    whole = random_states(1, heads, torch.float32)
    cut, outs = whole.clone(), [poisoned(tokens, width), poisoned(tokens, width)]
    rows = upload_plan(PrefillPlan.from_lengths([tokens], [0]), device).rows
    kernels.wkv6_packed(input_of(x, c, outs[0], whole[:, 1]), tokens, rows, True)
    begin = 0
    for length in (1, 16, 7, 1, 25):
        here = slice(begin, begin := begin + length)
        given = input_of({name: tensor[here] for name, tensor in x.items()}, c, outs[1][here], cut[:, 1])
        if length == 1:
            kernels.wkv6(given, 1, torch.zeros(1, device=DEVICE, dtype=torch.int32), True)
        else:
            rows = upload_plan(PrefillPlan.from_lengths([length], [0]), device).rows
            kernels.wkv6_packed(given, length, rows, True)
    assert torch.equal(*outs) and torch.equal(whole, cut)


def test_decays_from_none_to_all(kernels):
    """From a decay of 1 to one of 0, which no state and no output may turn into NaN."""
    width = 64
    c = constants(width) | {"decay": torch.linspace(-20, 20, width, device=DEVICE).half()}
    x = inputs_of(1, width) | {"w": torch.zeros(1, width, device=DEVICE).half()}
    states, out = random_states(1, 1, torch.float32), poisoned(1, width)
    want_states = states[:, 1].double()
    kernels.wkv6(input_of(x, c, out, states[:, 1]), 1, torch.zeros(1, device=DEVICE, dtype=torch.int32), True)
    assert off(out, expected(x, c, [1], [0], want_states)) < OUT
    assert off(states[:, 1], want_states) < STATE[torch.float32]

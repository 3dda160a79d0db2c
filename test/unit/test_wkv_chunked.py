"""The recurrence as the model runs it, token by token and in chunks, against the formula in float64."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

from rwkv_batch.ops import torch_ops
from rwkv_batch.ops.torch_ops import wkv_step
from rwkv_batch.ops.wkv_prefill import cut, wkv_prefill

pytestmark = pytest.mark.thorough

STRONGEST = -0.6065  # the log of the strongest decay the model can produce


def inputs(length, heads=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    r, k, v, raw = (torch.randn(length, heads, 64, generator=draw) for _ in range(4))
    w_log = STRONGEST * torch.rand(length, heads, 64, generator=draw)
    a = torch.rand(length, heads, 64, generator=draw)
    return [r, w_log, k, v, normalize(raw, dim=-1), a, torch.randn(heads, 64, 64, generator=draw)]


def formula(r, w_log, k, v, kk, a, state):
    """The recurrence as it is written down, in fp64."""
    r, w_log, k, v, kk, a, state = (x.double() for x in (r, w_log, k, v, kk, a, state))
    out = []
    for t in range(len(r)):
        transition = torch.diag_embed(w_log[t].exp()) - torch.einsum("hi,hj->hij", kk[t], kk[t] * a[t])
        state = state @ transition + torch.einsum("hv,hk->hvk", v[t], k[t])
        out.append(torch.einsum("hvk,hk->hv", state, r[t]))
    return torch.stack(out), state


def off(x, reference):
    return float((x.double() - reference).norm() / reference.norm())


def token_by_token(*args):
    *tokens, state = args
    steps = []
    for t in range(len(tokens[0])):
        y, states = wkv_step(*(x[t : t + 1] for x in tokens), state[None])
        state = states[0]
        steps.append(y)
    return torch.cat(steps), state


def in_chunks(*args):
    *tokens, state = args
    y, states = wkv_prefill(tokens, state[None], cut([len(tokens[0])], "cpu"))
    return y, states[0]


@pytest.mark.parametrize("run", [token_by_token, in_chunks])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 63, 200])
def test_equals_the_formula(run, length):
    args = inputs(length, seed=length)
    y, state = run(*args)
    want_y, want_state = formula(*args)
    assert y.shape == want_y.shape and off(y, want_y) < 2e-6 and off(state, want_state) < 2e-6


@pytest.mark.parametrize("decay", [STRONGEST, 0.0])
def test_the_ends_of_the_decay_range(decay):
    args = inputs(50)
    args[1] = torch.full_like(args[1], decay)
    y, state = in_chunks(*args)
    want_y, want_state = formula(*args)
    assert off(y, want_y) < 5e-6 and off(state, want_state) < 5e-6


def test_a_long_piece_loses_no_precision():
    args = inputs(1000, heads=1)
    y, state = in_chunks(*args)
    want_y, want_state = formula(*args)
    assert off(y[-16:], want_y[-16:]) < 2e-6 and off(state, want_state) < 2e-6


def test_the_state_given_is_not_changed():
    args = inputs(20)
    before = args[-1].clone()
    in_chunks(*args)
    token_by_token(*args)
    assert torch.equal(args[-1], before)


@pytest.mark.parametrize("together", [32, torch_ops.TOGETHER])
@pytest.mark.parametrize("lengths", [[2, 40, 16, 3, 17, 16], [15, 1000, 2], [33, 33]])
def test_a_piece_is_the_same_alone_and_beside_others(lengths, together, monkeypatch):
    monkeypatch.setattr(torch_ops, "TOGETHER", together)
    args = [inputs(length, seed=length + place) for place, length in enumerate(lengths)]
    slots = [5, 0, 7, 2, 3, 6][: len(lengths)]
    states = torch.full((8, 3, 64, 64), torch.nan)
    for slot, (*_, state) in zip(slots, args, strict=True):
        states[slot] = state
    tokens = [torch.cat([piece[i] for piece in args]) for i in range(6)]
    y = torch_ops.wkv(tokens, states, torch_ops.PackedRows(lengths, slots, "cpu"))
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for slot, piece, (start, end) in zip(slots, args, pairwise(ends), strict=True):
        want_y, want_state = in_chunks(*piece)
        assert torch.equal(y[start:end], want_y) and torch.equal(states[slot], want_state)
    assert states[[1, 4]].isnan().all()

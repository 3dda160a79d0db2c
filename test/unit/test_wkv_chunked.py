"""The recurrence as the model runs it, token by token and in chunks, against the formula in float64."""

import pytest
import torch
from torch.nn.functional import normalize

from rwkv_batch.ops.torch_ops import wkv_sequential, wkv_step
from rwkv_batch.ops.wkv_prefill import wkv_prefill

STRONGEST = -0.6065  # the log of the strongest decay the model can produce


def inputs(length, heads=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    r, k, v, raw = (torch.randn(length, heads, 64, generator=draw) for _ in range(4))
    w_log = STRONGEST * torch.rand(length, heads, 64, generator=draw)
    a = torch.rand(length, heads, 64, generator=draw)
    return [r, w_log, k, v, normalize(raw, dim=-1), a, torch.randn(heads, 64, 64, generator=draw)]


def formula(r, w_log, k, v, kk, a, state):
    """As it is written down, in float64."""
    r, w_log, k, v, kk, a, state = (x.double() for x in (r, w_log, k, v, kk, a, state))
    out = []
    for t in range(len(r)):
        transition = torch.diag_embed(w_log[t].exp()) - torch.einsum("hi,hj->hij", kk[t], kk[t] * a[t])
        state = state @ transition + torch.einsum("hv,hk->hvk", v[t], k[t])
        out.append(torch.einsum("hvk,hk->hv", state, r[t]))
    return torch.stack(out), state


def off(x, reference):
    return float((x.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("run", [wkv_sequential, wkv_prefill])
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
    y, state = wkv_prefill(*args)
    want_y, want_state = formula(*args)
    assert off(y, want_y) < 5e-6 and off(state, want_state) < 5e-6


def test_a_long_piece_loses_no_precision():
    args = inputs(1000, heads=1)
    y, state = wkv_prefill(*args)
    want_y, want_state = formula(*args)
    assert off(y[-16:], want_y[-16:]) < 2e-6 and off(state, want_state) < 2e-6


def test_the_state_given_is_not_changed():
    args = inputs(20)
    before = args[-1].clone()
    wkv_prefill(*args)
    wkv_sequential(*args)
    wkv_step(*[x[:1] for x in args[:-1]], args[-1][None])
    assert torch.equal(args[-1], before)

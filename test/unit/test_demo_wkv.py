"""The chunked recurrence against the step-by-step one in float64."""

import pytest
import torch

from demo.training.wkv_chunk import MAX_CHUNK, wkv_chunked

pytestmark = pytest.mark.thorough


def one_by_one(r, w_log, k, v, kk, a, state):
    """The recurrence as it is written down: one token after the other."""
    out = []
    for t in range(r.shape[1]):
        removed = torch.einsum("bhvk,bhk->bhv", state, kk[:, t])
        state = state * w_log[:, t].exp().unsqueeze(-2)
        state = state - torch.einsum("bhv,bhk->bhvk", removed, kk[:, t] * a[:, t])
        state = state + torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        out.append(torch.einsum("bhvk,bhk->bhv", state, r[:, t]))
    return torch.stack(out, 1), state


def inputs(batch, length, heads, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    shape = (batch, length, heads, 64)
    r, k, v, raw = (torch.randn(shape, dtype=torch.float64) for _ in range(4))
    w_log = -0.6065 * torch.rand(shape, dtype=torch.float64)
    a = torch.rand(shape, dtype=torch.float64)
    state = torch.randn(batch, heads, 64, 64, dtype=torch.float64)
    return [x.to(dtype) for x in (r, w_log, k, v, raw / raw.norm(dim=-1, keepdim=True), a, state)]


def off(x, reference):
    return float((x.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (3, 5)])
def test_same_values_and_state_as_one_by_one(length, batch, heads):
    args = inputs(batch, length, heads, seed=length)
    y, state = wkv_chunked(*args)
    want_y, want_state = one_by_one(*args)
    assert y.shape == want_y.shape and off(y, want_y) < 1e-11 and off(state, want_state) < 1e-11
    y32, state32 = wkv_chunked(*(x.float() for x in args))
    assert y32.dtype == torch.float32 and off(y32, want_y) < 1e-5 and off(state32, want_state) < 1e-5


@pytest.mark.parametrize("length", [1, 16, 17, 63])
def test_same_gradients_as_one_by_one(length):
    grads = []
    for run in (wkv_chunked, one_by_one):
        args = [x.requires_grad_() for x in inputs(1, length, 3, seed=7)]
        y, state = run(*args)
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        ((y * weight).sum() + state.square().sum()).backward()
        grads.append([x.grad for x in args])
    for name, got, want in zip(("r", "w_log", "k", "v", "kk", "a", "state"), *grads, strict=True):
        assert off(got, want) < 1e-10, name


@pytest.mark.parametrize("chunk", [1, 5, 32, MAX_CHUNK])
def test_chunk_length_does_not_change_the_result_even_at_the_strongest_decay(chunk):
    args = inputs(1, 70, 1)
    args[1] = torch.full_like(args[1], -0.6065)
    want_y, want_state = one_by_one(*args)
    y, state = wkv_chunked(*(x.float() for x in args), chunk=chunk)
    assert off(y, want_y) < 1e-5 and off(state, want_state) < 1e-5


def test_a_sequence_in_pieces_ends_in_the_same_state():
    *tokens, state = inputs(2, 40, 1)
    whole_y, whole = wkv_chunked(*tokens, state)
    pieces = []
    for start, stop in ((0, 7), (7, 8), (8, 40)):
        y, state = wkv_chunked(*(x[:, start:stop] for x in tokens), state)
        pieces.append(y)
    assert off(torch.cat(pieces, 1), whole_y) < 1e-11 and off(state, whole) < 1e-11


def test_low_precision_inputs_are_computed_in_the_dtype_of_the_state():
    args = inputs(1, 20, 1, dtype=torch.bfloat16)
    y, state = wkv_chunked(*args[:-1], args[-1].float())
    want_y, _ = one_by_one(*(x.double() for x in args))
    assert y.dtype == state.dtype == torch.float32 and off(y, want_y) < 1e-5


@pytest.mark.parametrize("chunk", [0, 65])
def test_a_chunk_that_would_overflow_is_refused(chunk):
    with pytest.raises(ValueError, match="chunk is"):
        wkv_chunked(*inputs(1, 4, 1), chunk=chunk)

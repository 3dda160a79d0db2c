"""The RWKV-6 recurrence in torch. Its decay may be any number from 0 to 1, so that nothing is divided by it.

    y_t = S_{t-1} r_t + (sum over keys of u k_t r_t) v_t,    S_t = S_{t-1} diag(w_t) + v_t k_t^T

S is `[value, key]`, as the states of RWKV-7.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_batch.ops.wkv_prefill import CHUNK, Chunks, join, split


def wkv6_step(
    r: Tensor, w_log: Tensor, k: Tensor, v: Tensor, state: Tensor, *, u: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of every row: returns y `[B, H, 64]` and the new state.

    Inputs `[B, H, 64]` (w_log: log of the decay), u `[H, 64]`, state `[B, H, value, key]`.
    """
    own = (r * u * k).sum(-1, keepdim=True)
    # A product of a row by a matrix: that of a matrix by a column is slower, and a single row's sums differ.
    y = torch.bmm(r.reshape(-1, 1, r.shape[-1]), state.flatten(0, 1).mT).view_as(v).addcmul_(own, v)
    return y, (state * w_log.exp().unsqueeze(-2)).addcmul_(v.unsqueeze(-1), k.unsqueeze(-2))


def wkv6_prefill(
    inputs: Sequence[Tensor], states: Tensor, chunks: Chunks, *, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Run pieces of rows, as `wkv_prefill.wkv_prefill` does.

    With D_i the log of the decays from the chunk's beginning to token i, token i reads what token j < i wrote
    by the weight `sum(r_i k_j exp(D_{i-1} - D_j))`, an exponent that is never positive.
    """
    _, heads, width = inputs[0].shape
    r, w_log, k, v = (split(x, chunks) for x in inputs)  # [chunks, H, CHUNK, 64]
    decay = w_log.cumsum(-2)  # D
    before, end = decay - w_log, decay[..., -1:, :]
    weights = r.new_zeros(*r.shape[:-1], CHUNK)
    for i in range(1, CHUNK):
        seen = (before[..., i : i + 1, :] - decay[..., :i, :]).exp_().mul_(k[..., :i, :])
        weights[..., i, :i] = (seen @ r[..., i, :].unsqueeze(-1)).squeeze(-1)
    weights.diagonal(dim1=-2, dim2=-1).copy_((r * u.unsqueeze(1) * k).sum(-1))
    # From here on heads are as good as rows: [chunks * H, ...]
    from_values, reads, writes, end, v = (
        x.reshape(-1, *x.shape[2:])
        for x in (weights @ v, r * before.exp(), k * (end - decay).exp(), end.exp(), v)
    )
    state, y = states.reshape(-1, width, width).clone(), torch.empty_like(v)
    first = 0
    for count in chunks.counts:
        here, s = slice(first, first + count * heads), state[: count * heads]
        torch.baddbmm(from_values[here], reads[here], s.mT, out=y[here])
        s.mul_(end[here]).baddbmm_(v[here].mT, writes[here])
        first = here.stop
    return join(y.view(-1, heads, CHUNK, width), chunks), state.view_as(states)

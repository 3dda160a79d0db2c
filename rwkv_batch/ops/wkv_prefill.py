"""The RWKV-7 recurrence over one long piece of a prompt: chunk after chunk, each as a few matrix products.

    S_t = S_{t-1} diag(w_t) - u_t (kk_t * a_t)^T + v_t k_t^T,    u_t = S_{t-1} kk_t,    y_t = S_t r_t

Write W_t for the product of the decays since the chunk began at S. Divide the keys written by it and multiply
the keys read by it, and the decays are gone: with A the products of keys read and keys written earlier in the
chunk,

    u = S (W_{t-1} kk_t) + A_kk,k v - A_kk,b u
    y = S (W_t r_t) + A_r,k v - A_r,b u
    S <- (S + v^T k/W - u^T b/W) W_end

A and the inverse of the triangle 1 + A_kk,b do not depend on S and are made for all chunks at once; four
products a chunk run in sequence.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 16  # tokens: longer chunks cost more arithmetic than the calls they save


def wkv_prefill(
    r: Tensor, w_log: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run one row: returns y `[T, H, 64]` and the last state.

    Inputs `[T, H, 64]` (w_log: log of the decay), state `[H, value, key]`.
    """
    length, heads, width = r.shape
    chunk = min(CHUNK, length)

    def split(x: Tensor) -> Tensor:
        """`[T, H, 64]` -> `[chunks, H, chunk, 64]`. Padding is zero: decay 1 and nothing written."""
        padded: Tensor = pad(x, (0, 0, 0, 0, 0, -length % chunk))
        return padded.view(-1, chunk, heads, width).transpose(1, 2)

    w_log, v = split(w_log), split(v)
    decay = w_log.cumsum(-2)  # log W
    end = decay[..., -1:, :].exp()  # [chunks, H, 1, key]
    grow = (-decay).exp()
    reads = torch.cat(
        (split(kk) * (decay - w_log).exp(), split(r) * decay.exp()), -2
    )  # [chunks, H, 2 chunk, key]
    writes = torch.cat((split(k) * grow, split(kk * a) * grow), -2)
    products = (reads @ writes.mT).mul_(_causal(chunk, r.device))  # A  [chunks, H, 2 chunk, 2 chunk]
    from_values = products[..., :chunk] @ v  # [chunks, H, 2 chunk, value]
    minus_one = torch.eye(chunk, device=r.device).neg_()
    solve = torch.linalg.solve_triangular(
        products[..., :chunk, chunk:], minus_one, upper=False, unitriangular=True
    )  # -(1 + A_kk,b)^-1
    y = torch.empty_like(v)
    for c in range(len(v)):
        seen = torch.baddbmm(from_values[c], reads[c], state.mT)
        minus_u = torch.bmm(solve[c], seen[:, :chunk])
        torch.baddbmm(seen[:, chunk:], products[c, :, chunk:, chunk:], minus_u, out=y[c])
        values = torch.cat((v[c], minus_u), -2)
        state = torch.baddbmm(state, values.mT, writes[c]).mul_(end[c])
    return y.transpose(1, 2).reshape(-1, heads, width)[:length], state


def _causal(chunk: int, device: torch.device) -> Tensor:
    """What a token may see of its chunk: `[2 chunk, 2 chunk]` of 0 and 1.

    u depends only on what was written before it, y on its own write as well.
    """
    ones = torch.ones(chunk, chunk, device=device)
    return torch.cat((ones.tril(-1), ones.tril())).repeat(1, 2)

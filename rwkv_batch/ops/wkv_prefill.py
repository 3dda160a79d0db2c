"""The RWKV-7 recurrence over pieces of prompts: chunk after chunk, each as a few matrix products.

    S_t = S_{t-1} diag(w_t) - u_t (kk_t * a_t)^T + v_t k_t^T,    u_t = S_{t-1} kk_t,    y_t = S_t r_t

Write W_t for the product of the decays since the chunk began at S. Divide the keys written by it and multiply
the keys read by it, and the decays are gone: with A the products of keys read and keys written earlier in the
chunk,

    u = S (W_{t-1} kk_t) + A_kk,k v - A_kk,b u
    y = S (W_t r_t) + A_r,k v - A_r,b u
    S <- (S + v^T k/W - u^T b/W) W_end

A and the inverse of the triangle 1 + A_kk,b do not depend on S and are made for all chunks at once; four
products run in sequence, for the first chunks of all pieces, then for the second ones, and so on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 16  # tokens: longer chunks cost more arithmetic than the calls they save


@dataclass(frozen=True)
class Chunks:
    """Where the tokens of several pieces lie when those are cut into chunks of `size` tokens.

    Pieces are in order of length, longest first. So those that have an nth chunk are the first ones.
    """

    size: int
    order: Tensor  # of the pieces
    places: Tensor | slice  # of all tokens, piece after piece as given, among `size * sum(counts)`
    counts: list[int]  # how many pieces have a first chunk, a second, ...


def cut(lengths: Sequence[int], device: torch.device | str, size: int = CHUNK) -> Chunks:
    """Of pieces that have so many tokens, each at least one."""
    order = sorted(range(len(lengths)), key=lambda piece: -lengths[piece])
    chunks = [-(-length // size) for length in lengths]
    counts = [sum(chunk < count for count in chunks) for chunk in range(max(chunks))]
    if len(lengths) == 1:  # as it lies: a copy less
        return Chunks(size, torch.tensor([0], device=device), slice(0, lengths[0]), counts)
    before = torch.tensor([0, *counts]).cumsum(0)
    places = []
    for rank, piece in sorted(enumerate(order), key=lambda item: item[1]):
        token = torch.arange(lengths[piece])
        places.append((before[token // size] + rank) * size + token % size)
    return Chunks(size, torch.tensor(order, device=device), torch.cat(places).to(device), counts)


def split(x: Tensor, chunks: Chunks) -> Tensor:
    """`[T, H, 64]` -> `[chunks, H, size, 64]`. Padding is zero: decay 1 and nothing written."""
    _, heads, width = x.shape
    padded = x.new_zeros(sum(chunks.counts) * chunks.size, heads, width)
    padded[chunks.places] = x
    return padded.view(-1, chunks.size, heads, width).transpose(1, 2)


def join(y: Tensor, chunks: Chunks) -> Tensor:
    """`[chunks, H, size, 64]` -> `[T, H, 64]`, without the padding."""
    return y.transpose(1, 2).reshape(-1, y.shape[1], y.shape[3])[chunks.places]


def wkv_prefill(inputs: Sequence[Tensor], states: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Run pieces of rows, packed one after the other: returns y `[T, H, 64]` and the last states.

    Inputs are r, the log of the decay, k, v, kk and a, all `[T, H, 64]`. States `[pieces, H, value, key]`
    are in `chunks.order` both before and after. What a piece gives does not depend on the others, bit for
    bit.
    """
    r, w_log, k, v, kk, a = inputs
    _, heads, width = r.shape

    w_log, v = split(w_log, chunks), split(v, chunks)
    decay = w_log.cumsum(-2)  # log W
    end = decay[..., -1:, :].exp()  # [chunks, H, 1, key]
    grow = (-decay).exp()
    reads = torch.cat(
        (split(kk, chunks) * (decay - w_log).exp(), split(r, chunks) * decay.exp()), -2
    )  # [chunks, H, 2 CHUNK, key]
    writes = torch.cat((split(k, chunks) * grow, split(kk * a, chunks) * grow), -2)
    products = (reads @ writes.mT).mul_(_causal(r.device))  # A  [chunks, H, 2 CHUNK, 2 CHUNK]
    from_values = products[..., :CHUNK] @ v  # [chunks, H, 2 CHUNK, value]
    minus_one = torch.eye(CHUNK, device=r.device).neg_()
    solve = torch.linalg.solve_triangular(
        products[..., :CHUNK, CHUNK:], minus_one, upper=False, unitriangular=True
    )  # -(1 + A_kk,b)^-1
    # From here on heads are as good as rows: [chunks * H, ...]
    reads, writes, from_values, solve, end, v, products = (
        x.reshape(-1, *x.shape[2:]) for x in (reads, writes, from_values, solve, end, v, products)
    )
    from_u = products[:, CHUNK:, CHUNK:]
    state, y = states.reshape(-1, width, width).clone(), torch.empty_like(v)
    first = 0
    for count in chunks.counts:
        here, s = slice(first, first + count * heads), state[: count * heads]
        seen = torch.baddbmm(from_values[here], reads[here], s.mT)
        minus_u = torch.bmm(solve[here], seen[:, :CHUNK])
        torch.baddbmm(seen[:, CHUNK:], from_u[here], minus_u, out=y[here])
        s.baddbmm_(torch.cat((v[here], minus_u), -2).mT, writes[here]).mul_(end[here])
        first = here.stop
    return join(y.view(-1, heads, CHUNK, width), chunks), state.view_as(states)


def _causal(device: torch.device) -> Tensor:
    """What a token may see of its chunk: `[2 CHUNK, 2 CHUNK]` of 0 and 1.

    u depends only on what was written before it, y on its own write as well.
    """
    ones = torch.ones(CHUNK, CHUNK, device=device)
    return torch.cat((ones.tril(-1), ones.tril())).repeat(1, 2)

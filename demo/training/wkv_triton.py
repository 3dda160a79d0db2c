"""The time-mix recurrence of demo/training/wkv_chunk.py and its gradient on a GPU, token by token in registers.

    u_t = S_{t-1} kk_t        S_t = S_{t-1} diag(w_t) - u_t b_t^T + v_t k_t^T        y_t = S_t r_t        b = kk * a

One program holds the 64 x 64 state of one head of one sequence. With G_t the gradient of S_t,

    G_t += dy_t r_t^T       dr_t = S_t^T dy_t       dv_t = G_t k_t       du_t = -G_t b_t
    dk_t = G_t^T v_t        db_t = -G_t^T u_t       dw_t = sum_i G_t * S_{t-1}
    dkk_t = S_{t-1}^T du_t  G_{t-1} = G_t diag(w_t) + du_t kk_t^T

The gradient needs the states in reverse. They are kept every 16 tokens, and between those S_{t-1} is found from
S_t by undoing the step, which divides by decays of at least exp(-0.6065).
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

KEPT = 16  # tokens from one kept state to the next
WARPS = 4  # of a program


@triton.jit
def forward_kernel(
    r_at, w_at, k_at, v_at, kk_at, a_at, start_at, y_at, u_at, kept_at, end_at,
    length, start_stride, heads: tl.constexpr, every: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    """A sequence's head: y, u, the state before every 16th token, and the last state."""
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // heads, program % heads
    i, j = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    tile = i * n + j
    state = tl.load(start_at + sequence * start_stride + head * n * n + tile)
    here = (sequence * length * heads + head) * n
    kept = program * (length // every) * n * n
    for _ in range(length // every):
        tl.store(kept_at + kept + tile, state)
        kept += n * n
        for _ in range(every):
            w, kk = tl.exp(tl.load(w_at + here + j)), tl.load(kk_at + here + j)
            b = kk * tl.load(a_at + here + j)
            u = tl.sum(state * kk, 1, keep_dims=True)
            state = state * w - u * b + tl.load(v_at + here + i) * tl.load(k_at + here + j)
            tl.store(u_at + here + i, u)
            tl.store(y_at + here + i, tl.sum(state * tl.load(r_at + here + j), 1, keep_dims=True))
            here += heads * n
    tl.store(end_at + program * n * n + tile, state)


@triton.jit
def add_five(a, b, c, d, e, f, g, h, i, j):
    """Five sums at once, which wait for each other's warps once."""
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def backward_kernel(
    r_at, w_at, k_at, v_at, kk_at, a_at, u_at, kept_at, end_at, dy_at, d_end_at,
    dr_at, dw_at, dk_at, dv_at, dkk_at, da_at, d_start_at,
    length, heads: tl.constexpr, every: tl.constexpr, n: tl.constexpr,
):  # fmt: skip
    """The gradients of a sequence's head, from its last token to its first."""
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // heads, program % heads
    i, j = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    tile = i * n + j
    state, grad = tl.load(end_at + program * n * n + tile), tl.load(d_end_at + program * n * n + tile)
    here = ((sequence + 1) * length - 1) * heads * n + head * n
    kept = (program + 1) * (length // every) * n * n
    for _ in range(length // every):
        for _ in range(every):
            w_log, kk, a = tl.load(w_at + here + j), tl.load(kk_at + here + j), tl.load(a_at + here + j)
            r, k, b, w = tl.load(r_at + here + j), tl.load(k_at + here + j), kk * a, tl.exp(w_log)
            v, u, dy = tl.load(v_at + here + i), tl.load(u_at + here + i), tl.load(dy_at + here + i)
            for_r = state * dy
            grad += dy * r
            state = (state + u * b - v * k) * tl.exp(-w_log)
            tl.store(dv_at + here + i, tl.sum(grad * k, 1, keep_dims=True))
            du = -tl.sum(grad * b, 1, keep_dims=True)
            dr, dk, minus_db, dw, dkk = tl.reduce(
                (for_r, grad * v, grad * u, grad * state, state * du), 0, add_five, keep_dims=True
            )
            tl.store(dr_at + here + j, dr)
            tl.store(dk_at + here + j, dk)
            tl.store(dw_at + here + j, dw * w)
            tl.store(dkk_at + here + j, dkk - minus_db * a)
            tl.store(da_at + here + j, -minus_db * kk)
            grad = grad * w + du * kk
            here -= heads * n
        kept -= n * n
        state = tl.load(kept_at + kept + tile)
    tl.store(d_start_at + program * n * n + tile, grad)


class Recurrence(torch.autograd.Function):
    """Both kernels, for autograd."""

    @staticmethod
    def forward(
        r: Tensor, w_log: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, length, heads, n = r.shape
        y, u = torch.empty_like(r), torch.empty_like(r)
        kept = r.new_empty(batch, heads, length // KEPT, n, n)
        end = r.new_empty(batch, heads, n, n)
        forward_kernel[(batch * heads,)](
            *(r, w_log, k, v, kk, a, start, y, u, kept, end),
            *(length, start.stride(0), heads, KEPT, n),
            num_warps=WARPS,
        )
        return y, end, u, kept

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # torch's class has no type
        r, w_log, k, v, kk, a, _ = inputs
        _, end, u, kept = output
        ctx.mark_non_differentiable(u, kept)
        ctx.save_for_backward(r, w_log, k, v, kk, a, u, kept, end)

    @staticmethod
    def backward(ctx, dy: Tensor, d_end: Tensor, *_: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors
        batch, length, heads, n = dy.shape
        grads = [torch.empty_like(dy, memory_format=torch.contiguous_format) for _ in range(6)]
        d_start = dy.new_empty(batch, heads, n, n)
        backward_kernel[(batch * heads,)](
            *(*saved, dy.contiguous(), d_end.contiguous(), *grads, d_start),
            *(length, heads, KEPT, n),
            num_warps=WARPS,
        )
        return *grads, d_start


def wkv_tokens(
    r: Tensor, w_log: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of `wkv_chunked` for fp32 tensors on a GPU and a length that 16 divides.

    `state` may be one for all sequences, expanded.
    """
    length = r.shape[1]
    if length % KEPT:
        raise ValueError(f"the length is {length}; it must be a multiple of {KEPT}")
    inputs = (x.contiguous() for x in (r, w_log, k, v, kk, a))
    y, end, _, _ = Recurrence.apply(*inputs, state)
    return y, end

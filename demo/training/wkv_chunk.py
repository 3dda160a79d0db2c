"""The RWKV-7 time-mix recurrence over whole sequences, in parallel chunks.

    S_t = S_{t-1} diag(w_t) - (S_{t-1} kk_t) (kk_t * a_t)^T + v_t k_t^T        y_t = S_t r_t

Write u_t = S_{t-1} kk_t and W_t for the product of the decays since the chunk began. Unrolled inside one
chunk that starts from S_0,

    u_t = S_0 (W_{t-1} kk_t) + sum_{s<t} [v_s (k_s W_{t-1}/W_s . kk_t) - u_s (b_s W_{t-1}/W_s . kk_t)],    b = kk * a

which is a unit lower triangular system in u. Its right side is linear in S_0, so it is solved for all chunks
at once with S_0 left open; only S -> S M + D, one small product a chunk, runs in sequence. A GPU multiplies many
small matrices much faster than it substitutes in them, so the system is solved by its inverse.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

MAX_CHUNK = 64  # 64 decays of at most exp(-0.6065) divide out as exp(39), far inside fp32


def inverse(lower: Tensor) -> Tensor:
    """(I + L)^-1 of strictly lower triangular L, which is (I - L)(I + L^2)(I + L^4)... because L^n = 0."""
    result = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device) - lower
    power, exponent = lower, 2
    while exponent < lower.shape[-1]:
        power = power @ power
        result = result + result @ power
        exponent *= 2
    return result


def wkv_chunked(
    r: Tensor, w_log: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, state: Tensor, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over T tokens.

    Returns y `[B, T, H, 64]` and the state after the last token `[B, H, 64, 64]`.

    r, k, v, a, w_log (log of the decay, in (-0.6065, 0]), kk (L2-normalised): `[B, T, H, 64]`. state: `[B, H,
    value, key]`. All arithmetic and both results are in the state's dtype (fp32 in use). Differentiable. Any
    T >= 1; `chunk` (1 to 64) changes only speed and rounding.
    """
    if not 1 <= chunk <= MAX_CHUNK:
        raise ValueError(f"chunk is {chunk}; use a length from 1 to {MAX_CHUNK}")
    batch, length, heads, width = r.shape
    chunk = min(chunk, length)
    spare = -length % chunk

    def split(x: Tensor) -> Tensor:
        """`[B, T, H, N]` -> `[chunks, B, H, chunk, N]`.

        Padding is zero: decay 1 and nothing written, so it leaves the state as it is.
        """
        x = pad(x.to(state.dtype), (0, 0, 0, 0, 0, spare))
        return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)

    r, w_log, k, v, kk, a = map(split, (r, w_log, k, v, kk, a))
    decay = w_log.cumsum(-2)  # log W_t
    total = decay[..., -1:, :]  # log W at the chunk's end  [chunks, B, H, 1, N]
    grow = (-decay).exp()
    b = kk * a
    b_up, k_up = b * grow, k * grow  # b_s / W_s, k_s / W_s
    kk_down, r_down = kk * (decay - w_log).exp(), r * decay.exp()  # W_{t-1} kk_t, W_t r_t

    lower = (kk_down @ b_up.mT).tril(-1)  # [chunks, B, H, t, s]
    from_v = (kk_down @ k_up.mT).tril(-1) @ v
    solved = inverse(lower) @ torch.cat((kk_down, from_v), -1)
    u_state, u_v = solved.split(width, -1)  # u = u_state S_0^T + u_v

    to_end = (total - decay).exp()  # W_end / W_s
    b_end, k_end = b * to_end, k * to_end
    carry = torch.diag_embed(total.squeeze(-2).exp()) - u_state.mT @ b_end  # M  [chunks, B, H, key, key]
    write = v.mT @ k_end - u_v.mT @ b_end  # D  [chunks, B, H, value, key]
    starts = []
    for move, add in zip(carry.unbind(0), write.unbind(0), strict=True):
        starts.append(state)
        state = state @ move + add

    start = torch.stack(starts).mT  # S_0^T of every chunk  [chunks, B, H, key, value]
    u = u_state @ start + u_v
    y = r_down @ start + (r_down @ k_up.mT).tril() @ v - (r_down @ b_up.mT).tril() @ u
    y = y.permute(1, 0, 3, 2, 4).reshape(batch, length + spare, heads, width)
    return y[:, :length], state

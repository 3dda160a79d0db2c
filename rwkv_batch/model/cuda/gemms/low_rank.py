"""The GEMMs of small matrices: of the low-rank functions, and others for which nothing is timed.

The outer sides of the low-rank functions run by "stream16" (`gemm_stream`), "low" (`gemm_lowrank`) or "blas"
(cuBLAS), as that is timed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_batch.model.cuda.gemms.kinds import BLAS, LOW, LOW_OUT, STREAM
from rwkv_batch.model.cuda.gemms.method import GemmCall, Method, Product
from rwkv_batch.ops.cuda.abi import SIGMOID, TANH
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.gemms import AUTO, MAX_RESIDENT_K, RESIDENT, Part

STREAM_TOKENS = 16  # for which gemm_stream takes each weight from memory once, at most
INNER_STREAM_TOKENS = 64  # for which it takes inner sides, at most, where there is no gemm_lowrank
SHORT_K = 256  # which gemm_stream divides among two warps only
LONG_SPLIT = 4  # parts of K of low-rank matrices with long K, where it must not depend on the tokens


class OuterSides(Method):
    """Outer sides by `gemm_stream`, with a prefetch, as these GEMMs leave memory idle."""

    form = Tensor

    def run(self, call: GemmCall) -> None:
        self.kernels.gemm_stream(call.small, split_k=2, prefetch=call.prefetch)


class ResidentOuterSides(OuterSides):
    """By `gemm_lowrank`, with w in shared memory."""

    def fits(self, product: Product, tokens: int) -> bool:
        return self.kernels.has_lowrank and product.shape[1] <= MAX_RESIDENT_K

    def run(self, call: GemmCall) -> None:
        self.kernels.gemm_lowrank(call.small, RESIDENT, call.ahead)


class OuterSidesByTorch(OuterSides):
    """By cuBLAS."""

    def run(self, call: GemmCall) -> None:
        by_torch(call.small)


def methods(kernels: Kernels) -> list[Method]:
    """All of them, as in halves.py."""
    kinds = {STREAM: OuterSides, LOW: ResidentOuterSides, BLAS: OuterSidesByTorch}
    return [made(kernels, name, (LOW_OUT,)) for name, made in kinds.items()]


def inner_sides(kernels: Kernels, parts: Sequence[Part]) -> None:
    """The inner sides of the low-rank functions, if any, by what suits the number of tokens."""
    if not parts:
        return
    same = kernels.invariant
    if kernels.has_lowrank:
        kernels.gemm_lowrank(parts, LONG_SPLIT if same else AUTO)
    elif same or len(parts[0][1]) <= INNER_STREAM_TOKENS:
        kernels.gemm_stream(parts)
    else:
        by_torch(parts)


def small_gemm(kernels: Kernels, part: Part) -> None:
    """A GEMM of a small matrix by what suits the number of tokens; nothing is timed. No more than TANH."""
    w, x, y, activation = part
    short, same = w.shape[1] <= SHORT_K, kernels.invariant
    if kernels.has_lowrank and (same or len(x) > STREAM_TOKENS):
        kernels.gemm_lowrank([part], RESIDENT if short else LONG_SPLIT if same else AUTO)
    elif same or len(x) <= STREAM_TOKENS:
        kernels.gemm_stream([part], split_k=2 if short else 8)
    else:
        torch.mm(x, w.T, out=y)
        if activation == TANH:
            y.tanh_()


def by_torch(parts: Sequence[Part]) -> None:
    """Each by cuBLAS; then the activation, which is none, TANH or SIGMOID."""
    for w, x, y, activation in parts:
        torch.mm(x, w.T, out=y)
        if activation in (TANH, SIGMOID):
            y.tanh_() if activation == TANH else y.sigmoid_()

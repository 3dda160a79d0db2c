"""The GEMMs of small matrices: of the low-rank functions, and others for which nothing is timed."""

from collections.abc import Callable, Sequence

import torch

from rwkv_batch.ops.cuda.abi import SIGMOID, TANH
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.gemms import AUTO, RESIDENT, Part

STREAM_TOKENS = 16  # for which gemm_stream takes each weight from memory once, at most
INNER_STREAM_TOKENS = 64  # for which it takes inner sides, at most, where there is no gemm_lowrank
SHORT_K = 256  # which gemm_stream divides among two warps only
LONG_SPLIT = 4  # parts of K of low-rank matrices with long K, where it must not depend on the tokens

Small = Callable[[Kernels, Sequence[Part]], None]  # runs small GEMMs of the same M, if there are any


def inner_sides(kernels: Kernels, parts: Sequence[Part]) -> None:
    """The inner sides of the low-rank functions by what suits the number of tokens."""
    if not parts:
        return
    same = kernels.invariant
    if kernels.has_lowrank:
        kernels.gemm_lowrank(parts, LONG_SPLIT if same else AUTO)
    elif same or len(parts[0][1]) <= INNER_STREAM_TOKENS:
        kernels.gemm_stream(parts)
    else:
        by_torch(kernels, parts)


def small_gemm(kernels: Kernels, part: Part) -> None:
    """A GEMM of a small matrix by what suits the number of tokens; nothing is timed."""
    w, x, _, _ = part
    short, same = w.shape[1] <= SHORT_K, kernels.invariant
    if kernels.has_lowrank and (same or len(x) > STREAM_TOKENS):
        kernels.gemm_lowrank([part], RESIDENT if short else LONG_SPLIT if same else AUTO)
    elif same or len(x) <= STREAM_TOKENS:
        kernels.gemm_stream([part], split_k=2 if short else 8)
    else:
        by_torch(kernels, [part])


def by_torch(kernels: Kernels, parts: Sequence[Part]) -> None:
    """Each by cuBLAS; then the activation, which is none, TANH or SIGMOID."""
    for w, x, y, activation in parts:
        torch.mm(x, w.T, out=y)
        if activation in (TANH, SIGMOID):
            y.tanh_() if activation == TANH else y.sigmoid_()


def in_launch(kernels: Kernels, parts: Sequence[Part]) -> None:
    """Nothing: the launch of the large GEMM runs them too."""

"""GEMMs of small matrices, for which nothing is timed, and of any by cuBLAS."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_batch.ops.cuda.abi import SIGMOID, TANH
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.gemms import AUTO, RESIDENT, Part

STREAM_TOKENS = 16  # for which gemm_stream takes each weight from memory once, at most
SHORT_K = 256  # which gemm_stream divides among two warps only
BLOCK_ROWS = 64  # of `in_blocks`
LONG_SPLIT = 4  # parts of K of low-rank matrices with long K, where it must not depend on the tokens


def in_blocks(x: Tensor, w: Tensor, y: Tensor) -> None:
    """y = x w by cuBLAS, always for BLOCK_ROWS rows: one GEMM or a batch of them.

    A library chooses the order of sums by the shape, so that one shape keeps it.
    """
    for begin in range(0, x.shape[-2], BLOCK_ROWS):
        some, to = x[..., begin : begin + BLOCK_ROWS, :], y[..., begin : begin + BLOCK_ROWS, :]
        block = x.new_zeros(*x.shape[:-2], BLOCK_ROWS, x.shape[-1])
        block[..., : some.shape[-2], :] = some
        to.copy_((block @ w)[..., : some.shape[-2], :])


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

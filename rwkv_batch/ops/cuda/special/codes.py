"""The kernels that every GPU can run on matrices of codes, as Python functions.

Tensors are as those of `binding`.
"""

from collections.abc import Sequence
from ctypes import POINTER, c_int, c_uint, c_void_p
from functools import partial

from torch import Tensor

from rwkv_batch.ops.cuda.abi import (
    CODES_FP5,
    CODES_FP6,
    CODES_FP8,
    CODES_INT4,
    CODES_INT8,
    CODES_NF4,
    CODES_WIDE_INT4,
    IDENTITY,
    RELU_SQUARE,
)
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.gemms import Codes, launch, pointer, pointers_of, prefetched

FORMATS = {
    "int8": CODES_INT8,
    "fp8": CODES_FP8,
    "fp6": CODES_FP6,
    "fp5": CODES_FP5,
    "int4": CODES_INT4,
    "int4-128": CODES_WIDE_INT4,
    "nf4": CODES_NF4,
}
CODE_SIGNATURES = {  # as signatures.SIGNATURES
    "rwkv_gemm_codes": (*[POINTER(c_void_p)] * 4, *[c_int] * 7, c_void_p, c_uint),
    "rwkv_decode_codes": (c_void_p, c_void_p, c_void_p, c_int, c_int, c_int),
}


def most_warp_rows(format: str) -> int:
    """Outputs that a warp of `gemm_codes` takes, at most."""
    return 32 if format in ("fp6", "fp5") else 64


class CodeKernels:
    """Those of a library of kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._call = partial(launch, kernels.library)
        for name, arguments in CODE_SIGNATURES.items():
            function = getattr(kernels.library, name)
            function.argtypes, function.restype = (*arguments, c_void_p), c_int

    def gemm_codes(
        self,
        ws: Codes,
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        activation: int = IDENTITY,
        warp_rows: int = 16,
        prefetch: Tensor | None = None,
    ) -> None:
        """y = f(scale (x w^T)) for up to three w, x `[M, K]` and y `[M, N]` of one shape, best for few rows.

        ws: blocks, as those of `orders`, whose scales are with the codes of int4 and nf4; N is a multiple of
        16, K of 64. f is IDENTITY or RELU_SQUARE. warp_rows: outputs of a warp, 16, 32 or 64, as
        `most_warp_rows` allows. prefetch: weights that the next kernel reads.
        """
        m, n, k = len(xs[0]), ys[0].shape[1], xs[0].shape[1]
        kind, square = FORMATS[ws.format], int(activation == RELU_SQUARE)
        self._call(
            "rwkv_gemm_codes",
            *map(pointers_of, (ws.codes, ws.scales, xs, ys)),
            len(xs),
            m,
            n,
            k,
            kind,
            square,
            warp_rows,
            *prefetched(prefetch),
        )

    def decode_codes(self, w: Tensor, scales: Tensor | None, to: Tensor, format: str) -> None:
        """The fp16 numbers `[N, K]` that blocks of codes stand for, at most what fp16 holds."""
        self._call(
            "rwkv_decode_codes", w.data_ptr(), pointer(scales), to.data_ptr(), *to.shape, FORMATS[format]
        )

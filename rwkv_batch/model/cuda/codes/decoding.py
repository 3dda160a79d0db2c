"""GEMMs with matrices of codes that first become fp16, some outputs at a time, for cuBLAS."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv_batch.model.cuda.packed.coded import CodedMatrix
from rwkv_batch.ops.cuda.abi import RELU_SQUARE
from rwkv_batch.ops.cuda.binding import Kernels

DECODED = "decoded"

# Writes some outputs of a matrix as fp16 to a place and returns them as `[inputs, outputs]`.
Decode = Callable[[CodedMatrix, slice, Tensor], Tensor]


def multiply_decoded(
    kernels: Kernels,
    decode: Decode,
    ws: Sequence[CodedMatrix],
    xs: Tensor,
    ys: Sequence[Tensor],
    activation: int,
) -> None:
    """y = f(x w^T) for each w, x of xs `[len(ws), M, K]` and y; f is IDENTITY or RELU_SQUARE."""
    for w, x, y in zip(ws, xs, ys, strict=True):
        for part in w.decoded_parts():
            torch.mm(x, decode(w, part, w.decoded_place(part)), out=y[:, part])
        if activation == RELU_SQUARE:
            kernels.relu_square(y)

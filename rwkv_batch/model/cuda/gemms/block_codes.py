"""The ways to run large GEMMs with matrices of codes in blocks, on any GPU.

- "codes16", "codes32", "codes64": `gemm_codes`, with so many outputs a warp; each 32 rows of x, or with more
  than 16 outputs each 16, read the codes anew, and each warp reads x. The sums do not depend on the number of
  rows
- "decoded": the codes become fp16, some outputs at a time, which cuBLAS multiplies; slower than fp16
"""

from functools import cached_property

import torch

from rwkv_batch.model.cuda.gemms.method import GemmCall, Method, Product
from rwkv_batch.model.cuda.gemms.tiled_codes import coded
from rwkv_batch.model.cuda.packed.blocks import BlockMatrix
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.special.codes import CodeKernels, most_warp_rows

DECODED = "decoded"
CODES = {"codes16": 16, "codes32": 32, "codes64": 64}  # outputs of a warp
CODES_TOKENS = 256  # with which `gemm_codes` is a candidate, at most


class BlockCodes(Method):
    """A method for codes in blocks."""

    form = BlockMatrix

    @cached_property
    def codes(self) -> CodeKernels:
        """Bound when they are first needed."""
        return CodeKernels(self.kernels)


class GemmCodes(BlockCodes):
    """By `gemm_codes`."""

    def __init__(self, kernels: Kernels, name: str) -> None:
        super().__init__(kernels, name)
        self._warp_rows = CODES[name]

    def fits(self, product: Product, tokens: int) -> bool:
        return tokens <= CODES_TOKENS and self._warp_rows <= most_warp_rows(coded(product).format)

    def launch(self, call: GemmCall) -> None:
        self.codes.gemm_codes(call.codes, call.xs, call.ys, call.activation, self._warp_rows, call.ahead)


class Decoded(BlockCodes):
    """By fp16 and cuBLAS."""

    leaves_square = True

    def launch(self, call: GemmCall) -> None:
        for w, x, y in zip(call.coded, call.xs, call.ys, strict=True):
            assert isinstance(w, BlockMatrix)
            for part in w.decoded_parts():
                codes, scales, place = w.decoded_part(part)
                self.codes.decode_codes(codes, scales, place, w.format)
                torch.mm(x, place.T, out=y[:, part])


def methods(kernels: Kernels) -> list[Method]:
    """All of them, as in halves.py."""
    return [*(GemmCodes(kernels, name) for name in CODES), Decoded(kernels, DECODED)]

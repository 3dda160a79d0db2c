"""GEMMs with matrices of codes in blocks, on any GPU.

- "codes16", "codes32", "codes64": `gemm_codes`, with so many outputs a warp; each 32 rows of x, or with more
  than 16 outputs each 16, read the codes anew, and each warp reads x
- "decoded": the codes become fp16, some outputs at a time, which cuBLAS multiplies; slower than fp16
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rwkv_batch.model.cuda.codes.coded_gemm import CodedRoom
from rwkv_batch.model.cuda.packed.blocks import BlockMatrix
from rwkv_batch.model.cuda.packed.coded import CodedMatrix
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.codes.kernels import CodeKernels, most_warp_rows

DECODED = "decoded"
CODES = {"codes16": 16, "codes32": 32, "codes64": 64}  # outputs of a warp
CODES_TOKENS = 256  # with which `gemm_codes` is a candidate, at most


@dataclass(frozen=True)
class BlockGemms:
    """Runs them by a method."""

    kernels: Kernels

    @cached_property
    def codes(self) -> CodeKernels:
        return CodeKernels(self.kernels)

    def candidates(self, w: CodedMatrix, tokens: int) -> tuple[str, ...]:
        """The methods for so many tokens. The sums of CODES do not depend on the number of tokens."""
        assert isinstance(w, BlockMatrix)
        codes = (method for method, rows in CODES.items() if rows <= most_warp_rows(w.format))
        return (*codes, DECODED) if tokens <= CODES_TOKENS else (DECODED,)

    def run(
        self,
        ws: Sequence[CodedMatrix],
        xs: Tensor,
        ys: Sequence[Tensor],
        method: str,
        room: CodedRoom | None = None,
        activation: int = IDENTITY,
        prefetch: Tensor | None = None,
        square: bool = False,
        ready: bool = False,
    ) -> None:
        """y = f(x w^T) for each w and x of xs `[len(ws), M, K]`.

        room, square and ready: as of CodedGemms, of no use here. prefetch: weights that the next kernel
        reads, which CODES fetch ahead.
        """
        kind = ws[0].format
        if method in CODES:
            codes, scales = [w.codes for w in ws], [w.scales for w in ws]
            self.codes.gemm_codes(codes, scales, list(xs), ys, kind, activation, CODES[method], prefetch)
            return
        for w, x, y in zip(ws, xs, ys, strict=True):
            assert isinstance(w, BlockMatrix)
            for part in w.decoded_parts():
                place = w.decoded_place(part)
                self.codes.decode_codes(w.codes_of(part), w.scales_of(part), place, kind)
                torch.mm(x, place.T, out=y[:, part])
            if activation == RELU_SQUARE:
                self.kernels.relu_square(y)

"""The ways to run large GEMMs in fp16.

- "stream16", "stream32": `gemm_stream`, with 16 or 32 rows of weights a warp; small GEMMs in the same launch
- "tile", "many": `gemm_tile`, and its kernel for many rows; "beside": "many" with small GEMMs in its launch
- "blas": cuBLAS through torch; with "mixed" and "low" small GEMMs run by `gemm_stream` and `gemm_lowrank`
- "lt0", "lt1"...: an algorithm of cuBLASLt
- "sparse": `gemm_sparse`, which skips the weights of inactive hidden units; "sparse/8" leaves its sums over
  parts of K to the next norm
- "lt0/2", "many/4"...: split-K into so many parts, by the first algorithm for it, or by the kernel of "many"
- "blocks": cuBLAS, for a fixed number of rows at a time

The outer sides of the low-rank functions run by "stream16" (`gemm_stream`), "low" (`gemm_lowrank`) or "blas"
(cuBLAS), as that is timed.
"""

import torch
from torch import Tensor

from rwkv_batch.model.cuda.gemms.kinds import (
    BESIDE,
    BLAS,
    HEAD,
    IN,
    KEY,
    LOW,
    LOW_OUT,
    MANY,
    OUT,
    SPARSE,
    SPLITS,
    STREAM,
    TILE,
    VALUE,
    split_of,
)
from rwkv_batch.model.cuda.gemms.low_rank import by_torch, in_launch, inner_sides
from rwkv_batch.model.cuda.gemms.method import GemmCall, Method, Product
from rwkv_batch.ops.cuda import tile
from rwkv_batch.ops.cuda.abi import SPARSE_SPLITS
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.buffers import MAX_SPLITS, SPLIT_TOKENS
from rwkv_batch.ops.cuda.gemms import MAX_RESIDENT_K, RESIDENT
from rwkv_batch.ops.cuda.special.blaslt import MAX_ALGORITHMS, BlasLt

LT_TOKENS = 64  # tokens for which cuBLASLt's algorithms are candidates, at least
STREAMED_TOKENS = 1024  # with which gemm_stream is a candidate, at most
TILE_TOKENS = 256  # which one tile of gemm_tile holds: each weight is taken from memory once
SPLIT_MULTIPLE = 64  # of which the K of a split is a multiple
SPLIT_ALGORITHMS = 3
BLOCK_ROWS = 64  # of `in_blocks`


class Stream(Method):
    """By `gemm_stream`."""

    form = Tensor

    def __init__(self, kernels: Kernels, name: str, warp_rows: int) -> None:
        super().__init__(kernels, name, (IN, OUT, KEY, HEAD), in_launch)
        self._warp_rows = warp_rows

    def fits(self, product: Product, tokens: int) -> bool:
        return tokens <= STREAMED_TOKENS

    def launch(self, call: GemmCall) -> None:
        three = zip(call.halves, call.xs, call.ys, strict=True)
        large = [(w, x, y, call.activation) for w, x, y in three]
        self.kernels.gemm_stream([*large, *call.small], self._warp_rows, prefetch=call.prefetch)


class Tile(Method):
    """By `gemm_tile`."""

    form, many, least_tokens = Tensor, False, 0

    def fits(self, product: Product, tokens: int) -> bool:
        return self.kernels.has_tile and tile.fits(*product.shape) and tokens >= self.least_tokens

    def launch(self, call: GemmCall) -> None:
        self.kernels.gemm_tile(
            call.halves,
            call.xs,
            call.ys,
            call.activation,
            call.transposed,
            self.many,
            self.beside(call),
        )


class Many(Tile):
    """By its kernel for many rows."""

    many, least_tokens = True, TILE_TOKENS + 1


class Beside(Many):
    """By that kernel, with the small GEMMs in its launch."""

    least_tokens = LT_TOKENS + 1


class Blas(Method):
    """By cuBLAS."""

    form, leaves_square = Tensor, True

    def launch(self, call: GemmCall) -> None:
        multiply = torch.bmm if call.x.dim() == 3 else torch.mm
        multiply(call.x, call.tensor if call.transposed else call.tensor.mT, out=call.y)


class Lt(Method):
    """By an algorithm of cuBLASLt."""

    form, leaves_square = Tensor, True

    def __init__(self, kernels: Kernels, lt: BlasLt, number: int) -> None:
        super().__init__(kernels, f"lt{number}", small=inner_sides if kernels.has_lowrank else by_torch)
        self._lt, self._number = lt, number

    def fits(self, product: Product, tokens: int) -> bool:
        return tokens >= LT_TOKENS and self._number < self._lt.algorithm_count(product.of_tokens(tokens))

    def launch(self, call: GemmCall) -> None:
        self._lt.run(call.tensor, call.x, call.y, self._number, call.transposed)


class Sparse(Method):
    """By `gemm_sparse`: its sums over parts of K, which it may add up itself."""

    form, skips_units = Tensor, True

    def fits(self, product: Product, tokens: int) -> bool:
        split = product.kind in SPLITS
        return self.kernels.sparse_fits(tokens, product.shape[1]) and (self.kernels.has_lowrank or not split)

    def launch(self, call: GemmCall) -> Tensor:
        together = self.kernels.has_lowrank and VALUE in self.kinds
        room = call.room.sparse_partials
        return self.kernels.gemm_sparse(call.x, call.tensor, room, call.prefetch, together)


class Split(Method):
    """By split-K: by an algorithm of cuBLASLt, or without one by the kernel of "many"."""

    form = Tensor

    def __init__(self, kernels: Kernels, parts: int, lt: BlasLt | None = None, number: int = 0) -> None:
        super().__init__(kernels, f"{MANY if lt is None else f'lt{number}'}/{parts}", SPLITS)
        self._parts, self._lt, self._number = parts, lt, number

    def fits(self, product: Product, tokens: int) -> bool:
        k = product.shape[1]
        if k % (self._parts * SPLIT_MULTIPLE) or not LT_TOKENS <= tokens <= SPLIT_TOKENS:
            return False
        if self._lt is None:
            return self.kernels.has_tile and tile.fits(*product.shape) and tokens > LT_TOKENS
        return self._number < self._lt.algorithm_count(product.of_tokens(tokens, self._parts))

    def launch(self, call: GemmCall) -> Tensor:
        sums = call.room.split_partials[: self._parts]
        if self._lt is None:
            self.kernels.gemm_many_split(call.tensor, call.x, sums, call.transposed)
        else:
            self._lt.run(call.tensor, call.x, sums, self._number, call.transposed)
        return sums


class InBlocks(Method):
    """For models that are to be batch-invariant, where there is no other for these GEMMs."""

    form = Tensor

    def fits(self, product: Product, tokens: int) -> bool:
        return self.kernels.invariant

    def launch(self, call: GemmCall) -> None:
        in_blocks(call.x, call.tensor, call.y)


class OuterSides(Method):
    """The outer sides of low-rank functions by `gemm_stream`, with a prefetch, as they leave memory idle."""

    form = Tensor

    def launch(self, call: GemmCall) -> None:
        self.kernels.gemm_stream(call.small, split_k=2, prefetch=call.prefetch)


class ResidentOuterSides(OuterSides):
    """By `gemm_lowrank`, with w in shared memory."""

    def fits(self, product: Product, tokens: int) -> bool:
        return self.kernels.has_lowrank and product.shape[1] <= MAX_RESIDENT_K

    def launch(self, call: GemmCall) -> None:
        self.kernels.gemm_lowrank(call.small, RESIDENT, call.ahead)


class OuterSidesByTorch(OuterSides):
    """By cuBLAS."""

    def launch(self, call: GemmCall) -> None:
        by_torch(self.kernels, call.small)


def in_blocks(x: Tensor, w: Tensor, y: Tensor) -> None:
    """y = x w by cuBLAS, always for BLOCK_ROWS rows: one GEMM or a batch of them.

    A library chooses the order of sums by the shape, so that one shape keeps it.
    """
    for begin in range(0, x.shape[-2], BLOCK_ROWS):
        some, to = x[..., begin : begin + BLOCK_ROWS, :], y[..., begin : begin + BLOCK_ROWS, :]
        block = x.new_zeros(*x.shape[:-2], BLOCK_ROWS, x.shape[-1])
        block[..., : some.shape[-2], :] = some
        to.copy_((block @ w)[..., : some.shape[-2], :])


def methods(kernels: Kernels, lt: BlasLt | None) -> list[Method]:
    """All of them; of two as fast as each other the first is taken."""
    splits = (2, MAX_SPLITS)
    return [
        Stream(kernels, STREAM, 16),
        Stream(kernels, "stream32", 32),
        Sparse(kernels, SPARSE, (VALUE,)),
        Blas(kernels, "mixed", (IN,), Kernels.gemm_stream),
        *([Blas(kernels, LOW, (IN,))] if kernels.has_lowrank else []),
        Tile(kernels, TILE),
        Many(kernels, MANY),
        Beside(kernels, BESIDE, (IN,), in_launch),
        Blas(kernels, BLAS, small=by_torch),
        InBlocks(kernels, "blocks", (VALUE,)),
        Sparse(kernels, f"{SPARSE}/{SPARSE_SPLITS}", (split_of(VALUE),)),
        OuterSides(kernels, STREAM, (LOW_OUT,), in_launch),
        ResidentOuterSides(kernels, LOW, (LOW_OUT,), in_launch),
        OuterSidesByTorch(kernels, BLAS, (LOW_OUT,), in_launch),
        *(Lt(kernels, lt, number) for number in range(MAX_ALGORITHMS) if lt is not None),
        *(
            Split(kernels, parts, lt, number)
            for parts in splits
            for number in range(SPLIT_ALGORITHMS)
            if lt is not None
        ),
        *(Split(kernels, parts) for parts in splits),
    ]

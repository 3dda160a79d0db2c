"""GEMMs with matrices of 8 and 4 bits, on a Hopper GPU.

- "coded": `gemm_tile8` or `gemm_tile4`, by the bits; weights become fp16 in registers, x stays fp16
- "many": `gemm_many8` or `gemm_many4`: the same for more than 96 rows
- "beside": as "coded", with small GEMMs in the same launch, for few rows
- "sparse": `gemm_sparse8`, of the channel mix's value projection in int8
- "partial sums", "sparse/8": as "coded" and "sparse", but the next norm adds up the sums over parts of K
- "fp8", "fp8/128": `gemm_tile_fp8`, with at most 256 or 128 rows of x in a tile
- "fp8lt0", "fp8lt1"...: fp8 by an algorithm of cuBLASLt

With fp8 on both sides, rows of x are made fp8 first, each with a scale of its own, by the norm before or on
their own. That is less exact than "coded", which few rows run with in any case, as they wait for weights
alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rwkv_batch.model.cuda.packed.coded import CodedMatrix
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SPARSE_SPLITS, TILE_K
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.blas.blaslt import BlasLt, GemmShape
from rwkv_batch.ops.cuda.gemms import CodedRows, Part
from rwkv_batch.ops.cuda.tile import MOST_OF_ONE_GROUP, partial_sums

CODED, MANY, BESIDE, PARTIAL_SUMS = "coded", "many", "beside", "partial sums"
SPARSE, SPARSE_SPLIT = "sparse", f"sparse/{SPARSE_SPLITS}"
FP8 = {"fp8": 256, "fp8/128": 128}  # rows of x in a tile
FP8_LT = tuple(f"fp8lt{number}" for number in range(4))
SCALES_AT_ONCE = 4  # which cuBLASLt reads together: those of r, k and v lie one after the other
FP8_TOKENS = 65  # for which x becomes fp8, at least
MANY_TOKENS = MOST_OF_ONE_GROUP + 1  # for which "many" is a candidate, at least


def takes_fp8(method: str) -> bool:
    """Whether a method of large matrices reads x as fp8."""
    return method in FP8 or method in FP8_LT


def skips_units(method: str) -> bool:
    """Whether a method of value reads the weights of active hidden units alone."""
    return method in (SPARSE, SPARSE_SPLIT)


def takes_squares(key: str, value: str) -> bool:
    """Whether squaring what "key" computes is better left to "value", which makes codes of it anyway.

    Both are methods of large matrices. cuBLASLt has no such epilogue, and the own kernel does it in passing.
    """
    return key in FP8_LT and takes_fp8(value)


@dataclass(frozen=True)
class CodedRoom:
    """Room for what a GEMM of fp8 reads: bytes for codes, and fp32 for scales."""

    codes: Tensor
    scales: Tensor

    def rows(self, count: int, tokens: int, width: int) -> CodedRows:
        """`count` times so many rows."""
        codes, scales = self.codes[: count * tokens * width], self.scales[: count * tokens]
        return codes.view(count, tokens, width), scales.view(count, tokens)


@dataclass(frozen=True)
class CodedGemms:
    """Runs them by a method."""

    kernels: Kernels
    lt: BlasLt | None

    def candidates(self, w: CodedMatrix, tokens: int) -> tuple[str, ...]:
        """The methods for that matrix and so many tokens."""
        n, k = w.shape
        if self.kernels.invariant:
            return (CODED,)
        if w.columns and self.kernels.sparse8_fits(tokens, k):
            return SPARSE, CODED
        if w.format != "fp8":
            return (CODED, MANY) if tokens >= MANY_TOKENS else (CODED,)
        if tokens < FP8_TOKENS or k % (2 * TILE_K):
            return (CODED,)
        algorithms = 0
        if self.lt is not None and tokens % SCALES_AT_ONCE == 0:
            algorithms = self.lt.algorithm_count(GemmShape(1, n, tokens, k, transposed=False, fp8=True))
        return CODED, *FP8, *FP8_LT[:algorithms]

    def splits(self, w: CodedMatrix, tokens: int) -> tuple[str, ...]:
        """The methods for it that leave partial sums to the next norm."""
        if self.kernels.invariant:
            return ()
        if w.columns:
            return (SPARSE_SPLIT,) if self.kernels.sparse8_fits(tokens, w.shape[1]) else ()
        # A norm that writes fp8 reads none.
        most = FP8_TOKENS - 1 if w.format == "fp8" else MOST_OF_ONE_GROUP
        return (PARTIAL_SUMS,) if tokens <= most and partial_sums(*w.shape) > 1 else ()

    def sparse(
        self, w: CodedMatrix, h: Tensor, method: str, partials: Tensor, prefetch: Tensor | None
    ) -> Tensor:
        """Hidden units h `[M, K]` times w^T by "sparse" or "sparse/8": partial sums."""
        assert w.columns and w.scales is not None
        together = method == SPARSE
        return self.kernels.gemm_sparse8(h, w.codes, w.scales, partials, prefetch, together)

    def partial_sums(self, w: CodedMatrix, x: Tensor, partials: Tensor, prefetch: Tensor | None) -> Tensor:
        """x w^T by "partial sums": these, for which `partials` has room."""
        ys = [partials[: partial_sums(*w.shape)]]
        if w.group:
            self.kernels.gemm_tile4([w.codes], [x], ys, w.group, prefetch=prefetch, partial_sums=True)
        else:
            assert w.scales is not None
            fp8, ahead = w.format == "fp8", prefetch
            self.kernels.gemm_tile8([w.codes], [w.scales], [x], ys, fp8, prefetch=ahead, partial_sums=True)
        return ys[0]

    def run(
        self,
        ws: Sequence[CodedMatrix],
        xs: Tensor,
        ys: Sequence[Tensor],
        method: str,
        room: CodedRoom | None,
        activation: int = IDENTITY,
        prefetch: Tensor | None = None,
        square: bool = False,
        ready: bool = False,
        beside: Sequence[Part] = (),
    ) -> None:
        """y = f(x w^T) for each w and x of xs `[len(ws), M, K]`, by a method of `candidates` but SPARSE.

        All w have one layout. room: for the methods of fp8 on both sides. prefetch: weights that the
        next kernel reads, which CODED fetches ahead. square: relu(x)^2 in place of x, with a
        method that makes x fp8 (`takes_squares`). ready: x is in the room as fp8, and not in xs.
        beside: the small GEMMs, with BESIDE.
        """
        codes, kind, group = [w.codes for w in ws], ws[0].format, ws[0].group
        scales = [w.scales for w in ws if w.scales is not None]
        if method == MANY:
            self.kernels.gemm_many_codes(codes, scales, list(xs), ys, activation, ws[0].columns, group)
            return
        if group:
            self.kernels.gemm_tile4(codes, list(xs), ys, group, activation, prefetch, beside)
            return
        if method in (CODED, BESIDE):
            fp8, columns = kind == "fp8", ws[0].columns
            self.kernels.gemm_tile8(codes, scales, list(xs), ys, fp8, activation, prefetch, columns, beside)
            return
        assert room is not None
        x_codes, x_scales = room.rows(*xs.shape)
        if not ready:
            self.kernels.quantize_rows(xs.flatten(0, 1), x_codes, x_scales, square)
        if method in FP8:
            x = list(x_codes), list(x_scales)
            self.kernels.gemm_tile_fp8(codes, scales, *x, ys, activation, FP8[method])
            return
        assert self.lt is not None
        for w, scale, row_codes, x_scale, y in zip(codes, scales, x_codes, x_scales, ys, strict=True):
            self.lt.run_fp8(w, scale, row_codes, x_scale, y, FP8_LT.index(method))
            if activation == RELU_SQUARE:
                self.kernels.relu_square(y)

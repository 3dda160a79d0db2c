"""The ways to run large GEMMs with matrices of 8 and 4 bits, on a Hopper GPU.

- "coded": `gemm_tile8` or `gemm_tile4`, by the bits; weights become fp16 in registers, x stays fp16
- "many": `gemm_many8` or `gemm_many4`: the same for more than 96 rows
- "beside": as "coded", with small GEMMs in the same launch, for few rows
- "sparse": `gemm_sparse8`, of the channel mix's value projection in int8
- "partial sums", "sparse/8": as "coded" and "sparse", but the next norm adds up the sums over parts of K
- "fp8", "fp8/128": `gemm_tile_fp8`, with at most 256 or 128 rows of x in a tile
- "fp8lt0", "fp8lt1"...: fp8 by an algorithm of cuBLASLt

With fp8 on both sides, rows of x are made fp8 first, each with a scale of its own, by the norm before or on
their own. That is less exact than "coded", which few rows run with in any case, as they wait for weights
alone. w is a matrix of fp8, or the copy in fp8 that one of another format has.
"""

from collections.abc import Sequence

from torch import Tensor

from rwkv_batch.model.cuda.gemms.kinds import BESIDE, IN, MANY, SPARSE, SPLITS, VALUE, split_of
from rwkv_batch.model.cuda.gemms.low_rank import in_launch
from rwkv_batch.model.cuda.gemms.method import GemmCall, Method, Product, codes_of
from rwkv_batch.model.cuda.packed.coded import CodedMatrix
from rwkv_batch.ops.cuda.abi import SPARSE_SPLITS, TILE_FEW_ROWS, TILE_K
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.gemms import CodedRows
from rwkv_batch.ops.cuda.special.blaslt import BlasLt
from rwkv_batch.ops.cuda.tile import MOST_OF_ONE_GROUP, partial_sums

CODED = "coded"
FP8_ALGORITHMS = 4
SCALES_AT_ONCE = 4  # which cuBLASLt reads together: those of r, k and v lie one after the other
FP8_TOKENS = 65  # for which x becomes fp8, at least
MANY_TOKENS = MOST_OF_ONE_GROUP + 1  # for which "many" is a candidate, at least


class Coded(Method):
    """By `gemm_tile8` or `gemm_tile4`."""

    form = CodedMatrix

    def launch(self, call: GemmCall) -> None:
        self.kernels.gemm_tile_codes(
            call.codes, call.xs, call.ys, call.activation, call.ahead, self.beside(call)
        )


class CodedBeside(Coded):
    """With the small GEMMs in the same launch."""

    def fits(self, product: Product, tokens: int) -> bool:
        return tokens <= TILE_FEW_ROWS and not self.kernels.invariant


class ManyCoded(Method):
    """By `gemm_many8` or `gemm_many4`."""

    form = CodedMatrix

    def fits(self, product: Product, tokens: int) -> bool:
        return tokens >= MANY_TOKENS and coded(product).format != "fp8" and not self.kernels.invariant

    def launch(self, call: GemmCall) -> None:
        self.kernels.gemm_many_codes(call.codes, call.xs, call.ys, call.activation)


class SparseCoded(Method):
    """By `gemm_sparse8`: its sums over parts of K, which it may add up itself."""

    form, skips_units = CodedMatrix, True

    def fits(self, product: Product, tokens: int) -> bool:
        by_units = coded(product).columns and not self.kernels.invariant
        return by_units and self.kernels.sparse8_fits(tokens, product.shape[1])

    def launch(self, call: GemmCall) -> Tensor:
        (w,), (scales,), room = call.coded, _scales(call.coded), call.room.sparse_partials
        together = VALUE in self.kinds
        return self.kernels.gemm_sparse8(call.x, w.codes, scales, room, call.prefetch, together)


class PartialSums(Method):
    """Leaves the sums over parts of K to the next norm; otherwise as Coded."""

    form = CodedMatrix

    def fits(self, product: Product, tokens: int) -> bool:
        w = coded(product)
        # A norm that writes fp8 reads none.
        most = MOST_OF_ONE_GROUP if w.in_fp8 is None else FP8_TOKENS - 1
        split = tokens <= most and partial_sums(*w.shape) > 1
        return split and not w.columns and not self.kernels.invariant

    def launch(self, call: GemmCall) -> Tensor:
        sums, ahead = call.room.split_partials[: partial_sums(*call.coded[0].shape)], call.ahead
        self.kernels.gemm_tile_codes(call.codes, call.xs, [sums], prefetch=ahead, partial_sums=True)
        return sums


class Fp8(Method):
    """By `gemm_tile_fp8`."""

    form, reads_fp8 = CodedMatrix, True

    def __init__(self, kernels: Kernels, name: str, most_rows: int = 0) -> None:
        """most_rows: of x in a tile."""
        super().__init__(kernels, name)
        self._most_rows = most_rows

    def fits(self, product: Product, tokens: int) -> bool:
        in_fp8 = coded(product).in_fp8 is not None and tokens >= FP8_TOKENS
        return in_fp8 and product.shape[1] % (2 * TILE_K) == 0 and not self.kernels.invariant

    def launch(self, call: GemmCall) -> None:
        ws, ys, (x, x_scales), most = codes_of(_in_fp8(call)), call.ys, self._rows(call), self._most_rows
        self.kernels.gemm_tile_fp8(ws, list(x), list(x_scales), ys, call.activation, most)

    def _rows(self, call: GemmCall) -> CodedRows:
        """x as fp8, which it is made here if the norm before has not."""
        if call.x_fp8 is not None:
            return call.x_fp8
        made = call.room.fp8_rows(len(call.coded), call.x.shape[-1])
        self.kernels.quantize_rows(call.x.flatten(0, -2), *made, call.square)
        return made


class Fp8Lt(Fp8):
    """By an algorithm of cuBLASLt."""

    leaves_square = True  # the library has no such epilogue

    def __init__(self, kernels: Kernels, lt: BlasLt, number: int) -> None:
        super().__init__(kernels, f"fp8lt{number}")
        self._lt, self._number = lt, number

    def fits(self, product: Product, tokens: int) -> bool:
        if not super().fits(product, tokens) or tokens % SCALES_AT_ONCE:
            return False
        return self._number < self._lt.algorithm_count(product.of_tokens(tokens, fp8=True))

    def launch(self, call: GemmCall) -> None:
        ws, rows = _in_fp8(call), self._rows(call)
        for w, scale, x, x_scale, y in zip(ws, _scales(ws), *rows, call.ys, strict=True):
            self._lt.run_fp8(w.codes, scale, x, x_scale, y, self._number)


def methods(kernels: Kernels, lt: BlasLt | None) -> list[Method]:
    """All of them, as in halves.py."""
    return [
        SparseCoded(kernels, SPARSE, (VALUE,)),
        Coded(kernels, CODED),
        ManyCoded(kernels, MANY),
        Fp8(kernels, "fp8", 256),
        Fp8(kernels, "fp8/128", 128),
        *(Fp8Lt(kernels, lt, number) for number in range(FP8_ALGORITHMS) if lt is not None),
        CodedBeside(kernels, BESIDE, (IN,), in_launch),
        SparseCoded(kernels, f"{SPARSE}/{SPARSE_SPLITS}", (split_of(VALUE),)),
        PartialSums(kernels, "partial sums", SPLITS),
    ]


def coded(product: Product) -> CodedMatrix:
    """Its matrix, which is codes."""
    assert isinstance(product.w, CodedMatrix)
    return product.w


def _in_fp8(call: GemmCall) -> list[CodedMatrix]:
    """Each w in fp8."""
    return [w.in_fp8 for w in call.coded if w.in_fp8 is not None]


def _scales(ws: Sequence[CodedMatrix]) -> list[Tensor]:
    return [w.scales for w in ws if w.scales is not None]

"""The methods for each kind of GEMM of a model, and a step's GEMMs by those that were chosen."""

from dataclasses import replace

import torch
from torch import Tensor

from rwkv_batch.model.cuda.gemms import block_codes, calls, halves, tiled_codes
from rwkv_batch.model.cuda.gemms.block_codes import CODES, DECODED
from rwkv_batch.model.cuda.gemms.kinds import (
    BLAS,
    EARLY,
    HEAD,
    IN,
    KEY,
    KINDS,
    LARGE,
    LATE,
    LAYERS,
    LOW,
    LOW_OUT,
    MANY,
    OUT,
    SEPARATE,
    SPLITS,
    STARTS,
    STREAM,
    TILE,
    TOGETHER,
    VALUE,
    WHOLE,
    output_method,
    split_of,
)
from rwkv_batch.model.cuda.gemms.method import GemmCall, Method, Product
from rwkv_batch.model.cuda.gemms.tiled_codes import CODED
from rwkv_batch.model.cuda.packed.blocks import BlockMatrix
from rwkv_batch.model.cuda.packed.coded import CodedMatrix, LargeMatrix, first_bytes
from rwkv_batch.model.cuda.packed.weights import CudaLayer, CudaWeights
from rwkv_batch.model.cuda.steps.adapters import StepAdapters
from rwkv_batch.ops.cuda import tile
from rwkv_batch.ops.cuda.abi import ADAPTER_ADD_FLOAT, ADAPTER_ADD_SQUARE, IDENTITY, RELU_SQUARE
from rwkv_batch.ops.cuda.binding import Addend, Kernels
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.special.blaslt import BlasLt

EARLY_TOKENS = 64  # at most; with them it gains 1% at most already (bench/results/h200-weights.md)
UNTIMED_TOKENS = 4096  # stands for all numbers so large that nothing is timed; every method can run it
# The likeliest methods for the fastest with many tokens, where nothing has been timed.
FOR_MANY = (LOW, WHOLE, LATE, SEPARATE, "fp8lt0", "fp8", MANY, DECODED, CODED, BLAS)
# Those whose sums for a row do not depend on the other rows.
INVARIANT = (WHOLE, LATE, SEPARATE, CODED, *CODES, TILE, STREAM, "blocks")


class Gemms:
    """The methods that can run each kind of GEMM of one model on one GPU."""

    def __init__(
        self,
        kernels: Kernels,
        weights: CudaWeights,
        lt: BlasLt | None,
        fits_row: bool = False,
        whole: bool = True,
    ) -> None:
        """fits_row: whether all layers of one row may run together. whole: whether it is no stage's."""
        self.kernels, self.weights, self._fits_row, self.whole = kernels, weights, fits_row, whole
        self.methods: list[Method] = [
            *halves.methods(kernels, lt),
            *tiled_codes.methods(kernels, lt),
            *block_codes.methods(kernels),
        ]
        self._products = _products(weights)
        self._same_sums: dict[int, dict[str, str]] = {}
        self._named = {
            (kind.removesuffix("_split"), method.name): method
            for kind, product in self._products.items()
            for method in self.methods
            if kind in method.kinds and type(product.w) is method.form
        }

    def candidates(self, kind: str, tokens: int) -> tuple[str, ...]:
        """The names of the methods that can run a kind of GEMM for so many tokens."""
        if kind in STARTS:
            return (LATE, EARLY) if self.kernels.overlaps and tokens <= EARLY_TOKENS else (LATE,)
        if kind == LAYERS:
            return (SEPARATE, TOGETHER) if tokens == 1 and self._fits_row else (SEPARATE,)
        product = self._products[kind]
        found = tuple(method.name for method in self.methods if method.takes(product, tokens))
        return (WHOLE, *found) if kind in SPLITS else found

    def find(self, kind: str, name: str) -> Method:
        """The method of that name for LOW_OUT or a kind of LARGE, with or without split-K."""
        return self._named[kind, name]

    def untimed(self, kind: str) -> str:
        """The method for so many tokens that nothing is timed, as cuBLAS is the fastest for large GEMMs."""
        coded = kind in LARGE and isinstance(self._products[kind].w, CodedMatrix)
        candidates = self.candidates(kind, UNTIMED_TOKENS if coded else 0)
        return next(method for method in FOR_MANY if method in candidates)

    def invariant_methods(self, tokens: int) -> dict[str, str]:
        """A method for each kind whose sums for a row are the same for any number of rows: that of any other
        number, or a faster one that has the same sums.
        """
        if tokens not in self._same_sums:  # of a step of each size
            self._same_sums[tokens] = self._with_same_sums(tokens)
        return self._same_sums[tokens]

    def _with_same_sums(self, tokens: int) -> dict[str, str]:
        wanted = dict.fromkeys(KINDS, INVARIANT) | {LOW_OUT: (LOW, STREAM)}
        candidates = {kind: self.candidates(kind, 0) for kind in KINDS}
        found = {kind: next(name for name in wanted[kind] if name in candidates[kind]) for kind in KINDS}
        for kind in [kind for kind, name in found.items() if name == TILE]:
            product = self._products[kind]
            if tile.sums_as_many(product.count, *product.shape, tokens) and self._takes(MANY, kind, tokens):
                found[kind] = MANY
        return found

    def _takes(self, name: str, kind: str, tokens: int) -> bool:
        """Whether the method of that name can run a kind of GEMM for so many tokens."""
        method = self._named.get((kind, name))
        return method is not None and method.takes(self._products[kind], tokens)

    def call(self, kind: str, layer: CudaLayer, b: Buffers) -> GemmCall:
        """The GEMM of a kind over what the buffers hold, to be timed."""
        if kind == HEAD:
            logits = torch.empty(len(b.x), len(self.weights.head), device=b.device, dtype=torch.float16)
            return calls.head(self.weights.head, b.normed, logits)
        large = {IN: calls.time_mix_in, OUT: calls.output, KEY: calls.key, VALUE: calls.value}
        return (large | {LOW_OUT: calls.low_out})[kind.removesuffix("_split")](layer, b)

    @property
    def format(self) -> str:
        """Of the large matrices, and their form: "fp16", "int8", "int8-columns", "int8-blocks".

        With copies in fp8 there are further methods to choose from: "int8-fp8", "int8-columns-fp8".
        """
        w = self._products[VALUE].w
        if not isinstance(w, CodedMatrix):
            return "fp16"
        form = "-blocks" if isinstance(w, BlockMatrix) else "-columns" if w.columns else ""
        return w.format + form + ("" if w.fp8_copy is None else "-fp8")


class StepGemms:
    """The GEMMs of one step over the buffers `b`: each by the method chosen, with what adapters add to it."""

    def __init__(self, gemms: Gemms, methods: dict[str, str], b: Buffers, adapters: StepAdapters) -> None:
        find = gemms.find
        self._in, self._low_out = find(IN, methods[IN]), find(LOW_OUT, methods[LOW_OUT])
        self._out, self._key = find(OUT, output_method(methods, OUT)), find(KEY, methods[KEY])
        self._value = find(VALUE, output_method(methods, VALUE))
        self._b, self._adapters = b, adapters
        self.in_early, self.key_early = (methods[kind] == EARLY for kind in STARTS)
        # Whether nothing reads the inputs of the key or its hidden units but key and value.
        alone = not adapters and gemms.weights.layers[-1].deep_embed is None
        # Where norms write x as fp8. Adapters read it too, and they want it in fp16.
        width = b.x.shape[1]
        self.in_fp8 = b.fp8_rows(3, width) if self._in.reads_fp8 and not adapters else None
        self.key_fp8 = b.fp8_rows(1, width) if self._key.reads_fp8 and alone else None
        # Value makes codes of its input anyway, and squares it in passing.
        self._value_squares = self._key.leaves_square and self._value.reads_fp8 and alone

    def time_mix_in(self, layer: CudaLayer, index: int, rkv: Tensor) -> None:
        """r, k and v `[3, T, C]`, and the low-rank functions into the buffers."""
        self._adapters.shrink(index, "att.receptance", self._b.mixed[:3].unbind(), first_bytes(layer.rkv))
        self._in.run(calls.time_mix_in(layer, self._b, self.in_fp8, rkv))
        self._low_out.run(calls.low_out(layer, self._b))
        self._adapters.expand(rkv.unbind())

    def output(self, layer: CudaLayer, index: int) -> Addend:
        """From the time mix back to the residual stream."""
        self._adapters.shrink(index, "att.output", [self._b.y])
        return self._added(self._out, calls.output(layer, self._b))

    def key(self, layer: CudaLayer, index: int) -> None:
        """The hidden units, squared where `value` does not do that."""
        b, adapters = self._b, self._adapters
        adapters.shrink(index, "ffn.key", [b.mixed[0]], first_bytes(layer.key))
        activation = IDENTITY if adapters or self._value_squares else RELU_SQUARE
        self._key.run(calls.key(layer, b, activation, self.key_fp8))
        adapters.expand([b.hidden], ADAPTER_ADD_SQUARE)

    def value(self, layer: CudaLayer, index: int, following: LargeMatrix | tuple[CodedMatrix, ...]) -> Addend:
        """From the channel mix back to the residual stream. following: what is multiplied with next."""
        ahead = None if self._value.skips_units else first_bytes(layer.value)
        self._adapters.shrink(index, "ffn.value", [self._b.hidden], ahead)
        call = calls.value(layer, self._b, first_bytes(following), self._value_squares)
        return self._added(self._value, call)

    def _added(self, method: Method, call: GemmCall) -> Addend:
        sums = method.run(call)
        if sums is None:
            self._adapters.expand([call.y])
            return Addend(y=call.y)
        self._adapters.expand([sums], ADAPTER_ADD_FLOAT)
        return Addend(partials=sums)


def _products(weights: CudaWeights) -> dict[str, Product]:
    """By kind of GEMM."""
    layer = weights.layers[-1]
    hidden, width = layer.key.shape
    longest = max(layer.low_out.values(), key=lambda w: w.shape[1])
    by_units = isinstance(layer.value, Tensor)
    every = (
        Product(IN, layer.rkv[0], (width, width), count=3),
        Product(LOW_OUT, longest, (width, longest.shape[1])),
        Product(KEY, layer.key, (hidden, width)),
        Product(HEAD, weights.head, (len(weights.head), width)),
        Product(OUT, layer.output, (width, width)),
        Product(VALUE, layer.value, (width, hidden), transposed=by_units),
    )
    splits = (replace(product, kind=split_of(product.kind)) for product in every[-2:])
    return {product.kind: product for product in (*every, *splits)}

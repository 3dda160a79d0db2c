"""The GEMMs of a layer, each by any of the methods that can run it (`methods.py`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from rwkv_batch.model.cuda.codes.block_gemm import CODES, BlockGemms
from rwkv_batch.model.cuda.codes.coded_gemm import (
    BESIDE,
    CODED,
    MANY,
    PARTIAL_SUMS,
    SPARSE,
    SPARSE_SPLIT,
    CodedGemms,
    CodedRoom,
    skips_units,
)
from rwkv_batch.model.cuda.gemms.methods import (
    FOR_MANY,
    LATE,
    LAYERS,
    LIBRARY,
    LT,
    METHODS,
    SEPARATE,
    SPLIT_K,
    STARTS,
    TILES,
    WHOLE,
)
from rwkv_batch.model.cuda.gemms.small_gemm import LONG_SPLIT, by_torch, in_blocks
from rwkv_batch.model.cuda.packed.blocks import BlockMatrix
from rwkv_batch.model.cuda.packed.coded import CodedMatrix, LargeMatrix, first_bytes
from rwkv_batch.model.cuda.packed.weights import CudaLayer, CudaWeights
from rwkv_batch.model.description import LOW_RANKS, MIXES
from rwkv_batch.ops.cuda import tile
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SIGMOID, TANH, TILE_FEW_ROWS
from rwkv_batch.ops.cuda.binding import Addend, Kernels
from rwkv_batch.ops.cuda.blas.blaslt import BlasLt, GemmShape
from rwkv_batch.ops.cuda.buffers import SPLIT_TOKENS, Buffers
from rwkv_batch.ops.cuda.gemms import AUTO, MAX_RESIDENT_K, RESIDENT, Part

ACTIVATIONS = {"tanh": TANH, "sigmoid": SIGMOID, "identity": IDENTITY}
LT_TOKENS = 64  # tokens for which cuBLASLt's algorithms are candidates, at least
SPLIT_MULTIPLE = 64  # of which the K of a split is a multiple
EARLY_TOKENS = 64  # at most; with them it gains 1% at most already (bench/results/h200-weights.md)
STREAMED_TOKENS = 1024  # with which it is a candidate, at most
TILE_TOKENS = 256  # which one tile of gemm_tile holds: each weight is taken from memory once
UNTIMED_TOKENS = 4096  # stands for all numbers so large that nothing is timed; every method can run it
PREFETCH_ROWS = 64  # the states of more rows would evict prefetched weights before they are used


@dataclass(frozen=True)
class Gemms:
    """Runs the GEMM of a kind by a method, over the buffers of a step."""

    kernels: Kernels
    weights: CudaWeights
    lt: BlasLt | None
    fits_row: bool = False  # whether all layers of one row may run together

    @cached_property
    def coded(self) -> CodedGemms:
        """Those with matrices of 8 and 4 bits on a Hopper."""
        return CodedGemms(self.kernels, self.lt)

    @cached_property
    def blocks(self) -> BlockGemms:
        """Those with matrices of codes in blocks."""
        return BlockGemms(self.kernels)

    def products(self, w: CodedMatrix) -> CodedGemms | BlockGemms:
        """Those with matrices of codes in the form of this one."""
        return self.blocks if isinstance(w, BlockMatrix) else self.coded

    def candidates(self, kind: str, tokens: int) -> tuple[str, ...]:
        """The methods that can run a kind of GEMM for so many tokens."""
        methods = METHODS[kind]
        if kind in STARTS:
            return methods if self.kernels.overlaps and tokens <= EARLY_TOKENS else (LATE,)
        if kind == LAYERS:
            return methods if tokens == 1 and self.fits_row else (SEPARATE,)
        coded = self._coded(kind.removesuffix("_split"))
        if coded is not None:
            if WHOLE in methods:
                return WHOLE, *(() if isinstance(coded, BlockMatrix) else self.coded.splits(coded, tokens))
            found = self.products(coded).candidates(coded, tokens)
            with_low_ranks = kind == "in" and CODED in found and not self.kernels.invariant
            return (*found, BESIDE) if with_low_ranks and tokens <= TILE_FEW_ROWS else found
        if WHOLE in methods:
            whole = self._shape(kind.removesuffix("_split"), tokens)
            found = (*(method for method in SPLIT_K if self._can_split(whole, *SPLIT_K[method])),)
            on_hopper = self.kernels.has_lowrank and self._sparse_fits(tokens)
            return (WHOLE, SPARSE_SPLIT, *found) if kind == "value_split" and on_hopper else (WHOLE, *found)
        layer, algorithms = self.weights.layers[-1], 0
        if self.lt is not None and kind != "low_out" and tokens >= LT_TOKENS:
            algorithms = self.lt.algorithm_count(self._shape(kind, tokens))
        short = kind != "low_out" or max(w.shape[1] for w in layer.low_out.values()) <= MAX_RESIDENT_K
        large = self.weights.head if kind == "head" else layer.key
        tiled = self.kernels.has_tile and tile.fits(*large.shape)
        runs = {
            **dict.fromkeys(("stream16", "stream32"), tokens <= STREAMED_TOKENS),
            SPARSE: kind == "value" and self._sparse_fits(tokens),
            "low": self.kernels.has_lowrank and short,
            "tile": tiled,
            MANY: tiled and tokens > TILE_TOKENS,
            BESIDE: tiled and tokens > LT_TOKENS,
            **{method: number < algorithms for number, method in enumerate(LT)},
        }
        return tuple(method for method in methods if runs.get(method, True))

    def untimed(self, kind: str) -> str:
        """The method for so many tokens that nothing is timed, as cuBLAS is the fastest for large GEMMs."""
        candidates = self.candidates(kind, UNTIMED_TOKENS if self._coded(kind) is not None else 0)
        return next(method for method in FOR_MANY if method in candidates)

    def invariant_methods(self) -> dict[str, str]:
        """A method for each kind whose sums for a row are the same for any number of rows."""
        chosen = {}
        for kind in METHODS:
            wanted = (
                ("low", "stream16")
                if kind == "low_out"
                else (WHOLE, LATE, SEPARATE, CODED, *CODES, "tile", "stream16", "blocks")
            )
            candidates = (*self.candidates(kind, 0), "blocks")
            chosen[kind] = next(method for method in wanted if method in candidates)
        return chosen

    def time_mix_in(
        self, layer: CudaLayer, b: Buffers, rkv: Tensor, method: str, ready: bool = False
    ) -> None:
        """r, k, v, and the inner sides of the low-rank functions with their activations.

        ready: the inputs of r, k and v are in `coded_room(b)` as fp8; in b.mixed is only the last of them.
        """
        low = [
            (w, b.mixed[MIXES.index(name)], b.low[name], ACTIVATIONS[LOW_RANKS[name]])
            for name, w in layer.low_in.items()
        ]
        if isinstance(layer.rkv, tuple):
            xs, ys, room = b.mixed[:3], list(rkv), coded_room(b)
            if method == BESIDE:
                self.coded.run(layer.rkv, xs, ys, method, room, beside=low)
            else:
                self.products(layer.rkv[0]).run(layer.rkv, xs, ys, method, room, ready=ready)
                self._low_in(low)
            return
        if method in ("stream16", "stream32"):
            large = [(layer.rkv[i], b.mixed[i], rkv[i], IDENTITY) for i in range(3)]
            self.kernels.gemm_stream(large + low, _warp_rows(method))
            return
        three = list(layer.rkv), list(b.mixed[:3]), list(rkv)
        if method == BESIDE:
            self.kernels.gemm_tile(*three, many=True, beside=low)
            return
        if method in TILES:
            self.kernels.gemm_tile(*three, many=method == MANY)
        else:
            self._by_library(layer.rkv, b.mixed[:3], rkv, method)
        if method == "mixed":
            self.kernels.gemm_stream(low)
        elif method in ("low", *TILES) or (method in LT and self.kernels.has_lowrank):
            self._low_in(low)
        else:
            by_torch(low)

    def _low_in(self, parts: Sequence[Part]) -> None:
        """The inner sides of the low-rank functions by what suits the number of tokens."""
        tokens, same = len(parts[0][1]), self.kernels.invariant
        if self.kernels.has_lowrank:
            self.kernels.gemm_lowrank(parts, LONG_SPLIT if same else AUTO)
        elif same or tokens <= LT_TOKENS:
            self.kernels.gemm_stream(parts)
        else:
            by_torch(parts)

    def low_out(self, layer: CudaLayer, b: Buffers, method: str) -> None:
        """The outer sides of the low-rank functions, and a prefetch, as these GEMMs leave memory idle."""
        parts = [(w, b.low[name], b.low_out[name], IDENTITY) for name, w in layer.low_out.items()]
        if method == "blas":
            for w, x, y, _ in parts:
                torch.mm(x, w.T, out=y)
        elif method == "low":
            ahead = first_bytes(layer.output) if len(b.x) <= PREFETCH_ROWS else None
            self.kernels.gemm_lowrank(parts, RESIDENT, ahead)
        else:
            self.kernels.gemm_stream(parts, split_k=2, prefetch=first_bytes(layer.output))

    def out(self, layer: CudaLayer, b: Buffers, method: str) -> Addend:
        """From the time mix back to the residual stream."""
        if method in SPLIT_K or method == PARTIAL_SUMS:
            return self._split(layer.output, b.y, b, method, prefetch=first_bytes(layer.key))
        self._gemm(layer.output, b.y, b.out, IDENTITY, method, b, prefetch=first_bytes(layer.key))
        return Addend(y=b.out)

    def key(
        self,
        layer: CudaLayer,
        b: Buffers,
        method: str,
        activation: int = RELU_SQUARE,
        ready: bool = False,
    ) -> None:
        """The hidden units of the channel mix, with that activation or IDENTITY.

        ready: as of `time_mix_in`.
        """
        x = b.mixed.view(-1, b.x.shape[1])[: len(b.x)]
        self._gemm(layer.key, x, b.hidden, activation, method, b, ready=ready)
        if method in LIBRARY and activation == RELU_SQUARE:
            self.kernels.relu_square(b.hidden)

    def value(
        self,
        layer: CudaLayer,
        b: Buffers,
        method: str,
        prefetch: Tensor | None = None,
        square: bool = False,
    ) -> Addend:
        """From the channel mix back to the residual stream.

        prefetch: weights of the next layer. square: the hidden units are still to be squared (`key` has not).
        """
        if isinstance(layer.value, CodedMatrix):
            if skips_units(method):
                room = b.sparse_partials
                return Addend(partials=self.coded.sparse(layer.value, b.hidden, method, room, prefetch))
            if method == PARTIAL_SUMS:
                return self._split(layer.value, b.hidden, b, method, prefetch=prefetch)
            self._gemm(layer.value, b.hidden, b.out, IDENTITY, method, b, prefetch, square)
            return Addend(y=b.out)
        if method in SPLIT_K:
            return self._split(layer.value, b.hidden, b, method, transposed=True)
        if skips_units(method):
            w, room, together = layer.value, b.sparse_partials, method == SPARSE and self.kernels.has_lowrank
            return Addend(partials=self.kernels.gemm_sparse(b.hidden, w, room, prefetch, together))
        if method in TILES:
            many = method == MANY
            self.kernels.gemm_tile([layer.value], [b.hidden], [b.out], transposed=True, many=many)
        elif method == "blocks":
            in_blocks(b.hidden, layer.value, b.out)
        else:
            self._by_library(layer.value, b.hidden, b.out, method, transposed=True)
        return Addend(y=b.out)

    def head(self, x: Tensor, logits: Tensor, method: str) -> None:
        """Logits `[T, rows of the head]` of normed x `[T, C]`."""
        self._gemm(self.weights.head, x, logits, IDENTITY, method, None)

    def call(self, kind: str, layer: CudaLayer, b: Buffers) -> Callable[[str], object]:
        """What runs the GEMM of a kind, by a method, on what the buffers hold; to be timed."""
        if kind == "head":
            logits = torch.empty(len(b.x), len(self.weights.head), device=b.device, dtype=torch.float16)
            return partial(self.head, b.normed, logits)
        if kind == "in":
            return partial(self.time_mix_in, layer, b, b.rkv)
        runs = {"low_out": self.low_out, "out": self.out, "key": self.key, "value": self.value}
        run: Callable[[CudaLayer, Buffers, str], object] = runs[kind.removesuffix("_split")]
        return partial(run, layer, b)

    def _sparse_fits(self, tokens: int) -> bool:
        return self.kernels.sparse_fits(tokens, len(self.weights.layers[-1].value))

    def _can_split(self, whole: GemmShape, algorithm: int | None, splits: int) -> bool:
        if whole.k % (splits * SPLIT_MULTIPLE) or not LT_TOKENS <= whole.m <= SPLIT_TOKENS:
            return False
        if algorithm is None:
            return self.kernels.has_tile and tile.fits(whole.n, whole.k) and whole.m > LT_TOKENS
        shape = replace(whole, batch=splits, k=whole.k // splits, split_k=True)
        return self.lt is not None and algorithm < self.lt.algorithm_count(shape)

    def _shape(self, kind: str, tokens: int) -> GemmShape:
        """Of the large GEMM of that kind."""
        hidden, width = self.weights.layers[-1].key.shape
        n = {"key": hidden, "head": len(self.weights.head)}.get(kind, width)
        k = hidden if kind == "value" else width
        return GemmShape(3 if kind == "in" else 1, n, tokens, k, kind == "value")

    def _gemm(
        self,
        w: LargeMatrix,
        x: Tensor,
        y: Tensor,
        activation: int,
        method: str,
        b: Buffers | None,
        prefetch: Tensor | None = None,
        square: bool = False,
        ready: bool = False,
    ) -> None:
        if isinstance(w, CodedMatrix):
            ahead = prefetch if len(x) <= PREFETCH_ROWS else None
            room = None if b is None else coded_room(b)
            self.products(w).run([w], x[None], [y], method, room, activation, ahead, square, ready)
        elif method in LIBRARY:
            self._by_library(w, x, y, method)
        elif method in TILES:
            self.kernels.gemm_tile([w], [x], [y], activation, many=method == MANY)
        else:
            self.kernels.gemm_stream([(w, x, y, activation)], _warp_rows(method), prefetch=prefetch)

    def _coded(self, kind: str) -> CodedMatrix | None:
        """The large matrix of a kind, or one of them, if it has 8 or 4 bits."""
        layer = self.weights.layers[-1]
        large = {"in": layer.rkv, "out": layer.output, "key": layer.key, "value": layer.value}
        found = large.get(kind, self.weights.head if kind == "head" else None)
        first = found[0] if isinstance(found, tuple) else found
        return first if isinstance(first, CodedMatrix) else None

    @property
    def format(self) -> str:
        """Of the large matrices, and their form: "fp16", "int8", "int8-columns", "int8-blocks"."""
        coded = self._coded("value")
        if coded is None:
            return "fp16"
        if isinstance(coded, BlockMatrix):
            return f"{coded.format}-blocks"
        return f"{coded.format}-columns" if coded.columns else coded.format

    def _split(
        self,
        w: LargeMatrix,
        x: Tensor,
        b: Buffers,
        method: str,
        transposed: bool = False,
        prefetch: Tensor | None = None,
    ) -> Addend:
        if isinstance(w, CodedMatrix):
            ahead = prefetch if len(x) <= PREFETCH_ROWS else None
            return Addend(partials=self.coded.partial_sums(w, x, b.split_partials, ahead))
        algorithm, splits = SPLIT_K[method]
        sums = b.split_partials[:splits]
        if algorithm is None:
            self.kernels.gemm_many_split(w, x, sums, transposed)
        else:
            assert self.lt is not None
            self.lt.run(w, x, sums, algorithm, transposed)
        return Addend(partials=sums)

    def _by_library(self, w: Tensor, x: Tensor, y: Tensor, method: str, transposed: bool = False) -> None:
        """y = x w^T (transposed: x w), one GEMM or a batch, by cuBLASLt or cuBLAS."""
        if method in LT:
            assert self.lt is not None
            self.lt.run(w, x, y, LT.index(method), transposed)
        else:
            (torch.bmm if x.dim() == 3 else torch.mm)(x, w if transposed else w.mT, out=y)


def coded_room(b: Buffers) -> CodedRoom:
    """Where x of a large GEMM goes as 8 bits."""
    return CodedRoom(b.codes, b.code_scales)


def output_method(methods: dict[str, str], kind: str) -> str:
    """The method for "out" or "value": with split-K if that was chosen."""
    split = methods[f"{kind}_split"]
    return methods[kind] if split == WHOLE else split


def _warp_rows(method: str) -> int:
    return 32 if method == "stream32" else 16

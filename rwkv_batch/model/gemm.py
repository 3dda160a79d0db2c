"""The matrix products of a layer, each in the ways it can be run, over buffers that a whole step shares.

"stream16" and "stream32": the weight-streaming kernel, its warps taking 16 or 32 rows of weights. "blas":
cuBLAS through torch. "mixed" and "low": the low-rank matrices by that kernel or by the one for small
matrices, cuBLAS for large ones. "sparse": without the weights of idle hidden units. "tile": the large
matrices by the tiled kernel for Hopper, the low-rank ones as with "low". "lt0" and so on: the large matrices
by one of the algorithms of cuBLASLt, the low-rank ones as with "low" where that can be.

What is added to the residual stream may also come in shares of K, as partial sums that the norm after it adds
up: "lt0/2" in two, by the first algorithm for these. Whether that takes less time than the whole product
shows only together with the norm, so it is a choice of its own, made after the others: of "out_parts" and
"value_parts".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rwkv_batch.model.description import LOW_RANKS, MIXES
from rwkv_batch.model.weights_cuda import CudaLayer, CudaWeights
from rwkv_batch.ops.cuda import cublaslt, tile
from rwkv_batch.ops.cuda.binding import (
    AUTO,
    IDENTITY,
    KEPT,
    MOST_KEPT,
    RELU_SQUARE,
    SIGMOID,
    SPARSE_ROWS,
    SPARSE_SLICES,
    TANH,
    Added,
    Kernels,
)

LT = tuple(f"lt{number}" for number in range(cublaslt.MOST))
WHOLE = "whole"
FUNCTIONS = {"tanh": TANH, "sigmoid": SIGMOID, "identity": IDENTITY}
SHARES = {
    f"lt{number}/{shares}": (number, shares) for shares in (2, 4) for number in range(3)
}  # with algorithm and shares of K
METHODS = {
    "in": ("stream16", "stream32", "mixed", "low", "tile", "blas", *LT),
    "low_out": ("stream16", "low", "blas"),
    "out": ("stream16", "stream32", "tile", "blas", *LT),
    "key": ("stream16", "stream32", "tile", "blas", *LT),
    "value": ("sparse", "tile", "blas", *LT),
    "head": ("stream16", "stream32", "tile", "blas", *LT),
    "out_parts": (WHOLE, *SHARES),
    "value_parts": (WHOLE, *SHARES),
}
LIBRARY = ("blas", *LT)
LT_TOKENS = 64  # for which cuBLASLt's algorithms are tried, at least
SHARE_TOKENS = 512  # and for which shares of K are, at most: more fill the multiprocessors
MOST_SHARES = max(shares for _, shares in SHARES.values())
SHARE_MULTIPLE = 64  # numbers of K
AHEAD_ROWS = 64  # the states of more rows would drive weights out of the cache again before they are used


class Buffers:
    """What a step over T tokens writes, in an arena that larger and smaller steps share (their buffers
    overlap). packed: of a prefill.
    """

    def __init__(
        self, weights: CudaWeights, tokens: int, arena: dict[str, Tensor], packed: bool = False
    ) -> None:
        self.arena, self.device = arena, weights.head.device
        layer = weights.layers[-1]  # layer 0 may have no "v"
        width = layer.output.shape[0]
        self.x = self._take("x", tokens, width, dtype=torch.float32)  # the residual stream
        self.behind = self._take(
            "behind", tokens, dtype=torch.int32
        )  # of rows that are fed one token: see Feed.resolve
        self.normed = self._take("normed", tokens, width)
        self.mixed = self._take("mixed", 6, tokens, width)  # in the order of MIXES
        self.rkv0 = self._take("rkv0", 3, tokens, width)  # of layer 0, whose v the others mix in
        self.rkv = self._take("rkv", 3, tokens, width)
        self.low = {name: self._take("low " + name, tokens, len(w)) for name, w in layer.low_in.items()}
        self.low_out = {name: self._take("low out " + name, tokens, width) for name in LOW_RANKS}
        self.y = self._take("y", tokens, width)  # what the time mix reads out
        self.out = self._take("out", tokens, width)  # what is added to x
        self.hidden = self._take("hidden", tokens, layer.key.shape[0])
        # the stream from the first norm of a layer of a prefill to the second; there are hidden units only
        # after that
        self.x_between = self.hidden.view(-1)[: 2 * tokens * width].view(torch.float32).view(tokens, width)
        self.parts = self._take(
            "parts", SPARSE_SLICES, min(tokens, SPARSE_ROWS[-1]), width, dtype=torch.float32
        )  # of the sparse product
        # those of shares of K, which the norm of a prefill does not take
        self.shares = self._take(
            "shares", 0 if packed else MOST_SHARES, min(tokens, SHARE_TOKENS), width, dtype=torch.float32
        )

    def take_bytes(self, name: str, count: int) -> Tensor:
        """Room for a kernel's own numbers, which a step over any tokens may overwrite."""
        return self._take(name, count, dtype=torch.uint8)

    def _take(self, name: str, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        numbers = torch.Size(shape).numel()
        flat = self.arena.get(name)
        if flat is None or len(flat) < numbers:
            flat = self.arena[name] = torch.empty(numbers, device=self.device, dtype=dtype)
        return flat[:numbers].view(shape)


def buffer_bytes(weights: CudaWeights, tokens: int, packed: bool = False) -> int:
    """What the buffers of a step over that many tokens take. Nothing is allocated to find out."""
    arena: dict[str, Tensor] = {}
    Buffers(replace(weights, head=weights.head.to("meta")), tokens, arena, packed)
    return sum(tensor.nbytes for tensor in arena.values())


@dataclass(frozen=True)
class Products:
    """Runs the product of a kind by a method; what is read and written are the step's buffers."""

    kernels: Kernels
    weights: CudaWeights
    lt: cublaslt.Lt | None

    def possible(self, kind: str, tokens: int) -> tuple[str, ...]:
        possible = METHODS[kind]
        if WHOLE in possible:
            return WHOLE, *(
                method for method in SHARES if self._has_shares(kind.removesuffix("_parts"), tokens, method)
            )
        if kind == "value" and tokens not in SPARSE_ROWS:
            possible = tuple(method for method in possible if method != "sparse")
        ranks = [w.shape[1] for w in self.weights.layers[-1].low_out.values()]
        if not self.kernels.has_low or (kind == "low_out" and max(ranks) > MOST_KEPT):
            possible = tuple(method for method in possible if method != "low")
        large = self.weights.head if kind == "head" else self.weights.layers[-1].key
        if not self.kernels.has_tile or not tile.fits(*large.shape):
            possible = tuple(method for method in possible if method != "tile")
        algorithms = (
            self.lt.count(self._shape(kind, tokens))
            if self.lt and kind != "low_out" and tokens >= LT_TOKENS
            else 0
        )
        return tuple(method for method in possible if method not in LT[algorithms:])

    def _has_shares(self, kind: str, tokens: int, method: str) -> bool:
        number, shares = SHARES[method]
        if self.lt is None or not LT_TOKENS <= tokens <= SHARE_TOKENS:
            return False
        whole = self._shape(kind, tokens)
        shape = replace(whole, parts=shares, k=whole.k // shares, shares=True)
        return whole.k % (shares * SHARE_MULTIPLE) == 0 and number < self.lt.count(shape)

    def _shape(self, kind: str, tokens: int) -> cublaslt.Shape:
        """Of the large product of that kind."""
        hidden, width = self.weights.layers[-1].key.shape
        n, k = {
            "in": (width, width),
            "out": (width, width),
            "key": (hidden, width),
            "value": (width, hidden),
            "head": (len(self.weights.head), width),
        }[kind]
        return cublaslt.Shape(3 if kind == "in" else 1, n, tokens, k, kind == "value")

    def for_many(self, kind: str) -> str:
        """The method for so many tokens that nothing is measured: large products are as good as certain to be
        faster by cuBLAS.
        """
        return next(method for method in ("low", WHOLE, "blas") if method in self.possible(kind, 0))

    def into_time_mix(self, layer: CudaLayer, b: Buffers, rkv: Tensor, method: str) -> None:
        """r, k, v, and the inner sides of the low-rank functions with their activation."""
        low = [
            (layer.low_in[name], b.mixed[MIXES.index(name)], b.low[name], FUNCTIONS[LOW_RANKS[name]])
            for name in layer.low_in
        ]
        if method in ("stream16", "stream32"):
            large = [(layer.rkv[i], b.mixed[i], rkv[i], IDENTITY) for i in range(3)]
            self.kernels.products(large + low, _rows_of_w(method))
            return
        if method == "tile":
            self.kernels.products_tile(list(layer.rkv), list(b.mixed[:3]), list(rkv))
        else:
            self._library(layer.rkv, b.mixed[:3], rkv, method)
        if method == "mixed":
            self.kernels.products(low)
            return
        if method in ("low", "tile") or (method in LT and self.kernels.has_low):
            self.kernels.products_low(low, AUTO)
            return
        for w, x, y, function in low:
            torch.mm(x, w.T, out=y)
            if function in (TANH, SIGMOID):
                y.tanh_() if function == TANH else y.sigmoid_()

    def low_out(self, layer: CudaLayer, b: Buffers, method: str) -> None:
        """The outer sides of the low-rank functions. A short product: memory goes on with the weights of
        `out`.
        """
        parts = [(w, b.low[name], b.low_out[name], IDENTITY) for name, w in layer.low_out.items()]
        if method == "blas":
            for w, x, y, _ in parts:
                torch.mm(x, w.T, out=y)
        elif method == "low":
            self.kernels.products_low(parts, KEPT, layer.output if len(b.x) <= AHEAD_ROWS else None)
        else:
            self.kernels.products(parts, shares=2, ahead=layer.output)

    def out(self, layer: CudaLayer, b: Buffers, method: str) -> Added:
        """From the time mix back to the residual stream."""
        if method in SHARES:
            return self._shares(layer.output, b.y, b, method)
        self._plain(layer.output, b.y, b.out, IDENTITY, method, ahead=layer.key)
        return Added(y=b.out)

    def key(self, layer: CudaLayer, b: Buffers, method: str) -> None:
        """The hidden units of the channel mix."""
        self._plain(layer.key, b.mixed.view(-1, b.x.shape[1])[: len(b.x)], b.hidden, RELU_SQUARE, method)
        if method in LIBRARY:
            self.kernels.relu_square(b.hidden)

    def value(self, layer: CudaLayer, b: Buffers, method: str, ahead: Tensor | None = None) -> Added:
        """From the channel mix back to the residual stream. ahead: what the next layer begins with."""
        if method in SHARES:
            return self._shares(layer.value, b.hidden, b, method, across=True)
        if method == "sparse":
            return Added(parts=self.kernels.product_sparse(b.hidden, layer.value, b.parts, ahead))
        if method == "tile":
            self.kernels.products_tile([layer.value], [b.hidden], [b.out], across=True)
        else:
            self._library(layer.value, b.hidden, b.out, method, across=True)
        return Added(y=b.out)

    def head(self, x: Tensor, logits: Tensor, method: str) -> None:
        """Logits `[T, rows of the head]` of normed x `[T, C]`."""
        self._plain(self.weights.head, x, logits, IDENTITY, method)

    def call(self, kind: str, layer: CudaLayer, b: Buffers, method: str) -> Callable[[], object]:
        """The product of that kind on whatever the buffers hold, to be timed."""
        if kind == "head":
            logits = torch.empty(len(b.x), len(self.weights.head), device=b.device, dtype=torch.float16)
            return lambda: self.head(b.normed, logits, method)
        if kind == "in":
            return lambda: self.into_time_mix(layer, b, b.rkv, method)
        run = {"low_out": self.low_out, "out": self.out, "key": self.key, "value": self.value}[
            kind.removesuffix("_parts")
        ]
        return lambda: run(layer, b, method)

    def _plain(
        self, w: Tensor, x: Tensor, y: Tensor, function: int, method: str, ahead: Tensor | None = None
    ) -> None:
        if method in LIBRARY:
            self._library(w, x, y, method)
        elif method == "tile":
            self.kernels.products_tile([w], [x], [y], function)
        else:
            self.kernels.products([(w, x, y, function)], _rows_of_w(method), ahead=ahead)

    def _shares(self, w: Tensor, x: Tensor, b: Buffers, method: str, across: bool = False) -> Added:
        assert self.lt is not None
        number, shares = SHARES[method]
        self.lt.run(w, x, b.shares[:shares], number, across)
        return Added(parts=b.shares[:shares])

    def _library(self, w: Tensor, x: Tensor, y: Tensor, method: str, across: bool = False) -> None:
        """y = x w^T (across: x w) of one product or several, by cuBLASLt as `method` says, else by cuBLAS."""
        if method in LT:
            assert self.lt is not None
            self.lt.run(w, x, y, LT.index(method), across)
        else:
            (torch.bmm if x.dim() == 3 else torch.mm)(x, w if across else w.mT, out=y)


def added_by(methods: dict[str, str], kind: str) -> str:
    """The method for "out" or "value": in shares, or else of the whole."""
    return methods[kind] if methods[f"{kind}_parts"] == WHOLE else methods[f"{kind}_parts"]


def _rows_of_w(method: str) -> int:
    return 32 if method == "stream32" else 16

"""The GEMMs among the kernels in `cuda/` as Python functions, and what all of them need.

Tensors are as those of `binding`.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL, Array, byref, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SPARSE_SPLITS, GemmPart
from rwkv_batch.ops.cuda.tile import (
    X_ROWS,
    adds_in_order,
    many_shape,
    many_shape_in_turn,
    many_shape_split,
    tile_shape,
    tile_shape_coded,
    tile_shape_fp8,
)

PREFETCH_BYTES = 8 << 20  # of weights for the next kernel: what memory delivers while this one leaves it idle
RESIDENT, AUTO = 0, -1  # split_k of gemm_lowrank: none, as w stays in shared memory; the fastest
MAX_RESIDENT_K = 1024
SPARSE_ROWS = (1, 2, 4, 8)  # batches that gemm_sparse takes

Part = tuple[Tensor, Tensor, Tensor, int]  # w [N, K], x [M, K], y [M, N], activation
CodedRows = tuple[Tensor, Tensor]  # codes [N, M, K] and scales [N, M], in the form of `quantize_rows`
GROUPS = {"int4": 64, "int4-128": 128}  # inputs that have a scale together


class Codes(NamedTuple):
    """Up to three w `[N, K]` of one shape as codes of one format, in the order that its kernel reads.

    codes: of int8, to each of which 128 is added (`orders.tiles_of_8_bits`, with `columns` `[K, N]` by
    `orders.paired_columns`); of fp8 bytes of e4m3 (`orders.ordered_codes`), none of them NaN; of int4 by
    groups (`orders.tiles_of_4_bits`); or blocks of any format. scales: `[N]` in fp32, None where they are
    with the codes.
    """

    codes: Sequence[Tensor]
    scales: Sequence[Tensor | None]
    format: str
    columns: bool = False

    @property
    def group(self) -> int | None:
        """Inputs that have a scale together, with 4 bits in tiles."""
        return GROUPS.get(self.format)

    @property
    def pointers(self) -> list[Array[c_void_p]]:
        """Of the codes, and of scales that are not with them."""
        return [pointers_of(self.codes)] + ([] if self.group else [pointers_of(self.scales)])


class GemmKernels:
    """What `Kernels` has of GEMMs, with all else that multiplies."""

    library: CDLL
    invariant: bool  # whether a row's sums are to be the same beside any other rows
    overlaps: bool  # whether a kernel may start before the one before it has ended
    _call: Callable[..., None]  # a kernel's name and arguments

    def relu_square(self, h: Tensor) -> None:
        """h = relu(h)^2 in place, at most what fp16 holds."""
        self._call("rwkv_relu_square", h.data_ptr(), h.numel())

    def gemm_stream(
        self, parts: Sequence[Part], warp_rows: int = 16, split_k: int = 8, prefetch: Tensor | None = None
    ) -> None:
        """y = f(x w^T) for every part, all with the same M: weights are streamed once, for few rows of x.

        warp_rows: of w that a warp takes, 16 or 32. split_k: warps that share one K, 8, or 2 for short K.
        prefetch: weights that the next kernel reads.
        """
        count, rows = len(parts), len(parts[0][1])
        self._call(
            "rwkv_gemm_stream", _gemm_parts(parts), count, rows, warp_rows, split_k, *prefetched(prefetch)
        )

    def gemm_lowrank(self, parts: Sequence[Part], split_k: int, prefetch: Tensor | None = None) -> None:
        """Small GEMMs for dozens of rows and more; needs `has_lowrank`. See `gemm_stream`.

        split_k: 1, 2, 4, 8, AUTO, or RESIDENT for K up to MAX_RESIDENT_K.
        """
        count, rows = len(parts), len(parts[0][1])
        self._call("rwkv_gemm_lowrank", _gemm_parts(parts), count, rows, split_k, *prefetched(prefetch))

    def gemm_tile(
        self,
        ws: Sequence[Tensor],
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        activation: int = IDENTITY,
        transposed: bool = False,
        many: bool = False,
        beside: Sequence[Part] = (),
    ) -> None:
        """y = f(x w^T) for up to three w `[N, K]`, x `[M, K]` and y `[M, N]` of one shape; needs `has_tile`.

        transposed: w is stored as `[K, N]`. f is IDENTITY or RELU_SQUARE; N and K are multiples of 64.
        many: by the kernel for hundreds of rows, whose sums may differ from those of the other unless
        `invariant`. beside: with
        `many` and not transposed, up to four small GEMMs with the same M and K in the same launch; N is a
        multiple of 16.
        """
        m, n, k = len(xs[0]), ys[0].shape[1], xs[0].shape[1]
        pointers, square = map(pointers_of, (ws, xs, ys)), int(activation == RELU_SQUARE)
        count, turned = len(ws), int(transposed)
        if many:
            shape, small = many_shape(count, n, m, beside=[len(part[0]) for part in beside]), _beside(beside)
            if self.invariant and not adds_in_order(count, n, k):
                shape = many_shape_in_turn(count, n, k, m)
            self._call("rwkv_gemm_many", *pointers, count, m, n, k, turned, square, byref(shape), *small)
        else:
            shape = tile_shape(count, n, k, m, transposed)
            self._call("rwkv_gemm_tile", *pointers, count, m, n, k, turned, square, byref(shape))

    def gemm_many_split(self, w: Tensor, x: Tensor, sums: Tensor, transposed: bool = False) -> None:
        """Sums over parts of K: sums `[P, M, N]` in fp32, whose sum over P is x w^T; needs `has_tile`.

        w, x and transposed as of `gemm_tile` with `many`; K is a multiple of 64 P.
        """
        (parts, m, n), k = sums.shape, x.shape[1]
        pointers = [pointers_of([tensor]) for tensor in (w, x, sums)]
        shape = many_shape_split(n, m, parts)
        self._call("rwkv_gemm_many", *pointers, 1, m, n, k, int(transposed), 0, byref(shape), None, 0)

    def gemm_tile_codes(
        self,
        ws: Codes,
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        activation: int = IDENTITY,
        prefetch: Tensor | None = None,
        beside: Sequence[Part] = (),
        partial_sums: bool = False,
    ) -> None:
        """GEMMs with weights of 8 or 4 bits; see `gemm_tile`.

        prefetch: weights that the next kernel reads. beside: GEMMs as of `gemm_stream`, with small w, in the
        same launch, for M up to TILE_FEW_ROWS. partial_sums: y of the only GEMM is `[P, M, N]` in fp32 (P:
        `tile.partial_sums`), whose sum over P is the product; M is at most MOST_OF_ONE_GROUP.
        """
        m, n, k = len(xs[0]), ys[0].shape[-1], xs[0].shape[1]
        group, square = ws.group, int(activation == RELU_SQUARE)
        shape = tile_shape_coded(len(xs), n, k, m, 4 if group else 8, self.invariant, partial_sums)
        form = [group] if group else [int(ws.format == "fp8"), int(ws.columns)]
        self._call(
            f"rwkv_gemm_tile{4 if group else 8}",
            *ws.pointers,
            pointers_of(xs),
            pointers_of(ys),
            len(xs),
            m,
            n,
            k,
            *form,
            square,
            byref(shape),
            *_beside(beside),
            *prefetched(prefetch),
        )

    def gemm_many_codes(
        self, ws: Codes, xs: Sequence[Tensor], ys: Sequence[Tensor], activation: int = IDENTITY
    ) -> None:
        """GEMMs with int8 or int4 for hundreds of rows; see `gemm_tile_codes`."""
        m, n, k = len(xs[0]), ys[0].shape[1], xs[0].shape[1]
        group, square = ws.group, int(activation == RELU_SQUARE)
        shape = many_shape(len(xs), n, m, codes=True)
        self._call(
            f"rwkv_gemm_many{4 if group else 8}",
            *ws.pointers,
            pointers_of(xs),
            pointers_of(ys),
            len(xs),
            m,
            n,
            k,
            group or int(ws.columns),
            square,
            byref(shape),
        )

    def quantize_rows(self, x: Tensor, codes: Tensor, scales: Tensor, square: bool = False) -> None:
        """Rows of x `[M, K]` as fp8 codes `[M, K]` in the order of `orders.ordered_codes`, and scales `[M]`.

        square: of relu(x)^2. Needs `has_tile`; K is a multiple of 64.
        """
        places = map(Tensor.data_ptr, (x, codes, scales))
        self._call("rwkv_quantize_rows", *places, *x.shape, int(square))

    def gemm_tile_fp8(
        self,
        ws: Codes,
        xs: Sequence[Tensor],
        x_scales: Sequence[Tensor],
        ys: Sequence[Tensor],
        activation: int = IDENTITY,
        most_rows: int = 256,
    ) -> None:
        """GEMMs with fp8 on both sides: x `[M, K]` codes in the order of w, scales `[M]`.

        K is a multiple of 128. most_rows: of x in a tile. Hundreds of rows have a kernel of their own.
        """
        m, n, k = len(xs[0]), ys[0].shape[1], xs[0].shape[1]
        pointers = map(pointers_of, (ws.codes, ws.scales, xs, x_scales, ys))
        many, square, parts = m > X_ROWS[-1], int(activation == RELU_SQUARE), len(xs)
        shape = many_shape(parts, n, m, most_rows) if many else tile_shape_fp8(parts, n, k, m, most_rows)
        kernel = f"rwkv_gemm_{'many' if many else 'tile'}_fp8"
        self._call(kernel, *pointers, parts, m, n, k, square, byref(shape))

    def gemm_sparse(
        self, h: Tensor, w: Tensor, partials: Tensor, prefetch: Tensor | None = None, together: bool = False
    ) -> Tensor:
        """h `[M, K]` times w `[K, N]` without the weights of hidden units that are zero in all rows.

        M is one of SPARSE_ROWS. partials: room for `[SPARSE_SPLITS, M, N]`. Returns the ones whose sum is the
        product. together: they are one, which the kernel adds up; needs `has_lowrank`.
        """
        places, rows = map(Tensor.data_ptr, (h, w, partials)), len(h)
        self._call("rwkv_gemm_sparse", *places, rows, *w.shape, int(together), *prefetched(prefetch))
        return partials[: 1 if together else SPARSE_SPLITS]

    def sparse_fits(self, rows: int, k: int) -> bool:
        """Whether `gemm_sparse` takes so many rows of K, as the GPU has shared memory for them."""
        return rows in SPARSE_ROWS and bool(self.library.rwkv_gemm_sparse_fits(rows, k))

    def gemm_sparse8(
        self,
        h: Tensor,
        w: Tensor,
        scales: Tensor,
        partials: Tensor,
        prefetch: Tensor | None = None,
        together: bool = False,
    ) -> Tensor:
        """A sparse GEMM with int8 (`orders.paired_columns`), scales `[N]` in fp32; see `gemm_sparse`."""
        places, rows = map(Tensor.data_ptr, (h, w, scales, partials)), len(h)
        self._call("rwkv_gemm_sparse8", *places, rows, *w.shape, int(together), *prefetched(prefetch))
        return partials[: 1 if together else SPARSE_SPLITS]

    def sparse8_fits(self, rows: int, k: int) -> bool:
        """Whether `gemm_sparse8` takes so many rows and so long a K."""
        return rows in SPARSE_ROWS and bool(self.library.rwkv_gemm_sparse8_fits(rows, k))


def launch(library: CDLL, kernel: str, *arguments: object) -> None:
    """Launch on the current stream. Raises RuntimeError if CUDA refuses."""
    error = getattr(library, kernel)(*arguments, raw_stream())
    if error:
        raise RuntimeError(
            f"The kernel {kernel} could not be launched (CUDA error {error}); check the driver."
        )


def raw_stream() -> int:
    """The current stream, as CUDA names it: torch's object for it takes longer to make than a launch."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def pointer(tensor: Tensor | None) -> int | None:
    """The address of a tensor's first number; None stays None."""
    return None if tensor is None else tensor.data_ptr()


def pointers_of(tensors: Sequence[Tensor | None]) -> Array[c_void_p]:
    """The addresses of tensors; None stays None."""
    return (c_void_p * len(tensors))(*(pointer(tensor) for tensor in tensors))


def _gemm_parts(parts: Sequence[Part]) -> Array[GemmPart]:
    arguments = (
        (w.data_ptr(), x.data_ptr(), y.data_ptr(), *w.shape, function) for w, x, y, function in parts
    )
    return (GemmPart * len(parts))(*(GemmPart(*each) for each in arguments))


def _beside(parts: Sequence[Part]) -> tuple[Array[GemmPart] | None, int]:
    """Small GEMMs as a kernel takes those that it computes in passing."""
    return _gemm_parts(parts) if parts else None, len(parts)


def prefetched(weights: Tensor | None) -> tuple[int | None, int]:
    """A tensor of weights as a kernel takes what it is to fetch ahead."""
    return pointer(weights), 0 if weights is None else min(weights.nbytes, PREFETCH_BYTES) // 16 * 16

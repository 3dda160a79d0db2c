"""The kernels in `cuda/` as Python functions: pointers out of tensors, the current stream, and errors raised.
Shapes are in the .cu files.

Every tensor must be contiguous, on the current device and fp16, but for the residual stream x and partial
sums (fp32) and indices (int32).
"""

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, byref, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.ops.cuda import build
from rwkv_batch.ops.cuda.tile import TileShape, tile_shape

IDENTITY, TANH, SIGMOID, RELU_SQUARE = range(4)
AHEAD_BYTES = (
    8 << 20
)  # of weights brought into the cache for the kernels after: what memory delivers while the gaps last
KEPT, AUTO = (
    0,
    -1,
)  # slices of K in products_low: none, as w stays on the multiprocessor; as many as are fastest
MOST_KEPT = 1024  # the longest K of the first kind
SPARSE_ROWS = (1, 2, 4, 8)  # batches for which there is a sparse product
SPARSE_SLICES = 8  # of its K
LATE, PENDING = (
    2,
    5,
)  # tokens that a state in fp16 may be behind, vectors of 64 numbers put off of each: as in cuda/wkv.cuh


class NormInput(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("parts", c_void_p),
        ("part_count", c_int),
        ("rows", c_int),
        ("tokens", c_void_p),
        ("table", c_void_p),
        ("gather", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("width", c_int),
    )


class PlacesInput(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("row_of", "first", "last", "slots"))


class ProductPart(Structure):
    _fields_ = (
        ("w", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("n", c_int),
        ("k", c_int),
        ("function", c_int),
    )


class TimeMixInput(Structure):
    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "r",
                "k",
                "v",
                "w",
                "a",
                "mix",
                "g",
                "v_first",
                "w0",
                "a0",
                "v0",
                "k_k",
                "k_a",
                "r_k",
                "norm_weight",
                "norm_bias",
                "out",
                "state",
            )
        ),
        ("slot_stride", c_size_t),
        ("width", c_int),
        ("work", c_void_p),
        ("pending", c_void_p),
        ("pending_stride", c_size_t),
        ("behind", c_void_p),
    )


class PackedInput(Structure):
    _fields_ = tuple(
        (name, c_void_p)
        for name in ("counts", "chunk_token", "chunk_tokens", "row_chunk", "row_chunks", "row_slot")
    )


SIGNATURES = {
    "rwkv_norm_mix": (
        POINTER(NormInput),
        c_int,
        c_void_p,
        c_void_p,
        c_size_t,
        c_void_p,
        c_int,
        c_void_p,
        c_void_p,
    ),
    "rwkv_norm": (POINTER(NormInput), c_int, c_void_p, c_void_p),
    "rwkv_norm_mix_run": (
        POINTER(NormInput),
        c_void_p,
        c_int,
        POINTER(PlacesInput),
        c_void_p,
        c_size_t,
        c_void_p,
        c_int,
        c_void_p,
        c_void_p,
    ),
    "rwkv_relu_square": (c_void_p, c_size_t, c_void_p),
    "rwkv_products": (POINTER(ProductPart), c_int, c_int, c_int, c_int, c_void_p, c_uint, c_void_p),
    "rwkv_products_low": (POINTER(ProductPart), c_int, c_int, c_int, c_void_p, c_uint, c_void_p),
    "rwkv_products_tile": (
        POINTER(c_void_p),
        POINTER(c_void_p),
        POINTER(c_void_p),
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        c_int,
        POINTER(TileShape),
        c_void_p,
    ),
    "rwkv_product_sparse": (c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p, c_uint, c_void_p),
    "rwkv_feed": (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_int, c_void_p),
    "rwkv_take": (c_void_p, c_void_p, c_int, c_void_p, c_void_p),
    "rwkv_wkv_step": (POINTER(TimeMixInput), c_int, c_void_p, c_void_p, c_int, c_void_p),
    "rwkv_wkv_settle": (
        c_void_p,
        c_void_p,
        c_int,
        c_void_p,
        c_void_p,
        c_size_t,
        c_void_p,
        c_size_t,
        c_int,
        c_void_p,
    ),
    "rwkv_wkv_prefill": (
        POINTER(TimeMixInput),
        POINTER(PackedInput),
        c_int,
        c_int,
        c_void_p,
        c_int,
        c_void_p,
    ),
    "rwkv_wkv_item_bytes": (),
}


@dataclass(frozen=True)
class Rows:
    """Packed rows of a prefill on the device, int32: `row_of` `[T]`; first and last token and slot of every
    row.
    """

    row_of: Tensor
    first: Tensor
    last: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Pieces:
    """Rows cut into chunks for one launch of the chunked recurrence; of chunks and rows there may be fewer,
    `packed` says how many.
    """

    packed: PackedInput
    chunks: int
    rows: int


@dataclass(frozen=True)
class Added:
    """What a norm adds to the residual stream first: nothing, `y` `[T, C]`, `parts` `[P, T, C]`, or (in its
    place) rows of `table`.
    """

    y: Tensor | None = None
    parts: Tensor | None = None
    tokens: Tensor | None = None  # [T]
    table: Tensor | None = None  # [vocabulary, C]


class Kernels:
    """The library for one GPU. Raises build.BuildError if it cannot be had."""

    def __init__(self, device: torch.device) -> None:
        self.library = build.load(build.architecture(device))
        self.has_low = (
            torch.cuda.get_device_capability(device)[0] == 9
        )  # products_low is there only on Hopper GPUs
        self.has_tile = torch.cuda.get_device_capability(device) == (9, 0)  # and so is products_tile
        self.sparse_parts = 1 if self.has_low else SPARSE_SLICES  # on Hopper, clusters add up the slices
        for name, arguments in SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = arguments, c_int

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self.library, name)(*arguments, torch.cuda.current_stream().cuda_stream)
        if error:
            raise RuntimeError(
                f"The kernel {name} could not be launched (CUDA error {error}); check the driver and free "
                "GPU memory."
            )

    def norm_mix(
        self,
        x: Tensor,
        added: Added,
        weight: Tensor,
        bias: Tensor,
        slots: Tensor,
        shift: Tensor,
        mixes: Tensor,
        out: Tensor,
    ) -> None:
        """Decode: add, norm, shift and mix. shift: `[slots, C]`, mixes: `[N, C]`, out: `[N, T, C]`. Negative
        slots are padding.
        """
        self._call(
            "rwkv_norm_mix",
            byref(_norm_input(x, added, weight, bias)),
            len(x),
            slots.data_ptr(),
            shift.data_ptr(),
            shift.stride(0),
            mixes.data_ptr(),
            len(mixes),
            out.data_ptr(),
        )

    def norm(
        self, x: Tensor, added: Added, weight: Tensor, bias: Tensor, out: Tensor, gather: Tensor | None = None
    ) -> None:
        """Add and norm; `gather`: which rows of x, in the order of out."""
        self._call("rwkv_norm", byref(_norm_input(x, added, weight, bias, gather)), len(out), out.data_ptr())

    def norm_mix_run(
        self,
        x: Tensor,
        to: Tensor,
        added: Added,
        weight: Tensor,
        bias: Tensor,
        rows: Rows,
        shift: Tensor,
        mixes: Tensor,
        out: Tensor,
    ) -> None:
        """Prefill: as `norm_mix`, of packed rows. The residual stream goes from x to `to`, both `[T, C]`;
        nothing is added in parts.
        """
        places = PlacesInput(
            *(tensor.data_ptr() for tensor in (rows.row_of, rows.first, rows.last, rows.slots))
        )
        self._call(
            "rwkv_norm_mix_run",
            byref(_norm_input(x, added, weight, bias)),
            to.data_ptr(),
            len(x),
            byref(places),
            shift.data_ptr(),
            shift.stride(0),
            mixes.data_ptr(),
            len(mixes),
            out.data_ptr(),
        )

    def relu_square(self, h: Tensor) -> None:
        self._call("rwkv_relu_square", h.data_ptr(), h.numel())

    def products(
        self,
        parts: Sequence[tuple[Tensor, Tensor, Tensor, int]],
        rows_of_w: int = 16,
        shares: int = 8,
        ahead: Tensor | None = None,
    ) -> None:
        """y = f(x w^T) for every (w `[N, K]`, x `[M, K]`, y `[M, N]`, f), all with the same M. ahead: weights
        that are wanted next.
        """
        self._call(
            "rwkv_products", _group(parts), len(parts), len(parts[0][1]), rows_of_w, shares, *_ahead(ahead)
        )

    def products_low(
        self, parts: Sequence[tuple[Tensor, Tensor, Tensor, int]], slices: int, ahead: Tensor | None = None
    ) -> None:
        """As `products`, for small matrices and more rows. slices: 1, 2, 4, 8, AUTO, or KEPT for K up to
        MOST_KEPT.
        """
        self._call("rwkv_products_low", _group(parts), len(parts), len(parts[0][1]), slices, *_ahead(ahead))

    def products_tile(
        self,
        ws: Sequence[Tensor],
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        function: int = IDENTITY,
        across: bool = False,
    ) -> None:
        """y = f(x w^T) on Hopper for up to three w `[N, K]` (across: `[K, N]`), x `[M, K]`, y `[M, N]` of one
        shape.

        f is IDENTITY or RELU_SQUARE; N and K are multiples of 64.
        """
        m, n, k = len(xs[0]), ys[0].shape[1], xs[0].shape[1]
        pointers = [
            (c_void_p * len(group))(*(tensor.data_ptr() for tensor in group)) for group in (ws, xs, ys)
        ]
        self._call(
            "rwkv_products_tile",
            *pointers,
            len(ws),
            m,
            n,
            k,
            int(across),
            int(function == RELU_SQUARE),
            byref(tile_shape(len(ws), n, k, m, across)),
        )

    def product_sparse(self, h: Tensor, w: Tensor, parts: Tensor, ahead: Tensor | None = None) -> Tensor:
        """h `[M, K]` times w `[K, N]` for M of SPARSE_ROWS. parts: room for sums `[SPARSE_SLICES, M, N]`.
        ahead: weights that are wanted next. Returns the parts that the product is the sum of.
        """
        self._call(
            "rwkv_product_sparse",
            h.data_ptr(),
            w.data_ptr(),
            parts.data_ptr(),
            len(h),
            *w.shape,
            *_ahead(ahead),
        )
        return parts[: self.sparse_parts]

    def feed(
        self,
        tokens: Tensor,
        slots: Tensor,
        rows: Tensor,
        behind: Tensor | None,
        single: int,
        counted: Tensor | None,
    ) -> None:
        """Before a step; see cuda_feed.Feed.resolve."""
        self._call(
            "rwkv_feed",
            tokens.data_ptr(),
            slots.data_ptr(),
            rows.data_ptr(),
            pointer(behind),
            single,
            pointer(counted),
            len(tokens),
        )

    def take(self, ids: Tensor, slots: Tensor, rows: Tensor) -> None:
        """After a draw; see cuda_feed.Feed.take."""
        self._call("rwkv_take", ids.data_ptr(), slots.data_ptr(), len(ids), rows.data_ptr())

    def wkv_step(self, in_: TimeMixInput, slots: Tensor, fp32: bool, counted: Tensor | None = None) -> None:
        """One token of each row: of all `slots` `[rows]`, or of the first `counted` `[1]` of them."""
        self._call("rwkv_wkv_step", byref(in_), len(slots), pointer(counted), slots.data_ptr(), int(fp32))

    def settle(
        self, slots: int, counted: int | None, most: int, rows: Tensor, states: Tensor, pending: Tensor
    ) -> None:
        """States `[slots, layers, heads, 64, 64]` fp16 that are behind are so no longer; pending: see Feed.

        slots: address of `most` int32 on the device, or of as many as stand at the address `counted`. rows:
        see cuda_feed.Feed.
        """
        self._call(
            "rwkv_wkv_settle",
            slots,
            counted,
            most,
            rows.data_ptr(),
            states.data_ptr(),
            states.stride(0),
            pending.data_ptr(),
            pending.stride(0),
            states.shape[1] * states.shape[2],
        )

    def wkv_prefill(self, in_: TimeMixInput, pieces: Pieces, items: Tensor, fp32: bool) -> None:
        """items: room for `item_bytes` bytes for every chunk and head."""
        self._call(
            "rwkv_wkv_prefill",
            byref(in_),
            byref(pieces.packed),
            pieces.chunks,
            pieces.rows,
            items.data_ptr(),
            int(fp32),
        )

    @property
    def item_bytes(self) -> int:
        return int(self.library.rwkv_wkv_item_bytes())


def _norm_input(
    x: Tensor, added: Added, weight: Tensor, bias: Tensor, gather: Tensor | None = None
) -> NormInput:
    parts = added.parts
    return NormInput(
        x.data_ptr(),
        pointer(added.y),
        pointer(parts),
        0 if parts is None else parts.shape[0],
        0 if parts is None else parts.shape[1],
        pointer(added.tokens),
        pointer(added.table),
        pointer(gather),
        weight.data_ptr(),
        bias.data_ptr(),
        x.shape[1],
    )


def _group(parts: Sequence[tuple[Tensor, Tensor, Tensor, int]]) -> Array[ProductPart]:
    return (ProductPart * len(parts))(
        *(
            ProductPart(w.data_ptr(), x.data_ptr(), y.data_ptr(), w.shape[0], w.shape[1], function)
            for w, x, y, function in parts
        )
    )


def _ahead(weights: Tensor | None) -> tuple[int | None, int]:
    return pointer(weights), 0 if weights is None else min(weights.nbytes, AHEAD_BYTES) // 16 * 16


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

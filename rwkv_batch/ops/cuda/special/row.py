"""The kernels of a whole decode step of one row, `cuda/decode_row*.cu`."""

from collections.abc import Sequence
from ctypes import byref, c_int

import torch
from torch import Tensor

from rwkv_batch.ops.cuda.abi import ROW_HALF, ROW_HALF_WAYS, ROW_INNER, TILE_K, RowInput
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.buffers import StepBuffers
from rwkv_batch.ops.cuda.gemms import launch
from rwkv_batch.ops.torch_ops import HEAD_SIZE

FUNCTIONS = "wagv"  # the low-rank functions, in the order of the kernel
MATRICES = ("r", "k", "v", "output", "key", "value")
SCALES = tuple(f"{name}_scales" for name in MATRICES)
NORMS = ("norm1_weight", "norm1_bias", "mixes", "norm2_weight", "norm2_bias", "x_k")
HEAD_VECTORS = ("w0", "a0", "v0", "k_k", "k_a", "r_k", "group_weight", "group_bias")
POINTERS = (
    *(f"{name}_inner" for name in FUNCTIONS),
    *(f"{name}_outer" for name in FUNCTIONS),
    *MATRICES,
    *SCALES,
    *NORMS,
    *HEAD_VECTORS,
)
RKV_ROWS = 27  # outputs of inner low-rank sides, which are as many bytes as r, k and v of a block


def rows_beside_head(ranks: int, heads: int, blocks: int) -> int:
    """Outputs of inner low-rank sides, of so many, that a block with a head computes.

    A block without one computes RKV_ROWS more, but no more than ROW_INNER.
    """
    free = max(blocks - 2 * heads, 0)
    return max(1, -(-(ranks - RKV_ROWS * free) // blocks), -(-(ranks - ROW_INNER * free) // (2 * heads)))


class RowKernel:
    """Steps of one row over the layers of a model; all of them on one stream."""

    def __init__(
        self,
        kernels: Kernels,
        form: int,
        layers: Sequence[dict[str, Tensor | None]],
        hidden: int,
        norm: tuple[Tensor, Tensor],
        ahead: Tensor,
    ) -> None:
        """layers: of each the tensors named in POINTERS; hidden: units of a channel mix.

        form: ROW_INT4, ROW_WIDE_INT4, ROW_INT8, or ROW_INT8_COLUMNS and ROW_HALF, with which value is
        `[hidden, C]`. Only ROW_HALF `normalizes`, with weight and bias `[C]` of `norm`, and fetches what the
        next kernel reads, `ahead`, into half of the L2 cache.
        """
        device = ahead.device
        self._library, self._form, self.normalizes = kernels.library, form, form == ROW_HALF
        self._norm, self._ahead = norm, ahead
        most = torch.cuda.get_device_properties(device).L2_cache_size // 2
        self._ahead_bytes = min(ahead.nbytes, most) // 16 * 16 if self.normalizes else 0
        self._layers = layers  # kept, as the table points to them
        pointers = [
            [0 if (t := layer[name]) is None else t.data_ptr() for name in POINTERS] for layer in layers
        ]
        last, width = layers[-1], _rows(layers[-1]["k_k"])
        self._table = torch.tensor(pointers, dtype=torch.int64, device=device)
        ranks = [_rows(last[f"{name}_inner"]) for name in FUNCTIONS]
        # What launches leave for each other: sums of two launches in turn, of the stream and of inner sides,
        # of which each makes those of the next zero; and how many there were. With ROW_HALF outputs of the
        # channel mix have several sums, r, k, v and inner sides none, and those of two layers take turns.
        of_output = 1 + (ROW_HALF_WAYS if form == ROW_HALF else 1)
        self._sums = torch.zeros(2, of_output, width, dtype=torch.int64, device=device)
        inner = 3 * width + sum(ranks) if form == ROW_HALF else len(layers) * sum(ranks)
        self._inner = torch.zeros(2, inner, dtype=torch.int64, device=device)
        self._launches = torch.zeros(1, dtype=torch.int32, device=device)
        heads = width // HEAD_SIZE
        blocks = torch.cuda.get_device_properties(device).multi_processor_count // 2 * 2
        head_rows = 0 if form == ROW_HALF else rows_beside_head(sum(ranks), heads, blocks)
        self._shape = (heads, hidden // TILE_K, head_rows)
        self._ranks = (c_int * len(FUNCTIONS))(*ranks)

    @property
    def fits(self) -> bool:
        """Whether the kernel takes such a model."""
        return bool(self._library.rwkv_decode_row_fits(self._form, self._ranks, *self._shape))

    def run(
        self,
        tokens: Tensor,
        slots: Tensor,
        table: Tensor,
        b: StepBuffers,
        shift: Tensor,
        wkv: Tensor,
        pending: Tensor,
    ) -> None:
        """b.x `[1, C]` becomes the stream behind the last layer, and the slot's states move on.

        b.normed `[1, C]` becomes its layer norm, if the kernel `normalizes`.

        tokens, slots and b.lag `[1]`; shift `[slots, layers, 2, C]`, wkv `[slots, layers, heads, 64, 64]`
        fp16 and pending as in feed.Feed, all of the first layers.
        """
        inputs = RowInput(
            self._table.data_ptr(),
            *map(Tensor.data_ptr, (tokens, slots, b.lag, table, b.x, shift, wkv, pending)),
            *(tensor.stride(0) for tensor in (shift, wkv, pending)),
            *(tensor.data_ptr() for tensor in (self._sums, self._inner, self._launches)),
            self._ranks,
            shift.shape[1],
            len(self._layers),
            *self._shape,
            self._form,
            *(tensor.data_ptr() for tensor in (*self._norm, b.normed, self._ahead)),
            self._ahead_bytes,
        )
        launch(self._library, "rwkv_decode_row", byref(inputs))


def _rows(matrix: Tensor | None) -> int:
    assert matrix is not None
    return len(matrix)

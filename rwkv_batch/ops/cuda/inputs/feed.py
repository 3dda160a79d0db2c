"""What the device knows of each slot between steps: the token drawn last, and how far the state lags.

So a step can be queued before the host knows what the step before has drawn, and writes to fp16 states can be
deferred.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.cuda.abi import DEFERRED_VECTORS, MAX_LAG, STOPS
from rwkv_batch.ops.cuda.binding import ChunkedRows, Kernels
from rwkv_batch.ops.cuda.inputs.staging import Records, upload

# SequenceRecord of cuda/sequence_feed.cuh
RECORD = np.dtype([("last", "i4"), ("ended", "i4"), ("lag", "i4"), ("stops", "i4", STOPS)])


class Feed:
    """One record for each slot of `wkv` `[slots, layers, heads, 64, 64]`. All calls belong on one stream.

    fp16 states may lag up to MAX_LAG tokens: `pending`
    `[slots, layers, heads, MAX_LAG, DEFERRED_VECTORS, 64]` holds what has not been written into them
    (cuda/wkv.cuh). States never lag that are fp32, or whose kernel defers nothing; `pending` is None.
    """

    def __init__(self, kernels: Kernels, wkv: Tensor, defers: bool = True) -> None:
        """defers: whether the kernel of the recurrence defers writes to fp16 states."""
        self._kernels, self._wkv = kernels, wkv
        self._records = Records(len(wkv), RECORD, wkv.device)
        self.pending = pending_writes(wkv) if defers else None

    @property
    def records(self) -> Tensor:
        """Of all slots, on the device."""
        return self._records.table

    def begin(self, slot: int, stop_ids: Collection[int]) -> None:
        """A new sequence in the slot, which those ids finish, STOPS of them at most."""
        self._records.put(slot, (0, 0, 0, (*stop_ids, *[-1] * (STOPS - len(stop_ids)))))

    def prepare(self) -> None:
        """Upload the records of new sequences: once before each step, also one that replays a graph."""
        self._records.flush()

    def resolve(
        self,
        tokens: Tensor,
        slots: Tensor,
        lag: Tensor,
        single: int,
        counted: Tensor | None = None,
        fed: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Fill in the tokens that the host does not know. `prepare` comes first.

        tokens `[n]` int32 become those of `fed`, or others in place: a negative one, what the sequence in
        that slot drew last. slots `[rows]` int32 become negative where this was a stop id. lag `[n]` int32 is
        filled in for sequences that are fed one token, the first `single` or `counted` `[1]` of them: how
        many tokens their states lag. From then on it is one more, or none.
        """
        lag_or_none = None if self.pending is None else lag
        given = (tokens, slots)
        self._kernels.resolve_drawn(given, fed or given, self._records.table, lag_or_none, single, counted)

    @torch.inference_mode()
    def flush(self, slots: Collection[int]) -> None:
        """Write what is pending into the states of these slots."""
        if self.pending is not None and slots:
            self.prepare()
            with torch.cuda.device(self._wkv.device):
                self.flush_slots(upload(list(slots), self._wkv.device, torch.int32))

    def flush_slots(self, slots: Tensor) -> None:
        """Write what is pending into the states of slots `[n]` int32 on the device, negative for none.

        `prepare` comes first.
        """
        if self.pending is not None:
            self._kernels.wkv_flush(
                slots.data_ptr(), None, len(slots), self._records.table, self._wkv, self.pending
            )

    def flush_rows(self, pieces: ChunkedRows) -> None:
        """Write what is pending into the states of a prefill's rows, whose number is on the device."""
        if self.pending is not None:
            packed = pieces.input
            rows = packed.counts + torch.int32.itemsize  # the number of rows follows that of chunks
            self._kernels.wkv_flush(
                packed.row_slot, rows, pieces.rows, self._records.table, self._wkv, self.pending
            )

    def record_drawn(self, ids: Tensor, slots: Tensor) -> None:
        """ids `[n]` int32 were drawn by the sequences in slots `[n]` int32; negative slots are padding."""
        self._kernels.record_drawn(ids, slots, self._records.table)


def pending_writes(wkv: Tensor) -> Tensor | None:
    """Room for the deferred writes to states `[slots, layers, heads, 64, 64]`; None for fp32."""
    if wkv.dtype != torch.float16:
        return None
    return wkv.new_zeros(*wkv.shape[:3], MAX_LAG, DEFERRED_VECTORS, wkv.shape[3])

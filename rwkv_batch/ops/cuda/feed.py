"""What rows drew last, on the device, so that a step can be queued before the host knows what the one before
has drawn; and what the last steps have put off of their states.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.cuda.binding import LATE, PENDING, Kernels, Pieces
from rwkv_batch.ops.cuda.records import Records
from rwkv_batch.ops.cuda.slots import Slots
from rwkv_batch.ops.cuda.staging import upload

STOPS = 13  # ids that may end a row on the device, as in cuda/feed.cuh
ROW = np.dtype([("last", "i4"), ("ended", "i4"), ("behind", "i4"), ("stops", "i4", STOPS)])  # its records


class Feed:
    """One record for each slot of `states`. All calls belong on one stream.

    States in fp16 may be up to LATE tokens behind: `pending` `[slots, layers, heads, LATE, PENDING, 64]`
    holds what steps have put off (cuda/wkv.cuh).
    """

    def __init__(self, kernels: Kernels, states: Slots) -> None:
        self.states = states
        self._kernels = kernels
        self._rows = Records(len(states.wkv), ROW, states.wkv.device)
        self.pending = pending_of(states.wkv)

    def begin(self, slot: int, stop_ids: Collection[int]) -> None:
        """A new row, which those ids end, STOPS of them at most. What may have been put off in that slot is
        the old row's and forgotten.
        """
        self._rows.put(slot, (0, 0, 0, (*stop_ids, *[-1] * (STOPS - len(stop_ids)))))

    def prepare(self) -> None:
        """Once before each step, also one that replays a graph: tells the device of the rows that
        have begun.
        """
        self._rows.flush()

    def resolve(
        self, tokens: Tensor, slots: Tensor, behind: Tensor, single: int, counted: Tensor | None = None
    ) -> None:
        """tokens `[n]`, slots `[n]` or more, int32, in place: where a token is negative it becomes what the
        row in that slot drew last, and the slot negative if this has ended the row. `prepare` comes first.

        behind `[n]` int32 is filled in for rows that are fed one token, the first `single` or `counted` `[1]`
        of them: how many tokens their states are behind. From this moment on it is one more, or none.
        """
        self._kernels.feed(
            tokens, slots, self._rows.table, None if self.pending is None else behind, single, counted
        )

    def settle(self, slots: Collection[int]) -> None:
        """The states in these slots are no longer behind: before anyone but a step of one token reads or
        replaces them.
        """
        if self.pending is not None and slots:
            self.prepare()
            index = upload(list(slots), self.states.wkv.device, torch.int32)
            self._kernels.settle(
                index.data_ptr(), None, len(index), self._rows.table, self.states.wkv, self.pending
            )

    def settle_rows(self, pieces: Pieces) -> None:
        """The same of the rows of a prefill."""
        if self.pending is not None:
            packed = pieces.packed
            rows = packed.counts + torch.int32.itemsize  # where their number stands: after that of chunks
            self._kernels.settle(
                packed.row_slot, rows, pieces.rows, self._rows.table, self.states.wkv, self.pending
            )

    def take(self, ids: Tensor, slots: Tensor) -> None:
        """ids `[n]` int32 were drawn by the rows in slots `[n]` int32; negative slots are nobody's."""
        self._kernels.take(ids, slots, self._rows.table)


def pending_of(states: Tensor) -> Tensor | None:
    """Room for what is put off of states `[slots, layers, heads, 64, 64]`; none of those in fp32."""
    return (
        states.new_zeros(*states.shape[:3], LATE, PENDING, states.shape[3])
        if states.dtype == torch.float16
        else None
    )

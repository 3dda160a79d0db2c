"""What rows drew last, on the device, so that a step can be queued before the host knows what the one before has drawn."""
from collections.abc import Collection

import numpy as np
from torch import Tensor

from rwkv_batch.ops.cuda_lib import Kernels
from rwkv_batch.ops.cuda_records import Records
from rwkv_batch.ops.cuda_slots import Slots

STOPS = 14  # ids that may end a row on the device, as in cuda/feed.cu
ROW = np.dtype([("last", "i4"), ("ended", "i4"), ("stops", "i4", STOPS)])  # its records


class Feed:
    """One record for each slot of `states`. All calls belong on one stream."""

    def __init__(self, kernels: Kernels, states: Slots) -> None:
        self.states = states
        self._kernels = kernels
        self._rows = Records(len(states.wkv), ROW, states.wkv.device)

    def begin(self, slot: int, stop_ids: Collection[int]) -> None:
        """A new row, which those ids end, STOPS of them at most."""
        self._rows.put(slot, (0, 0, (*stop_ids, *[-1] * (STOPS - len(stop_ids)))))

    def prepare(self) -> None:
        """Once before each step, also one that replays a graph: tells the device of the rows that have begun."""
        self._rows.flush()

    def resolve(self, tokens: Tensor, slots: Tensor) -> None:
        """tokens `[n]`, slots `[n]` or more, int32, in place: where a token is negative it becomes what the row in that slot drew last, and
        the slot negative if this has ended the row. `prepare` comes first."""
        self._kernels.feed(tokens, slots, self._rows.table)

    def take(self, ids: Tensor, slots: Tensor) -> None:
        """ids `[n]` int32 were drawn by the rows in slots `[n]` int32; negative slots are nobody's."""
        self._kernels.take(ids, slots, self._rows.table)

"""A record for each slot in device memory: written by the host at first, by the device afterwards."""

import numpy as np
import torch

from rwkv_batch.ops.cuda.staging import Uploads


class Records:
    """All zeros at first. All calls belong on one stream.

    New records stay on the host until `flush`, since an upload costs the same for one as for hundreds.
    """

    def __init__(self, slots: int, dtype: np.dtype, device: torch.device) -> None:
        """`dtype`: of a record, a multiple of 8 bytes."""
        words = dtype.itemsize // 8
        self.table = torch.zeros(slots, words, dtype=torch.int64, device=device)  # [slots, words of a record]
        self._host = np.zeros(slots, dtype)
        self._words = self._host.view(np.int64).reshape(slots, words)
        self._new: set[int] = set()
        self._uploads = Uploads(slots * (1 + words), torch.int64)
        # [slots, slot and record]
        self._staged = torch.empty(slots, 1 + words, dtype=torch.int64, device=device)

    def put(self, slot: int, record: tuple[object, ...]) -> None:
        """`record`: its fields, in order. It replaces one that is not uploaded yet."""
        self._host[slot] = record
        self._new.add(slot)

    @torch.inference_mode()
    def flush(self) -> None:
        """Queue the upload of new records: before each kernel or graph that reads or writes the table."""
        if not self._new:
            return
        slots, count = list(self._new), len(self._new)
        numbers = self._uploads.buffer()[: count * self._staged.shape[1]].reshape(count, -1)
        numbers[:, 0], numbers[:, 1:] = slots, self._words[slots]
        staged = self._staged[:count]
        self._uploads.send(staged)
        self.table.index_copy_(0, staged[:, 0], staged[:, 1:])
        self._new.clear()

"""Small arrays on their way between host and device: pinned, so that neither side waits for the other."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.host_memory import pinned, pinned_if_possible, pins

BUFFERS = 4  # used in turn


class Uploads:
    """Copies of up to `size` numbers to a device, on its current stream."""

    def __init__(self, size: int, dtype: torch.dtype = torch.int32) -> None:
        self._host = pinned_if_possible(torch.empty, BUFFERS, size, dtype=dtype)
        self._numbers: list[np.ndarray] = list(self._host.numpy())
        self._done = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._current = 0

    def buffer(self) -> np.ndarray:
        """`[size]`, to be filled for the next `send`. Waits until its own last copy is done."""
        self._current = (self._current + 1) % BUFFERS
        self._done[self._current].synchronize()
        return self._numbers[self._current]

    def send(self, target: Tensor) -> None:
        """Fill the contiguous `target` with the buffer's first numbers."""
        target.view(-1).copy_(self._host[self._current, : target.numel()], non_blocking=True)
        self._done[self._current].record(torch.cuda.current_stream(target.device))


class Records:
    """A record for each slot in device memory, all zeros at first. All calls belong on one stream.

    The host writes the first record of a sequence; then the device does.
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


class Download:
    """A copy of a device tensor to the host, of what is in it once the current stream has come here.

    Nothing may write to the tensor afterwards: the copy is on a stream of its own, so that the next step does
    not wait for it.
    """

    def __init__(self, source: Tensor) -> None:
        self._source = source  # its memory must stay until it is read
        self._host = pinned(torch.empty, source.shape, dtype=source.dtype, wanted=source.numel() > 0)
        stream = _downloading(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            self._host.copy_(source, non_blocking=True)
        self._done = stream.record_event()

    def wait(self) -> Tensor:
        """The tensor on the host."""
        self._done.synchronize()
        return self._host


@cache
def _downloading(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def upload(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`[n]` on the device, in the order of the current stream."""
    host = pinned(torch.tensor, numbers, dtype=dtype, wanted=pins(device))
    return host.to(device, non_blocking=True)

"""Small arrays on their way between host and device: pinned, so that neither side waits for the other."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BUFFERS = 4  # used in turn


class Uploads:
    """Copies of up to `size` numbers to a device, on its current stream."""

    def __init__(self, size: int, dtype: torch.dtype = torch.int32) -> None:
        self._host = torch.empty(BUFFERS, size, dtype=dtype, pin_memory=True)
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


class Download:
    """A copy of a device tensor to the host, in the order of the current stream."""

    def __init__(self, source: Tensor) -> None:
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.numel() > 0)
        self._host.copy_(source, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(source.device))

    def wait(self) -> Tensor:
        """The tensor on the host."""
        self._done.synchronize()
        return self._host


def upload(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`[n]` on the device, in the order of the current stream."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)

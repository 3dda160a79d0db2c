"""Memory for the weights of a model on a CPU, in large pages where the system gives them.

A step of one row reads all weights once. A processor fetches what is read next only as far as the page goes,
and looks up each page: in pages of 2 MB in place of 4 KB the same bytes arrive sooner.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a large page on most processors
BLOCK = 64 << 20  # bytes that are asked for at once, and taken as they are written
ALIGNED = 64  # bytes, a line of the cache
LEAST = 1 << 14  # bytes of a tensor that is worth it


class WeightMemory:
    """Blocks of memory that tensors are copied into, side by side; each is freed with its last tensor."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, or the tensor itself where it is small or the system gives no such pages."""
        if tensor.nbytes < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor
        size = -(-tensor.nbytes // ALIGNED) * ALIGNED
        if size > len(self._left):
            try:
                self._left = _block(max(size, BLOCK))
            except OSError:  # a limit of memory or of mappings, which the tensor itself is within
                return tensor
        kept = self._left[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._left = self._left[size:]
        return kept.copy_(tensor)


def _block(size: int) -> Tensor:
    """Bytes that begin where a large page does."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :][:size]

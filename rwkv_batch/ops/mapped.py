"""Pages of mapped files, which leave this process once their numbers have been read.

A file that is mapped and read counts as memory of the process until it is unmapped, and the weights of a
model are packed into other memory beside it. Pages that have left come back from the system's cache of the
file as soon as they are read again.
"""

import ctypes
import mmap
from pathlib import Path

import numpy as np
from torch import Tensor

PAGEMAP = Path("/proc/self/pagemap")  # of Linux: 8 bytes for each page
PRESENT, SWAPPED, OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
LEAST = 1 << 18  # bytes of a tensor that is worth it


def let_go(tensor: Tensor) -> None:
    """Let the pages of a tensor leave the process where all of them are those of a mapped file.

    Numbers that were written into such a tensor are in pages of their own: then nothing leaves. Nor does
    anything where the system does not say whose pages they are.
    """
    if tensor.nbytes < LEAST or tensor.device.type != "cpu" or not _is_dense(tensor):
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    count = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE - first
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and _are_of_file(first, count):
        begin, size = first * mmap.PAGESIZE, count * mmap.PAGESIZE
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers lie side by side, in any order."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in sizes) + 1 == tensor.numel()


def _are_of_file(first: int, count: int) -> bool:
    """Whether the process has no page of its own among these."""
    try:
        with PAGEMAP.open("rb", buffering=0) as file:
            file.seek(8 * first)
            pages = np.frombuffer(file.read(8 * count), np.uint64)
    except OSError:
        return False
    own = (pages & SWAPPED != 0) | ((pages & PRESENT != 0) & (pages & OF_FILE == 0))
    return len(pages) == count and not own.any()

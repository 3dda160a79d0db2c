"""The device to run on, and the memory it has left."""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT, LARGEST_KEPT = 256 << 20, 32 << 20  # bytes; the second is the most that glibc takes
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED")


class DeviceError(Exception):
    """The device asked for is not there, or too small; one sentence with the way out."""


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first GPU if there is one. Raises DeviceError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"--device {name} is no device; use auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"--device {name} is not there: torch sees {torch.cuda.device_count()} GPUs; use --device cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name} is not supported; use auto, cpu, cuda or cuda:1")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def describe(device: torch.device) -> str:
    """For people: its name, and how many threads a CPU uses."""
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated."""
    if device.type == "cpu":
        return _free_host_bytes()
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def host_bytes() -> int:
    """Memory of this machine, or the limit of the container that this process runs in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" is no number
        total = min(total, int((CGROUP / "memory.max").read_text()))
    return total


def keep_freed_memory() -> None:
    """Let this process keep some of what it frees, where the C library is glibc.

    A step on a CPU allocates and frees the same megabytes as the one before. Given back to the system each
    time, they cost a page fault for every 4 KiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)


@contextmanager
def out_of_memory_as_error(what: str, device: torch.device) -> Iterator[None]:
    """Raises DeviceError, which names `what`, when memory runs out inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch has a narrower class for a GPU, but not for a CPU, nor for CUDA calls that are not its own.
        own = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not own and not OUT_OF_MEMORY.search(str(error)):
            raise
        raise DeviceError(
            f"{what[0].upper()}{what[1:]} do not fit into the {free_bytes(device) / 2**30:.1f} GiB of "
            f"memory left on {describe(device)}; use a smaller model, --max-rows, or end what else uses this "
            "memory."
        ) from error


def _free_host_bytes() -> int:
    """Memory that this machine can still give, or the container that this process runs in."""
    free = host_bytes()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError, StopIteration):  # "max" is no number
        limit = int((CGROUP / "memory.max").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        free = min(free, limit - next(int(line.split()[1]) for line in lines if line.startswith("anon ")))
    return free

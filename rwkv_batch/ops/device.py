"""The device to run on, and the memory it has left."""

import ctypes
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT, LARGEST_KEPT = 256 << 20, 32 << 20  # bytes; the second is the most that glibc takes
LARGEST_IN_HEAP = 128 << 10  # bytes, what glibc begins with before it adapts
RESERVED_PART = 24  # of a GPU's memory
LEAST_RESERVED, MOST_RESERVED = 1 << 29, 1 << 30
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED")


EventPair = tuple[torch.cuda.Event, torch.cuda.Event]  # where something begins, and where it ends


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
    if device.type == "cpu" and device.index:
        raise DeviceError(f"--device {name} is not there: all cores are one device; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name} is not supported; use auto, cpu, cuda or cuda:1")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def find_devices(names: str) -> list[torch.device]:
    """Those of the stages of a model, `cuda:0+cuda:1`, all of one type. Raises DeviceError."""
    found = [find_device(name) for name in names.split("+")]
    if len({device.type for device in found}) > 1:
        raise DeviceError("--pp-devices names devices of two types; name GPUs only, or cpu only")
    return found


def describe(device: torch.device) -> str:
    """For people: its name, and how many threads a CPU uses."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated."""
    if device.type == "cpu":
        return _free_host_bytes()
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return min(free, _allowed_bytes(device, total) - torch.cuda.memory_reserved(device))


def reserve_bytes(device: torch.device) -> int:
    """What is left free of a GPU's memory, 0 of a CPU's.

    That is for workspaces of cuBLAS, kernels that are loaded late, and what an allocator cannot use.
    """
    if device.type == "cpu":
        return 0
    allowed = _allowed_bytes(device, torch.cuda.mem_get_info(device)[1])
    return min(max(allowed // RESERVED_PART, LEAST_RESERVED), MOST_RESERVED)


def _allowed_bytes(device: torch.device, total: int) -> int:
    return int(torch.cuda.get_per_process_memory_fraction(device) * total)


def limit_memory(device: torch.device, limit: int) -> None:
    """Let this process allocate so many bytes of a GPU at most, besides what CUDA itself takes.

    Raises DeviceError if the device is none, or has less.
    """
    if device.type == "cpu":
        raise DeviceError("--gpu-memory is for a GPU, and this runs on a CPU; leave it out")
    total = torch.cuda.mem_get_info(device)[1]
    if limit > total:
        raise DeviceError(
            f"--gpu-memory asks for {limit / 2**30:.1f} GiB, and {describe(device)} has {total / 2**30:.1f}; "
            "leave it out to use all that is free"
        )
    torch.cuda.set_per_process_memory_fraction(limit / total, device)


def allocated_bytes(device: torch.device) -> int:
    """What tensors take of a GPU; 0 of a CPU, where nobody counts."""
    return 0 if device.type == "cpu" else torch.cuda.memory_allocated(device)


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free, without what torch keeps for itself, and all. Nothing waits for the device."""
    if device.type == "cpu":
        return _free_host_bytes(), host_bytes()
    return torch.cuda.mem_get_info(device)


def host_bytes() -> int:
    """Memory of this machine, or the limit of the container that this process runs in."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" is no number
        total = min(total, int((CGROUP / "memory.max").read_text(encoding="utf-8")))
    return total


def keep_freed_memory() -> None:
    """Let this process keep some of what it frees from now on, where the C library is glibc.

    A step on a CPU allocates and frees the same megabytes as the one before. Given back to the system each
    time, they cost a page fault for every 4 KiB.
    """
    _set_malloc({M_TRIM_THRESHOLD: KEPT, M_MMAP_THRESHOLD: LARGEST_KEPT})


def give_freed_memory_back() -> None:
    """Let what this process frees go back to the system, until `keep_freed_memory`.

    Loading a model frees blocks between others that stay. Kept, they would take as much as a third of it.
    """
    _set_malloc({M_MMAP_THRESHOLD: LARGEST_IN_HEAP})


def _set_malloc(parameters: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in parameters.items():
            mallopt(parameter, value)


@contextmanager
def own_stream(places: Sequence[torch.device], number: int) -> Iterator[None]:
    """What this thread queues inside has a stream of its own, so that the steps of others go on beside it.

    places: those of one model, and it is so on each of them. It is done when this ends. `number`: one that no
    model has which is there. Graphs go on using the workspace that cuBLAS has for the stream they were
    captured beside (model/cuda/steps/capture.py).
    """
    gpus = [device for device in dict.fromkeys(places) if device.type == "cuda"]
    streams = [stream_for(device, f"loading {number}") for device in gpus]
    with ExitStack() as inside:
        for stream in reversed(streams):  # whose GPU becomes the current one too
            inside.enter_context(torch.cuda.stream(stream))
        yield
    for stream in streams:
        stream.synchronize()


@cache
def stream_for(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream for that purpose, of all models.

    torch has 32, and then gives out the same ones again: a copy must not be on one where a graph is captured.
    """
    return torch.cuda.Stream(device)


def touch(device: torch.device) -> None:
    """Return when a GPU has done something behind all that is queued; one that hangs never does."""
    if device.type == "cuda":
        torch.zeros(1, device=device).add_(1).item()


class StepClock:
    """The time that steps take of devices, of which nothing waits: on a GPU between two events."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """devices: of the stages of a model; each counts once."""
        self.devices = [*dict.fromkeys(devices)]
        self._began = 0.0
        self._ended: list[tuple[str, tuple[float, ...], int]] = []
        # Of each step the events in front of it and behind it on every GPU.
        self._events: deque[tuple[str, int, list[EventPair]]] = deque()
        self._free: list[list[EventPair]] = []  # to be used again
        self._on_gpus = self.devices[0].type == "cuda"

    def start(self) -> None:
        """Before steps are run or queued."""
        self._began = time.perf_counter()
        if self._on_gpus:
            if not self._free:
                self._free.append([(self._event(), self._event()) for _ in self.devices])
            for device, (start, _) in zip(self.devices, self._free[-1], strict=True):
                start.record(torch.cuda.current_stream(device))

    def stop(self, kind: str | None, steps: int = 1) -> None:
        """Behind so many. kind: what `read` calls them; None: there was no step."""
        if kind is None:
            return
        if self._on_gpus:
            pairs = self._free.pop()
            for device, (_, end) in zip(self.devices, pairs, strict=True):
                end.record(torch.cuda.current_stream(device))
            self._events.append((kind, steps, pairs))
        else:
            taken = time.perf_counter() - self._began
            self._ended.append((kind, (taken,) * len(self.devices), steps))

    def read(self) -> list[tuple[str, tuple[float, ...], int]]:
        """Kind, seconds of each device and number of the steps that have ended since the last call."""
        while self._events and all(end.query() for _, end in self._events[0][2]):
            kind, steps, pairs = self._events.popleft()
            self._ended.append((kind, tuple(start.elapsed_time(end) / 1e3 for start, end in pairs), steps))
            self._free.append(pairs)
        ended, self._ended = self._ended, []
        return ended

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)


def is_out_of_memory(error: Exception) -> bool:
    """Whether it says that the host or a device has no memory left."""
    # torch has a narrower class for a GPU, but not for a CPU, nor for CUDA calls that are not its own.
    own = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return own or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None)


@contextmanager
def out_of_memory_as_error(what: str, device: torch.device) -> Iterator[None]:
    """Raises DeviceError, which names `what`, when memory runs out inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
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
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError, StopIteration):  # "max" is no number
        limit = int((CGROUP / "memory.max").read_text(encoding="utf-8"))
        lines = (CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
        free = min(free, limit - next(int(line.split()[1]) for line in lines if line.startswith("anon ")))
    return free

"""Allocations of torch and numpy that fail once, in the test's own process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from fault_points import FaultPoints
from torch.utils._python_dispatch import TorchDispatchMode

HOST = (
    "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
)
DEVICE = "CUDA out of memory. Tried to allocate 20.00 MiB."
OF_NUMPY = ("empty", "zeros", "stack", "array", "concatenate")


def host_memory() -> Exception:
    """What torch raises where the host has no memory."""
    return RuntimeError(HOST)


def device_memory() -> Exception:
    """What torch raises where a GPU has none."""
    return torch.cuda.OutOfMemoryError(DEVICE)


class _Mode(TorchDispatchMode):
    """Operations whose results are new tensors are points, where the product calls them."""

    def __init__(self, points: FaultPoints, error: Callable[[], Exception]) -> None:
        super().__init__()
        self._points, self._error = points, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))  # where it is new, nothing else has been changed by it
        if self._points.armed is not None and (
            func is torch.ops.aten.lift_fresh.default or _is_new(result, args)  # the first: torch.tensor
        ):
            self._points.reach(self._error)
        return result


def _is_new(result: Any, arguments: Any) -> bool:
    """Whether it has memory of its own."""
    found = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(found, torch.Tensor):
        return False
    of = found.untyped_storage().data_ptr()
    flat = [each for one in arguments for each in (one if isinstance(one, list | tuple) else [one])]
    return all(each.untyped_storage().data_ptr() != of for each in flat if isinstance(each, torch.Tensor))


@contextmanager
def failing_memory(points: FaultPoints, error: Callable[[], Exception]) -> Iterator[None]:
    """Allocations of all threads that begin inside, and of this one, are points."""
    start = threading.Thread.start

    def with_mode(thread: threading.Thread) -> None:
        run = thread.run

        def runs() -> None:
            with _Mode(points, error):
                run()

        thread.run = runs  # type: ignore[method-assign]
        start(thread)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if points.armed is not None:
                points.reach(MemoryError)
            return call(*args, **kwargs)

        return made

    patches = [mock.patch.object(threading.Thread, "start", with_mode)]
    patches += [mock.patch.object(np, name, counted(getattr(np, name))) for name in OF_NUMPY]
    for patch in patches:
        patch.start()
    try:
        with _Mode(points, error):
            yield
    finally:
        for patch in patches:
            patch.stop()

"""Allocations of torch and numpy that fail once, in the test's own process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from failing_child.new_tensors import NewTensors, starting_with
from fault_points import FaultPoints

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


@contextmanager
def failing_memory(points: FaultPoints, error: Callable[[], Exception]) -> Iterator[None]:
    """Allocations by the product are points, in this thread and in those that begin inside."""

    def mode() -> NewTensors:
        return NewTensors(lambda: points.armed is not None, lambda: points.reach(error))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if points.armed is not None:
                points.reach(MemoryError)
            return call(*args, **kwargs)

        return made

    patches = [mock.patch.object(threading.Thread, "start", starting_with(mode))]
    patches += [mock.patch.object(np, name, counted(getattr(np, name))) for name in OF_NUMPY]
    for patch in patches:
        patch.start()
    try:
        with mode():
            yield
    finally:
        for patch in patches:
            patch.stop()

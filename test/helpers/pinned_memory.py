"""Pinned memory that the system refuses, on a GPU or in place of one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from fault_points import FaultPoints
from torch import Tensor

from rwkv_batch.engine.rows import adapters
from rwkv_batch.state import snapshot

MAKERS = ("empty", "zeros", "tensor")
CUDA = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"


def refused() -> Exception:
    """What torch raises where cudaHostAlloc finds none."""
    return RuntimeError(CUDA)


@contextmanager
def pinned_memory(points: FaultPoints) -> Iterator[None]:
    """Allocations of pinned memory are points. Without a GPU states and adapters have other memory for it."""
    on_gpu = torch.cuda.is_available()

    def counted(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            if pin_memory:
                points.reach(refused)
            return make(*arguments, pin_memory=pin_memory and on_gpu, **options)

        return made

    patches = [mock.patch.object(torch, name, counted(getattr(torch, name))) for name in MAKERS]
    if not on_gpu:
        patches += [mock.patch.object(module, "pins", lambda device: True) for module in (snapshot, adapters)]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()

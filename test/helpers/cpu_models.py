"""Models on a CPU by torch's operations and by compiled kernels."""

from collections.abc import Callable

import pytest

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.torch_model import TorchModel
from rwkv_batch.ops.cpu.binding import CpuKernels, load
from rwkv_batch.runner.torch_runner import CPU_MODELS, MODELS

WAYS = ("torch", "kernels")


def kernels() -> CpuKernels:
    """The kernels for CPUs, or the test is skipped."""
    found = load()
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


def maker(way: str) -> Callable[[Checkpoint], TorchModel]:
    """What makes models by one of WAYS."""
    if way == "torch":
        return lambda checkpoint: MODELS[checkpoint.family](checkpoint)
    found = kernels()
    return lambda checkpoint: CPU_MODELS[checkpoint.family](checkpoint, kernels=found)

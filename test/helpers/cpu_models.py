"""Models on a CPU by torch's operations and by compiled kernels."""

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tools import absent

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.torch_model import TorchModel
from rwkv_batch.ops.cpu import build
from rwkv_batch.ops.cpu.binding import CpuKernels, load
from rwkv_batch.runner.torch_runner import CPU_MODELS, MODELS

WAYS = ("torch", "kernels")
TARGETS = ("native", "x86-64-v3", "x86-64")  # the others have no AVX-512, and neither AVX nor fp16


def kernels() -> CpuKernels:
    """The kernels for CPUs, or the test is skipped."""
    found = load()
    if found is None:
        absent("There is no C++ compiler.")
    return found


def kernels_for(target: str) -> CpuKernels:
    """The kernels for one of TARGETS, or the test is skipped."""
    return kernels() if target == "native" else CpuKernels(library_for(target))


def library_for(target: str) -> ctypes.CDLL:
    """Their library, or the test is skipped."""
    if target == "native":
        kernels()
        return ctypes.CDLL(str(build.build()))
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 processor")
    if build.compiler() is None:
        absent("There is no C++ compiler.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "NATIVE", (f"-march={target}",))
        return ctypes.CDLL(str(build.build()))


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """What a kernel does not write is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """With so many threads of torch, and of the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def maker(way: str) -> Callable[[Checkpoint], TorchModel]:
    """What makes models by one of WAYS."""
    if way == "torch":
        return lambda checkpoint: MODELS[checkpoint.family](checkpoint)
    found = kernels()
    return lambda checkpoint: CPU_MODELS[checkpoint.family](checkpoint, kernels=found)

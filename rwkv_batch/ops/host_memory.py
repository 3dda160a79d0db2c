"""Pinned host memory, which a GPU copies to and from by itself. The system may have too little of it."""

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

# How CUDA says it. An error of a kernel is raised by the next call, which this may be: that is none of these.
REFUSED = re.compile(r"out of memory|OS call failed|can't allocate memory", re.IGNORECASE)


class NoPinnedMemory(MemoryError):
    """The system has no pinned memory left. What needed it can be asked for again later."""


def pins(device: torch.device) -> bool:
    """Whether what is copied to or from a device belongs in pinned memory."""
    return device.type == "cuda"


def pinned(make: Callable[..., Tensor], *arguments: Any, dtype: torch.dtype, wanted: bool = True) -> Tensor:
    """A tensor in pinned memory if `wanted`, for a step, which waits for no copy.

    `make`: torch.empty, torch.zeros or torch.tensor. Raises NoPinnedMemory.
    """
    if not wanted:
        return make(*arguments, dtype=dtype)
    try:
        return make(*arguments, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        if not REFUSED.search(str(error)):
            raise
        raise NoPinnedMemory(f"The system has no pinned memory left ({_line(error)}).") from error


def pinned_if_possible(
    make: Callable[..., Tensor], *arguments: Any, dtype: torch.dtype, wanted: bool = True
) -> Tensor:
    """A tensor in pinned memory if `wanted` and possible, else in pageable memory, which is copied slower.

    Whoever copies it waits until the copy is done before it is changed or freed.
    """
    try:
        return pinned(make, *arguments, dtype=dtype, wanted=wanted)
    except NoPinnedMemory as error:
        found = make(*arguments, dtype=dtype)
        _Said.say(error)
        return found


def pinned_copy(tensor: Tensor, wanted: bool = True) -> Tensor:
    """The tensor itself, or if `wanted` a copy in pinned memory, or in other where there is none."""
    if not wanted:
        return tensor
    copy = pinned_if_possible(torch.empty, tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor)


class _Said:
    """Whether the log has it: once, as there may be a copy in each step."""

    already = False

    @classmethod
    def say(cls, error: NoPinnedMemory) -> None:
        if not cls.already:
            cls.already = True
            log.warning("%s Other memory is used in its place, which is copied slower.", error)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")

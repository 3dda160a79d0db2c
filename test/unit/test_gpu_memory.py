"""`--gpu-memory`: how much of a GPU a server takes, without a GPU."""

from contextlib import nullcontext

import pytest
import torch

from rwkv_batch.engine.engine import Engine
from rwkv_batch.ops import device
from rwkv_batch.ops.device import DeviceError

GIB = 1 << 30
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """One with 80 GiB, of which others take 20 and this process 5."""
    allowed = {"fraction": 1.0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (55 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: allowed["fraction"])
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, _: allowed.update(fraction=part)
    )


@pytest.mark.parametrize(("limit", "free"), [(None, 55), (12, 7), (70, 55), (80, 55)])
def test_what_is_free_is_what_may_still_be_taken(gpu, limit, free):
    if limit is not None:
        device.limit_memory(GPU, limit * GIB)
    assert device.free_bytes(GPU) == pytest.approx(free * GIB, abs=4096)


def test_more_than_the_gpu_has_is_refused(gpu):
    with pytest.raises(DeviceError, match=r"--gpu-memory asks for 81.0 GiB, and cuda:0 \(a GPU\) has 80.0"):
        device.limit_memory(GPU, 81 * GIB)


def test_a_cpu_refuses_it():
    with pytest.raises(DeviceError, match="--gpu-memory is for a GPU"):
        Engine(device="cpu", gpu_memory=8 * GIB)

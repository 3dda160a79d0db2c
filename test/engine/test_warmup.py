"""The steps that run before the first one."""

import pytest
import torch
from checkpoints import tiny
from cuda_gpu import needs_gpu

from bench.make_checkpoint import FAMILIES
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.runner.cuda_runner import CUDA_MODELS, CudaRunner
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.runner.warmup import launch_all_kernels


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_no_state_remembers_them(rows: int) -> None:
    runner = TorchRunner(tiny(), [torch.device("cpu")], torch.float32)
    runner.allocate(rows, 1, 16)
    launch_all_kernels(runner, rows)
    assert not any(runner.states.read(slot).any() for slot in range(rows + 1))


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("family", FAMILIES)
class TestOnAGpu:
    pytestmark = needs_gpu

    def test_no_state_remembers_them(self, rows: int, family: str) -> None:
        checkpoint = from_tensors(family, FAMILIES[family](2, 128, 512))
        model = CUDA_MODELS[checkpoint.family](checkpoint, torch.device("cuda"))
        runner = CudaRunner(model, torch.float16, "own")
        runner.allocate(rows, 1, 16)
        assert not any(runner.states.read(slot).any() for slot in range(rows + 1))

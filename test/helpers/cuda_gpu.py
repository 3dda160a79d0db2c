"""What the GPU tests share."""

import pytest
import torch
from torch import Tensor

from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SIGMOID, TANH

DEVICE = "cuda"  # "cpu" under --emulated
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS = [1, 2, 3, 7, 17, 33, 129, 321]
ACTIVATIONS = {
    IDENTITY: lambda x: x,
    TANH: torch.tanh,
    SIGMOID: torch.sigmoid,
    RELU_SQUARE: lambda x: x.relu().square(),
}


def off(x: Tensor, reference: Tensor) -> float:
    """Relative error over the whole tensor."""
    reference = reference.double()
    return float((x.to(reference.device).double() - reference).norm() / reference.norm())


def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
    """Random fp16 numbers on the device."""
    return (torch.randn(shape, device=DEVICE) * std + mean).half()


def poisoned(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """A tensor on the device in which anything that is not written stands out."""
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def clear_choice(logits: Tensor, error: float) -> Tensor:
    """Rows whose largest logit is ahead by more than the error, relative to the largest in magnitude."""
    best = logits.topk(2).values
    return best[:, 0] - best[:, 1] > error * logits.abs().amax(1)

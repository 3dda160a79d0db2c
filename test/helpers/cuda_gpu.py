"""What the GPU tests share."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rwkv_batch.model.cuda.cuda_model import CudaModel
from rwkv_batch.model.cuda.gemms.autotune import Autotuner
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SIGMOID, TANH
from rwkv_batch.ops.cuda.binding import Kernels

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


def check_tiles(
    kernels: Kernels,
    parts: int,
    rows: int,
    n: int,
    k: int,
    transposed: bool,
    activation: int,
    many: bool = False,
) -> None:
    """`gemm_tile` of so many random w and x in one launch, against torch in fp64."""
    ws = [normal(*((k, n) if transposed else (n, k)), std=k**-0.5) for _ in range(parts)]
    xs, ys = [normal(rows, k) for _ in range(parts)], [poisoned(rows, n) for _ in range(parts)]
    kernels.gemm_tile(ws, xs, ys, activation, transposed, many)
    for w, x, y in zip(ws, xs, ys, strict=True):
        assert off(y, ACTIVATIONS[activation](x.double() @ (w if transposed else w.T).double())) < 1e-3


def unflushed(
    model: CudaModel, tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], states: CudaStates
) -> Tensor:
    """`CudaModel.forward`, with writes to states deferred, as between two steps."""
    return model.run(tokens.tolist(), lengths, slots, states)[0].float()


class CodedRows(NamedTuple):
    """Codes `[N, M, K]` and scales `[N, M]`."""

    codes: Tensor
    scales: Tensor


def poisoned_codes(count: int, rows: int, width: int) -> CodedRows:
    """Room for codes and scales, all of which are NaN as fp8 and fp32."""
    codes = torch.full((count, rows, width), 0x7F, device=DEVICE, dtype=torch.uint8)
    return CodedRows(codes, poisoned(count, rows, dtype=torch.float32))


def as_fp8(kernels: Kernels, x: Tensor) -> CodedRows:
    """x `[N, M, K]` by `quantize_rows`."""
    found = poisoned_codes(*x.shape)
    kernels.quantize_rows(x.flatten(0, 1), found.codes, found.scales)
    return found


def same_codes(found: CodedRows, wanted: CodedRows) -> bool:
    """To the bit, with scales that may be infinite or NaN."""
    scales = (found.scales.view(torch.int32), wanted.scales.view(torch.int32))
    return torch.equal(found.codes, wanted.codes) and torch.equal(*scales)


def clear_choice(logits: Tensor, error: float) -> Tensor:
    """Rows whose largest logit is ahead by more than the error, relative to the largest in magnitude."""
    best = logits.topk(2).values
    return best[:, 0] - best[:, 1] > error * logits.abs().amax(1)


def time_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs run by the methods that are guessed."""
    monkeypatch.setattr(Autotuner, "unmeasured", lambda *_: [])
    monkeypatch.setattr(Autotuner, "measure", lambda *_: None)

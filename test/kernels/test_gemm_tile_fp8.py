"""The tiled GEMM with fp8 on both sides against torch in fp64, at odd sizes and by every shape of tile."""

import pytest
import torch
from cuda_gpu import ACTIVATIONS, DEVICE, ROWS, needs_gpu, off, poisoned

from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE
from rwkv_batch.ops.cuda.gemms import Codes

pytestmark = [*needs_gpu, pytest.mark.usefixtures("hopper")]
SHAPES = [(64, 128), (192, 384), (768, 768), (2048, 512), (512, 2048), (3072, 768), (65536, 128)]


def coded(rows: int, k: int, largest: float = 448.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes, scales of rows, and what they stand for in fp64."""
    numbers = (torch.randn(rows, k, device=DEVICE) * largest / 5).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = (torch.rand(rows, device=DEVICE) + 0.5) / k**0.5 / 64
    return numbers.view(torch.uint8), scales, numbers.double() * scales.double()[:, None]


@pytest.mark.parametrize("rows", [*ROWS, 64, 100, 192, 512, 961])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("most_rows", [128, 256])
@pytest.mark.parametrize("activation", [IDENTITY, RELU_SQUARE])
def test_gemms(kernels, rows, n, k, most_rows, activation):
    count = 3 if n < 4096 else 1
    ws, w_scales, w_numbers = zip(*(coded(n, k) for _ in range(count)), strict=True)
    xs, x_scales, x_numbers = zip(*(coded(rows, k) for _ in range(count)), strict=True)
    ys = [poisoned(rows, n) for _ in range(count)]
    kernels.gemm_tile_fp8(Codes(ws, w_scales, "fp8"), xs, x_scales, ys, activation, most_rows)
    for w, x, y in zip(w_numbers, x_numbers, ys, strict=True):
        # The tensor cores keep fewer digits of sums of fp8 than fp32 has.
        assert off(y, ACTIVATIONS[activation](x @ w.T)) < 2e-3


@pytest.mark.parametrize("code", range(0, 256, 17))
def test_scales_belong_to_their_rows(kernels, code):
    """x has one code that is not zero in each row, w is one where it is."""
    one, k, n, rows = 0x38, 128, 64, 200  # 0x38: 1 in e4m3
    if code & 0x7F == 0x7F:
        code -= 1
    w, x = (torch.zeros(size, k, device=DEVICE, dtype=torch.uint8) for size in (n, rows))
    w[:, 3], x[:, 3] = one, code
    w_scales, x_scales = (torch.arange(1.0, size + 1, device=DEVICE) for size in (n, rows))
    y = poisoned(rows, n)
    kernels.gemm_tile_fp8(Codes([w], [w_scales / 64], "fp8"), [x], [x_scales / 512], [y])
    number = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).double().item()
    want = number * (x_scales.double() / 512)[:, None] * (w_scales.double() / 64)
    assert torch.allclose(y.double(), want, rtol=1e-3, atol=1e-7)


def test_relu_squared_never_overflows(kernels):
    w, w_scales, _ = coded(64, 128)
    x, x_scales, _ = coded(8, 128)
    y = poisoned(8, 64)
    kernels.gemm_tile_fp8(Codes([w], [w_scales * 1e4], "fp8"), [x], [x_scales * 1e4], [y], RELU_SQUARE)
    assert y.isfinite().all() and y.max() == torch.finfo(torch.float16).max

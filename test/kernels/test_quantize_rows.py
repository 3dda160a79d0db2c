"""Rows of fp16 as fp8 with scales, against torch's conversion."""

import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu, normal, poisoned

from rwkv_batch.model.cuda.packed.orders import ordered_codes

pytestmark = [*needs_gpu, pytest.mark.usefixtures("hopper")]
LARGEST = 448.0


def quantized(kernels, x: torch.Tensor, square: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in the kernel's order, and scales."""
    codes = torch.full(x.shape, 0x7F, device=DEVICE, dtype=torch.uint8)  # NaN, where nothing is written
    scales = poisoned(len(x), dtype=torch.float32)
    kernels.quantize_rows(x, codes, scales, square)
    return codes, scales


@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("k", [64, 192, 768, 4096, 16384, 16448, 65536])
def test_codes_and_scales(kernels, rows, k):
    x = normal(rows, k) * torch.rand(rows, 1, device=DEVICE).half()
    codes, scales = quantized(kernels, x)
    most = x.float().abs().amax(1)
    assert torch.allclose(scales, most / LARGEST, rtol=1e-6, atol=0)
    want = ordered_codes((x.float() * (LARGEST / most)[:, None]).to(torch.float8_e4m3fn).view(torch.uint8))
    # The factor may differ in its last digit, which decides ties; with some factors one of 128 is one.
    assert (codes != want).float().mean() < 1e-2
    found, near = (every.view(torch.float8_e4m3fn).float() for every in (codes, want))
    assert ((found - near).abs() <= near.abs() / 7 + 2**-9).all()  # neighbours at most


@pytest.mark.parametrize("k", [192, 4096, 16384])
def test_codes_of_squares(kernels, k):
    x = normal(70, k)
    x[3] = torch.finfo(torch.float16).max
    x[4] = -1
    codes, scales = quantized(kernels, x, square=True)
    kernels.relu_square(x)
    want, want_scales = quantized(kernels, x)
    assert torch.equal(codes, want) and torch.equal(scales, want_scales)


def test_rows_of_zeros_and_the_largest_numbers(kernels):
    x = torch.zeros(3, 128, device=DEVICE, dtype=torch.float16)
    x[1] = torch.finfo(torch.float16).max
    x[2, 5] = -torch.finfo(torch.float16).tiny
    codes, scales = quantized(kernels, x)
    numbers = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    assert torch.equal(numbers[0], torch.zeros(128, device=DEVICE)) and scales[0] == 0
    assert torch.allclose(numbers[1], x[1].float(), rtol=1e-6)
    assert (numbers[2] != 0).sum() == 1 and torch.allclose(numbers[2].sum(), x[2, 5].float())


def test_a_row_does_not_depend_on_the_others(kernels):
    x = normal(40, 768)
    codes, scales = quantized(kernels, x)
    alone, scale = quantized(kernels, x[7:8])
    assert torch.equal(codes[7], alone[0]) and scales[7] == scale[0]

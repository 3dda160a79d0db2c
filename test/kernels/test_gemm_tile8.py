"""The tiled GEMM with weights of 8 bits against torch in fp64, at odd sizes, and with every code there is."""

import pytest
import torch
from cuda_gpu import ACTIVATIONS, DEVICE, ROWS, needs_gpu, normal, off, poisoned

from rwkv_batch.model.cuda.packed.orders import ordered_codes
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE
from rwkv_batch.ops.cuda.tile import tile_shape_coded

on_hopper = [*needs_gpu, pytest.mark.usefixtures("hopper")]
SHAPES = [(64, 64), (192, 320), (768, 768), (2048, 512), (512, 2048), (3072, 768), (4096, 192), (65536, 128)]


def quantized(n: int, k: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random weights: as the kernel takes them, their scales, and in fp64."""
    scale = (torch.rand(n, device=DEVICE) + 0.5) / k**0.5
    if fp8:
        numbers = torch.randn(n, k, device=DEVICE).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes = numbers.view(torch.uint8)
    else:
        numbers = torch.randint(-127, 128, (n, k), device=DEVICE)
        scale /= 64
        codes = (numbers + 128).to(torch.uint8)
    weights = numbers.double() * scale.double()[:, None]
    return ordered_codes(codes), scale, weights


@pytest.mark.parametrize("rows", [*ROWS, 16, 64, 100, 512])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("activation", [IDENTITY, RELU_SQUARE])
class TestTiles:
    pytestmark = on_hopper

    def test_gemms(self, kernels, rows, n, k, fp8, activation):
        count = 3 if n < 4096 else 1
        ws, scales, wanted = zip(*(quantized(n, k, fp8) for _ in range(count)), strict=True)
        xs, ys = [normal(rows, k) for _ in range(count)], [poisoned(rows, n) for _ in range(count)]
        kernels.gemm_tile8(ws, scales, xs, ys, fp8, activation)
        for w, x, y in zip(wanted, xs, ys, strict=True):
            assert off(y, ACTIVATIONS[activation](x.double() @ w.T)) < 1e-3


@pytest.mark.parametrize("fp8", [False, True])
class TestCodes:
    pytestmark = on_hopper

    def test_every_code_is_its_number(self, kernels, fp8):
        """Each row of w has one code everywhere, and x one number that is not zero."""
        codes = torch.arange(256, device=DEVICE, dtype=torch.uint8)
        if fp8:  # but for its two NaN
            wanted = codes.view(torch.float8_e4m3fn).double().nan_to_num(0)
            codes = torch.where(wanted == 0, torch.zeros_like(codes), codes)
        else:
            wanted = codes.double() - 128
        w, y = ordered_codes(codes[:, None].repeat(1, 192)), poisoned(192, 256)
        scale = torch.ones(256, device=DEVICE)
        kernels.gemm_tile8([w], [scale], [torch.eye(192, device=DEVICE).half()], [y], fp8)
        assert torch.equal(y.double(), wanted.expand(192, 256))

    def test_a_row_is_the_same_alone_and_among_any_others(self, kernels, fp8, monkeypatch):
        """As a batch-invariant model has them."""
        monkeypatch.setattr(kernels, "invariant", True)
        w, scale, _ = quantized(2048, 512, fp8)
        x, together = normal(321, 512), poisoned(321, 2048)
        kernels.gemm_tile8([w], [scale], [x], [together], fp8)
        for rows in (1, 16, 17, 40, 64, 90, 128, 150, 180, 256):
            first = poisoned(rows, 2048)
            kernels.gemm_tile8([w], [scale], [x[:rows]], [first], fp8)
            assert torch.equal(first, together[:rows])

    def test_relu_squared_never_overflows(self, kernels, fp8):
        w, scale, _ = quantized(64, 64, fp8)
        y = poisoned(8, 64)
        kernels.gemm_tile8([w], [scale * 1000], [normal(8, 64) * 100], [y], fp8, RELU_SQUARE)
        assert y.isfinite().all() and y.max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 192)])
def test_the_order_of_the_codes(n, k):
    """Of each four lanes, lane q has 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of each 16 numbers, side by side."""
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    ordered = ordered_codes(codes)
    for row in (0, 5, n - 1):
        for strip in range(k // 64):
            wanted = [
                codes[row, strip * 64 + 16 * step + 2 * lane + at]
                for lane in range(4)
                for step in range(4)
                for at in (0, 1, 8, 9)
            ]
            assert ordered[row, strip * 64 : strip * 64 + 64].tolist() == [int(code) for code in wanted]


@pytest.mark.parametrize(
    ("parts", "n", "k"),
    [(3, 4096, 4096), (1, 16384, 4096), (1, 4096, 16384), (1, 65536, 4096), (3, 768, 768), (1, 64, 64)],
)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("same", [False, True])
def test_every_shape_fits_the_chip(parts, n, k, bits, same):
    """Two blocks share a multiprocessor at least. same: K is divided alike for any number of rows."""
    shapes = [tile_shape_coded(parts, n, k, m, bits, same) for m in range(1, 1025)]
    for m, shape in enumerate(shapes, 1):
        few, tile = shape.x_rows <= 16, 64 * 36 if bits == 4 else 64 * 64
        strips, k_parts = 4 if few else 2 if shape.x_rows <= 64 else 1, shape.split_k * (2 if few else 1)
        rings = (tile * shape.w_stages + shape.x_rows * shape.x_stages * 128) * strips
        received = -(-shape.x_rows // 8 // shape.split_k) * k_parts * 2048 * (k_parts > 1)
        assert rings + received <= 113 * 1024 and 2 <= shape.x_stages <= 16 and 2 <= shape.w_stages <= 16
        assert shape.x_rows * -(-m // shape.x_rows) < m + max(32 if same else 16, m * 3 // 5)
    assert len({(shape.split_k, shape.x_rows < 32) for shape in shapes}) == 1 or not same

"""The tiled GEMM for Hopper against torch in fp64, at odd sizes and in launches that overlap."""

import pytest
import torch
from cuda_gpu import ROWS, check_tiles, needs_gpu, normal, off, poisoned

from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE
from rwkv_batch.ops.cuda.binding import Addend
from rwkv_batch.ops.cuda.tile import tile_shape

on_hopper = [*needs_gpu, pytest.mark.usefixtures("hopper")]
SHAPES = [(64, 64), (192, 320), (768, 768), (2048, 512), (512, 2048), (3072, 768), (4096, 192), (65536, 128)]


@pytest.mark.parametrize("rows", [*ROWS, 16, 64, 512])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", [IDENTITY, RELU_SQUARE])
class TestTiles:
    pytestmark = on_hopper

    def test_gemms(self, kernels, rows, n, k, transposed, activation):
        check_tiles(kernels, 3 if n < 4096 else 1, rows, n, k, transposed, activation)


@pytest.mark.parametrize(("n", "k"), [(192, 320), (2048, 512), (512, 2048), (4096, 1024)])
@pytest.mark.parametrize("transposed", [False, True])
class TestRows:
    pytestmark = on_hopper

    def test_a_row_is_the_same_alone_and_among_any_others(self, kernels, n, k, transposed):
        w, x = normal(*((k, n) if transposed else (n, k)), std=k**-0.5), normal(321, k)
        together = poisoned(321, n)
        kernels.gemm_tile([w], [x], [together], IDENTITY, transposed)
        for rows in (1, 16, 17, 40, 64, 90, 128, 150, 180, 256):
            first = poisoned(rows, n)
            kernels.gemm_tile([w], [x[:rows]], [first], IDENTITY, transposed)
            assert torch.equal(first, together[:rows])


class TestSequence:
    pytestmark = on_hopper

    @pytest.mark.parametrize("rows", [16, 64, 200])
    def test_launches_that_overlap_wait_for_what_they_read(self, kernels, rows):
        """A hundred GEMMs, each of what a norm makes of the one before."""
        width = 512
        ws = normal(100, width, width, std=width**-0.5)
        x, weight, bias = (
            torch.randn(rows, width, device="cuda"),
            torch.ones(width, device="cuda").half(),
            normal(width),
        )
        want, normed, y = x.double(), poisoned(rows, width), poisoned(rows, width)
        kernels.norm(x, Addend(), weight, bias, normed)
        for i, w in enumerate(ws):
            kernels.gemm_tile([w], [normed], [y], IDENTITY, transposed=bool(i % 2))
            kernels.norm(x, Addend(y=y), weight, bias, normed)
        for i, w in enumerate(ws):
            inputs = torch.nn.functional.layer_norm(want, (width,), weight.double(), bias.double())
            want = want + inputs @ (w if i % 2 else w.T).double()
        assert off(x, want) < 1e-2


class TestRelu:
    pytestmark = on_hopper

    def test_relu_squared_never_overflows(self, kernels):
        y = poisoned(1, 64)
        kernels.gemm_tile([normal(64, 64).abs() * 100], [normal(1, 64).abs() * 100], [y], RELU_SQUARE)
        assert y.isfinite().all() and y.max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize(
    ("parts", "n", "k"),
    [
        (3, 2048, 2048),
        (1, 2048, 2048),
        (1, 2048, 8192),
        (1, 4096, 16384),
        (1, 64, 64),
        (1, 65536, 4096),
        (3, 768, 768),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_shape_fits_the_chip_and_its_split_k_follows_from_the_weights(parts, n, k, transposed):
    shapes = [tile_shape(parts, n, k, m, transposed) for m in range(1, 1025)]
    assert len({shape.split_k for shape in shapes}) == 1
    for m, shape in enumerate(shapes, 1):
        strips = 2 if shape.x_rows <= 32 else 1
        rings = (shape.groups * 64 * shape.w_stages + shape.x_rows * shape.x_stages) * 128 * strips
        received = (
            -(-shape.x_rows // 8 // shape.split_k) * shape.split_k * shape.groups * 2048 * (shape.split_k > 1)
        )
        assert rings + received <= 226 * 1024 and 2 <= shape.x_stages <= 16 and 2 <= shape.w_stages <= 16
        assert shape.x_rows * -(-m // shape.x_rows) < m + max(16, m * 3 // 5)  # rows computed for nothing

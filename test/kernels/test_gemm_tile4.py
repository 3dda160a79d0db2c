"""The tiled GEMM with weights of 4 bits against torch in fp64, at odd sizes, and with every code there is."""

from collections.abc import Sequence

import pytest
import torch
from cuda_gpu import ACTIVATIONS, DEVICE, ROWS, needs_gpu, normal, off, poisoned
from quantized_tiles import quantized4

from rwkv_batch.model.cuda.packed.orders import tiles_of_4_bits
from rwkv_batch.ops.cuda import tile
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE
from rwkv_batch.ops.cuda.gemms import Codes

on_hopper = [*needs_gpu, pytest.mark.usefixtures("hopper")]
GROUPS = [64, 128]
SHAPES = [(64, 64), (192, 320), (768, 768), (2048, 512), (512, 2048), (3072, 768), (4096, 192), (65536, 128)]


def in_groups(ws: Sequence[torch.Tensor], group: int) -> Codes:
    return Codes(ws, [], "int4" if group == 64 else "int4-128")


@pytest.mark.parametrize("rows", [*ROWS, 16, 64, 100, 512])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("activation", [IDENTITY, RELU_SQUARE])
@pytest.mark.parametrize("group", GROUPS)
class TestTiles:
    pytestmark = on_hopper

    def test_gemms(self, kernels, group, rows, n, k, activation):
        count = 3 if n < 4096 else 1
        ws, wanted = zip(*(quantized4(n, k, group) for _ in range(count)), strict=True)
        xs, ys = [normal(rows, k) for _ in range(count)], [poisoned(rows, n) for _ in range(count)]
        kernels.gemm_tile_codes(in_groups(ws, group), xs, ys, activation)
        for w, x, y in zip(wanted, xs, ys, strict=True):
            assert off(y, ACTIVATIONS[activation](x.double() @ w.T)) < 1e-3


@pytest.mark.parametrize("rows", [1, 7, 8, 16, 17, 33, 64, 90])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("group", GROUPS)
class TestPartialSums:
    pytestmark = on_hopper

    def test_their_sum_is_the_product(self, kernels, group, rows, n, k):
        (w, weights), x, parts = quantized4(n, k, group), normal(rows, k), tile.partial_sums(n, k)
        y = poisoned(parts + 1, rows, n, dtype=torch.float32)
        kernels.gemm_tile_codes(in_groups([w], group), [x], [y[:parts]], partial_sums=True)
        assert off(y[:parts].sum(0), x.double() @ weights.T) < 1e-3
        assert y[parts].isnan().all()


@pytest.mark.parametrize("rows", [8, 16, 64, 96])
@pytest.mark.parametrize("group", GROUPS)
class TestStagesUsedAgain:
    """K so long that every stage of a ring is filled more than once, in one launch: racecheck watches it."""

    pytestmark = on_hopper

    def test_sums(self, kernels, group, rows):
        (w, weights), x, y = quantized4(512, 16384, group), normal(rows, 16384), poisoned(rows, 512)
        kernels.gemm_tile_codes(in_groups([w], group), [x], [y])
        assert off(y, x.double() @ weights.T) < 1e-3

    def test_partial_sums(self, kernels, group, rows):
        (w, weights), x = quantized4(512, 16384, group), normal(rows, 16384)
        y = poisoned(tile.partial_sums(512, 16384), rows, 512, dtype=torch.float32)
        kernels.gemm_tile_codes(in_groups([w], group), [x], [y], partial_sums=True)
        assert off(y.sum(0), x.double() @ weights.T) < 1e-3


@pytest.mark.many_launches
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 16384), (16384, 4096)])
@pytest.mark.parametrize("group", GROUPS)
class TestLongRings:
    """Stages are used again, while some warps have just read what is replaced."""

    pytestmark = on_hopper

    def test_every_run_gives_the_same_sums(self, kernels, group, rows, n, k):
        w, weights = quantized4(n, k, group)
        x, y, again = normal(rows, k), poisoned(rows, n), poisoned(rows, n)
        kernels.gemm_tile_codes(in_groups([w], group), [x], [y])
        assert (y.double() - x.double() @ weights.T).abs().max() < 0.02
        different = torch.zeros((), dtype=torch.bool, device=DEVICE)
        for _ in range(100):
            kernels.gemm_tile_codes(in_groups([w], group), [x], [again])
            different |= (again != y).any()
        assert not different


@pytest.mark.many_launches
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 90])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 16384)])
@pytest.mark.parametrize("group", GROUPS)
class TestLongRingsOfPartialSums:
    pytestmark = on_hopper

    def test_every_run_gives_the_same(self, kernels, group, rows, n, k):
        (w, weights), x, size = quantized4(n, k, group), normal(rows, k), (tile.partial_sums(n, k), rows, n)
        y, again = poisoned(*size, dtype=torch.float32), poisoned(*size, dtype=torch.float32)
        kernels.gemm_tile_codes(in_groups([w], group), [x], [y], partial_sums=True)
        assert (y.sum(0).double() - x.double() @ weights.T).abs().max() < 0.02
        different = torch.zeros((), dtype=torch.bool, device=DEVICE)
        for _ in range(100):
            kernels.gemm_tile_codes(in_groups([w], group), [x], [again], partial_sums=True)
            different |= (again != y).any()
        assert not different


@pytest.mark.parametrize("group", GROUPS)
class TestCodes:
    pytestmark = on_hopper

    def test_every_code_is_its_number(self, kernels, group):
        """Each row of w has one code everywhere, and x one number that is not zero."""
        codes = torch.arange(64, device=DEVICE, dtype=torch.uint8) % 16
        groups = -(-192 // group)
        scales = torch.full((64, groups), 0.25, device=DEVICE).half()
        minimums = (torch.arange(64, device=DEVICE) // 16).half()[:, None].repeat(1, groups)
        wanted = codes * 0.25 + minimums[:, 0].double()
        w, y = tiles_of_4_bits(codes[:, None].repeat(1, 192), scales, minimums, group), poisoned(192, 64)
        kernels.gemm_tile_codes(in_groups([w], group), [torch.eye(192, device=DEVICE).half()], [y])
        assert torch.equal(y.double(), wanted.expand(192, 64))

    def test_a_row_is_the_same_alone_and_among_any_others(self, kernels, monkeypatch, group):
        """A batch-invariant model has its rows so."""
        monkeypatch.setattr(kernels, "invariant", True)
        (w, _), x, together = quantized4(2048, 512, group), normal(321, 512), poisoned(321, 2048)
        kernels.gemm_tile_codes(in_groups([w], group), [x], [together])
        for rows in (1, 16, 17, 40, 64, 90, 128, 150, 180, 256):
            first = poisoned(rows, 2048)
            kernels.gemm_tile_codes(in_groups([w], group), [x[:rows]], [first])
            assert torch.equal(first, together[:rows])

    def test_relu_squared_never_overflows(self, kernels, group):
        codes = torch.randint(0, 16, (64, 64), device=DEVICE, dtype=torch.uint8)
        scales, minimums = (torch.full((64, 1), at, device=DEVICE).half() for at in (10.0, -80.0))
        y = poisoned(8, 64)
        w = tiles_of_4_bits(codes, scales, minimums, group)
        kernels.gemm_tile_codes(in_groups([w], group), [normal(8, 64) * 100], [y], RELU_SQUARE)
        assert y.isfinite().all() and y.max() == torch.finfo(torch.float16).max


def test_the_order_of_the_codes():
    """Lane q of four has a word of rows i and i + 8 for each 16 numbers along k, in the halves of its bytes.

    Words of two such pairs of rows, 16 apart, are side by side, and each lane's begin four places later.
    """
    codes = torch.randint(0, 16, (128, 192), dtype=torch.uint8)
    scales, minimums = torch.randn(128, 3).half(), torch.randn(128, 3).half()
    tiles = tiles_of_4_bits(codes, scales, minimums, 64)
    assert tiles.shape == (2, 3, 64 * 36)
    for row, strip in ((0, 0), (5, 2), (58, 1), (127, 1)):
        found = tiles[row // 64, strip]
        sixteen, below, of_eight = row % 64 // 16, row % 16 // 8, row % 8
        words = found[:2048].view(4, 4, 16, 2, 4)[:, :, :, sixteen % 2]
        of_row = found[2048:].view(torch.float16).view(4, 8, 2, 2)[sixteen, of_eight, below]
        assert of_row.tolist() == [scales[row, strip].item(), minimums[row, strip].item()]
        for lane in range(4):
            place = (sixteen // 2 * 8 + of_eight + 4 * lane) % 16
            for step in range(4):
                for byte, at in enumerate((0, 8, 1, 9)):
                    code = int(words[step, lane, place, byte]) >> 4 * below & 15
                    assert code == int(codes[row, strip * 64 + 16 * step + 2 * lane + at])


def test_groups_of_128_have_their_scales_between_two_tiles_of_codes():
    codes = torch.randint(0, 16, (128, 192), dtype=torch.uint8)
    scales, minimums = torch.randn(128, 2).half(), torch.randn(128, 2).half()
    wide = tiles_of_4_bits(codes, scales, minimums, 128)
    assert wide.shape == (2, 2, 64 * 68)
    each = (part.repeat_interleave(2, 1)[:, :3] for part in (scales, minimums))
    tiles = tiles_of_4_bits(codes, *each, 64)  # with all scales for every 64
    for strip in range(3):
        group, later = strip // 2, strip % 2
        assert torch.equal(wide[:, group, 2304 * later :][:, :2048], tiles[:, strip, :2048])
        assert torch.equal(wide[:, group, 2048:2304], tiles[:, strip, 2048:])
    assert not wide[:, 1, 2304:].any()  # of what is no number along k

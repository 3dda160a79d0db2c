"""The tiled GEMM with weights of 8 bits against torch in fp64, at odd sizes, and with every code there is."""

from collections.abc import Sequence

import pytest
import torch
from cuda_gpu import ACTIVATIONS, DEVICE, ROWS, needs_gpu, normal, off, poisoned
from quantized_tiles import ORDERS, quantized8
from torch import Tensor

from rwkv_batch.model.cuda.packed.orders import ordered_codes, paired_columns, tiles_of_8_bits
from rwkv_batch.ops.cuda import tile
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.gemms import Codes
from rwkv_batch.ops.cuda.tile import tile_shape_coded

on_hopper = [*needs_gpu, pytest.mark.usefixtures("hopper")]
SHAPES = [(64, 64), (192, 320), (768, 768), (2048, 512), (512, 2048), (3072, 768), (4096, 192), (65536, 128)]
KINDS = [*ORDERS]


def run(
    kernels: Kernels,
    ws: Sequence[Tensor],
    scales: Sequence[Tensor],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    kind: str,
    activation: int = IDENTITY,
    partial_sums: bool = False,
) -> None:
    """gemm_tile8 with weights of that kind."""
    codes = Codes(ws, scales, "fp8" if kind == "fp8" else "int8", columns=kind == "columns")
    kernels.gemm_tile_codes(codes, xs, ys, activation, partial_sums=partial_sums)


@pytest.mark.parametrize("rows", [*ROWS, 16, 64, 100, 512, 961])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", [IDENTITY, RELU_SQUARE])
class TestTiles:
    pytestmark = on_hopper

    def test_gemms(self, kernels, rows, n, k, kind, activation):
        count = 3 if n < 4096 else 1
        ws, scales, wanted = zip(*(quantized8(n, k, kind) for _ in range(count)), strict=True)
        xs, ys = [normal(rows, k) for _ in range(count)], [poisoned(rows, n) for _ in range(count)]
        run(kernels, ws, scales, xs, ys, kind, activation)
        for w, x, y in zip(wanted, xs, ys, strict=True):
            assert off(y, ACTIVATIONS[activation](x.double() @ w.T)) < 1e-3


@pytest.mark.parametrize("rows", [1, 7, 8, 16, 17, 33, 64, 90])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
class TestPartialSums:
    pytestmark = on_hopper

    def test_their_sum_is_the_product(self, kernels, rows, n, k, kind):
        (w, scale, weights), x, parts = quantized8(n, k, kind), normal(rows, k), tile.partial_sums(n, k)
        y = poisoned(parts + 1, rows, n, dtype=torch.float32)
        run(kernels, [w], [scale], [x], [y[:parts]], kind, partial_sums=True)
        assert off(y[:parts].sum(0), x.double() @ weights.T) < 1e-3
        assert y[parts].isnan().all()


@pytest.mark.parametrize("rows", [8, 16, 64, 96])
class TestStagesUsedAgain:
    """K so long that every stage of a ring is filled more than once, in one launch: racecheck watches it."""

    pytestmark = on_hopper

    @pytest.mark.parametrize("kind", KINDS)
    def test_sums(self, kernels, rows, kind):
        (w, scale, weights), x, y = quantized8(512, 16384, kind), normal(rows, 16384), poisoned(rows, 512)
        run(kernels, [w], [scale], [x], [y], kind)
        assert off(y, x.double() @ weights.T) < 1e-3

    @pytest.mark.parametrize("kind", ["int8", "fp8"])
    def test_partial_sums(self, kernels, rows, kind):
        (w, scale, weights), x = quantized8(512, 16384, kind), normal(rows, 16384)
        y = poisoned(tile.partial_sums(512, 16384), rows, 512, dtype=torch.float32)
        run(kernels, [w], [scale], [x], [y], kind, partial_sums=True)
        assert off(y.sum(0), x.double() @ weights.T) < 1e-3


class TestNoPartialSums:
    pytestmark = on_hopper

    def test_of_columns(self, kernels):
        (w, scale, _), x = quantized8(64, 1024, "columns"), normal(8, 1024)
        y = poisoned(tile.partial_sums(64, 1024), 8, 64, dtype=torch.float32)
        with pytest.raises(RuntimeError, match="could not be launched"):
            run(kernels, [w], [scale], [x], [y], "columns", partial_sums=True)


@pytest.mark.many_launches
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 16384), (16384, 4096)])
@pytest.mark.parametrize("kind", KINDS)
class TestLongRings:
    """Stages are used again, while some warps have just read what is replaced."""

    pytestmark = on_hopper

    def test_every_run_gives_the_same_sums(self, kernels, rows, n, k, kind):
        w, scale, weights = quantized8(n, k, kind)
        x, y, again = normal(rows, k), poisoned(rows, n), poisoned(rows, n)
        run(kernels, [w], [scale], [x], [y], kind)
        wanted = x.double() @ weights.T
        assert (y.double() - wanted).abs().max() < 0.02
        different = torch.zeros((), dtype=torch.bool, device=DEVICE)
        for _ in range(100):
            run(kernels, [w], [scale], [x], [again], kind)
            different |= (again != y).any()
        assert not different


@pytest.mark.many_launches
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 90])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 16384)])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
class TestLongRingsOfPartialSums:
    pytestmark = on_hopper

    def test_every_run_gives_the_same(self, kernels, rows, n, k, kind):
        (w, scale, weights), x = quantized8(n, k, kind), normal(rows, k)
        size = tile.partial_sums(n, k), rows, n
        y, again = poisoned(*size, dtype=torch.float32), poisoned(*size, dtype=torch.float32)
        run(kernels, [w], [scale], [x], [y], kind, partial_sums=True)
        assert (y.sum(0).double() - x.double() @ weights.T).abs().max() < 0.02
        different = torch.zeros((), dtype=torch.bool, device=DEVICE)
        for _ in range(100):
            run(kernels, [w], [scale], [x], [again], kind, partial_sums=True)
            different |= (again != y).any()
        assert not different


@pytest.mark.parametrize("kind", KINDS)
class TestCodes:
    pytestmark = on_hopper

    def test_every_code_is_its_number(self, kernels, kind):
        """Each row of w has one code everywhere, and x one number that is not zero."""
        codes = torch.arange(256, device=DEVICE, dtype=torch.uint8)
        if kind == "fp8":  # but for its two NaN
            wanted = codes.view(torch.float8_e4m3fn).double().nan_to_num(0)
            codes = torch.where(wanted == 0, torch.zeros_like(codes), codes)
        else:
            wanted = codes.double() - 128
        w, y = ORDERS[kind](codes[:, None].repeat(1, 192)), poisoned(192, 256)
        scale = torch.ones(256, device=DEVICE)
        run(kernels, [w], [scale], [torch.eye(192, device=DEVICE).half()], [y], kind)
        assert torch.equal(y.double(), wanted.expand(192, 256))

    def test_every_place_has_its_own_number(self, kernels, kind):
        """Each y is one number of w, as x has one row for each number along k, in tiles of any size."""
        codes = torch.randint(0, 256, (192, 320), device=DEVICE, dtype=torch.uint8)
        if kind == "fp8":
            codes = torch.where(codes % 128 == 127, codes - 1, codes)
            wanted = codes.view(torch.float8_e4m3fn).double()
        else:
            wanted = codes.double() - 128
        w, x = ORDERS[kind](codes), torch.eye(320, device=DEVICE).half()
        for rows in (8, 16, 32, 48, 64, 96, 128, 160, 192):
            found = []
            for some in x.split(rows):
                found.append(poisoned(len(some), 192))
                run(kernels, [w], [torch.ones(192, device=DEVICE)], [some], [found[-1]], kind)
            assert torch.equal(torch.cat(found).double(), wanted.T)

    def test_a_row_is_the_same_alone_and_among_any_others(self, kernels, kind, monkeypatch):
        """A batch-invariant model has its rows so."""
        monkeypatch.setattr(kernels, "invariant", True)
        w, scale, _ = quantized8(2048, 512, kind)
        x, together = normal(321, 512), poisoned(321, 2048)
        run(kernels, [w], [scale], [x], [together], kind)
        for rows in (1, 16, 17, 40, 64, 90, 128, 150, 180, 256):
            first = poisoned(rows, 2048)
            run(kernels, [w], [scale], [x[:rows]], [first], kind)
            assert torch.equal(first, together[:rows])

    def test_relu_squared_never_overflows(self, kernels, kind):
        w, scale, _ = quantized8(64, 64, kind)
        y = poisoned(8, 64)
        run(kernels, [w], [scale * 1000], [normal(8, 64) * 100], [y], kind, RELU_SQUARE)
        assert y.isfinite().all() and y.max() == torch.finfo(torch.float16).max


def test_the_order_of_tiles():
    """Lane q of four has a word of each row for each 16 numbers along k.

    16 bytes are rows i and i + 8 of two sixteens of rows, which change places in every second pair of rows;
    each lane's begin two places later.
    """
    codes = torch.randint(0, 256, (128, 192), dtype=torch.uint8)
    tiles = tiles_of_8_bits(codes)
    assert tiles.shape == (2, 3, 4096)
    for row, strip in ((0, 0), (5, 2), (58, 1), (127, 1), (22, 0)):
        words = tiles[row // 64, strip].view(4, 4, 16, 2, 2, 4)
        sixteen, below, of_eight = row % 64 // 16, row % 16 // 8, row % 8
        for lane in range(4):
            place = (sixteen // 2 * 8 + of_eight + 2 * lane) % 16
            for step in range(4):
                found = words[step, lane, place, sixteen % 2 ^ of_eight // 2 % 2, below]
                first = strip * 64 + 16 * step + 2 * lane
                assert found.tolist() == [int(codes[row, first + at]) for at in (0, 1, 8, 9)]


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 192)])
def test_the_order_of_the_codes(n, k):
    """Of fp8 lane q of each four has 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of each 16 numbers, side by side."""
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    found = ordered_codes(codes)
    for row in (0, 5, n - 1):
        for strip in range(k // 64):
            wanted = [
                codes[row, strip * 64 + 16 * step + 2 * lane + at]
                for lane in range(4)
                for step in range(4)
                for at in (0, 1, 8, 9)
            ]
            assert found[row, strip * 64 : strip * 64 + 64].tolist() == [int(code) for code in wanted]


@pytest.mark.parametrize("warp", range(4))
def test_the_operands_of_paired_columns(warp):
    """What Int8Columns reads, by the manual's words for ldmatrix.trans and for the operand of mma and wgmma.

    The box of 64 numbers along k and 64 columns lies in the TMA's swizzle of 64 bytes.
    """
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    pieces = paired_columns(codes).view(64, 4, 16)
    shared = torch.empty_like(pieces)
    for row in range(64):
        for piece in range(4):
            shared[row, piece ^ row // 2 % 4] = pieces[row, piece]
    for step in range(4):  # 16 numbers along k
        for half in range(2):  # eight of these: a matrix of eight rows of eight pairs of bytes
            first = step * 16 + half * 8
            matrix = torch.stack([shared[row, warp ^ row // 2 % 4] for row in range(first, first + 8)])
            for group in range(8):
                for quad in range(4):
                    word = matrix.view(8, 8, 2)[2 * quad : 2 * quad + 2, group].flatten()
                    row, k = warp * 16 + group, first + 2 * quad
                    assert torch.equal(word[0::2], codes[row, k : k + 2])  # of a[2 half]
                    assert torch.equal(word[1::2], codes[row + 8, k : k + 2])  # of a[2 half + 1]


@pytest.mark.parametrize(
    ("parts", "n", "k"),
    [(3, 4096, 4096), (1, 16384, 4096), (1, 4096, 16384), (1, 65536, 4096), (3, 768, 768), (1, 64, 64)],
)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("same", [False, True])
def test_every_shape_fits_the_chip(parts, n, k, bits, same):
    """Two blocks share a multiprocessor, unless one is all it gets or has two warpgroups.

    same: K is divided alike for any number of rows.
    """
    shapes = [tile_shape_coded(parts, n, k, m, bits, same) for m in range(1, 1025)]
    for m, shape in enumerate(shapes, 1):
        by_strips, tile = (bits, shape.x_rows) == (4, 8), 64 * 36 if bits == 4 else 64 * 64
        strips = 8 if by_strips else 4 if shape.x_rows <= 16 else 2 if shape.x_rows <= 64 else 1
        k_parts = shape.split_k * (2 if shape.x_rows <= 16 and not by_strips else 1)
        groups = shape.groups
        alone = groups == 2 or (by_strips and parts * n // 64 * shape.split_k <= 132)
        rings = (tile * groups * shape.w_stages + shape.x_rows * shape.x_stages * 128) * strips
        received = -(-shape.x_rows // 8 // shape.split_k) * k_parts * 2048 * groups * (k_parts > 1)
        assert rings + received <= (225 if alone else 113) * 1024
        assert 2 <= shape.x_stages <= 16 and 2 <= shape.w_stages <= 16
        assert groups == 1 or (shape.x_rows > 96 and not same)
        assert shape.x_rows * -(-m // shape.x_rows) < m + max(32 if same else 16, m * 3 // 5)
    assert len({(shape.split_k, shape.x_rows < 32) for shape in shapes}) == 1 or not same

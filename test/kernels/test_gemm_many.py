"""GEMMs of hundreds of rows on Hopper against torch in fp64, at odd sizes, by every shape of tile."""

import pytest
import torch
from cuda_gpu import ACTIVATIONS, DEVICE, check_tiles, needs_gpu, normal, off, poisoned
from quantized_tiles import quantized4, quantized8

from rwkv_batch.ops.cuda import gemms, tile
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SIGMOID, TANH, TileShape
from rwkv_batch.ops.cuda.binding import Addend
from rwkv_batch.ops.cuda.gemms import GROUPS, Codes

on_hopper = [*needs_gpu, pytest.mark.usefixtures("hopper")]
SHAPES = [(64, 64), (192, 320), (768, 768), (2048, 512), (512, 2048), (3072, 768), (4096, 192)]
CODES = ["int8", "columns", "int4", "int4-128"]  # the second is int8 too


def tiles_of(rows: dict[int, tuple[int, ...]]) -> list[tuple[int, int]]:
    return [(groups, x_rows) for groups, sizes in rows.items() for x_rows in sizes]


TILES = tiles_of(tile.MANY_ROWS)


@pytest.mark.parametrize("rows", [1, 257, 320, 700])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", [IDENTITY, RELU_SQUARE])
class TestMany:
    pytestmark = on_hopper

    def test_gemms(self, kernels, rows, n, k, transposed, activation):
        check_tiles(kernels, 3 if n < 2048 else 1, rows, n, k, transposed, activation, many=True)


@pytest.mark.parametrize("rows", [1, 257, 700])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("activation", [IDENTITY, RELU_SQUARE])
class TestCodes:
    pytestmark = on_hopper

    def test_gemms(self, kernels, rows, n, k, kind, activation):
        check_codes(kernels, 3 if n < 2048 else 1, rows, n, k, kind, activation)


@pytest.mark.parametrize("rows", [1, 16, 33, 257, 320, 700])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", [IDENTITY, RELU_SQUARE])
class TestSameBits:
    pytestmark = on_hopper

    @pytest.mark.parametrize(
        ("parts", "n", "k"),
        [(1, 8512, 192), (3, 4096, 4096), (1, 4096, 16384), (1, 2048, 2048), (1, 1024, 4160), (3, 768, 768)],
    )
    def test_of_a_batch_invariant_model_they_are_those_of_a_tile(
        self, kernels, monkeypatch, rows, transposed, activation, parts, n, k
    ):
        monkeypatch.setattr(kernels, "invariant", True)
        ws = list(normal(parts, *((k, n) if transposed else (n, k)), std=k**-0.5))
        xs, found = list(normal(parts, rows, k)), []
        for many in (False, True):
            ys = poisoned(parts, rows, n)
            kernels.gemm_tile(ws, xs, list(ys), activation, transposed, many)
            found.append(ys)
        assert torch.equal(*found)


class TestTiles:
    """Every shape, with more tiles than multiprocessors, stages that are used again, and tiles in part."""

    pytestmark = on_hopper

    @pytest.mark.parametrize("shape", TILES)
    @pytest.mark.parametrize("transposed", [False, True])
    def test_shapes(self, kernels, monkeypatch, shape, transposed):
        n, k, rows = 8256, 1472, 600
        w, x, y = normal(*((k, n) if transposed else (n, k)), std=k**-0.5), normal(rows, k), poisoned(rows, n)
        groups, x_rows = shape
        monkeypatch.setattr(tile, "MANY_ROWS", {groups: (x_rows,)})
        kernels.gemm_tile([w], [x], [y], RELU_SQUARE, transposed, many=True)
        assert off(y, ACTIVATIONS[RELU_SQUARE](x.double() @ (w if transposed else w.T).double())) < 1e-3

    @pytest.mark.parametrize("shape", TILES)
    def test_shapes_of_fp8(self, kernels, monkeypatch, shape):
        n, k, rows = 8256, 1408, 600
        groups, x_rows = shape
        monkeypatch.setattr(tile, "MANY_ROWS", {groups: (x_rows,)})
        (w, of_w), (x, of_x) = fp8(n, k), fp8(rows, k)
        y = poisoned(rows, n)
        kernels.gemm_tile_fp8(Codes([w], [of_w], "fp8"), [x], [of_x], [y])
        assert off(y, numbers(x, of_x) @ numbers(w, of_w).T) < 2e-3  # digits of the tensor cores' sums of fp8

    @pytest.mark.parametrize("shape", TILES)
    @pytest.mark.parametrize("kind", CODES)
    def test_shapes_of_codes(self, kernels, monkeypatch, shape, kind):
        groups, x_rows = shape
        monkeypatch.setattr(tile, "MANY_ROWS", {groups: (x_rows,)})
        check_codes(kernels, 1, 600, 8256, 1472, kind, RELU_SQUARE)

    @pytest.mark.parametrize("shape", TILES)
    def test_thousands_of_rows(self, kernels, monkeypatch, shape):
        """All rows of w come by more than once, with some of the rows of x each time."""
        groups, x_rows = shape
        monkeypatch.setattr(tile, "MANY_ROWS", {groups: (x_rows,)})
        check_tiles(kernels, 3, 2500, 832, 192, False, IDENTITY, many=True)

    @pytest.mark.parametrize("shape", [(64, 1), (80, 2), (160, 5), (256, 4)])
    def test_a_shape_that_there_is_not_is_refused(self, kernels, monkeypatch, shape):
        monkeypatch.setattr(gemms, "many_shape", lambda *_, **more: TileShape(*shape, 1))
        with pytest.raises(RuntimeError, match="rwkv_gemm_many"):
            kernels.gemm_tile([normal(64, 64)], [normal(300, 64)], [poisoned(300, 64)], many=True)

    def test_parts_that_k_has_not_are_refused(self, kernels):
        w, x = normal(64, 192), normal(300, 192)
        for parts in (0, 2):  # 192 is not two multiples of 64
            with pytest.raises(RuntimeError, match="rwkv_gemm_many"):
                kernels.gemm_many_split(w, x, torch.empty(parts, 300, 64, device=DEVICE))


@pytest.mark.parametrize("rows", [1, 257, 320, 700])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (768, 768), (1024, 1024), (2560, 320)])
class TestBeside:
    """Small GEMMs in the same launch, as the inner low-rank sides beside r, k and v."""

    pytestmark = on_hopper

    @pytest.mark.parametrize("sizes", [(64, 64, 128), (96, 32, 16, 480)])
    def test_both_are_right(self, kernels, rows, n, k, sizes):
        ws, xs, small = normal(3, n, k, std=k**-0.5), normal(3, rows, k), []
        alone, ys = poisoned(3, rows, n), poisoned(3, rows, n)
        for size, activation in zip(sizes, (TANH, IDENTITY, SIGMOID, RELU_SQUARE), strict=False):
            small.append((normal(size, k, std=k**-0.5), normal(rows, k), poisoned(rows, size), activation))
        kernels.gemm_tile(list(ws), list(xs), list(alone), many=True)
        kernels.gemm_tile(list(ws), list(xs), list(ys), many=True, beside=small)
        assert torch.equal(ys, alone)
        for w, x, y, activation in small:
            assert off(y, ACTIVATIONS[activation](x.double() @ w.T.double())) < 1e-3

    @pytest.mark.parametrize("shape", tiles_of(tile.BESIDE_ROWS))
    def test_shapes(self, kernels, monkeypatch, rows, n, k, shape):
        groups, x_rows = shape
        monkeypatch.setattr(tile, "BESIDE_ROWS", {groups: (x_rows,)})
        w, x, y, small = normal(n, k, std=k**-0.5), normal(rows, k), poisoned(rows, n), poisoned(rows, 224)
        inner = normal(224, k, std=k**-0.5)
        kernels.gemm_tile([w], [x], [y], RELU_SQUARE, many=True, beside=[(inner, x, small, TANH)])
        assert off(y, ACTIVATIONS[RELU_SQUARE](x.double() @ w.T.double())) < 1e-3
        assert off(small, ACTIVATIONS[TANH](x.double() @ inner.T.double())) < 1e-3


@pytest.mark.parametrize("rows", [1, 65, 80, 320, 512])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (768, 3072), (1024, 1024), (2560, 512)])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
class TestSplit:
    """Sums over parts of K, which a norm adds up."""

    pytestmark = on_hopper

    def test_sums_of_each_part(self, kernels, rows, n, k, parts, transposed):
        w, x = normal(*((k, n) if transposed else (n, k)), std=k**-0.5), normal(rows, k)
        sums = torch.full((parts, rows, n), float("nan"), device=DEVICE)
        kernels.gemm_many_split(w, x, sums, transposed)
        of_w = (w if transposed else w.T).double()
        for found, some_x, some_w in zip(sums, x.double().chunk(parts, 1), of_w.chunk(parts), strict=True):
            assert off(found, some_x @ some_w) < 1e-5

    @pytest.mark.parametrize("shape", tiles_of(tile.SPLIT_ROWS))
    def test_shapes(self, kernels, monkeypatch, rows, n, k, parts, transposed, shape):
        groups, x_rows = shape
        monkeypatch.setattr(tile, "SPLIT_ROWS", {groups: (x_rows,)})
        self.test_sums_of_each_part(kernels, rows, n, k, parts, transposed)


class TestRows:
    pytestmark = on_hopper

    @pytest.mark.parametrize("transposed", [False, True])
    def test_a_row_is_the_same_alone_and_among_any_others(self, kernels, transposed):
        n, k = 512, 2048
        w, x = normal(*((k, n) if transposed else (n, k)), std=k**-0.5), normal(961, k)
        together = poisoned(961, n)
        kernels.gemm_tile([w], [x], [together], IDENTITY, transposed, many=True)
        for rows in (1, 150, 257, 320, 512):
            first = poisoned(rows, n)
            kernels.gemm_tile([w], [x[:rows]], [first], IDENTITY, transposed, many=True)
            assert torch.equal(first, together[:rows])


class TestSequence:
    pytestmark = on_hopper

    @pytest.mark.parametrize("split", [False, True])
    def test_launches_that_overlap_wait_for_what_they_read(self, kernels, split):
        """A hundred GEMMs, each of what a norm makes of the one before, or of its sums over parts of K."""
        width, rows = 512, 300
        ws, weight, bias = normal(100, width, width, std=width**-0.5), torch.ones(width).half(), normal(width)
        x, weight = torch.randn(rows, width, device=DEVICE), weight.to(DEVICE)
        want, normed, y = x.double(), poisoned(rows, width), poisoned(rows, width)
        sums = torch.full((4, rows, width), float("nan"), device=DEVICE)
        kernels.norm(x, Addend(), weight, bias, normed)
        for i, w in enumerate(ws):
            transposed = bool(i % 2)
            if split:
                kernels.gemm_many_split(w, normed, sums, transposed)
            else:
                kernels.gemm_tile([w], [normed], [y], IDENTITY, transposed, many=True)
            added = Addend(partials=sums) if split else Addend(y=y)
            kernels.norm(x, added, weight, bias, normed)
        for i, w in enumerate(ws):
            inputs = torch.nn.functional.layer_norm(want, (width,), weight.double(), bias.double())
            want = want + inputs @ (w if i % 2 else w.T).double()
        assert off(x, want) < 1e-2

    def test_scales_are_those_of_their_tile(self, kernels):
        """A GEMM of fp8 whose blocks have several tiles, each row with a scale of its own."""
        n, k, rows = 16384, 128, 1000
        w = torch.full((n, k), 0x38, device=DEVICE, dtype=torch.uint8)  # 1 in e4m3
        of_w, of_x = (torch.rand(size, device=DEVICE) + 0.5 for size in (n, rows))
        y = poisoned(rows, n)
        kernels.gemm_tile_fp8(Codes([w], [of_w / k], "fp8"), [w[:rows]], [of_x], [y])
        assert torch.allclose(y.double(), of_x.double()[:, None] * of_w.double(), rtol=1e-3)


def check_codes(kernels, count: int, rows: int, n: int, k: int, kind: str, activation: int) -> None:
    """`gemm_many_codes` of so many random w and x in one launch, against torch in fp64."""
    ws, scales, wanted = zip(*(codes(n, k, kind) for _ in range(count)), strict=True)
    xs, ys = [normal(rows, k) for _ in range(count)], [poisoned(rows, n) for _ in range(count)]
    name = "int8" if kind == "columns" else kind
    kernels.gemm_many_codes(Codes(ws, scales, name, kind == "columns"), xs, ys, activation)
    for w, x, y in zip(wanted, xs, ys, strict=True):
        assert off(y, ACTIVATIONS[activation](x.double() @ w.T)) < 1e-3


def codes(n: int, k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Codes as the kernel takes them, their scales if these are apart, and what they stand for in fp64."""
    if kind in GROUPS:
        w, wanted = quantized4(n, k, GROUPS[kind])
        return w, None, wanted
    return quantized8(n, k, kind)


def fp8(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes, and scales of rows."""
    codes = (torch.randn(rows, k, device=DEVICE) * 90).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), (torch.rand(rows, device=DEVICE) + 0.5) / k**0.5 / 64


def numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).double() * scales.double()[:, None]


@pytest.mark.parametrize("m", [257, 300, 320, 512, 700, 960, 4096])
@pytest.mark.parametrize("most_rows", [128, 256])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("beside", [(), (128, 128, 96, 480)])
def test_a_shape_is_one_that_there_is(m, most_rows, codes, beside):
    for parts, n in ((3, 4096), (1, 4096), (1, 16384), (1, 64)):
        shape = tile.many_shape(parts, n, m, most_rows, codes, beside)
        sizes = tile.BESIDE_ROWS if beside and not codes else tile.MANY_ROWS
        assert shape.x_rows in sizes[shape.groups] and shape.x_rows <= most_rows

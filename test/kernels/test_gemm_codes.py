"""GEMMs of few rows with codes in blocks against torch in fp64, at odd sizes, and with every code."""

import pytest
import torch
from coded import KINDS, NF4_HALVES, matrix, numbers, random_weight
from cuda_gpu import ACTIVATIONS, DEVICE, needs_gpu, normal, off, poisoned

from rwkv_batch.model.cuda.packed.blocks import BlockMatrix
from rwkv_batch.model.cuda.packed.orders import (
    blocks_of_4_bits,
    blocks_of_5_bits,
    blocks_of_6_bits,
    blocks_of_8_bits,
    blocks_of_pairs,
)
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.gemms import Codes
from rwkv_batch.ops.cuda.special.codes import CodeKernels, most_warp_rows
from rwkv_batch.ops.weights.channels import Fp5Weight, Fp6Weight, decode_float
from rwkv_batch.ops.weights.groups import Int4Weight, WideInt4Weight

# With either activation for every number of tiles of x.
ROWS = [
    (rows, (IDENTITY, RELU_SQUARE)[i % 2]) for i, rows in enumerate((1, 2, 5, 8, 9, 15, 16, 17, 32, 33, 70))
]
SHAPES = [(64, 64), (192, 320), (128, 768), (1024, 192), (320, 2048), (8256, 64)]
# Rows of w that a warp takes: for as many as the largest, AMD GPUs have no registers with some formats.
WARP_ROWS = [(kind, rows) for kind in KINDS for rows in (16, 32, 64) if rows <= most_warp_rows(kind)]
pytestmark = needs_gpu


def one(w: BlockMatrix) -> Codes:
    return Codes([w.codes], [w.scales], w.format)


@pytest.fixture(scope="module")
def codes(kernels: Kernels) -> CodeKernels:
    return CodeKernels(kernels)


@pytest.mark.parametrize(("kind", "warp_rows"), WARP_ROWS)
@pytest.mark.parametrize(("rows", "activation"), ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gemms(codes, kind, warp_rows, rows, activation, n, k):
    count = 3 if n < 1024 else 1
    weights = [random_weight(kind, n, k) for _ in range(count)]
    ws = [matrix(weight, DEVICE) for weight in weights]
    xs, ys = [normal(rows, k) for _ in range(count)], [poisoned(rows, n) for _ in range(count)]
    codes.gemm_codes(
        Codes([w.codes for w in ws], [w.scales for w in ws], kind), xs, ys, activation, warp_rows
    )
    for weight, x, y in zip(weights, xs, ys, strict=True):
        want = ACTIVATIONS[activation](x.double() @ numbers(weight).to(DEVICE).T)
        assert off(y, want) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "warp_rows"), [(48, 32), (80, 64)])
def test_a_count_of_rows_that_fills_no_tile(codes, kind, n, warp_rows):
    """The last tile of rows of w overlaps the one before."""
    warp_rows = min(warp_rows, most_warp_rows(kind))
    weight, x, y = random_weight(kind, n, 128), normal(3, 128), poisoned(3, n)
    w = matrix(weight, DEVICE)  # of a multiple of 64 outputs, of which these are the first
    codes.gemm_codes(one(w), [x], [y], IDENTITY, warp_rows)
    assert off(y, x.double() @ numbers(weight).to(DEVICE).T) < 1e-3


class TestEveryCode:
    """Each row of w has one code everywhere, and x one number that is not zero."""

    def product(self, codes, blocks, scales, n, kind):
        y = poisoned(192, n)
        x = torch.eye(192, device=DEVICE).half()
        of = None if scales is None else scales.to(DEVICE)
        codes.gemm_codes(Codes([blocks.to(DEVICE)], [of], kind), [x], [y])
        return y.double().cpu()

    def test_int8(self, codes):
        every = torch.arange(256, dtype=torch.uint8)
        found = self.product(
            codes, blocks_of_8_bits(every[:, None].repeat(1, 192)), torch.ones(256), 256, "int8"
        )
        assert torch.equal(found, (every.double() - 128).expand(192, 256))

    def test_fp8(self, codes):
        """Each code of fp8 is its number; its two NaN are left out."""
        every = torch.arange(256, dtype=torch.uint8)
        wanted = every.view(torch.float8_e4m3fn).double().nan_to_num(0)
        every = torch.where(wanted == 0, torch.zeros_like(every), every)
        found = self.product(
            codes, blocks_of_8_bits(every[:, None].repeat(1, 192)), torch.ones(256), 256, "fp8"
        )
        assert torch.equal(found, wanted.expand(192, 256))

    @pytest.mark.parametrize("kind", [Fp6Weight, Fp5Weight])
    def test_fp6_and_fp5(self, codes, kind):
        count = 2 ** kind.bits()
        every = torch.arange(count, dtype=torch.uint8)
        order = blocks_of_6_bits if kind is Fp6Weight else blocks_of_5_bits
        blocks = order(every[:, None].repeat(1, 192))
        found = self.product(codes, blocks, torch.ones(count), count, kind.format)
        wanted = decode_float(every, kind.exponent, kind.mantissa).double()
        assert wanted.max() == kind.most and torch.equal(found, wanted.expand(192, count))

    @pytest.mark.parametrize("kind", [Int4Weight, WideInt4Weight])
    def test_int4(self, codes, kind):
        every, groups = torch.arange(64, dtype=torch.uint8) % 16, kind.groups(192)
        scales = torch.full((64, groups), 0.25).half()
        minimums = (torch.arange(64) // 16).half()[:, None].repeat(1, groups)
        blocks = blocks_of_4_bits(every[:, None].repeat(1, 192), scales, minimums, kind.group)
        found = self.product(codes, blocks, None, 64, kind.format)
        assert torch.equal(found, (every * 0.25 + minimums[:, 0].double()).expand(192, 64))

    def test_nf4(self, codes):
        """Every byte, which is two codes."""
        every = torch.arange(256, dtype=torch.uint8)
        blocks = blocks_of_pairs(every[:, None].repeat(1, 96), torch.full((256, 3), 0.5).half())
        found = self.product(codes, blocks, None, 256, "nf4")
        pairs = NF4_HALVES.view(torch.float32).view(256, 2).double() * 0.5
        assert torch.equal(found, pairs.repeat(1, 96).T)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone_and_among_any_others(codes, kind):
    """A warp may have any number of outputs."""
    w = matrix(random_weight(kind, 64, 576), DEVICE)
    x, together = normal(70, 576), poisoned(70, 64)
    codes.gemm_codes(one(w), [x], [together], warp_rows=32)
    codes.gemm_codes(one(w), [x], [again := poisoned(70, 64)], warp_rows=most_warp_rows(kind))
    assert torch.equal(again, together)
    for rows in (1, 8, 9, 16, 17, 33):
        first = poisoned(rows, 64)
        codes.gemm_codes(one(w), [x[:rows]], [first])
        assert torch.equal(first, together[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_relu_squared_never_overflows(codes, kind):
    w = matrix(KINDS[kind].pack(torch.randn(64, 64) * 100), DEVICE)
    y = poisoned(8, 64)
    codes.gemm_codes(one(w), [normal(8, 64) * 100], [y], RELU_SQUARE)
    assert y.isfinite().all() and y.max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 20])
def test_prefetched_weights_change_nothing(codes, kind, rows):
    w, x, prefetch = matrix(random_weight(kind, 128, 320), DEVICE), normal(rows, 320), normal(2048, 4104)
    y, again = poisoned(rows, 128), poisoned(rows, 128)
    codes.gemm_codes(one(w), [x], [y])
    for size in (1, 1000, 2048):
        codes.gemm_codes(one(w), [x], [again.fill_(float("nan"))], prefetch=prefetch[:size])
        assert torch.equal(y, again)


def test_what_does_not_fit_is_refused(codes):
    w, y = matrix(random_weight("int8", 64, 64), DEVICE), poisoned(1, 64)
    with pytest.raises(RuntimeError, match="rwkv_gemm_codes"):
        codes.gemm_codes(one(w), [normal(1, 32)], [y])
    fp6 = matrix(random_weight("fp6", 64, 64), DEVICE)
    with pytest.raises(RuntimeError, match="rwkv_gemm_codes"):
        codes.gemm_codes(one(fp6), [normal(1, 64)], [y], warp_rows=64)
    with pytest.raises(RuntimeError, match="rwkv_gemm_codes"):
        codes.gemm_codes(Codes([w.codes] * 4, [w.scales] * 4, "int8"), [normal(1, 64)] * 4, [y] * 4)

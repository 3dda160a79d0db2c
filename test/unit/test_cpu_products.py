"""The products of the kernels for CPUs against fp64, and that a row's depends on nothing but the row."""

import errno
import mmap
import os
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch
from cpu_models import TARGETS, kernels_for, poisoned_outputs, torch_threads
from tools import absent
from torch.nn.functional import linear

from rwkv_batch.ops.cpu import products
from rwkv_batch.ops.cpu.memory import WeightMemory
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.ops.weights.groups import CALIBRATED, NF4, Nf4Weight
from rwkv_batch.ops.weights.products import product_with

pytestmark = pytest.mark.thorough

SHAPES = [(1, 1), (5, 3), (16, 64), (65, 130), (33, 515), (200, 1030), (64, 4099)]  # outputs, inputs
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 40, 97]
IN_FP32 = ["fp8", "fp6", "fp5", "nf4"]  # whose rows are multiplied as they are


@pytest.fixture(scope="module", autouse=True, params=TARGETS)
def compiled(request):
    return kernels_for(request.param)


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_outputs():
        yield


@pytest.fixture(params=[1, 2])
def threads(request):
    with torch_threads(request.param):
        yield request.param


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(outputs, inputs):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=generator)


@cache  # for all targets and numbers of threads
def four_bits(outputs, inputs, name="int4", seed=3):
    """Weights of 4 bits, no group of which is like another."""
    factors = draw(outputs, -(-inputs // 64), seed=seed + 1).abs() + 0.1
    matrix = draw(outputs, inputs, seed=seed) * factors.repeat_interleave(64, 1)[:, :inputs]
    return CALIBRATED[name].pack(matrix + draw(outputs, 1, seed=seed + 2))


def bounds(x, weights, bias=0.0, sizes=None, most=32767):
    """The product in fp64, and what 16 bits of a row and fp32 sums may change of it.

    sizes: of the numbers that are added up for a weight, where it is not one. most: of a row in steps.
    """
    x, weights = x.double(), weights.double()
    step = x.abs().amax(1, keepdim=True) / most
    sizes = weights.abs() if sizes is None else sizes
    rounding = 0.5 * step * weights.abs().sum(1) + 1e-6 * (x.abs() @ sizes.T) + 1e-37
    return x @ weights.T + bias, rounding + 1e-6 * torch.as_tensor(bias).abs()


def assert_within(y, bounds):
    want, off = bounds
    assert ((y - want).abs() <= off).all()


def bounds_of_int8(x, values, scales, bias=0.0):
    return bounds(x, values.double() * scales.double().unsqueeze(1), bias)


def assert_int8(y, x, values, scales, bias=0.0):
    assert_within(y, bounds_of_int8(x, values, scales, bias))


def bounds_of_int4(x, weight, bias=0.0):
    """Of which scale times code and the minimum are added up apart."""
    plain, sizes = numbers_of(weight)
    return bounds(x, plain, bias, sizes, 32639)


def assert_int4(y, x, weight, bias=0.0):
    assert_within(y, bounds_of_int4(x, weight, bias))


@lru_cache(maxsize=8)
def numbers_of(weight):
    """In fp64, and the sizes of what is added up for each."""
    plain = weight.dequantize().double()
    minimums = weight.parts["minimums"].double().repeat_interleave(weight.group, 1)[:, : weight.shape[1]]
    return plain, (plain - minimums).abs() + minimums.abs()


def rows_of(shape, scaled=False):
    """Inputs of a product, some with rows of different sizes."""
    made = (draw(rows, shape[1], seed=rows) for rows in ROWS)
    return [x * draw(len(x), 1, seed=9).exp() if scaled else x for x in made]


# What follows has the products in fp64, once for all targets and numbers of threads.


@cache
def plain_products(dtype, shape):
    weight, bias = draw(*shape).to(dtype), draw(shape[0], seed=1)
    wanted = [(x, linear(x.double(), weight.double(), bias.double())) for x in rows_of(shape)]
    return weight, bias, wanted


@cache
def int8_products(shape):
    values, scales, bias = integers(*shape), draw(shape[0]).abs(), draw(shape[0], seed=1)
    wanted = [(x, bounds_of_int8(x, values, scales, bias.double())) for x in rows_of(shape, True)]
    return values, scales, bias, wanted


@cache
def products_of_4_bits(name, shape):
    weight, bias = four_bits(*shape, name), draw(shape[0], seed=1)
    return weight, bias, [(x, bounds_of_int4(x, weight, bias.double())) for x in rows_of(shape, True)]


@cache
def other_products(name, shape):
    weight, bias = FORMATS[name].pack(draw(*shape)), draw(shape[0], seed=1)
    plain = weight.dequantize().double()
    return weight, bias, [(x, linear(x.double(), plain, bias.double())) for x in rows_of(shape)]


def assert_near(y, want):
    assert float((y - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_fp64(compiled, shape, dtype, threads):
    weight, bias, wanted = plain_products(dtype, shape)
    product = products.packed_linear(compiled, weight, bias)
    for x, want in wanted:
        assert_near(product(x), want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_int8_product_is_that_of_fp64(compiled, shape, threads):
    values, scales, bias, wanted = int8_products(shape)
    product = products.int8_linear(compiled, values, scales, bias)
    for x, want in wanted:
        assert_within(product(x), want)


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 128)], ids=str)
def test_a_product_of_4_bits_is_that_of_fp64(compiled, shape, name, threads):
    weight, bias, wanted = products_of_4_bits(name, shape)
    product = product_with(weight, bias, kernels=compiled)
    assert isinstance(product, products.PackedLinear)
    for x, want in wanted:
        assert_within(product(x), want)


@pytest.mark.parametrize("name", IN_FP32)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 128)], ids=str)
def test_a_product_of_another_format_is_that_of_fp64(compiled, shape, name, threads):
    weight, bias, wanted = other_products(name, shape)
    product = product_with(weight, bias, kernels=compiled)
    assert isinstance(product, products.PackedLinear)
    for x, want in wanted:
        assert_near(product(x), want)


def test_every_code_is_its_number(compiled):
    """Of fp8, the smallest ones too, and of nf4, whose scales here are 1."""
    codes = torch.arange(256, dtype=torch.uint8)
    fp8 = codes[codes & 127 != 127].view(torch.float8_e4m3fn).unsqueeze(1)
    product = products.fp8_linear(compiled, fp8, torch.ones(len(fp8)))
    assert torch.equal(product(torch.ones(1, 1))[0], fp8.float().flatten())
    nf4 = Nf4Weight.pack(NF4.repeat(3, 4))
    assert torch.equal(product_with(nf4, kernels=compiled)(torch.eye(64)).T, NF4.repeat(3, 4))


@pytest.mark.parametrize("kind", ["fp32", "fp16", "int8", *CALIBRATED, *IN_FP32])
def test_a_row_has_the_same_product_beside_any_others(compiled, kind, threads):
    """Also one of which few inputs are not zeros, as behind a ReLU: alone, their weights are not read."""
    weight, x = draw(200, 1030), draw(97, 1030, seed=1)
    x[::2] *= draw(49, 1030, seed=2) > torch.linspace(0.9, 4.5, 49)[:, None]  # 82% of zeros, and all of them
    if kind == "int8":
        product = products.int8_linear(compiled, integers(200, 1030), draw(200).abs())
    elif kind in CALIBRATED:
        product = product_with(four_bits(200, 1030, kind), kernels=compiled)
    elif kind in IN_FP32:
        product = product_with(FORMATS[kind].pack(weight), kernels=compiled)
    else:
        product = products.packed_linear(compiled, weight.half() if kind == "fp16" else weight, None)
    alone = torch.cat([product(row) for row in x.split(1)])
    for rows in (2, 3, 4, 5, 6, 7, 31, 96, 97):
        assert torch.equal(product(x[:rows]), alone[:rows])
    assert torch.equal(product(x.flip(0)), alone.flip(0))


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4", "fp8", "nf4"])
def test_squares_are_those_of_the_positive_numbers(compiled, kind):
    if kind == "int8":
        product = products.int8_linear(compiled, integers(70, 90), draw(70).abs() / 100)
    elif kind in FORMATS:
        product = product_with(FORMATS[kind].pack(draw(70, 90)), kernels=compiled)
    else:
        product = products.packed_linear(compiled, draw(70, 90), draw(70, seed=1))
    x = draw(5, 90, seed=2)
    assert torch.equal(product.activated(x, "squared"), product(x).relu().square())


def test_a_large_result_is_whole(compiled, threads):
    """A large result is stored past the cache."""
    weight, x = draw(30011, 24), draw(40, 24, seed=1)
    got = products.packed_linear(compiled, weight, None)(x)
    assert float((got - x.double() @ weight.double().T).abs().max()) < 1e-4


def test_weights_are_kept_side_by_side_and_none_is_written_over(compiled):
    """Small ones, those that fill a block of the memory, and one that is larger than a block."""
    shapes = [(3, 5), (200, 1030), (3000, 4099), (9000, 8192), (200, 1030)]
    weights = [integers(*shape) for shape in shapes] + [draw(65, 130).half()]
    memory = WeightMemory()
    kept = [memory.keep(weight) for weight in weights]
    for weight, copy in zip(weights, kept, strict=True):
        assert copy.dtype == weight.dtype and torch.equal(copy, weight)
    product = products.packed_linear(compiled, draw(200, 515), None)
    x = draw(3, 515, seed=1)
    assert torch.equal(product.kept_in(memory)(x), product(x))


def test_weights_stay_where_they_are_if_there_are_no_large_pages_for_them(monkeypatch):
    """As under a limit of the memory of a process, which they are within themselves."""
    maps, mapped = [False, True], mmap.mmap

    def limited(*arguments, **named):
        if not maps.pop():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mapped(*arguments, **named)

    monkeypatch.setattr(mmap, "mmap", limited)
    memory, weights = WeightMemory(), [draw(600, 1030), draw(9000, 2048), draw(600, 1030, seed=1)]
    kept = [memory.keep(weight) for weight in weights]
    assert [mine is given for mine, given in zip(kept, weights, strict=True)] == [False, True, False]
    assert all(map(torch.equal, kept, weights)) and not maps


def test_a_view_is_multiplied_as_what_it_shows(compiled):
    weight, x = draw(70, 64), draw(64, 9, seed=1)
    assert torch.equal(
        products.packed_linear(compiled, weight, None)(x.T),
        products.packed_linear(compiled, weight, None)(x.T.contiguous()),
    )


@pytest.mark.parametrize("inputs", [16384, products.MOST_INPUTS])
@pytest.mark.parametrize("sign", ["same", "alternating"])
def test_the_largest_sums_of_int8_do_not_overflow(compiled, inputs, sign):
    x, values = torch.full((2, inputs), 3e4), torch.full((20, inputs), 127, dtype=torch.int8)
    x[1] = -x[1]
    if sign == "alternating":
        x[:, ::2], values[:, ::2] = -x[:, ::2], -values[:, ::2]
    want = 127 * 3e4 * inputs * torch.tensor([1.0, -1.0]).unsqueeze(1).expand(2, 20)
    got = products.int8_linear(compiled, values, torch.ones(20))(x)
    assert float((got / want - 1).abs().max()) < 1e-5  # fp32 sums of one sign, where there are no integers


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_of_4_bits_do_not_overflow(compiled, name, sign):
    """Whole groups of the largest code and of the smallest, with rows at the edge of 16 bits."""
    matrix = torch.tensor([0.0, 1.0]).repeat(20, 4096)
    matrix[:, 2:] = matrix[:, 1:2]
    weight, x = CALIBRATED[name].pack(matrix), torch.full((2, 8192), 3e4 * sign)
    x[1, ::2] = -x[1, ::2]
    assert_int4(product_with(weight, kernels=compiled)(x), x, weight)


def test_rows_of_zeros_give_the_bias_and_outliers_cost_only_their_row(compiled):
    values, scales, bias = integers(50, 300), draw(50).abs(), draw(50, seed=1)
    x = draw(6, 300, seed=2)
    x[1] = 0
    x[2, 7], x[3] = 1e30, x[3] * 1e-30
    got = products.int8_linear(compiled, values, scales, bias)(x)
    assert torch.equal(got[1], bias)
    assert_int8(got, x, values, scales, bias.double())
    others = products.int8_linear(compiled, values, scales, bias)(x[[0, 4, 5]])
    assert torch.equal(got[[0, 4, 5]], others)
    weight = four_bits(50, 300)
    got = product_with(weight, bias, kernels=compiled)(x)
    assert torch.equal(got[1], bias)
    assert_int4(got, x, weight, bias.double())
    assert torch.equal(got[[0, 4, 5]], product_with(weight, bias, kernels=compiled)(x[[0, 4, 5]]))


@pytest.mark.parametrize("size", [1e-45, 1e-41, 1e-38, 1e-30, 1e30])
def test_rows_and_scales_may_be_of_any_size(compiled, size):
    values, x = integers(20, 100), draw(3, 100)
    tiny = products.int8_linear(compiled, values, torch.full((20,), size))(x)
    assert_int8(tiny, x, values, torch.full((20,), size))
    small = x * size
    assert_int8(products.int8_linear(compiled, values, torch.ones(20))(small), small, values, torch.ones(20))
    weight = four_bits(20, 100)
    assert_int4(product_with(weight, kernels=compiled)(small), small, weight)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4", "fp8", "nf4"])
def test_a_row_that_is_not_finite_is_seen_and_spoils_no_other(compiled, kind, bad):
    x = draw(5, 70)
    if kind == "int8":
        product = products.int8_linear(compiled, integers(20, 70), torch.ones(20))
    elif kind in FORMATS:
        product = product_with(FORMATS[kind].pack(draw(20, 70)), kernels=compiled)
    else:
        product = products.packed_linear(compiled, draw(20, 70), None)
    good = product(x)
    x[3, 69] = bad
    got = product(x)
    assert not got[3].isfinite().any() and torch.equal(got[[0, 1, 2, 4]], good[[0, 1, 2, 4]])


@pytest.mark.parametrize(
    ("values", "scales"),
    [
        (torch.zeros(4, 4), torch.ones(4)),
        (torch.zeros(4, 4, dtype=torch.int8), torch.ones(3)),
        (torch.zeros(4, 4, dtype=torch.int8), torch.ones(4).half()),
        (torch.full((4, 4), -128, dtype=torch.int8), torch.ones(4)),
        (torch.zeros(1, products.MOST_INPUTS + 1, dtype=torch.int8), torch.ones(1)),
    ],
)
def test_what_int8_cannot_hold_is_refused(compiled, values, scales):
    with pytest.raises(ValueError, match="int8_linear takes"):
        products.int8_linear(compiled, values, scales)


def test_the_threads_are_those_that_torch_has(compiled):
    """A second pool would wait beside it and take its cores."""
    if not Path("/proc/self/task").is_dir():
        absent("There is no /proc, which lists threads.")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        product = products.packed_linear(compiled, draw(4096, 512), None)
        x = draw(64, 512)
        torch.zeros(1 << 22).exp_()  # wakes torch's threads
        running = set(os.listdir("/proc/self/task"))
        product(x)
        assert set(os.listdir("/proc/self/task")) <= running, "threads of others may end meanwhile"
    finally:
        torch.set_num_threads(before)

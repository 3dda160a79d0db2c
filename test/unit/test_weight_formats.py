"""Weight formats against their formulas in numpy and, where there is one, a format of torch."""

from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
import torch

from rwkv_batch.ops.weights.bits import pack_codes, packed_size, unpack_codes
from rwkv_batch.ops.weights.channels import Fp5Weight, Fp6Weight, decode_float, encode_float
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.ops.weights.groups import NF4

pytestmark = pytest.mark.thorough

FLOATS = {"fp8": (4, 3, 448.0), "fp6": (3, 2, 28.0), "fp5": (2, 2, 7.0)}  # exponent and mantissa bits, most
GROUPS = {"int4": 64, "int4-128": 128}
SHAPES = [(1, 1), (3, 7), (5, 64), (17, 65), (4, 130), (2, 2049), (1025, 1030)]


def numbers(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Rows of different sizes, one of zeros, and one with a number far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(outputs, inputs, generator=generator)
    matrix *= torch.logspace(-4, 3, outputs).unsqueeze(1)
    matrix[outputs // 2] = 0
    matrix[-1, -1] = 1e4
    return matrix


def float_value(code: int, exponent: int, mantissa: int) -> float:
    """IEEE 754's formula, without infinities."""
    sign = -1.0 if code >> (exponent + mantissa) & 1 else 1.0
    place, fraction = code >> mantissa & (2**exponent - 1), code & (2**mantissa - 1)
    bias = 2 ** (exponent - 1) - 1
    if place == 0:
        return sign * fraction / 2**mantissa * 2.0 ** (1 - bias)
    return sign * (1 + fraction / 2**mantissa) * 2.0 ** (place - bias)


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value nearest to each number, the one with an even place in `values` of two that are as near."""
    distance = np.abs(x[..., None].astype(np.float64) - values)
    odd = np.arange(len(values)) % 2
    best = distance.min(-1, keepdims=True)
    return values[np.argmin(np.where(distance == best, odd, 2), -1)]


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    """To a float format of `FLOATS`. Even codes have even mantissas, so even places do when codes ascend."""
    exponent, mantissa, most = FLOATS[name]
    values = np.array([float_value(code, exponent, mantissa) for code in range(2 ** (exponent + mantissa))])
    return np.copysign(nearest(np.abs(x), values[values <= most]), x)


def by_channel(matrix: np.ndarray, name: str) -> np.ndarray:
    most = np.float32(127 if name == "int8" else FLOATS[name][2])
    scales = np.abs(matrix).max(1, keepdims=True) / most
    steps = np.divide(matrix, scales, out=np.zeros_like(matrix), where=scales > 0)
    q = np.rint(steps) if name == "int8" else rounded(np.clip(steps, -most, most), name)
    return q.astype(np.float32) * scales


def by_group(matrix: np.ndarray, size: int) -> np.ndarray:
    found = np.empty_like(matrix)
    for row, out in zip(matrix, found, strict=True):
        for start in range(0, len(row), size):
            group = row[start : start + size]
            low, step = np.float16(group.min()), np.float16((group.max() - group.min()) / np.float32(15))
            low, step = np.float32(low), np.float32(step)
            q = np.clip(np.rint((group - low) / step), 0, 15) if step > 0 else 0
            out[start : start + size] = q * step + low
    return found


def by_quantile(matrix: np.ndarray) -> np.ndarray:
    table = NF4.numpy()
    found = np.empty_like(matrix)
    for row, out in zip(matrix, found, strict=True):
        for start in range(0, len(row), 64):
            group = row[start : start + 64]
            scale = np.float32(np.float16(np.abs(group).max()))
            q = group / scale if scale > 0 else 0 * group
            out[start : start + 64] = table[np.argmin(np.abs(q[:, None] - table), 1)] * scale
    return found


def formula(matrix: torch.Tensor, name: str) -> np.ndarray:
    x = matrix.numpy()
    if name == "fp16":
        return x.astype(np.float16).astype(np.float32)
    if name == "bf16":  # the upper half of fp32: half of the lower is added, one less where the last bit is 0
        bits = x.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    if name in GROUPS:
        return by_group(x, GROUPS[name])
    return by_quantile(x) if name == "nf4" else by_channel(x, name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_matrix_is_rounded_by_the_formula(name, shape):
    matrix = numbers(*shape)
    found, wanted = FORMATS[name].pack(matrix).dequantize().numpy(), formula(matrix, name)
    # A product and a sum may be one rounding or two.
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", FORMATS)
def test_the_dtype_of_a_checkpoint_does_not_matter(name, dtype):
    matrix = numbers(6, 100).to(torch.bfloat16).clamp(-6e4, 6e4).half()
    packed, wanted = FORMATS[name].pack(matrix.to(dtype)), FORMATS[name].pack(matrix.to(dtype).float())
    assert all(torch.equal(packed.parts[part], wanted.parts[part]) for part in wanted.parts)


BITS = {"fp16": 16, "bf16": 16, "int8": 8, "fp8": 8, "fp6": 6, "fp5": 5}
BITS |= {"int4": 4 + 32 / 64, "int4-128": 4 + 32 / 128, "nf4": 4 + 16 / 64}


@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_are_packed(name):
    packed = FORMATS[name].pack(torch.randn(16, 1024))
    scales = 0 if name in GROUPS or BITS[name] == 16 or name == "nf4" else 16 * 4
    assert packed.nbytes == 16 * 1024 * BITS[name] / 8 + scales


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_zeros_and_huge_numbers_stay_finite(name):
    matrix = torch.zeros(4, 200)
    matrix[1] = 3e38 * torch.linspace(-1, 1, 200)
    matrix[2, :130] = 1e-44
    matrix[3] = 1e-9
    found = FORMATS[name].pack(matrix).dequantize()
    assert found.isfinite().all()
    assert not found[0].any()
    assert found[1, 0] < -6e4 and found[1, -1] > 6e4
    assert (found[1].diff() >= -1e-3 * found[1].abs().max()).all()  # the step of a group is rounded
    assert (found[3] >= 0).all() and (found[3] <= 2e-9).all()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_can_be_packed_again_without_a_change(name):
    matrix = FORMATS[name].pack(torch.randn(8, 256)).dequantize()
    torch.testing.assert_close(FORMATS[name].pack(matrix).dequantize(), matrix, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_of_a_float_stands_for_its_number_and_is_its_own_nearest(name):
    exponent, mantissa, most = FLOATS[name]
    codes = torch.arange(2 ** (1 + exponent + mantissa), dtype=torch.uint8)
    wanted = torch.tensor([float_value(int(code), exponent, mantissa) for code in codes])
    there = wanted.abs() <= most  # the last code of e4m3 is NaN
    assert len(codes[~there]) == (2 if name == "fp8" else 0)
    found = decode_float(codes[there], exponent, mantissa)
    assert torch.equal(found, wanted[there]) and torch.equal(found.signbit(), wanted[there].signbit())
    assert torch.equal(encode_float(wanted[there], exponent, mantissa), codes[there])


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_rounded_to_nearest_and_in_the_middle_to_even(name):
    exponent, mantissa, most = FLOATS[name]
    count = 2 ** (exponent + mantissa)
    values = sorted(v for c in range(count) if (v := float_value(c, exponent, mantissa)) <= most)
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    x = np.array([*values, *middles, *(np.nextafter(np.float32(m), s) for m in middles for s in (0, 1e9))])
    x = np.concatenate([x, -x, np.linspace(-most, most, 9999)]).astype(np.float32)
    found = decode_float(encode_float(torch.from_numpy(x), exponent, mantissa), exponent, mantissa).numpy()
    assert np.array_equal(found, rounded(x, name).astype(np.float32))


def test_e4m3_is_that_of_torch():
    x = torch.cat([torch.linspace(-448, 448, 99_999), torch.randn(99_999) / 64])
    assert torch.equal(encode_float(x, 4, 3), x.to(torch.float8_e4m3fn).view(torch.uint8))
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 127) != 127]
    assert torch.equal(decode_float(every, 4, 3), every.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(("kind", "most", "codes"), [(Fp6Weight, 28, 63), (Fp5Weight, 7, 31)])
def test_the_largest_number_of_a_row_is_exact(kind, most, codes):
    """No code is left unused: a row that has them all comes back as it was."""
    places = torch.arange(codes + 1, dtype=torch.uint8)
    row = decode_float(places, kind.exponent, kind.mantissa).unsqueeze(0)
    assert row.abs().max() == most and torch.equal(kind.pack(row).dequantize(), row)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 64, 131])
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_codes_are_one_run_of_bits(bits, count):
    codes = torch.randint(0, 2**bits, (3, count), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, packed_size(count, bits))
    for row, its_bytes in zip(codes.tolist(), packed.numpy(), strict=True):
        whole = sum(code << (bits * place) for place, code in enumerate(row))
        assert int.from_bytes(its_bytes.tobytes(), "little") == whole
    assert torch.equal(unpack_codes(packed, bits, count), codes)


def test_nf4_has_the_quantiles_of_the_paper():
    """QLoRA, appendix E: eight quantiles below and nine above the middle, of which they share zero."""
    quantile, outermost = NormalDist().inv_cdf, 0.9677083
    above = [quantile(p) for p in np.linspace(outermost, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(outermost, 0.5, 8)[:-1]]
    wanted = np.array(sorted([*above, 0.0, *below])) / max(above)
    np.testing.assert_allclose(NF4.numpy(), wanted, atol=2e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_another_matrix_are_refused(name):
    kind = FORMATS[name]
    packed = kind.pack(torch.randn(4, 64))
    with pytest.raises(ValueError, match="does not fit"):
        kind((4, 200), packed.parts)
    with pytest.raises(ValueError, match="in place of"):
        kind((4, 64), packed.parts | {"more": torch.zeros(1)})

"""Products with packed matrices on a CPU: `x -> x @ W.T + bias` for rows x in fp32.

A row's product comes out the same, bit for bit, beside any other rows.
"""

from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from rwkv_batch.ops.cpu.binding import CpuKernels
from rwkv_batch.ops.cpu.products import fp8_linear, int4_linear, int8_linear, nf4_linear
from rwkv_batch.ops.linear import Linear, prepare
from rwkv_batch.ops.weights.bits import unpack_codes
from rwkv_batch.ops.weights.channels import Fp8BothWeight, Fp8Weight, Int8Weight, SmallFloatWeight
from rwkv_batch.ops.weights.groups import Int4Weight, Nf4Weight
from rwkv_batch.ops.weights.halves import HalfWeight
from rwkv_batch.ops.weights.weight import Weight

OUTPUTS_AT_ONCE = 256  # rows of a matrix that are dequantized and multiplied while they are in the cache
# Rows of x in every product, the missing ones zero: a library takes other ways for other numbers of rows.
ROWS_AT_ONCE = 16
ALIGNED = 16  # numbers, so that all rows begin where vectors do
# Of torch's int8 product, which reads whole vectors and crashes otherwise.
INT8_INPUTS, INT8_ALIGNED = 32, 16  # a multiple of numbers, and of bytes where a matrix begins


def product_with(
    weight: Weight, bias: Tensor | None = None, *, invariant: bool = False, kernels: CpuKernels | None = None
) -> Linear:
    """How a CPU multiplies with a matrix of any format. bias: `[outputs]`.

    invariant and kernels: as for `prepare`.
    """
    if isinstance(weight, HalfWeight):
        matrix = weight.dequantize()
        return prepare(matrix, bias, device="cpu", dtype=torch.float32, invariant=invariant, kernels=kernels)
    if kernels and not isinstance(weight, Fp8BothWeight):
        return _by_kernels(weight, bias, kernels)
    if isinstance(weight, Int8Weight):
        return int8_product(weight.parts["values"], weight.parts["scales"], bias)
    multiply = partial(_by_blocks, weight=weight, bias=bias)
    if isinstance(weight, Fp8BothWeight):
        return lambda x: multiply(Fp8BothWeight.rounded(x))
    return multiply


def _by_kernels(weight: Weight, bias: Tensor | None, kernels: CpuKernels) -> Linear:
    """fp6 and fp5 take the 8 bits of fp8, which has all of their numbers."""
    values, scales = weight.parts["values"], weight.parts["scales"]
    if isinstance(weight, Int8Weight):
        return int8_linear(kernels, values, scales, bias)
    if isinstance(weight, Fp8Weight):
        return fp8_linear(kernels, values, scales, bias)
    if isinstance(weight, SmallFloatWeight):
        return fp8_linear(kernels, weight.as_fp8(), scales, bias)
    assert isinstance(weight, Int4Weight | Nf4Weight)
    codes = unpack_codes(values, 4, weight.shape[1])
    if isinstance(weight, Nf4Weight):
        return nf4_linear(kernels, codes, scales, weight.group, bias)
    return int4_linear(kernels, codes, scales, weight.parts["minimums"], weight.group, bias)


def int8_product(values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Linear:
    """`x -> (x @ values.T) * scales + bias`. values: `[N, K]` int8, scales: `[N]` fp32."""
    if _has_int8() and values.shape[1] % INT8_INPUTS == 0:
        if values.data_ptr() % INT8_ALIGNED:  # as it may be in a file
            values = values.clone()
        return partial(_int8, values=values, scales=scales, bias=bias)
    shape = (values.shape[0], values.shape[1])
    return partial(_by_blocks, weight=Int8Weight(shape, {"values": values, "scales": scales}), bias=bias)


def _int8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    # torch is fast with bf16 only. Its scales are bf16 too, so they are left to fp32.
    ones = scales.new_ones(len(scales), dtype=torch.bfloat16)
    product = torch._weight_int8pack_mm(x.bfloat16().contiguous(), values, ones).float().mul_(scales)
    return product if bias is None else product.add_(bias)


def _by_blocks(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Some rows of the matrix are dequantized at a time, and multiplied with all rows of x."""
    outputs, inputs = weight.shape
    count, columns = (-(-size // step) * step for size, step in ((len(x), ROWS_AT_ONCE), (inputs, ALIGNED)))
    filled, block = x.new_zeros(count, columns), x.new_zeros(min(OUTPUTS_AT_ONCE, outputs), columns)
    filled[: len(x), :inputs] = x
    product = x.new_empty(count, outputs)
    for start in range(0, outputs, OUTPUTS_AT_ONCE):
        rows = slice(start, min(start + OUTPUTS_AT_ONCE, outputs))
        matrix = block[: rows.stop - start]
        matrix[:, :inputs] = weight.read_rows(rows)
        for at in range(0, count, ROWS_AT_ONCE):
            together = slice(at, at + ROWS_AT_ONCE)
            product[together, rows] = linear(filled[together], matrix, None if bias is None else bias[rows])
    return product[: len(x)]


@cache
def _has_int8() -> bool:
    """Whether this torch has a fast int8 product for this processor and gets it right."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":  # it has, and it takes a hundred times as long
        return False
    values = torch.eye(64, dtype=torch.int8)
    try:
        return torch.equal(_int8(values.float(), values, torch.ones(64), None), values.float())
    except (RuntimeError, AttributeError):
        return False

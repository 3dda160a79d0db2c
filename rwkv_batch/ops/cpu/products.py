"""Products with weights that are packed for the kernels for CPUs.

A row's product is the same, bit for bit, beside any other rows.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rwkv_batch.ops.cpu.binding import CpuKernels, PackedMatrix
from rwkv_batch.ops.cpu.memory import WeightMemory

PANEL = 64  # outputs that lie together
SUMMED_AT_ONCE = 1024  # outputs: torch makes a copy of them in 32 bits
MOST_INPUTS = 65536  # 255 * 127 times as many is below 2^31


@dataclass(frozen=True)
class PackedLinear:
    """`x -> x @ weight.T + bias` for fp32 rows x `[rows, inputs]`."""

    kernels: CpuKernels
    matrix: PackedMatrix

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.product(x, self.matrix)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """One of ACTIVATIONS of the product."""
        return self.kernels.product(x, self.matrix, activation)

    def kept_in(self, memory: WeightMemory) -> "PackedLinear":
        """Copy the weights into that memory, and multiply with these."""
        return replace(self, matrix=replace(self.matrix, weights=memory.keep(self.matrix.weights)))


def packed_linear(kernels: CpuKernels, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """The product with a weight `[outputs, inputs]`, fp32 or fp16, and a bias `[outputs]`."""
    kind = "fp16" if weight.dtype == torch.float16 else "fp32"
    return PackedLinear(
        kernels,
        PackedMatrix(kind, pack(weight), (), _filled(bias, len(weight)), len(weight), weight.shape[1]),
    )


def int8_linear(
    kernels: CpuKernels, values: Tensor, scales: Tensor, bias: Tensor | None = None
) -> PackedLinear:
    """`x -> x @ (scales * values).T + bias` for fp32 rows x `[rows, inputs]`.

    values: int8 `[outputs, inputs]`, -127 to 127. scales: fp32 `[outputs]`. bias: fp32 `[outputs]`. x is used
    as it is, or rounded to 16 bits a row where the processor multiplies bytes (product_int8.cpp). Raises
    ValueError for other types, a value of -128, or more inputs than the sums hold.
    """
    if values.dtype != torch.int8 or scales.dtype != torch.float32 or values.shape[:1] != scales.shape:
        raise ValueError("int8_linear takes int8 values [outputs, inputs] and fp32 scales [outputs].")
    outputs, inputs = values.shape
    if inputs > MOST_INPUTS or (values.numel() and int(values.min()) == -128):
        raise ValueError(f"int8_linear takes values of -127 to 127 and at most {MOST_INPUTS} inputs.")
    sums = torch.cat([rows.sum(1, dtype=torch.int32) for rows in values.split(SUMMED_AT_ONCE)])
    totals = _filled(sums * 128, outputs, torch.int32)
    packed, both = pack(values, kernels.int8_group), (_filled(scales, outputs), totals)
    return PackedLinear(kernels, PackedMatrix("int8", packed, both, _filled(bias, outputs), outputs, inputs))


def fp8_linear(
    kernels: CpuKernels, values: Tensor, scales: Tensor, bias: Tensor | None = None
) -> PackedLinear:
    """`x -> x @ (scales * values).T + bias` for fp32 rows x `[rows, inputs]`.

    values: `[outputs, inputs]` in float8_e4m3fn, none NaN. scales: fp32 `[outputs]`. bias: fp32 `[outputs]`.
    """
    packed, own = pack(values.view(torch.uint8)), (_filled(scales, len(values)),)
    return PackedLinear(
        kernels, PackedMatrix("fp8", packed, own, _filled(bias, len(values)), len(values), values.shape[1])
    )


def int4_linear(
    kernels: CpuKernels,
    codes: Tensor,
    scales: Tensor,
    minimums: Tensor,
    group: int,
    bias: Tensor | None = None,
) -> PackedLinear:
    """`x -> x @ (scales * codes + minimums).T + bias` for fp32 rows x `[rows, inputs]`.

    codes: uint8 `[outputs, inputs]`, 0 to 15. scales and minimums: fp16 `[outputs, inputs / group rounded
    up]`. group: 64 or 128. bias: fp32 `[outputs]`. x is used as it is, or rounded to 16 bits a row where the
    processor multiplies bytes (product_groups.cpp).
    """
    packed = _pack_groups(codes, scales, minimums, group, kernels.int4_inputs)
    return PackedLinear(
        kernels,
        PackedMatrix("int4", packed, (), _filled(bias, len(codes)), len(codes), codes.shape[1], group),
    )


def nf4_linear(
    kernels: CpuKernels, codes: Tensor, scales: Tensor, group: int, bias: Tensor | None = None
) -> PackedLinear:
    """Multiply by `scales * NF4[codes]`; x is used as it is."""
    packed = _pack_groups(codes, scales, torch.zeros_like(scales), group, 1)
    return PackedLinear(
        kernels, PackedMatrix("nf4", packed, (), _filled(bias, len(codes)), len(codes), codes.shape[1], group)
    )


def _pack_groups(codes: Tensor, scales: Tensor, minimums: Tensor, group: int, together: int) -> Tensor:
    """`[panels, groups, bytes]` uint8, as product_groups.cpp has them; together: inputs side by side."""
    outputs, inputs = codes.shape
    panels, groups = -(-outputs // PANEL), -(-inputs // group)
    codes = pad(codes, (0, groups * group - inputs, 0, panels * PANEL - outputs))
    # Of [panels, pairs of halves, outputs, groups, steps, inputs] to [panels, groups, steps, pairs, outputs,
    # inputs].
    halves = codes.view(panels, -1, 2, 32 if together == 1 else 16, groups, group // together, together)
    packed = (halves[:, :, 0] | halves[:, :, 1] << 4).permute(0, 3, 4, 1, 2, 5).flatten(2)
    of_groups = pad(torch.stack([scales, minimums]), (0, 0, 0, panels * PANEL - outputs))
    of_panels = of_groups.view(2, panels, PANEL, groups).permute(1, 3, 0, 2).flatten(2)
    return torch.cat([packed, of_panels.contiguous().view(torch.uint8)], 2)


def pack(weight: Tensor, group: int = 1) -> Tensor:
    """`[outputs, inputs]` -> `[panels, inputs / group, 64, group]`, filled up with zeros."""
    outputs, inputs = weight.shape
    panels, groups = -(-outputs // PANEL), -(-inputs // group)
    if outputs % PANEL or inputs % group:
        filled = weight.new_zeros(panels * PANEL, groups * group)
        filled[:outputs, :inputs] = weight
        weight = filled
    packed = weight.reshape(panels, PANEL, groups, group).transpose(1, 2)
    return packed.clone(memory_format=torch.contiguous_format)


def _filled(vector: Tensor | None, outputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A vector `[outputs]` filled up with zeros to whole panels."""
    filled = torch.zeros(-(-outputs // PANEL) * PANEL, dtype=dtype)
    if vector is not None:
        filled[:outputs] = vector
    return filled

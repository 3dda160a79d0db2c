"""Matrices of 8 and 4 bits on a Hopper GPU, as `cuda/gemm_tile8.cu` and its neighbours read them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rwkv_batch.model.cuda.packed.orders import (
    ordered_codes,
    paired_columns,
    tiles_of_4_bits,
    tiles_of_8_bits,
)
from rwkv_batch.ops.weights.bits import unpack_codes
from rwkv_batch.ops.weights.channels import Fp8Weight, Int8Weight, SmallFloatWeight
from rwkv_batch.ops.weights.groups import Int4Weight, WideInt4Weight
from rwkv_batch.ops.weights.weight import Weight

OUTPUT_MULTIPLE = 64  # of which outputs are a multiple; those added are zero
SIGN = 0x80  # which makes a whole number's byte 128 more than the number
CODED = (Int8Weight, Fp8Weight, Int4Weight, WideInt4Weight)


@dataclass(frozen=True)
class CodedMatrix:
    """`[outputs, inputs]`, of which both are multiples of 64."""

    codes: Tensor  # uint8, in an order of orders.py: of fp8 in rows, of int8 and int4 in tiles
    scales: Tensor | None  # [outputs], fp32; those of 4 bits are with the codes
    format: str  # "int8", "fp8", "int4" or "int4-128"
    shape: tuple[int, int]
    columns: bool = False  # whether `paired_columns` has made the codes: `[inputs, outputs]`
    fp8_copy: "CodedMatrix | None" = None  # of the same numbers, for many rows of x in fp8

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def in_fp8(self) -> "CodedMatrix | None":
        """What is multiplied with x in fp8: the matrix itself, or its copy, if it has one."""
        return self if self.format == "fp8" else self.fp8_copy

    @property
    def device(self) -> torch.device:
        return self.codes.device


LargeMatrix = Tensor | CodedMatrix


def coded(weight: Weight, device: torch.device, columns: bool = False) -> CodedMatrix:
    """A matrix in a format of CODED on a GPU, which is a Hopper.

    It has zeros up to a multiple of OUTPUT_MULTIPLE outputs. columns: int8 is to lie by inputs, of which some
    are skipped; others have one layout.
    """
    assert isinstance(weight, CODED)
    parts, shape = filled(weight, device), (round_up_outputs(weight.shape[0]), weight.shape[1])
    codes, scales = parts["values"], parts["scales"]
    if isinstance(weight, Int4Weight):
        tiles = tiles_of_4_bits(codes, scales, parts["minimums"], weight.group)
        return CodedMatrix(tiles, None, weight.format, shape)
    columns = columns and isinstance(weight, Int8Weight)
    order = ordered_codes if isinstance(weight, Fp8Weight) else paired_columns if columns else tiles_of_8_bits
    return CodedMatrix(order(codes), scales, weight.format, shape, columns)


def with_fp8_copy(matrix: CodedMatrix, weight: Weight) -> CodedMatrix:
    """A matrix with a copy in fp8 of the numbers that it stands for, a byte each. weight: what it is made of.

    One of fp8 needs none.
    """
    if matrix.format == "fp8":
        return matrix
    return replace(matrix, fp8_copy=coded(Fp8Weight.repack(weight, matrix.device), matrix.device))


def filled(weight: Weight, device: torch.device) -> dict[str, Tensor]:
    """Its parts on a GPU, with zeros up to a multiple of OUTPUT_MULTIPLE outputs.

    Values are bytes `[outputs, inputs]`, but for nf4, of which a byte has two. To int8 SIGN is added.
    """
    parts = {name: part.to(device) for name, part in weight.parts.items()}
    nothing = SIGN if isinstance(weight, Int8Weight) else 0
    if isinstance(weight, Int8Weight | Fp8Weight):
        parts["values"] = parts["values"].view(torch.uint8) ^ nothing
    elif isinstance(weight, Int4Weight | SmallFloatWeight):
        bits = weight.bits() if isinstance(weight, SmallFloatWeight) else 4
        parts["values"] = unpack_codes(parts["values"], bits, weight.shape[1])
    outputs = weight.shape[0]
    more = (0, round_up_outputs(outputs) - outputs)
    fill = {"values": nothing}
    return {
        name: pad(part, (0, 0) * (part.dim() - 1) + more, value=fill.get(name, 0))
        for name, part in parts.items()
    }


def round_up_outputs(outputs: int) -> int:
    """The smallest multiple of OUTPUT_MULTIPLE that is not below it."""
    return outputs + -outputs % OUTPUT_MULTIPLE


def first_bytes(matrix: LargeMatrix | tuple[CodedMatrix, ...]) -> Tensor:
    """What a kernel before can fetch ahead: the tensor that a product with it reads first."""
    if isinstance(matrix, tuple):
        matrix = matrix[0]
    return matrix.codes if isinstance(matrix, CodedMatrix) else matrix

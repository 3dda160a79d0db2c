"""Matrices of 8 bits on a GPU, as `cuda/gemm_tile8.cu` reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.ops.cuda.tile import tiles_of_codes
from rwkv_batch.ops.weights.channels import Fp8Weight, Int8Weight
from rwkv_batch.ops.weights.weight import Weight

OUTPUT_MULTIPLE = 64  # of which outputs are a multiple; those added are zero
SIGN = 0x80  # which makes a whole number's byte 128 more than the number
CODED = (Int8Weight, Fp8Weight)


@dataclass(frozen=True)
class CodedMatrix:
    """`[outputs, inputs]`, of which both are multiples of 64."""

    tiles: Tensor  # [outputs / 64, inputs / 64, 64, 64] uint8
    scales: Tensor  # [outputs], fp32
    fp8: bool  # what the codes are, else int8

    def __len__(self) -> int:
        return len(self.scales)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), self.tiles.shape[1] * self.tiles.shape[3]

    @property
    def device(self) -> torch.device:
        return self.tiles.device


LargeMatrix = Tensor | CodedMatrix


def has_products(device: torch.device) -> bool:
    """Whether the kernels multiply with such matrices on a GPU: on a Hopper."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def coded(weight: Weight, device: torch.device) -> CodedMatrix:
    """A matrix in int8 or fp8 on a GPU, with zeros up to a multiple of OUTPUT_MULTIPLE outputs."""
    assert isinstance(weight, CODED)
    codes = weight.parts["values"].view(torch.uint8).to(device)
    fp8 = isinstance(weight, Fp8Weight)
    if not fp8:
        codes = codes ^ SIGN
    missing = -len(codes) % OUTPUT_MULTIPLE
    if missing:
        codes = torch.cat([codes, codes.new_full((missing, codes.shape[1]), 0 if fp8 else SIGN)])
    scales = torch.cat([weight.parts["scales"].to(device), torch.zeros(missing, device=device)])
    return CodedMatrix(tiles_of_codes(codes), scales, fp8)


def first_bytes(matrix: LargeMatrix | tuple[CodedMatrix, ...]) -> Tensor:
    """What a kernel before can fetch ahead: the tensor that a product with it reads first."""
    if isinstance(matrix, tuple):
        matrix = matrix[0]
    return matrix.tiles if isinstance(matrix, CodedMatrix) else matrix

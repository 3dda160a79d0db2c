"""Random matrices of codes as the tiled GEMMs for Hopper take them."""

import torch
from cuda_gpu import DEVICE
from torch import Tensor

from rwkv_batch.model.cuda.packed.orders import (
    ordered_codes,
    paired_columns,
    tiles_of_4_bits,
    tiles_of_8_bits,
)

ORDERS = {"int8": tiles_of_8_bits, "fp8": ordered_codes, "columns": paired_columns}  # the last is int8


def quantized8(n: int, k: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Random weights: as the kernel takes them, their scales, and in fp64."""
    scale = (torch.rand(n, device=DEVICE) + 0.5) / k**0.5
    if kind == "fp8":
        numbers = torch.randn(n, k, device=DEVICE).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes = numbers.view(torch.uint8)
    else:
        numbers = torch.randint(-127, 128, (n, k), device=DEVICE)
        scale /= 64
        codes = (numbers + 128).to(torch.uint8)
    weights = numbers.double() * scale.double()[:, None]
    return ORDERS[kind](codes), scale, weights


def quantized4(n: int, k: int, group: int) -> tuple[Tensor, Tensor]:
    """Random weights: as the kernel takes them, and in fp64, rounded to fp16 as it rounds them."""
    codes, groups = torch.randint(0, 16, (n, k), device=DEVICE, dtype=torch.uint8), -(-k // group)
    scales = ((torch.rand(n, groups, device=DEVICE) + 0.5) / k**0.5 / 4).half()
    minimums = (scales.float() * (torch.rand(n, groups, device=DEVICE) - 9)).half()
    of_numbers = [part.double().repeat_interleave(group, 1)[:, :k] for part in (scales, minimums)]
    weights = codes.double() * of_numbers[0] + of_numbers[1]
    return tiles_of_4_bits(codes, scales, minimums, group), weights.half().double()

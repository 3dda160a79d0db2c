"""Matrices of codes for tests of the kernels that every GPU runs."""

import torch
from torch import Tensor

from rwkv_batch.model.cuda.packed.blocks import BlockMatrix, decoded_room, in_blocks
from rwkv_batch.ops.weights.channels import ChannelWeight, Fp5Weight, Fp6Weight, Fp8Weight, Int8Weight
from rwkv_batch.ops.weights.groups import (
    NF4,
    WHOLE_PAIRS,
    GroupWeight,
    Int4Weight,
    Nf4Weight,
    WideInt4Weight,
    pairs_of,
)
from rwkv_batch.ops.weights.weight import Weight

OF_CHANNELS = (Int8Weight, Fp8Weight, Fp6Weight, Fp5Weight)
KINDS = {kind.format: kind for kind in (*OF_CHANNELS, Int4Weight, WideInt4Weight, Nf4Weight)}
NF4_HALVES = pairs_of(NF4.half().float())


def random_weight(kind: str, n: int, k: int) -> Weight:
    """A matrix of random numbers, whose products with others are near 1; no two groups are alike."""
    matrix = torch.randn(n, k) * (torch.rand(n, 1) + 0.5) / k**0.5
    if not issubclass(KINDS[kind], ChannelWeight):
        factors, offsets = torch.rand(n, k // 64) + 0.5, torch.randn(n, k // 64) / k**0.5
        matrix = (matrix.view(n, -1, 64) * factors[..., None] + offsets[..., None]).flatten(1)
    return KINDS[kind].pack(matrix)


def numbers(weight: Weight) -> Tensor:
    """What a matrix stands for in fp64; of groups rounded to fp16, as the kernels multiply with it."""
    if not isinstance(weight, GroupWeight):
        return weight.dequantize().double()
    four = isinstance(weight, Int4Weight)
    found = weight.look_up(slice(None), WHOLE_PAIRS if four else NF4_HALVES).double()
    found *= weight.parts["scales"].double()[..., None]
    if four:
        found += weight.parts["minimums"].double()[..., None]
    return found.half().double().flatten(1)[:, : weight.shape[1]]


def matrix(weight: Weight, device: str) -> BlockMatrix:
    """The matrix in the form that the kernels read."""
    return in_blocks(weight, decoded_room([weight], torch.device(device)))

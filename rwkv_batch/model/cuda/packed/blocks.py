"""Matrices of codes on any GPU, as `cuda/codes.cuh` has them: in blocks of 16 outputs and 64 inputs."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rwkv_batch.model.cuda.packed.coded import OUTPUT_MULTIPLE, CodedMatrix, filled, round_up_outputs
from rwkv_batch.model.cuda.packed.orders import (
    blocks_of_4_bits,
    blocks_of_5_bits,
    blocks_of_6_bits,
    blocks_of_8_bits,
    blocks_of_pairs,
)
from rwkv_batch.ops.weights.channels import ChannelWeight
from rwkv_batch.ops.weights.groups import Int4Weight, Nf4Weight
from rwkv_batch.ops.weights.weight import Weight

BLOCK_OUTPUTS = 16
ORDERS = {"fp6": blocks_of_6_bits, "fp5": blocks_of_5_bits}
# Bytes of room for a matrix as fp16, at most; a larger one is decoded and multiplied in parts. Of 7.2B they
# are half of a key or value.
DECODED_BYTES = 64 << 20


@dataclass(frozen=True)
class DecodedRoom:
    """Room for outputs as fp16, which the matrices of a model share; it is taken when it is first needed."""

    numbers: int
    device: torch.device

    @property
    def nbytes(self) -> int:
        """What it takes then."""
        return self.numbers * torch.float16.itemsize

    @cached_property
    def tensor(self) -> Tensor:
        """`[numbers]` fp16."""
        return torch.empty(self.numbers, dtype=torch.float16, device=self.device)


@dataclass(frozen=True, kw_only=True)
class BlockMatrix(CodedMatrix):
    """A matrix of codes in blocks, in a format that need not have products in tiles.

    codes: `[outputs / 16, inputs / 64, bytes of a block]`, of int4-128 `[outputs / 16, inputs / 128, bytes of
    two blocks]`, uint8.
    """

    decoded: DecodedRoom

    def decoded_parts(self) -> list[slice]:
        """The outputs that fit into `decoded` together, in turn."""
        outputs, inputs = self.shape
        at_once = self.decoded.numbers // inputs // OUTPUT_MULTIPLE * OUTPUT_MULTIPLE
        return [slice(start, min(start + at_once, outputs)) for start in range(0, outputs, at_once)]

    def decoded_part(self, part: slice) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of a part of `decoded_parts` codes, scales, and where it goes: `[outputs, inputs]` fp16."""
        inputs, scales = self.shape[1], None if self.scales is None else self.scales[part]
        place = self.decoded.tensor[: (part.stop - part.start) * inputs].view(-1, inputs)
        return self.codes[part.start // BLOCK_OUTPUTS : part.stop // BLOCK_OUTPUTS], scales, place


def decoded_room(weights: Collection[Weight], device: torch.device) -> DecodedRoom:
    """Room for matrices of these on a GPU, one at a time, or for a part of one."""
    sizes = [round_up_outputs(weight.shape[0]) * weight.shape[1] for weight in weights]
    least = max((OUTPUT_MULTIPLE * weight.shape[1] for weight in weights), default=0)
    numbers = max(min(max(sizes, default=0), DECODED_BYTES // 2), least)
    return DecodedRoom(numbers, device)


def in_blocks(weight: Weight, decoded: DecodedRoom) -> BlockMatrix:
    """A matrix on the GPU of `decoded`, with zeros up to a multiple of OUTPUT_MULTIPLE outputs."""
    parts, shape = filled(weight, decoded.device), (round_up_outputs(weight.shape[0]), weight.shape[1])
    codes, scales = parts["values"], parts["scales"]
    if isinstance(weight, Int4Weight):
        blocks = blocks_of_4_bits(codes, scales, parts["minimums"], weight.group)
    elif isinstance(weight, Nf4Weight):
        blocks = blocks_of_pairs(codes, scales)
    else:
        blocks = ORDERS.get(weight.format, blocks_of_8_bits)(codes)
    own = scales if isinstance(weight, ChannelWeight) else None
    return BlockMatrix(codes=blocks, scales=own, format=weight.format, shape=shape, decoded=decoded)

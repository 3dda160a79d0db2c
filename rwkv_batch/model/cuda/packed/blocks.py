"""Matrices of codes on any GPU, as `cuda/codes.cuh` has them: in blocks of 16 outputs and 64 inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rwkv_batch.model.cuda.packed.coded import SIGN, CodedMatrix, DecodedRoom, round_up_outputs
from rwkv_batch.model.cuda.packed.orders import (
    blocks_of_4_bits,
    blocks_of_5_bits,
    blocks_of_6_bits,
    blocks_of_8_bits,
    blocks_of_pairs,
)
from rwkv_batch.ops.weights.bits import unpack_codes
from rwkv_batch.ops.weights.channels import ChannelWeight, Fp6Weight, Fp8Weight, Int8Weight, SmallFloatWeight
from rwkv_batch.ops.weights.groups import Int4Weight, Nf4Weight
from rwkv_batch.ops.weights.weight import Weight

BLOCK_OUTPUTS = 16


@dataclass(frozen=True)
class BlockMatrix(CodedMatrix):
    """As its base, in blocks; its format may be one that it has no products for there.

    codes: `[outputs / 16, inputs / 64, bytes of a block]`, uint8.
    """

    def codes_of(self, part: slice) -> Tensor:
        """As of its base."""
        return self.codes[part.start // BLOCK_OUTPUTS : part.stop // BLOCK_OUTPUTS]


def in_blocks(weight: Weight, decoded: DecodedRoom) -> BlockMatrix:
    """A matrix on the GPU of `decoded`, with zeros up to a multiple of OUTPUT_MULTIPLE outputs."""
    outputs, inputs = weight.shape
    shape = (round_up_outputs(outputs), inputs)
    more = (0, 0, 0, shape[0] - outputs)
    parts = {name: part.to(decoded.device) for name, part in weight.parts.items()}
    scales = None
    if isinstance(weight, Int4Weight):
        codes = unpack_codes(parts["values"], 4, inputs)
        repeats = weight.group // Int4Weight.group
        of_groups = [
            pad(parts[name].repeat_interleave(repeats, 1)[:, : inputs // Int4Weight.group], more)
            for name in ("scales", "minimums")
        ]
        blocks = blocks_of_4_bits(pad(codes, more), *of_groups)
    elif isinstance(weight, Nf4Weight):
        blocks = blocks_of_pairs(pad(parts["values"], more), pad(parts["scales"], more))
    elif isinstance(weight, SmallFloatWeight):
        codes = pad(unpack_codes(parts["values"], weight.bits(), inputs), more)
        blocks = blocks_of_6_bits(codes) if isinstance(weight, Fp6Weight) else blocks_of_5_bits(codes)
    else:
        assert isinstance(weight, Int8Weight | Fp8Weight)
        codes, nothing = parts["values"].view(torch.uint8), 0
        if isinstance(weight, Int8Weight):
            codes, nothing = codes ^ SIGN, SIGN
        blocks = blocks_of_8_bits(pad(codes, more, value=nothing))
    if isinstance(weight, ChannelWeight):
        scales = pad(parts["scales"], (0, shape[0] - outputs))
    kind = Int4Weight.format if isinstance(weight, Int4Weight) else weight.format
    return BlockMatrix(blocks, scales, kind, shape, decoded=decoded)

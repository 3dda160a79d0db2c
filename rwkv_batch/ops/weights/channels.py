"""8, 6 and 5 bits with one fp32 scale for each output: `w = s q`, with s so that the largest q is reached.

A scale is `max |w| / largest q`, and q is w / s in fp32, rounded to the nearest code, ties to even. Where all
numbers of an output are zero, so are its scale and codes.
"""

from abc import abstractmethod
from typing import ClassVar, Self

import torch
from torch import Tensor

from rwkv_batch.ops.weights.bits import pack_codes, packed_size, unpack_codes
from rwkv_batch.ops.weights.weight import PartLayout, Weight, blocks, over

FP16_BIAS, FP16_MANTISSA = 15, 10


class ChannelWeight(Weight):
    """What formats with a scale for each output have in common. `most`: the largest q."""

    most: ClassVar[float]

    @classmethod
    @abstractmethod
    def values(cls, inputs: int) -> tuple[torch.dtype, int]:
        """Dtype and count of the packed numbers of an output."""

    @classmethod
    @abstractmethod
    def encode(cls, numbers: Tensor) -> Tensor:
        """fp32 `[n, inputs]` of at most `most`, to packed numbers."""

    @classmethod
    def layout(cls, outputs: int, inputs: int) -> dict[str, PartLayout]:
        dtype, count = cls.values(inputs)
        return {
            "values": PartLayout(dtype, (outputs, count)),
            "scales": PartLayout(torch.float32, (outputs,)),
        }

    @classmethod
    def pack_rows(cls, rows: Tensor) -> dict[str, Tensor]:
        scales = rows.abs().amax(1) / cls.most
        numbers = over(rows, scales.unsqueeze(1)).clamp_(-cls.most, cls.most)
        return {"values": cls.encode(numbers), "scales": scales}


class Int8Weight(ChannelWeight):
    """Whole numbers from -127 to 127."""

    format, most = "int8", 127

    @classmethod
    def values(cls, inputs: int) -> tuple[torch.dtype, int]:
        return torch.int8, inputs

    @classmethod
    def encode(cls, numbers: Tensor) -> Tensor:
        return numbers.round().to(torch.int8)

    def read_rows(self, rows: slice) -> Tensor:
        return self.parts["values"][rows].float().mul_(self.parts["scales"][rows, None])


class Fp8Weight(ChannelWeight):
    """e4m3 without infinities: 4 bits of precision from 2^-6 to 448, and steps of 2^-9 below."""

    format, most = "fp8", 448

    @classmethod
    def values(cls, inputs: int) -> tuple[torch.dtype, int]:
        return torch.float8_e4m3fn, inputs

    @classmethod
    def encode(cls, numbers: Tensor) -> Tensor:
        return numbers.to(torch.float8_e4m3fn)

    def read_rows(self, rows: slice) -> Tensor:
        codes = self.parts["values"].view(torch.uint8)[rows]
        return decode_float(codes, 4, 3).mul_(self.parts["scales"][rows, None])


class Fp8BothWeight(Fp8Weight):
    """A matrix of fp8 that multiplies rows of x which have become fp8 too, as a GPU does with many rows."""

    @classmethod
    def of(cls, weight: Fp8Weight) -> Self:
        """A matrix with the parts of another."""
        return cls(weight.shape, weight.parts)

    @classmethod
    def rounded(cls, x: Tensor) -> Tensor:
        """Rows `[n, inputs]` fp32 as fp8 with a scale each, in fp32 again."""
        scales = x.abs().amax(1, keepdim=True) / cls.most
        return over(x, scales).to(torch.float8_e4m3fn).float().mul_(scales)


class SmallFloatWeight(ChannelWeight):
    """A sign, `exponent` and `mantissa` bits, without infinities and NaN; packed as in `bits`."""

    exponent: ClassVar[int]
    mantissa: ClassVar[int]

    @classmethod
    def bits(cls) -> int:
        """Of a number."""
        return 1 + cls.exponent + cls.mantissa

    @classmethod
    def values(cls, inputs: int) -> tuple[torch.dtype, int]:
        return torch.uint8, packed_size(inputs, cls.bits())

    @classmethod
    def encode(cls, numbers: Tensor) -> Tensor:
        return pack_codes(encode_float(numbers, cls.exponent, cls.mantissa), cls.bits())

    def read_rows(self, rows: slice) -> Tensor:
        return self._numbers(rows).mul_(self.parts["scales"][rows, None])

    def as_fp8(self) -> Tensor:
        """Its numbers before their scales, `[outputs, inputs]` in float8_e4m3fn, which has them all."""
        found = torch.empty(self.shape, dtype=torch.float8_e4m3fn)
        for rows in blocks(*self.shape):
            found[rows] = self._numbers(rows).to(found.dtype)
        return found

    def _numbers(self, rows: slice) -> Tensor:
        codes = unpack_codes(self.parts["values"][rows], self.bits(), self.shape[1])
        return decode_float(codes, self.exponent, self.mantissa)


class Fp6Weight(SmallFloatWeight):
    """e3m2: 3 bits of precision from 1/4 to 28, and steps of 1/16 below."""

    format, most, exponent, mantissa = "fp6", 28, 3, 2


class Fp5Weight(SmallFloatWeight):
    """e2m2: 3 bits of precision from 1 to 7, and steps of 1/4 below."""

    format, most, exponent, mantissa = "fp5", 7, 2, 2


def encode_float(numbers: Tensor, exponent: int, mantissa: int) -> Tensor:
    """The nearest code to each number, ties to even, uint8: sign, exponent, mantissa from the highest bit on.

    The exponent's bias is `2 ** (exponent - 1) - 1`, and exponent 0 stands for subnormal numbers.
    """
    lowest = 2 - 2 ** (exponent - 1)  # exponent of the smallest normal number
    size = numbers.abs()
    place = torch.frexp(size.clamp(min=2.0**lowest)).exponent - 1  # frexp gives [1/2, 1)
    steps = torch.ldexp(size, mantissa - place).round_().to(torch.int32)  # 2^mantissa is the first of a place
    # A number that is rounded up to the next place has the mantissa 0 there, as the sum carries over.
    codes: Tensor = steps + ((place - lowest) << mantissa)
    codes = codes | (numbers.signbit().int() << (exponent + mantissa))
    return codes.to(torch.uint8)


def decode_float(codes: Tensor, exponent: int, mantissa: int) -> Tensor:
    """The fp32 number of each code, uint8, but for NaN, which these are not.

    The bits of a code are moved to where fp16 has them, subnormal ones too, and the other bias is a factor.
    """
    wide = codes.to(torch.int16)
    magnitude = (wide & (2 ** (exponent + mantissa) - 1)) << (FP16_MANTISSA - mantissa)
    sign = (wide >> (exponent + mantissa)) << 15
    factor = 2.0 ** (FP16_BIAS - (2 ** (exponent - 1) - 1))
    numbers: Tensor = (magnitude | sign).view(torch.float16).float().mul_(factor)
    return numbers

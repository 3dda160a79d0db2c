"""The seam of weight formats: a matrix as packed tensors, and back.

A format is a subclass. It knows no model: which matrices of a model are packed says
`rwkv_batch/model/quantization/matrices.py`. Every row (output) is packed by itself, so a matrix is packed and
read some rows at a time, and no second copy of it is made.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

NUMBERS_AT_ONCE = 1 << 17  # of a matrix that is packed or read, in fp32
ON_GPU_AT_ONCE = 1 << 26  # of one on a GPU, where each launch takes longer than so few numbers
REPACKED_AT_ONCE = 1 << 22  # of one that is read and packed there: what both take is some 100 MB


class PartLayout(NamedTuple):
    """One packed tensor of a matrix."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Weight(ABC):
    """A matrix `[outputs, inputs]` in a format.

    parts: the packed tensors, by the names of `layout`.
    """

    format: ClassVar[str]  # as --weights names it

    def __init__(self, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> None:
        """Raises ValueError, a sentence's end, for parts that are none of a matrix of this shape."""
        wanted = self.layout(*shape)
        if parts.keys() != wanted.keys():
            raise ValueError(f"has the parts {', '.join(sorted(parts))} in place of {', '.join(wanted)}")
        for name, (dtype, size) in wanted.items():
            if parts[name].dtype != dtype or tuple(parts[name].shape) != size:
                raise ValueError(f"has a part {name} that does not fit {self.format} of {list(shape)}")
        self.shape, self.parts = shape, {name: parts[name] for name in wanted}

    @classmethod
    def pack(cls, matrix: Tensor) -> Self:
        """A matrix of finite numbers in any floating dtype. Numbers past the format's range saturate."""
        outputs, inputs = matrix.shape
        at_once = ON_GPU_AT_ONCE if matrix.is_cuda else NUMBERS_AT_ONCE
        return cls._pack((outputs, inputs), lambda rows: matrix[rows].float(), "cpu", at_once)

    @classmethod
    def repack(cls, weight: "Weight", device: torch.device | str) -> Self:
        """The numbers that a matrix of another format stands for; read, packed and kept on a device."""
        parts = {name: part.to(device) for name, part in weight.parts.items()}
        source = type(weight)(weight.shape, parts)
        on_cpu = torch.device(device).type == "cpu"
        at_once = NUMBERS_AT_ONCE if on_cpu else REPACKED_AT_ONCE
        return cls._pack(weight.shape, source.read_rows, device, at_once)

    @classmethod
    def _pack(
        cls,
        shape: tuple[int, int],
        read: Callable[[slice], Tensor],
        device: torch.device | str,
        at_once: int,
    ) -> Self:
        """read: some rows in fp32. device: where the parts are. at_once: numbers that are read together."""
        parts = {
            name: torch.empty(size, dtype=dtype, device=device)
            for name, (dtype, size) in cls.layout(*shape).items()
        }
        for rows in blocks(*shape, at_once):
            for name, part in cls.pack_rows(read(rows)).items():
                parts[name][rows] = part
        return cls(shape, parts)

    @classmethod
    @abstractmethod
    def layout(cls, outputs: int, inputs: int) -> dict[str, PartLayout]:
        """The packed tensors of a matrix; the first dimension of each is `outputs`."""

    @classmethod
    @abstractmethod
    def pack_rows(cls, rows: Tensor) -> dict[str, Tensor]:
        """The parts of some rows `[n, inputs]`, fp32."""

    @abstractmethod
    def read_rows(self, rows: slice) -> Tensor:
        """Some rows dequantized, `[n, inputs]` fp32: the reference for every product with them."""

    def dequantize(self) -> Tensor:
        """The matrix that it stands for, `[outputs, inputs]` fp32."""
        return self.to("cpu", torch.float32)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """The matrix that it stands for in a dtype on a device."""
        matrix = torch.empty(self.shape, dtype=dtype, device=device)
        for rows in blocks(*self.shape):
            matrix[rows] = self.read_rows(rows).to(device, dtype)
        return matrix

    def on_meta(self) -> Self:
        """Its shape and parts without their numbers."""
        return type(self)(self.shape, {name: part.to("meta") for name, part in self.parts.items()})

    @property
    def nbytes(self) -> int:
        """What the parts take."""
        return sum(part.nbytes for part in self.parts.values())

    def numel(self) -> int:
        """Numbers of the matrix."""
        return self.shape[0] * self.shape[1]


Matrix = Tensor | Weight  # of a model: either has `shape` and `to(device, dtype)`


def blocks(outputs: int, inputs: int, numbers: int = NUMBERS_AT_ONCE) -> Iterator[slice]:
    """Rows that are packed or read at once, of so many numbers, until all have been."""
    at_once = max(1, numbers // max(inputs, 1))
    return (slice(start, min(start + at_once, outputs)) for start in range(0, outputs, at_once))


def grouped(rows: Tensor, size: int) -> Tensor:
    """`[n, inputs]` in groups of neighbours, `[n, groups, size]`; the last is filled up with its last number.

    So the smallest, the largest and the largest absolute number of a group are those of its own.
    """
    missing = -rows.shape[1] % size
    if missing:
        rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], 1)
    return rows.reshape(len(rows), -1, size)


def over(rows: Tensor, scales: Tensor) -> Tensor:
    """`rows / scales`; zero where a scale is, as where a row or group is all zeros."""
    return torch.where(scales > 0, rows / scales, 0)

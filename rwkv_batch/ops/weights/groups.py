"""4 bits with scales for each group of neighbouring inputs of an output."""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from rwkv_batch.ops.weights.bits import pack_codes, packed_size
from rwkv_batch.ops.weights.weight import PartLayout, Weight, blocks, grouped, over

MOST_HALF = 65504.0  # the largest number of fp16
# Of the paper "QLoRA" (arXiv 2305.14314), appendix E.
BELOW = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
BELOW_ZERO = (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
ABOVE_ZERO = (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
ABOVE = (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
NF4 = torch.tensor((*BELOW, *BELOW_ZERO, *ABOVE_ZERO, *ABOVE))
NF4_BETWEEN = (NF4[1:] + NF4[:-1]) / 2


class GroupWeight(Weight):
    """What formats with scales for each group have in common. The last group of an output may be shorter."""

    group: ClassVar[int]

    @classmethod
    def groups(cls, inputs: int) -> int:
        """Of an output."""
        return -(-inputs // cls.group)

    def look_up(self, rows: slice, pairs: Tensor) -> Tensor:
        """What the codes of some rows stand for by a table of `pairs_of`: `[n, groups, group]` fp32.

        In the last group what is missing is anything.
        """
        packed = self.parts["values"][rows]
        found = pairs.to(packed.device).index_select(0, packed.flatten().int())
        numbers = found.view(torch.float32).view(len(packed), -1)
        filled = self.groups(self.shape[1]) * self.group
        numbers = pad(numbers, (0, filled - numbers.shape[1]))
        return numbers.view(len(packed), -1, self.group)


def pairs_of(table: Tensor) -> Tensor:
    """For each byte, two codes of 4 bits, what these stand for: `[256]` fp64, each the bits of two fp32.

    To look bytes up takes a third of the time that it takes to unpack them and look codes up.
    """
    return torch.stack([table.repeat(16), table.repeat_interleave(16)], 1).view(torch.float64).flatten()


WHOLE_PAIRS = pairs_of(torch.arange(16.0))
NF4_PAIRS = pairs_of(NF4)


class Int4Weight(GroupWeight):
    """`w = s q + m` with q from 0 to 15, and s and m in fp16 for each group of 64.

    m is the smallest number of a group, and s the largest less the smallest, divided by 15; both are rounded
    to fp16. q is (w - m) / s in fp32, rounded, ties to even.
    """

    format, group = "int4", 64

    @classmethod
    def layout(cls, outputs: int, inputs: int) -> dict[str, PartLayout]:
        of_groups = PartLayout(torch.float16, (outputs, cls.groups(inputs)))
        values = PartLayout(torch.uint8, (outputs, packed_size(inputs, 4)))
        return {"values": values, "scales": of_groups, "minimums": of_groups}

    @classmethod
    def pack_rows(cls, rows: Tensor) -> dict[str, Tensor]:
        groups = grouped(rows.clamp(-MOST_HALF, MOST_HALF), cls.group)
        low, high = groups.amin(2), groups.amax(2)
        return cls.pack_groups(groups, low, high, rows.shape[1])

    @classmethod
    def pack_heeding(cls, matrix: Tensor, heed: Tensor, shrinks: Sequence[float]) -> Self:
        """A matrix whose groups have the range of that of `shrinks` with which they are closest.

        Closest: the sum of squared errors, each times `heed` `[inputs]`, is the smallest.
        """
        outputs, inputs = matrix.shape
        layout = cls.layout(outputs, inputs)
        parts = {name: torch.empty(size, dtype=dtype) for name, (dtype, size) in layout.items()}
        of_groups = grouped(heed.unsqueeze(0), cls.group)
        for rows in blocks(outputs, inputs):
            groups = grouped(matrix[rows].float().clamp(-MOST_HALF, MOST_HALF), cls.group)
            low, high = groups.amin(2), groups.amax(2)
            best, least_kept, most_kept = torch.full_like(low, torch.inf), low.clone(), high.clone()
            for shrink in shrinks:
                step, least = ((high - low) * shrink / 15).half().float(), (low * shrink).half().float()
                step, least = step.unsqueeze(2), least.unsqueeze(2)
                found = over(groups - least, step).round_().clamp_(0, 15).mul_(step).add_(least)
                error = (found - groups).square_().mul_(of_groups).sum(2)
                better = error < best
                best = torch.where(better, error, best)
                least_kept[better] = low[better] * shrink
                most_kept[better] = high[better] * shrink
            for name, part in cls.pack_groups(groups, least_kept, most_kept, inputs).items():
                parts[name][rows] = part
        return cls((outputs, inputs), parts)

    @classmethod
    def pack_groups(cls, groups: Tensor, low: Tensor, high: Tensor, inputs: int) -> dict[str, Tensor]:
        """Groups `[n, groups, group]` with codes for `low` to `high` `[n, groups]`; the others saturate."""
        scales, minimums = ((high - low) / 15).half(), low.half()
        steps = over(groups - minimums.float().unsqueeze(2), scales.float().unsqueeze(2))
        codes = steps.round_().clamp_(0, 15).to(torch.uint8)
        packed = pack_codes(codes.flatten(1)[:, :inputs], 4)
        return {"values": packed, "scales": scales, "minimums": minimums}

    def read_rows(self, rows: slice) -> Tensor:
        scales, minimums = (self.parts[name][rows].float().unsqueeze(2) for name in ("scales", "minimums"))
        numbers = self.look_up(rows, WHOLE_PAIRS).mul_(scales).add_(minimums)
        return numbers.flatten(1)[:, : self.shape[1]]


class WideInt4Weight(Int4Weight):
    """int4 with groups of 128: a quarter of a bit less for each number."""

    format, group = "int4-128", 128


CALIBRATED = {kind.format: kind for kind in (Int4Weight, WideInt4Weight)}  # which `pack_heeding` makes too


class Nf4Weight(GroupWeight):
    """`w = s NF4[q]`: 16 quantiles of the normal distribution, and `s = max |w|` in fp16 for blocks of 64.

    q is the code whose number is nearest to w / s in fp32; in the middle of two it is the lower one.
    """

    format, group = "nf4", 64

    @classmethod
    def layout(cls, outputs: int, inputs: int) -> dict[str, PartLayout]:
        return {
            "values": PartLayout(torch.uint8, (outputs, packed_size(inputs, 4))),
            "scales": PartLayout(torch.float16, (outputs, cls.groups(inputs))),
        }

    @classmethod
    def pack_rows(cls, rows: Tensor) -> dict[str, Tensor]:
        groups = grouped(rows, cls.group)
        scales = groups.abs().amax(2).clamp_(max=MOST_HALF).half()
        ratios, borders = over(groups, scales.float().unsqueeze(2)), NF4_BETWEEN.to(rows.device)
        codes = torch.bucketize(ratios, borders, out_int32=True).to(torch.uint8)
        return {"values": pack_codes(codes.flatten(1)[:, : rows.shape[1]], 4), "scales": scales}

    def read_rows(self, rows: slice) -> Tensor:
        scales = self.parts["scales"][rows].float().unsqueeze(2)
        numbers = self.look_up(rows, NF4_PAIRS).mul_(scales)
        return numbers.flatten(1)[:, : self.shape[1]]

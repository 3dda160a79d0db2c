"""Adapters of rows: low-rank pairs beside the weights, `y += (x A^T) B^T`, for the tokens of each.

What the time mix reads out of the state may be scaled by channel too, `y (1 + offset)` before the group norm:
the `time_offset` of tuned states.

This is how they lie in a slot on any device, and their products in torch, the reference.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rwkv_batch.ops.host_memory import pinned_copy, pinned_if_possible
from rwkv_batch.ops.linear import Linear, prepare

TARGETS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")
RANK_MULTIPLE = 16  # to which ranks are filled up with zeros: a step of the kernels
MOST_RANK = 256
ALIGNMENT = 8  # numbers of which the place of a matrix is a multiple
ENTRY = 2  # numbers of an entry of a table: rank, and place of A in units of ALIGNMENT; B follows A


@dataclass(frozen=True)
class LowRankAdapter:
    """An adapter as it lies in a slot: one run of numbers, and where its matrices are in that.

    digest: 32 hexadecimal digits that follow from its numbers and its scaling.
    """

    digest: str
    rank: int  # the largest, as it was trained
    numbers: Tensor  # [n], in the dtype of the model's activations
    table: Tensor  # [layers, TARGETS, ENTRY] int32; rank 0: that matrix is not changed
    offsets: Tensor | None = None  # [layers, width], in that dtype: of what is read out of the state

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    def of_layers(self, part: range, width: int, hidden: int) -> "LowRankAdapter":
        """What it has of neighbouring layers, of a model of that width and so many hidden units.

        The numbers of these layers lie side by side, as model/adapters/low_rank.py lays them out.
        """
        table = self.table[part.start : part.stop].clone()
        ranks, places = table.unbind(-1)
        sizes = ranks * torch.tensor([sum(shape) for shape in shapes(width, hidden)])
        first = int(places[ranks > 0].min()) if ranks.any() else 0
        end = int((places * ALIGNMENT + sizes).max())
        places[ranks > 0] -= first
        return replace(
            self,
            numbers=self.numbers[first * ALIGNMENT : end],
            table=pinned_copy(table, self.table.is_pinned()),
            offsets=None if self.offsets is None else self.offsets[part.start : part.stop],
        )

    def pair(self, layer: int, target: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor] | None:
        """A `[rank, inputs]` and B `[outputs, rank]` for a matrix; None: it is not changed."""
        rank, place = self.table[layer, target].tolist()
        if not rank:
            return None
        inner, outer = self.numbers[place * ALIGNMENT :][: rank * (inputs + outputs)].split(
            [rank * inputs, rank * outputs]
        )
        return inner.view(rank, inputs), outer.view(outputs, rank)


def scaled(adapter: LowRankAdapter, factor: float, width: int, hidden: int) -> LowRankAdapter:
    """An adapter that changes so many times as much as this one, with a digest of its own."""
    numbers = adapter.numbers.clone()
    changed = replace(
        adapter,
        digest=scaled_digest(adapter.digest, factor),
        numbers=pinned_copy(numbers, adapter.numbers.is_pinned()),
    )
    for layer in range(len(adapter.table)):
        for target, (outputs, inputs) in enumerate(shapes(width, hidden)):
            if pair := changed.pair(layer, target, inputs, outputs):
                pair[1].copy_(pair[1].float() * factor)
    return changed


def scaled_digest(digest: str, factor: float) -> str:
    """That of an adapter scaled by a factor."""
    return hashlib.sha256(f"{digest} x {factor!r}".encode()).hexdigest()[: len(digest)]


def readout_adapter(digest: str, offsets: Tensor, dtype: torch.dtype, pinned: bool = False) -> LowRankAdapter:
    """One that changes no matrix. offsets: `[layers, width]`. pinned: whether it is copied to a GPU."""
    table = pinned_if_possible(
        torch.zeros, len(offsets), len(TARGETS), ENTRY, dtype=torch.int32, wanted=pinned
    )
    offsets = offsets.to(dtype)
    return LowRankAdapter(digest, 0, torch.empty(0, dtype=dtype), table, pinned_copy(offsets, pinned))


def shapes(width: int, hidden: int) -> list[tuple[int, int]]:
    """Outputs and inputs of each of TARGETS."""
    return [(width, width)] * 4 + [(hidden, width), (width, hidden)]


def slot_numbers(layers: int, width: int, hidden: int, most_rank: int) -> int:
    """How many numbers an adapter has at most."""
    return layers * filled(most_rank) * sum(map(sum, shapes(width, hidden)))


def filled(rank: int) -> int:
    """The next multiple of RANK_MULTIPLE."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter whose matrices are packed for a device: A and B by layer and place in TARGETS."""

    pairs: Mapping[tuple[int, int], tuple[Linear, Linear]]
    scales: Tensor | None  # [layers, width], fp32: of what is read out of the state

    @classmethod
    def on(
        cls,
        adapter: LowRankAdapter,
        width: int,
        hidden: int,
        device: torch.device,
        dtype: torch.dtype,
        layers: range | None = None,
    ) -> "PreparedAdapter":
        """For a model of that width and so many hidden units. layers: those that are needed; None: all."""
        pairs = {}
        for layer in layers or range(len(adapter.table)):
            for target, (outputs, inputs) in enumerate(shapes(width, hidden)):
                if pair := adapter.pair(layer, target, inputs, outputs):
                    inner, outer = (prepare(matrix, device=device, dtype=dtype) for matrix in pair)
                    pairs[layer, target] = inner, outer
        offsets = adapter.offsets
        return cls(pairs, None if offsets is None else 1 + offsets.to(device, torch.float32))


@dataclass(frozen=True)
class Changes:
    """What adapters change in one layer.

    groups: tokens `[n]`, or those side by side, and their adapter.
    """

    groups: Sequence[tuple[Tensor | slice, PreparedAdapter]] = ()
    layer: int = 0

    def of(self, layer: int) -> "Changes":
        """The changes in one layer."""
        return Changes(self.groups, layer) if self.groups else self

    def add(self, target: str, x: Tensor, y: Tensor) -> Tensor:
        """y `[T, outputs]`, the product of x `[T, inputs]` and one of TARGETS, with the change, in place."""
        for tokens, adapter in self.groups:
            if pair := adapter.pairs.get((self.layer, TARGETS.index(target))):
                change = pair[1](pair[0](x[tokens]))
                if isinstance(tokens, slice):
                    y[tokens].add_(change)
                else:
                    y.index_add_(0, tokens, change)
        return y

    def scales(self, count: int) -> Tensor | None:
        """What is read out of the state is multiplied with, `[count, width]` for so many tokens; None: 1."""
        scaled = [(tokens, a.scales[self.layer]) for tokens, a in self.groups if a.scales is not None]
        if not scaled:
            return None
        found = scaled[0][1].new_ones(count, len(scaled[0][1]))
        for tokens, scale in scaled:
            found[tokens] = scale
        return found

    def scale(self, y: Tensor) -> Tensor:
        """y `[T, H, 64]`, what is read out of the state, scaled in place."""
        scales = self.scales(len(y))
        return y if scales is None else y.mul_(scales.view(y.shape))


def changes_of(
    adapters: Sequence[PreparedAdapter | None],
    of_rows: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
) -> Changes:
    """Of packed rows, each with an adapter by its slot, negative for none; of no rows: nothing."""
    if not of_rows:
        return Changes()
    slots = torch.tensor(of_rows).repeat_interleave(torch.tensor(lengths))
    groups: list[tuple[Tensor | slice, PreparedAdapter]] = []
    for slot in sorted({slot for slot in of_rows if slot >= 0}):
        adapter, tokens = adapters[slot], (slots == slot).nonzero()[:, 0]
        assert adapter is not None
        first, last = int(tokens[0]), int(tokens[-1])
        together = last - first + 1 == len(tokens)
        groups.append((slice(first, last + 1) if together else tokens.to(device), adapter))
    return Changes(groups)

"""Adapters of a step's rows on the GPU: their slots, which rows have which, and the launches of a layer."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.cuda.abi import (
    ADAPTER_ADD,
    ADAPTER_PARTS,
    ADAPTER_SPLITS,
    ADAPTER_TILE,
    AdapterInput,
    AdapterPart,
    ReadoutInput,
)
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.inputs.staging import Uploads
from rwkv_batch.ops.low_rank import ENTRY, TARGETS, LowRankAdapter, filled, shapes, slot_numbers

NONE = -1  # in place of a slot: no adapter; in place of a row: none
TILE_NUMBERS = 1 + ADAPTER_TILE  # of a tile: a slot, and rows
LAYER_LAUNCHES = 8  # of StepAdapters, for a layer


def most_tiles(slots: int, tokens: int) -> int:
    """Tiles of a step over so many tokens, each with an adapter in one of the slots or with none, at most."""
    return min(tokens, (tokens + (slots + 1) * (ADAPTER_TILE - 1)) // ADAPTER_TILE)


def fill_tiles(tiles: np.ndarray, slots: np.ndarray) -> None:
    """Write the tiles `[n, TILE_NUMBERS]` of rows whose adapters are in `slots` `[rows]`; both int32."""
    tiles.fill(NONE)
    order = np.argsort(slots, kind="stable").astype(np.int32)
    found, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    at = 0
    for slot, start, count in zip(found, starts, counts, strict=True):
        size = -(-count // ADAPTER_TILE)
        rows = np.full(size * ADAPTER_TILE, NONE, np.int32)
        rows[:count] = order[start : start + count]
        tiles[at : at + size, 0], tiles[at : at + size, 1:] = slot, rows.reshape(size, ADAPTER_TILE)
        at += size


def _sums_bytes(slots: int, most_rank: int, tokens: int) -> int:
    """What A x of one matrix takes, for all parts of K: of a step over so many tokens."""
    numbers = ADAPTER_SPLITS * most_tiles(slots, tokens) * ADAPTER_TILE * filled(most_rank)
    return numbers * torch.float32.itemsize


class AdapterSlots:
    """Room for the adapters of running rows, and which rows have which. All calls belong on one stream."""

    def __init__(
        self,
        kernels: Kernels,
        sizes: tuple[int, int, int],
        slots: int,
        most_rank: int,
        most_tokens: int,
        device: torch.device,
    ) -> None:
        """sizes: layers, width and hidden units of the model. most_tokens: of a step."""
        layers, width, hidden = sizes
        self.kernels, self.slots = kernels, slots
        self.most_rank = filled(most_rank)
        self.shapes = shapes(width, hidden)
        numbers = slot_numbers(layers, width, hidden, most_rank)
        self._weights = torch.empty(slots, numbers, device=device, dtype=torch.float16)
        self._tables = torch.zeros(slots, layers, len(TARGETS), ENTRY, device=device, dtype=torch.int32)
        self._offsets = torch.zeros(slots, layers, width, device=device, dtype=torch.float16)
        # What is uploaded for a step: its tiles, and the slot of each of its rows.
        self._tile_numbers = most_tiles(slots, most_tokens) * TILE_NUMBERS
        numbers = self._tile_numbers + most_tokens
        self._step = torch.full((numbers,), NONE, device=device, dtype=torch.int32)
        self._uploads = Uploads(numbers)
        self._placed: bytes | None = None  # slots of the rows that the tiles are of

    def load(self, slot: int, adapter: LowRankAdapter) -> None:
        """Queue the copy of an adapter, whose tensors are pinned, into a slot."""
        self._weights[slot, : len(adapter.numbers)].copy_(adapter.numbers, non_blocking=True)
        self._tables[slot].copy_(adapter.table, non_blocking=True)
        if adapter.offsets is None:
            self._offsets[slot].zero_()
        else:
            self._offsets[slot].copy_(adapter.offsets, non_blocking=True)

    def place(self, adapters: Sequence[int], rows: int) -> None:
        """The next steps are over so many rows, the first of which have their adapters in these slots.

        NONE, as for the other rows: no adapter.
        """
        slots = np.full(rows, NONE, np.int32)
        slots[: len(adapters)] = adapters
        placed = slots.tobytes()
        if placed == self._placed:  # as in nearly every decode step
            return
        tiles, row_slots = np.split(self._uploads.buffer(), [self._tile_numbers])
        # All of them: those of rows that there were before may not stay.
        fill_tiles(tiles.reshape(-1, TILE_NUMBERS), slots)
        row_slots[:rows] = slots
        self._uploads.send(self._step)
        self._placed = placed

    def input(self) -> AdapterInput:
        """Without parts."""
        return AdapterInput(
            weights=self._weights.data_ptr(),
            slot_stride=self._weights.stride(0),
            tiles=self._step.data_ptr(),
            entry_stride=self._tables.stride(0) // ENTRY,
            most_rank=self.most_rank,
        )

    def readout(self, layer: int) -> ReadoutInput:
        """By what the step's rows are scaled in a layer."""
        offsets = self._offsets[:, layer]
        slot_of = self._step[self._tile_numbers :]
        return ReadoutInput(offsets.data_ptr(), offsets.stride(0), slot_of.data_ptr())

    def entry(self, layer: int, target: int) -> int:
        """The address of a matrix's entry in slot 0."""
        return self._tables[0, layer, target].data_ptr()


class StepAdapters:
    """The launches by which adapters change the GEMMs of a step over the buffers `b`; slots None: none do."""

    def __init__(self, slots: AdapterSlots | None, b: Buffers) -> None:
        self._slots, self._b = slots, b
        self._tiles = most_tiles(slots.slots, len(b.x)) if slots else 0
        self._input, self._parts = AdapterInput(), 0

    def __bool__(self) -> bool:
        return self._slots is not None

    def shrink(self, layer: int, first: str, xs: Sequence[Tensor], prefetch: Tensor | None = None) -> None:
        """A x of neighbours in TARGETS, the first of them named. Their GEMM comes next, then `expand`.

        xs: `[T, inputs]`. prefetch: weights of that GEMM.
        """
        slots = self._slots
        if slots is None:
            return
        each = _sums_bytes(slots.slots, slots.most_rank, len(self._b.x))
        sums = self._b.scratch("adapter sums", ADAPTER_PARTS * each)
        self._input, self._parts, target = slots.input(), len(xs), TARGETS.index(first)
        for place, x in enumerate(xs):
            n, k = slots.shapes[target + place]
            self._input.part[place] = AdapterPart(
                x=x.data_ptr(),
                sums=sums[place * each :].data_ptr(),
                entry=slots.entry(layer, target + place),
                n=n,
                k=k,
            )
        slots.kernels.adapter_shrink(self._input, self._parts, self._tiles, prefetch)

    def readout(self, layer: int) -> ReadoutInput | None:
        """By what is scaled what the rows read out of their states."""
        return self._slots.readout(layer) if self._slots else None

    def expand(self, ys: Sequence[Tensor], output: int = ADAPTER_ADD) -> None:
        """Add B A x to what the GEMMs have made: `[T, outputs]` each, or partial sums."""
        slots = self._slots
        if slots is None:
            return
        for place, y in enumerate(ys):
            self._input.part[place].y = y.data_ptr()
        slots.kernels.adapter_expand(self._input, self._parts, self._tiles, output)


def adapter_bytes(sizes: tuple[int, int, int], slots: int, most_rank: int, steps: Sequence[int]) -> int:
    """What slots take on the device, with the sums of steps over so many tokens, in arenas of their own.

    sizes: as of AdapterSlots. Zero without slots.
    """
    if not slots:
        return 0
    layers, width, _ = sizes
    numbers = slots * (slot_numbers(*sizes, most_rank) + layers * width) * torch.float16.itemsize
    uploaded = (most_tiles(slots, max(steps)) * TILE_NUMBERS + max(steps)) * torch.int32.itemsize
    return numbers + uploaded + sum(ADAPTER_PARTS * _sums_bytes(slots, most_rank, tokens) for tokens in steps)

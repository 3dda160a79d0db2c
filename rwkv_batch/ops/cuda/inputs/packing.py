"""Where the rows of a prefill lie, as the kernels read it: int32 arrays, uploaded in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.cuda.abi import CHUNK, ChunksInput
from rwkv_batch.ops.cuda.binding import ChunkedRows, RowBounds
from rwkv_batch.ops.host_memory import pinned, pins

SCRATCH_CHUNKS = 320  # of one launch, which the kernels' scratch memory holds; a longer row runs alone
NO_SLOT = -1  # of padding: no state is read or written
CHUNKED = ("chunk_token", "chunk_tokens", "row_chunk", "row_chunks", "row_slot")  # as in ChunksInput


@dataclass(frozen=True)
class PrefillPlan:
    """The order in which rows run, and how the recurrence is launched.

    Rows of one token come first; their recurrence is that of a decode step. Rows of more tokens, the longest
    first, run in chunks, launch by launch, none with more than SCRATCH_CHUNKS unless it is a single row.
    """

    order: list[int]  # the caller's number of each row
    tokens: int
    single: int  # rows of one token
    launches: list[tuple[int, int]]  # chunks, rows
    # By the names of RowBounds and ChunksInput; "counts": single, then chunks and rows of each launch.
    numbers: dict[str, list[int]]

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], slots: Sequence[int]) -> "PrefillPlan":
        """lengths: at least 1; slots: one for each row."""
        order = sorted(range(len(lengths)), key=lambda row: lengths[row] > 1)
        ends = list(accumulate(lengths[row] for row in order))
        first = [end - lengths[row] for end, row in zip(ends, order, strict=True)]
        row_of: list[int] = []
        for place, row in enumerate(order):
            row_of += [place] * lengths[row]
        single = sum(length == 1 for length in lengths)
        numbers: dict[str, list[int]] = {name: [] for name in CHUNKED}
        launches: list[tuple[int, int]] = []
        for place in sorted(range(single, len(order)), key=lambda place: -lengths[order[place]]):
            length, start = lengths[order[place]], first[place]
            chunks = -(-length // CHUNK)
            if not launches or launches[-1][0] + chunks > SCRATCH_CHUNKS:
                launches.append((0, 0))
            before, rows = launches[-1]
            numbers["row_chunk"].append(before)
            numbers["row_chunks"].append(chunks)
            numbers["row_slot"].append(slots[order[place]])
            numbers["chunk_token"] += range(start, start + length, CHUNK)
            numbers["chunk_tokens"] += [CHUNK] * (length // CHUNK) + [length % CHUNK] * (length % CHUNK > 0)
            launches[-1] = before + chunks, rows + 1
        numbers |= {
            "row_of": row_of,
            "first": first,
            "last": [end - 1 for end in ends],
            "slots": [slots[row] for row in order],
            "counts": [single, *(number for launch in launches or [(0, 0)] for number in launch)],
        }
        return cls(order, len(row_of), single, launches, numbers)

    def of_tokens(self, of_rows: Sequence[int]) -> list[int]:
        """What belongs to each token, given what belongs to each of the caller's rows; empty for nothing."""
        return [of_rows[self.order[place]] for place in self.numbers["row_of"]] if of_rows else []


class PlanLayout:
    """Where the numbers of each name begin in one array, and its size."""

    def __init__(self, room: dict[str, int]) -> None:
        """room: for how many numbers of each name."""
        ends = list(accumulate(room.values()))
        self.starts = {name: end - room[name] for name, end in zip(room, ends, strict=True)}
        self.size = ends[-1]

    def fill(self, host: np.ndarray, plan: PrefillPlan) -> None:
        """Write the plan's numbers into `[size]` int32."""
        for name, start in self.starts.items():
            host[start : start + len(plan.numbers[name])] = plan.numbers[name]


@dataclass(frozen=True)
class DeviceRows:
    """A plan on the device. With `counted`, all numbers of rows and chunks are upper bounds."""

    rows: RowBounds
    single: int
    counted: Tensor | None  # [1] how many rows of one token there are, unless there are exactly `single`
    pieces: list[ChunkedRows]


def upload_plan(plan: PrefillPlan, device: torch.device) -> DeviceRows:
    """The plan in device memory of its own."""
    layout = PlanLayout({name: len(numbers) for name, numbers in plan.numbers.items()})
    host = pinned(torch.empty, layout.size, dtype=torch.int32, wanted=pins(device))
    layout.fill(host.numpy(), plan)
    at = _places(host.to(device, non_blocking=True), layout)
    chunk = row = 0
    pieces = []
    for launch, (chunks, rows) in enumerate(plan.launches):
        pieces.append(_pieces(at, launch, chunk, row, chunks, rows))
        chunk, row = chunk + chunks, row + rows
    return DeviceRows(_rows(at, plan.tokens, len(plan.order)), plan.single, None, pieces)


class StagedPlan:
    """Tokens and plan of any prefill of one launch and at most `size` tokens, at fixed addresses."""

    def __init__(self, size: int, device: torch.device) -> None:
        chunks = most_chunks(size)
        rows = dict.fromkeys(("first", "last", "slots"), size + 1)
        self._layout = PlanLayout(dict.fromkeys(CHUNKED, chunks) | rows | {"row_of": size, "counts": 3})
        self._size = size
        self._flat = torch.empty(size + self._layout.size, device=device, dtype=torch.int32)
        at = _places(self._flat[size:], self._layout)
        self.tokens = self._flat[:size]
        self.rows = DeviceRows(
            _rows(at, size, size + 1), size, at["counts"][:1], [_pieces(at, 0, 0, 0, chunks, chunks)]
        )
        self.fill(torch.zeros(0, dtype=torch.int32), PrefillPlan.from_lengths([], []))

    def fill(self, tokens: Tensor, plan: PrefillPlan) -> None:
        """Upload both, tokens from the host. Tokens behind the plan's are padding: their row has no slot."""
        host, rows = pinned(torch.zeros, len(self._flat), dtype=torch.int32), len(plan.order)
        numbers, starts = host.numpy()[self._size :], self._layout.starts
        self._layout.fill(numbers, plan)
        numbers[starts["row_of"] + plan.tokens : starts["row_of"] + self._size] = rows
        numbers[starts["slots"] + rows] = NO_SLOT
        host[: len(tokens)] = tokens
        self._flat.copy_(host, non_blocking=True)


def most_chunks(tokens: int) -> int:
    """The most chunks that rows of two tokens and more have in one launch."""
    return min(tokens // 2, SCRATCH_CHUNKS)


def _places(flat: Tensor, layout: PlanLayout) -> dict[str, Tensor]:
    return {name: flat[start:] for name, start in layout.starts.items()}


def _rows(at: dict[str, Tensor], tokens: int, rows: int) -> RowBounds:
    return RowBounds(at["row_of"][:tokens], at["first"][:rows], at["last"][:rows], at["slots"][:rows])


def _pieces(at: dict[str, Tensor], launch: int, chunk: int, row: int, chunks: int, rows: int) -> ChunkedRows:
    """The pieces of one launch, whose chunks and rows follow those of the launches before."""
    tensors = (
        at["counts"][1 + 2 * launch :],
        *(at[name][chunk:] for name in CHUNKED[:2]),
        *(at[name][row:] for name in CHUNKED[2:]),
    )
    return ChunkedRows(ChunksInput(*(tensor.data_ptr() for tensor in tensors)), chunks, rows)

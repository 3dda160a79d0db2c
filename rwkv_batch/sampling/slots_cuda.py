"""What the sampler on a GPU keeps of the rows in its slots: lists of penalties, and how each row is drawn."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.sampling.penalties import Penalties, PenaltyRule
from rwkv_batch.sampling.structs_cuda import PENALTY_ENTRY, PENALTY_LIST, PENALTY_LIST_AT, ROW_FILTER

FIRST_CAPACITY = 256  # drawn tokens that a row has room for when it begins
NO_FILTER = (0.0, 0.0, 1.0)


class PenaltyLists:
    """What rows have drawn, for their penalties. A list that is full moves to one twice as long."""

    def __init__(self, slots: int, vocab: int, records: Tensor) -> None:
        """records: those of the slots on the device, which point to the lists."""
        self._vocab, self._records = vocab, records
        size = FIRST_CAPACITY * PENALTY_ENTRY.itemsize
        self._first = torch.empty(slots, size, dtype=torch.uint8, device=records.device)
        self._grown: dict[int, Tensor] = {}  # slot -> the list that did not fit any more
        self._capacity = np.zeros(slots, np.int64)  # 0: no penalties
        self._used = np.zeros(slots, np.int64)  # entries that may be in use

    def begin(self, slot: int, rule: PenaltyRule | None, drawn: Sequence[int]) -> tuple[int, int, int]:
        """The row's list, with what it has drawn before: address, capacity (0: no penalties), and entries."""
        self._grown.pop(slot, None)
        self._capacity[slot] = FIRST_CAPACITY if rule else 0
        address, used = self._first.data_ptr() + slot * self._first.shape[1], 0
        if drawn and rule:
            address, used = self._fill(slot, rule, drawn)
        self._used[slot] = used
        return address, int(self._capacity[slot]), used

    def make_room(self, slots: np.ndarray, steps: int) -> None:
        """For a token a step, of the rows in these slots."""
        capacity = self._capacity[slots]
        used = self._used[slots] + steps
        for slot in slots[(capacity > 0) & (used > capacity) & (capacity < self._vocab)]:
            self._grow(int(slot))
        self._used[slots] = used

    def _fill(self, slot: int, rule: PenaltyRule, drawn: Sequence[int]) -> tuple[int, int]:
        """Enter what a row has drawn before; the address of its list, and how many entries are in use."""
        past = Penalties(rule, drawn).drawn
        entries = np.zeros(len(past), PENALTY_ENTRY)
        for name in ("id", "decaying", "count"):
            entries[name] = past[name]
        place = self._first[slot]
        if len(past) >= FIRST_CAPACITY:
            self._capacity[slot] = 1 << len(past).bit_length()
            size = int(self._capacity[slot]) * PENALTY_ENTRY.itemsize
            place = self._grown[slot] = torch.empty(size, dtype=torch.uint8, device=self._first.device)
        place[: entries.nbytes].copy_(as_bytes(entries), non_blocking=True)
        return place.data_ptr(), len(past)

    def _grow(self, slot: int) -> None:
        """Move a row's penalties to a list twice as long."""
        capacity = int(self._capacity[slot])
        old = self._grown.get(slot, self._first[slot])
        size = 2 * capacity * PENALTY_ENTRY.itemsize
        new = torch.empty(size, dtype=torch.uint8, device=self._first.device)
        new[: len(old)].copy_(old)
        moved = np.array([(new.data_ptr(), 2 * capacity)], PENALTY_LIST)
        end = PENALTY_LIST_AT + PENALTY_LIST.itemsize
        record = self._records.view(torch.uint8)[slot, PENALTY_LIST_AT:end]
        record.copy_(as_bytes(moved), non_blocking=True)
        self._grown[slot], self._capacity[slot] = new, 2 * capacity


class SlotWays:
    """How the rows in slots are drawn, and those of the next step."""

    def __init__(self, slots: int) -> None:
        self._plain = np.zeros(slots, bool)
        self._by_flashinfer = np.zeros(slots, bool)
        self._filters = np.zeros(slots, ROW_FILTER)
        self._filtered = np.zeros(slots, bool)
        self.all_plain = False  # of the next step
        self.flashinfer = np.zeros(0, np.int64)  # rows of the next step that FlashInfer draws
        self.filters: np.ndarray | None = None  # of the rows of the next step; None: they are off

    def begin(self, slot: int, plain: bool, by_flashinfer: bool, of_row: tuple[float, float, float]) -> None:
        """plain: whether rwkv_sample_plain draws the row. of_row: min_p, top_a and repetition of a filter."""
        self._plain[slot], self._by_flashinfer[slot] = plain, by_flashinfer
        self._filters[slot] = *of_row, -1
        self._filtered[slot] = of_row != NO_FILTER

    def choose(self, slots: np.ndarray) -> None:
        """The next step draws for the rows in these slots."""
        self.all_plain = bool(self._plain[slots].all())
        self.flashinfer = np.flatnonzero(self._by_flashinfer[slots])
        self.filters = self._filters[slots] if self._filtered[slots].any() else None


def as_bytes(records: np.ndarray) -> Tensor:
    """`records` as uint8. The driver stages copies of these to the device, so `records` may go at once."""
    return torch.from_numpy(records.view(np.uint8))

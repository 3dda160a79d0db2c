"""Who runs next: admission, the prefill budget, the decode batch. Pure Python, no torch.

Waiting rows enter first come, first served, as slots fall free. Each step runs every row that decodes, and at most
`prefill_tokens` prompt tokens of rows that still have some, so that a long prompt never stops the others' text.
"""
from collections import deque
from collections.abc import Callable

from rwkv_batch.sequence import Sequence

PIECE = 16  # prompts are cut at multiples of this where possible: the chunk of the parallel recurrence


class QueueFull(Exception):
    """More rows wait than the queue may hold."""


class Scheduler:
    """The rows of all requests, waiting or running. One slot per running row."""

    def __init__(self, slots: int, prefill_tokens: int, max_waiting: int) -> None:
        if slots < 1 or prefill_tokens < 1 or max_waiting < 1:
            raise ValueError(f"slots ({slots}), prefill_tokens ({prefill_tokens}) and max_waiting ({max_waiting}) must be at least 1")
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.max_waiting = max_waiting
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by slot
        self._free = list(range(slots - 1, -1, -1))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, rows: list[Sequence]) -> None:
        """Queue the rows of one request, all or none. Raises QueueFull."""
        room = self.max_waiting + len(self._free) - len(self.waiting)
        if len(rows) > room:
            raise QueueFull(f"{len(self.waiting)} rows wait already and {len(rows)} more do not fit into the queue of {self.max_waiting}")
        self.waiting.extend(rows)

    def admit(self) -> list[Sequence]:
        """Give free slots to the rows that have waited longest; return those rows."""
        admitted = []
        while self.waiting and self._free:
            row = self.waiting.popleft()
            row.slot = self._free.pop()
            self.running[row.slot] = row
            admitted.append(row)
        return admitted

    def plan(self) -> list[tuple[Sequence, int]]:
        """The next step: rows, each with the number of tokens it is fed. Rows that decode come first."""
        decode = [(row, 1) for row in self.running.values() if not row.prompt_left]
        return decode + self._prefill([row for row in self.running.values() if row.prompt_left])

    def _prefill(self, rows: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Share the budget: half of it for the row that came first, so that it always moves; the rest goes to the
        shortest prompts, so that they need not wait behind a long one; what is left over, to the first again."""
        if not rows:
            return []
        budget = self.prefill_tokens
        oldest = min(rows, key=lambda row: row.number)
        share = {oldest: min(oldest.prompt_left, max(budget // 2, 1))}
        budget -= share[oldest]
        for row in sorted(rows, key=lambda row: (row.prompt_left, row.number)):
            more = min(row.prompt_left - share.get(row, 0), budget)
            if more:
                share[row] = share.get(row, 0) + more
                budget -= more
        return [(row, _rounded(row, count)) for row, count in share.items()]

    def release(self, row: Sequence) -> None:
        """A running row has ended: its slot is free at once."""
        assert row.slot is not None, "only a running row holds a slot"
        del self.running[row.slot]
        self._free.append(row.slot)
        row.slot = None

    def drop(self, unwanted: Callable[[Sequence], bool]) -> None:
        """Forget the rows, waiting or running, that nobody wants any more."""
        self.waiting = deque(row for row in self.waiting if not unwanted(row))
        for row in [row for row in self.running.values() if unwanted(row)]:
            self.release(row)


def _rounded(row: Sequence, count: int) -> int:
    """`count`, cut to whole pieces unless it ends the prompt or is smaller than one."""
    return count if count == row.prompt_left or count < PIECE else count - count % PIECE

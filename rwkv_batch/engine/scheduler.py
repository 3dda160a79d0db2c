"""Who runs next: admission, the prefill budget, the decode batch. Pure Python, no torch.

Waiting rows enter first come, first served, as slots fall free. Each step runs every row that decodes, and at
most `prefill_tokens` prompt tokens of rows that still have some, so that a long prompt never stops the
others' text. Rows that write the same session run one after the other.
"""

from collections import deque
from collections.abc import Callable

from rwkv_batch.engine.sequence import Sequence

PIECE = 16  # prompts are cut at multiples of this where possible: the chunk of the parallel recurrence


class QueueFull(Exception):
    """More rows wait than the queue may hold."""


class Scheduler:
    """The rows of all requests, waiting or running. One slot per running row; slots beyond `rows` are for
    others to hold.
    """

    def __init__(self, rows: int, prefill_tokens: int, max_waiting: int, slots: int | None = None) -> None:
        if rows < 1 or prefill_tokens < 1 or max_waiting < 1:
            raise ValueError(
                f"rows ({rows}), prefill_tokens ({prefill_tokens}) and max_waiting ({max_waiting}) must be "
                "at least 1"
            )
        self.rows = rows
        self.prefill_tokens = prefill_tokens
        self.max_waiting = max_waiting
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by slot
        self.queues: dict[str, deque[Sequence]] = {}  # by session: the rows behind the one whose turn it is
        self._free = list(range((slots or rows) - 1, -1, -1))

    @property
    def busy(self) -> bool:
        """Whether a row waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def runnable(self) -> bool:
        """Whether a step would do something."""
        return any(row.can_step for row in self.running.values()) or bool(self.waiting and self._room)

    def add(self, rows: list[Sequence]) -> None:
        """Queue the rows of one request, all or none. Raises QueueFull; ValueError if they could
        never fit.
        """
        if len(rows) > self.max_waiting + self.rows:
            raise ValueError(
                f"The request has {len(rows)} rows and the server takes at most "
                f"{self.max_waiting + self.rows} at once; "
                "send fewer prompts."
            )
        waiting = len(self.waiting) + sum(map(len, self.queues.values()))
        if len(rows) > self.max_waiting + self._room - waiting:
            raise QueueFull(
                f"{waiting} rows wait already and {len(rows)} more do not fit into the queue of "
                f"{self.max_waiting}"
            )
        for row in rows:
            if row.target is None or row.target not in self.queues:
                self.waiting.append(row)
                if row.target is not None:
                    self.queues[row.target] = deque()
            else:
                self.queues[row.target].append(row)

    def admit(self) -> list[Sequence]:
        """Give free slots to the rows that have waited longest; return those rows."""
        admitted = []
        while self.waiting and self._room:
            row = self.waiting.popleft()
            row.slot = self._free.pop()
            self.running[row.slot] = row
            admitted.append(row)
        return admitted

    def move(self, row: Sequence, slot: int) -> None:
        """Let a running row go on in another slot, which was not the scheduler's before; its old
        one is free.
        """
        assert row.slot is not None, "only a running row has a slot"
        del self.running[row.slot]
        self._free.append(row.slot)
        row.slot = slot
        self.running[slot] = row

    def plan(self) -> list[tuple[Sequence, int]]:
        """The next step: rows, each with the number of tokens it is fed. Rows that decode come first."""
        ready = [row for row in self.running.values() if row.can_step]
        decode = [(row, 1) for row in ready if not row.prompt_left]
        return decode + self._prefill([row for row in ready if row.prompt_left])

    def _prefill(self, rows: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Share the budget: half of it for the row that came first, so that it always moves; the rest goes to
        the shortest prompts, so that they need not wait behind a long one; what is left over, to the first
        again.
        """
        if not rows:
            return []
        budget = self.prefill_tokens
        oldest = min(rows, key=lambda row: row.number)
        share = {oldest: min(oldest.prompt_left, max(budget // 2, 1))}
        budget -= share[oldest]
        for row in sorted(rows, key=lambda row: (row.prompt_left, row.number)):
            if not budget:
                break
            more = min(row.prompt_left - share.get(row, 0), budget)
            if more:
                share[row] = share.get(row, 0) + more
                budget -= more
        return [(row, _rounded(row, count)) for row, count in share.items()]

    def release(self, row: Sequence) -> None:
        """A running row has ended: its slot is free at once."""
        self.free(self.give_away(row))

    def give_away(self, row: Sequence) -> int:
        """A running row has ended; its slot is somebody else's until `free`."""
        assert row.slot is not None, "only a running row has a slot"
        slot, row.slot = row.slot, None
        del self.running[slot]
        return slot

    def free(self, *slots: int) -> None:
        """Slots that rows may have."""
        self._free.extend(slots)

    def lock(self, session: str) -> None:
        """Rows of a session that no row has the turn of are to wait for `unlock`."""
        self.queues[session] = deque()

    def unlock(self, session: str | None) -> None:
        """A turn on the session is over: the next row's begins. It waits where it would stand had it not been
        held back.
        """
        if session is None:
            return
        queue = self.queues[session]
        if not queue:
            del self.queues[session]
            return
        row = queue.popleft()
        place = next(
            (i for i, other in enumerate(self.waiting) if other.number > row.number), len(self.waiting)
        )
        self.waiting.insert(place, row)

    def drop(self, unwanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Forget the rows that wait and that nobody wants any more; return those that run, which the caller
        ends.
        """
        for queue in self.queues.values():
            for row in [row for row in queue if unwanted(row)]:
                queue.remove(row)
        dropped = [row for row in self.waiting if unwanted(row)]
        self.waiting = deque(row for row in self.waiting if not unwanted(row))
        for row in dropped:
            self.unlock(row.target)
        return [row for row in self.running.values() if unwanted(row)]

    @property
    def _room(self) -> int:
        """How many rows could be admitted now."""
        return min(len(self._free), self.rows - len(self.running))


def _rounded(row: Sequence, count: int) -> int:
    """`count`, no further than the next cut, and in whole pieces unless it ends the prompt, meets a cut or is
    smaller than one.
    """
    if row.cuts and row.fed + count >= row.cuts[0]:
        return row.cuts[0] - row.fed
    return count if count == row.prompt_left or count < PIECE else count - count % PIECE

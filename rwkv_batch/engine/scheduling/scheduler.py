"""Which rows run next: admission, the prefill budget, the decode batch. Pure Python, no torch.

Waiting rows are admitted as slots fall free: those of batches behind all others, then by their deadlines,
then first come, first served. Each step runs every row that decodes, and at most `prefill_tokens` prompt
tokens of those that still have some, so that a long prompt never holds up the text of others. Turns of one
session run one after the other.
"""

import itertools
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rwkv_batch.engine.scheduling.row import DECODING, LOADING, PAUSING, Row


class QueueFull(Exception):
    """More rows wait than the queue may hold."""


class Scheduler:
    """The rows of all requests, waiting or running, and the free slots.

    Every running row has a slot. Slots beyond `max_rows` are for sessions that do not run.
    """

    def __init__(
        self, max_rows: int, prefill_tokens: int, max_waiting: int, slots: int | None = None
    ) -> None:
        if max_rows < 1 or prefill_tokens < 1 or max_waiting < 1:
            raise ValueError(
                f"max_rows ({max_rows}), prefill_tokens ({prefill_tokens}) and max_waiting ({max_waiting}) "
                "must be at least 1"
            )
        self.max_rows = max_rows
        self.prefill_tokens = prefill_tokens
        self.max_waiting = max_waiting
        self.waiting: deque[Row] = deque()
        self.running: dict[int, Row] = {}  # by slot
        self.queues: dict[str, deque[Row]] = {}  # by locked session: the turns behind the present one
        self.batch: dict[Row, None] = {}  # of those that run, the rows of batches
        self.leaving: set[Row] = set()  # of these, those that give their slots to others
        self._free = list(range((slots or max_rows) - 1, -1, -1))
        self._stalled = False  # all that could be admitted wait for their adapters

    @property
    def runnable(self) -> bool:
        """Whether a step would do something."""
        return (
            any(row.can_step for row in self.running.values())
            or bool(self.leaving)
            or (bool(self.waiting) and not self._stalled and self._room >= len(self.waiting[0].together))
        )

    def add(self, rows: list[Row], limited: bool = True) -> None:
        """Queue the rows of one request, all or none.

        Raises ValueError if they could never fit, and, where the queue is `limited`, QueueFull.
        """
        count = len(rows)
        together = len(rows[0].together) if rows else 0
        if together > self.max_rows:
            raise ValueError(
                f"The mixture has {together} states, and at most {self.max_rows} rows run at once; give "
                "fewer."
            )
        if limited and count > self.max_waiting + self.max_rows:
            raise ValueError(
                f"The request has {count} rows and the server takes at most "
                f"{self.max_waiting + self.max_rows} at once; send fewer prompts."
            )
        waiting = self._ahead_of(rows) + sum(map(len, self.queues.values()))
        most = self.max_waiting + self._room  # those that free slots are for wait until the next step
        if limited and count > most - waiting:
            raise QueueFull(
                f"of at most {most} rows that may wait now {waiting} do, and the request has {count}; try "
                "again in a moment"
            )
        self._stalled = False
        for row in rows:
            if not row.leads:
                continue  # it goes where the first of its mixture goes
            if row.life.target in self.queues:
                self.queues[row.life.target].extend(row.together)
                continue
            self._queue(row.together)
            if row.life.target is not None:
                self.lock(row.life.target)

    def admit(
        self,
        has_adapter: Callable[[Row], bool] = lambda row: True,
        takes: Callable[[Row], bool] = lambda row: True,
    ) -> list[Row]:
        """Give free slots to the rows that have waited longest; return those.

        `has_adapter`: whether a row's adapter is there. One whose adapter is not waits, and so do those
        behind it that have adapters, so that one falls free; others pass. `takes`: if not, all wait.
        """
        admitted, passed, more = list[Row](), deque[Row](), True
        while more and self.waiting and self._room >= len(group := self.waiting[0].together):
            waits = group[0].life.adapter and (passed or not has_adapter(group[0]))
            if more := bool(waits or takes(group[0])):
                for row in group:
                    self.waiting.popleft()
                    if not waits:
                        row.admit(slot := self._free.pop())
                        self.running[slot] = row
                        if row.request.batch:
                            self.batch[row] = None
                (passed if waits else admitted).extend(group)
        self.waiting.extendleft(reversed(passed))
        self._stalled = bool(passed) and more
        return admitted

    def retry(self) -> None:
        """An adapter has come: what waits for it may be admitted."""
        self._stalled = False

    def plan(self) -> list[tuple[Row, int]]:
        """The next step: rows, each with the number of tokens fed. Those that decode come first."""
        ready = [row for row in self.running.values() if row.can_step]
        decode = [(row, 1) for row in ready if row.state is DECODING]
        rest = [row for row in ready if row.state is not DECODING]
        # The last tokens of mixtures, which draw together, so that the budget does not part them.
        last = {row: 1 for row in rest if row.draws.members and row.draws_after(1)}
        return [*decode, *last.items(), *self._prefill([row for row in rest if row not in last])]

    def detach(self, row: Row) -> int:
        """A running row leaves; its slot belongs to the caller until `free`."""
        assert row.slot is not None, "only a running row has a slot"
        slot, row.slot = row.slot, None
        del self.running[slot]
        if self.batch:
            self.batch.pop(row, None)
            self.leaving.discard(row)
        return slot

    def lacking(self, has_adapter: Callable[[Row], bool] = lambda row: True) -> int:
        """How many slots rows of batches should leave: those that others wait for and cannot have.

        A row whose adapter has no room on the device could not use a slot, unless an adapter leaves with it.
        """
        if not self.batch or not self.waiting or self.waiting[0].request.batch:
            return 0
        most, count, passed = self._room + len(self.batch), 0, False
        adapters_leave = any(row.life.adapter for row in self.batch)
        for row in itertools.takewhile(lambda row: not row.request.batch, self.waiting):
            if count == most:
                break
            if row.life.adapter and not adapters_leave and (passed or not has_adapter(row)):
                passed = True
            else:
                count += 1
        return max(0, count - self._room)

    def give_up(self, row: Row, kept: Any) -> None:
        """A row of a batch has left its slot to others, and waits for one in which its state is this."""
        self.free(self.detach(row))
        row.leave(kept)
        self._queue([row])

    def free(self, *slots: int) -> None:
        """Slots that rows may have."""
        self._free.extend(slots)
        self._stalled = False

    def spare(self) -> int | None:
        """A slot that no row needs, however many run, which belongs to the caller until `free`."""
        return self._free.pop() if len(self._free) > self.max_rows - len(self.running) else None

    def lock(self, session: str) -> None:
        """Turns of a session that has none under way wait for `unlock`."""
        self.queues[session] = deque()

    def unlock(self, session: str | None) -> None:
        """A turn of the session is over: the next one is queued where its arrival puts it."""
        if session is None:
            return
        queue = self.queues[session]
        if not queue:
            del self.queues[session]
            return
        together = queue[0].together
        for _ in together:
            queue.popleft()
        self._queue(together)

    def drop(self, unwanted: Callable[[Row], bool]) -> list[Row]:
        """Forget waiting rows that are unwanted; return the running ones, which the caller ends."""
        for queue in self.queues.values():
            for row in [row for row in queue if unwanted(row)]:
                queue.remove(row)
        self._stalled = False
        dropped = [row for row in self.waiting if unwanted(row)]
        self.waiting = deque(row for row in self.waiting if not unwanted(row))
        for row in dropped:
            self.unlock(row.life.target)
        return [row for row in self.running.values() if unwanted(row)]

    def rows(self) -> Iterator[Row]:
        """All that wait or run."""
        yield from self.waiting
        yield from self.running.values()
        for queue in self.queues.values():
            yield from queue

    def need_steps(self) -> Iterator[Row]:
        """Those that wait for a step, and not for the database, a file or another turn of their session."""
        yield from self.waiting
        for row in self.running.values():
            if not (row.state is LOADING or row.text.finish_reason or row.held & PAUSING):
                yield row

    @property
    def _room(self) -> int:
        """How many rows could be admitted now."""
        return min(len(self._free), self.max_rows - len(self.running))

    def _prefill(self, rows: list[Row]) -> list[tuple[Row, int]]:
        """Share the budget of prompt tokens.

        Half of it goes to the oldest, so that it always moves; the rest to the shortest prompts, so that they
        need not wait behind a long one; what is left over to the oldest again.
        """
        if not rows:
            return []
        budget = self.prefill_tokens
        if self.batch and (urgent := [row for row in rows if not row.request.batch]):
            shares = self._shares(urgent, budget)
            left = budget - sum(shares.values())
            others = [row for row in rows if row.request.batch]
            return self._rounded(shares | (self._shares(others, left) if left and others else {}))
        return self._rounded(self._shares(rows, budget))

    def _shares(self, rows: list[Row], budget: int) -> dict[Row, int]:
        oldest = min(rows, key=lambda row: row.arrival)
        share = {oldest: min(oldest.tokens_to_feed, max(budget // 2, 1))}
        budget -= share[oldest]
        for row in sorted(rows, key=lambda row: (row.input.left, row.arrival)):
            more = min(row.tokens_to_feed - share.get(row, 0), budget)
            if more:
                share[row] = share.get(row, 0) + more
                budget -= more
        return share

    @staticmethod
    def _rounded(shares: dict[Row, int]) -> list[tuple[Row, int]]:
        return [(row, row.input.rounded(count, row.tokens_to_feed)) for row, count in shares.items()]

    def _ahead_of(self, rows: list[Row]) -> int:
        """How many wait that are no rows of batches, or all if these are."""
        last = self.waiting[-1] if self.waiting else None
        if last is None or not last.request.batch or (rows and rows[0].request.batch):
            return len(self.waiting)
        return sum(1 for row in self.waiting if not row.request.batch)

    def _queue(self, together: Sequence[Row]) -> None:
        """Rows that come into slots together wait where their rank puts them."""
        first = together[0].rank
        if not self.waiting or self.waiting[-1].rank < first:
            self.waiting.extend(together)
            return
        place = bisect(self.waiting, first, key=lambda row: row.rank)
        for row in reversed(together):
            self.waiting.insert(place, row)

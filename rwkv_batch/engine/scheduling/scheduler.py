"""Which sequences run next: admission, the prefill budget, the decode batch. Pure Python, no torch.

Waiting sequences are admitted first come, first served, as slots fall free. Each step runs every sequence
that decodes, and at most `prefill_tokens` prompt tokens of those that still have some, so that a long prompt
never holds up the text of others. Turns of one session run one after the other.
"""

from collections import deque
from collections.abc import Callable, Iterator

from rwkv_batch.engine.scheduling.sequence import DECODING, Sequence

PIECE = 16  # prompts are cut at multiples of this where possible: the chunk of the parallel recurrence


class QueueFull(Exception):
    """More sequences wait than the queue may hold."""


class Scheduler:
    """The sequences of all requests, waiting or running, and the free slots.

    Every running sequence has a slot. Slots beyond `max_rows` are for sessions that do not run.
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
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by slot
        self.queues: dict[str, deque[Sequence]] = {}  # by locked session: the turns behind the present one
        self._free = list(range((slots or max_rows) - 1, -1, -1))
        self._stalled = False  # all that could be admitted wait for their adapters

    @property
    def runnable(self) -> bool:
        """Whether a step would do something."""
        return any(seq.can_step for seq in self.running.values()) or (
            bool(self.waiting) and not self._stalled and self._room >= len(self.waiting[0].together)
        )

    def add(self, sequences: list[Sequence], limited: bool = True) -> None:
        """Queue the sequences of one request, all or none.

        Raises ValueError if they could never fit, and, where the queue is `limited`, QueueFull.
        """
        count = len(sequences)
        together = len(sequences[0].together) if sequences else 0
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
        waiting = len(self.waiting) + sum(map(len, self.queues.values()))
        if limited and count > self.max_waiting + self._room - waiting:
            raise QueueFull(
                f"{waiting} rows wait already and {count} more do not fit into the queue of "
                f"{self.max_waiting}"
            )
        self._stalled = False
        for seq in sequences:
            if not seq.leads:
                continue  # it goes where the first of its mixture goes
            if seq.target in self.queues:
                self.queues[seq.target].extend(seq.together)
                continue
            self.waiting.extend(seq.together)
            if seq.target is not None:
                self.lock(seq.target)

    def admit(
        self,
        has_adapter: Callable[[Sequence], bool] = lambda seq: True,
        takes: Callable[[Sequence], bool] = lambda seq: True,
    ) -> list[Sequence]:
        """Give free slots to the sequences that have waited longest; return those.

        `has_adapter`: whether a sequence's adapter is there. One whose adapter is not waits, and so do those
        behind it that have adapters, so that one falls free; others pass. `takes`: if not, all wait.
        """
        admitted, passed, more = list[Sequence](), deque[Sequence](), True
        while more and self.waiting and self._room >= len(group := self.waiting[0].together):
            waits = group[0].adapter and (passed or not has_adapter(group[0]))
            if more := bool(waits or takes(group[0])):
                for seq in group:
                    self.waiting.popleft()
                    if not waits:
                        seq.admit(slot := self._free.pop())
                        self.running[slot] = seq
                (passed if waits else admitted).extend(group)
        self.waiting.extendleft(reversed(passed))
        self._stalled = bool(passed) and more
        return admitted

    def retry(self) -> None:
        """An adapter has come: what waits for it may be admitted."""
        self._stalled = False

    def plan(self) -> list[tuple[Sequence, int]]:
        """The next step: sequences, each with the number of tokens fed. Those that decode come first."""
        ready = [seq for seq in self.running.values() if seq.can_step]
        decode = [(seq, 1) for seq in ready if seq.state is DECODING]
        rest = [seq for seq in ready if seq.state is not DECODING]
        # The last tokens of mixtures, which draw together, so that the budget does not part them.
        last = [(seq, 1) for seq in rest if seq.mixture and seq.draws_after(1)]
        return (
            decode + last + self._prefill([seq for seq in rest if not (seq.mixture and seq.draws_after(1))])
        )

    def detach(self, seq: Sequence) -> int:
        """A running sequence leaves; its slot belongs to the caller until `free`."""
        assert seq.slot is not None, "only a running sequence has a slot"
        slot, seq.slot = seq.slot, None
        del self.running[slot]
        return slot

    def free(self, *slots: int) -> None:
        """Slots that sequences may have."""
        self._free.extend(slots)
        self._stalled = False

    def spare(self) -> int | None:
        """A slot that no sequence needs, however many run, which belongs to the caller until `free`."""
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
        later = (i for i, other in enumerate(self.waiting) if other.arrival > together[0].arrival)
        place = next(later, len(self.waiting))
        for seq in reversed(together):
            queue.popleft()
            self.waiting.insert(place, seq)

    def drop(self, unwanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Forget waiting sequences that are unwanted; return the running ones, which the caller ends."""
        for queue in self.queues.values():
            for seq in [seq for seq in queue if unwanted(seq)]:
                queue.remove(seq)
        self._stalled = False
        dropped = [seq for seq in self.waiting if unwanted(seq)]
        self.waiting = deque(seq for seq in self.waiting if not unwanted(seq))
        for seq in dropped:
            self.unlock(seq.target)
        return [seq for seq in self.running.values() if unwanted(seq)]

    def sequences(self) -> Iterator[Sequence]:
        """All that wait or run."""
        yield from self.waiting
        yield from self.running.values()
        for queue in self.queues.values():
            yield from queue

    @property
    def _room(self) -> int:
        """How many sequences could be admitted now."""
        return min(len(self._free), self.max_rows - len(self.running))

    def _prefill(self, sequences: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Share the budget of prompt tokens.

        Half of it goes to the oldest, so that it always moves; the rest to the shortest prompts, so that they
        need not wait behind a long one; what is left over to the oldest again.
        """
        if not sequences:
            return []
        budget = self.prefill_tokens
        oldest = min(sequences, key=lambda seq: seq.arrival)
        share = {oldest: min(oldest.tokens_to_feed, max(budget // 2, 1))}
        budget -= share[oldest]
        for seq in sorted(sequences, key=lambda seq: (seq.tokens_left, seq.arrival)):
            more = min(seq.tokens_to_feed - share.get(seq, 0), budget)
            if more:
                share[seq] = share.get(seq, 0) + more
                budget -= more
        return [(seq, _rounded(seq, count)) for seq, count in share.items()]


def _rounded(seq: Sequence, count: int) -> int:
    """`count`, but no further than the next cut.

    It is in whole pieces unless it ends the prompt, meets a cut or is smaller than a piece.
    """
    if seq.cuts and seq.fed + count >= seq.cuts[0]:
        return seq.cuts[0] - seq.fed
    return count if count == seq.tokens_to_feed or count < PIECE else count - count % PIECE

"""What an engine counts for its metrics. In a step that is a few numbers, however many rows it has.

Counts of rows are those of leading rows: of a mixture's the first.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from msgspec.structs import replace

from rwkv_batch.engine.metrics.histogram import Histogram
from rwkv_batch.engine.scheduling.row import DECODING, Row
from rwkv_batch.runner.protocol import LAST, Batch
from rwkv_batch.sampling.reference import BROKEN
from rwkv_batch.wire.metrics import POWERS, STEP_KINDS, STEPS, WAITS, StepKind
from rwkv_batch.wire.protocol import RowTimes

BY_THEMSELVES = ("stop", "length")  # how rows end that nobody has ended


@dataclass(frozen=True)
class DrawMarks:
    """Of the rows that draw in a step, those that have drawn before; they come first."""

    decoding: int  # how many these are,
    leading: int  # of them the leading rows,
    ahead: int  # and of those the ones whose draw before was not known when the step was launched
    known_at: float  # when the last draws that were known had landed
    steps: int  # that were launched together


@dataclass
class WaitTimes:
    """Seconds that rows wait."""

    queued: Histogram = field(default_factory=partial(Histogram, WAITS))  # for a slot
    first_token: Histogram = field(default_factory=partial(Histogram, WAITS))
    between_tokens: Histogram = field(default_factory=partial(Histogram, STEPS))
    whole: Histogram = field(default_factory=partial(Histogram, WAITS))  # for the end of the text
    preemptions: int = 0  # rows of batches that had to leave their slots and wait again
    traced: dict[Row, RowTimes] = field(default_factory=dict)  # of requests that are, until they end


@dataclass
class StepCounts:
    """What steps are like."""

    kind: StepKind | None = None  # of those launched last; None: there were none
    together: int = 1  # how many these are
    times: dict[str, Histogram] = field(default_factory=lambda: {k: Histogram(STEPS) for k in STEP_KINDS})
    drafted: int = 0  # tokens of drafts
    accepted: int = 0  # of these
    rows: Histogram = field(default_factory=partial(Histogram, POWERS))
    tokens: Histogram = field(default_factory=partial(Histogram, POWERS))


class EngineCounts:
    """Plain numbers since the engine began. All methods are for the engine's thread."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by outcome
        self.rows = self.prompt_tokens = self.cached_tokens = 0  # of those accepted
        self.finished: Counter[str] = Counter()  # rows, by what has ended them
        self.prefill_tokens = self.generation_tokens = 0
        self.corrupted = 0  # rows with logits that are not finite
        self.cache_queries = self.cache_hits = 0  # tokens
        self.waits, self.steps = WaitTimes(), StepCounts()
        self._arrived: dict[Row, float] = {}  # rows that have not ended
        self._landed_at = 0.0
        self._gaps = (0.0, 0.0)  # between the draws that land and those before: of rows ahead, of the others

    # Requests

    def accept(self, rows: list[Row], prompts: list[list[int]], cached: list[int]) -> None:
        """A request was accepted. rows: all; cached: as of protocol.Accepted."""
        self.requests["accepted"] += 1
        now = monotonic()
        leading = [row for row in rows if row.leads]
        self._arrived.update(dict.fromkeys(leading, now))
        if leading and leading[0].request.traced:
            self.waits.traced |= {row: RowTimes(row.key[1], row.number, "", now) for row in leading}
        self.rows += len(leading)
        self.prompt_tokens += sum(map(len, prompts))
        self.cached_tokens += sum(cached)

    def admit(self, row: Row) -> None:
        """A row has got its slot."""
        if (arrived := self._arrived.get(row)) is not None:
            self.waits.queued.observe(monotonic() - arrived)
            if row in self.waits.traced:
                self._trace(row, admitted=monotonic())

    def begin(self, row: Row) -> None:
        """The prefix cache has been asked for the prompt; `fed` of it need not be fed."""
        if row.request.prefix_cache:
            self.cache_queries += len(row.prompt)
            self.cache_hits += row.input.fed

    def text_ended(self, row: Row) -> None:
        """Of a row nothing more is drawn, though it may not be answered yet."""
        if row in self.waits.traced:
            self._trace(row, text_ended=monotonic())

    def finish(self, row: Row, reason: str) -> RowTimes | None:
        """A row has ended; only the first call for it counts. Returns its times if it is traced."""
        arrived = self._arrived.pop(row, None)
        if arrived is None:
            return None
        self.finished[reason] += 1
        if reason in BY_THEMSELVES:
            self.waits.whole.observe(monotonic() - arrived)
        times = self.waits.traced.pop(row, None)
        stored = row.life.target is not None and times is not None and times.text_ended is not None
        return times and replace(times, reason=reason, answered=monotonic(), committed=stored)

    def _trace(self, row: Row, **times: float) -> None:
        self.waits.traced[row] = replace(self.waits.traced[row], **times)

    def waited(self, rows: Iterable[Row], now: float) -> float:
        """Seconds for which these rows have waited: since the last step has landed, or the first one came."""
        oldest = min((self._arrived.get(row, now) for row in rows), default=now)
        return max(0.0, now - max(oldest, self._landed_at))

    # Steps

    def launch(
        self, plan: list[tuple[Row, int]], batch: Batch, drawing: list[Row], drafted: int = 0
    ) -> DrawMarks:
        """A step has been launched; its rows have not advanced yet. drafted: tokens of drafts in it."""
        decoding = rows = len(plan)
        while decoding and plan[decoding - 1][0].state is not DECODING:
            decoding -= 1
        self.steps.kind = "prefill" if not decoding else "decode" if decoding == rows else "mixed"
        self.prefill_tokens += len(batch.tokens) - decoding - drafted
        self.steps.together = batch.steps
        self.steps.rows.observe(rows, batch.steps)
        self.steps.tokens.observe(len(batch.tokens), batch.steps)
        if batch.mixtures:
            leading = [row for row in drawing[:decoding] if row.leads]
            ahead = sum(1 for row in leading if row.in_flight)
            return DrawMarks(decoding, len(leading), ahead, self._landed_at, batch.steps)
        ahead = batch.tokens[:decoding].count(LAST)
        return DrawMarks(decoding, decoding, ahead, self._landed_at, batch.steps)

    def land(self, marks: DrawMarks, drawing: list[Row], ids: list[int]) -> None:
        """A step's draws are known; `lack` takes back those that do not count."""
        before, now, steps = self._landed_at, monotonic(), marks.steps
        self._landed_at = now
        self._gaps = (now - before) / steps, (now - marks.known_at) / steps
        for gap, rows in zip(self._gaps, (marks.ahead, marks.leading - marks.ahead), strict=True):
            if rows:
                self.waits.between_tokens.observe(gap, rows * steps)
        self.generation_tokens += marks.leading * steps
        beginning = slice(marks.decoding, len(drawing))
        for row, token in zip(drawing[beginning], ids[beginning], strict=True):
            arrived = self._arrived.get(row)
            wanted = row.request.max_tokens and token != BROKEN and token not in row.request.stop_ids
            if arrived is not None and row.generating and wanted:
                self.generation_tokens += 1
                self.waits.first_token.observe(now - arrived)
                if row in self.waits.traced:
                    self._trace(row, first_token=now)

    def verified(self, drafted: int, accepted: int, taken: int) -> None:
        """A row has drawn `taken` tokens more than one, as of its draft so many tokens were accepted.

        A stop id is none of them, so that `lack` need not take it back.
        """
        self.steps.drafted += drafted
        self.steps.accepted += accepted
        if taken:
            self.generation_tokens += taken
            gap = self._gaps[1]  # it was not ahead
            self.waits.between_tokens.observe(gap, -1)
            self.waits.between_tokens.observe(gap / (1 + taken), 1 + taken)

    def lack(self, marks: DrawMarks, row: Row, place: int, draws: int = 1) -> None:
        """Take back so many tokens drawn at this place, for a row that has ended or ends with a stop id."""
        if draws and place < marks.decoding and row.leads:
            self.generation_tokens -= draws
            of_ahead, of_others = self._gaps
            gap = of_ahead if marks.ahead and row.draws.ahead else of_others
            self.waits.between_tokens.observe(gap, -draws)

"""Steps: as the runner takes them, and those that are queued on the device."""

from dataclasses import dataclass
from time import monotonic

from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.scheduling.counts import DrawMarks
from rwkv_batch.engine.scheduling.sequence import DECODING, LAST, Sequence
from rwkv_batch.runner.protocol import Batch, Draws, DrawUnder
from rwkv_batch.sampling.mixtures import MixedRows
from rwkv_batch.sampling.prompt_logprobs import ScoredRow
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import TokenLogprob

# How many steps are launched together follows the time between the draws of one launch and the next, and what
# part of it the host waits for them: twice as many after a short time with little waiting, half as many after
# a long time or with much waiting.
SHORT, LONG = 0.012, 0.024  # seconds
LITTLE, MUCH = 0.25, 0.75


@dataclass
class StepInFlight:
    """A step whose draws are not known yet."""

    fed: list[Sequence]  # all sequences that it feeds
    drawing: list[Sequence]  # those that draw
    logprob_places: list[int]  # places in `drawing` of those that want logprobs
    marks: DrawMarks
    scored: list[tuple[Sequence, ScoredRow]]  # those that get logprobs of their prompts
    draws: Draws | None
    draw: DrawUnder | None = None  # in place of `draws`, until the masks of its rows are known

    def draw_under(self, masks: MaskMaker) -> Draws:
        """The draws, which are queued now if they waited for masks."""
        if self.draw:
            bound = [(i, seq.constraint) for i, seq in enumerate(self.drawing) if seq.generating]
            self.draws, self.draw = self.draw(masks.of([(i, row) for i, row in bound if row])), None
        assert self.draws
        return self.draws

    def logprobs(self, ids: list[int], tokenizer: Tokenizer) -> dict[int, TokenLogprob]:
        """Logprobs of what was drawn, for the sequences that want them, by their place in `drawing`."""
        found = self.draws.logprobs() if self.draws and self.logprob_places else []
        text = tokenizer.token_bytes
        return {
            place: TokenLogprob(text(ids[place]), logprob, [(text(token), p) for token, p in top])
            for place, (logprob, top) in zip(self.logprob_places, found, strict=True)
        }

    def give_prompt_logprobs(self, tokenizer: Tokenizer) -> None:
        """To the sequences that want them. The draws have been waited for."""
        assert self.draws
        text = tokenizer.token_bytes
        for (seq, row), found in zip(self.scored, self.draws.prompt_logprobs(), strict=True):
            seq.prompt_logprobs += [
                TokenLogprob(text(target), logprob, [(text(token), p) for token, p in top])
                for target, (logprob, top) in zip(row.targets, found, strict=True)
            ]


def batch_of(plan: list[tuple[Sequence, int]], adapters: list[int]) -> tuple[Batch, list[Sequence]]:
    """A planned step as the runner takes it, and the sequences that draw in it. adapters: as of Batch."""
    draws = [i for i, (seq, count) in enumerate(plan) if seq.draws_after(count)]
    drawing = [plan[i][0] for i in draws]
    tops = {
        i: n for i, seq in enumerate(drawing) if (n := seq.request.top_logprobs) is not None and seq.leads
    }
    batch = Batch(
        tokens=[token for seq, count in plan for token in seq.next_tokens(count)],
        counts=[count for _, count in plan],
        slots=[seq.slot for seq, _ in plan if seq.slot is not None],
        draws=draws,
        top_logprobs=tops,
        mixtures=mixed_rows(drawing),
        adapters=adapters,
        scored=scored_in(plan),
    )
    return batch, drawing


class Pace:
    """How many steps the host launches together: more where the device would wait for it otherwise.

    Then the host has less to do for each, but new rows and the readers of text wait for all of them. Whether
    the device waits shows in how long the host waits for draws.
    """

    def __init__(self, most: int) -> None:
        """most: as of Runner.most_steps."""
        self._most, self.steps = most, 1  # the steps of the next launch, as far as its rows allow
        self._began = self._landed_at = 0.0

    def wait(self) -> None:
        """The host begins to wait for draws."""
        self._began = monotonic()

    def land(self, steps: int) -> None:
        """It has those of so many steps, which were launched together."""
        before, now = self._landed_at, monotonic()
        self._landed_at, took, waited = now, now - before, now - self._began
        if waited > MUCH * took or took > LONG:
            self.steps = max(steps // 2, 1)
        elif waited <= LITTLE * took and took <= SHORT:
            self.steps = min(steps * 2, self._most)

    def steps_of(self, batch: Batch, drawing: list[Sequence]) -> int:
        """For a batch and the sequences that draw in it, as far as these allow: a power of two."""
        most = self.steps
        if most == 1 or batch.top_logprobs or batch.mixtures or batch.scored:
            return 1
        rows = len(batch.slots)
        if not len(batch.tokens) == len(drawing) == batch.tokens.count(LAST) == rows:
            return 1
        least = min(seq.known_draws_left for seq in drawing)
        while most > 1 and most > least:
            most //= 2
        return most


def scored_in(plan: list[tuple[Sequence, int]]) -> dict[int, ScoredRow]:
    """The rows of a planned step that want logprobs of the prompt's tokens behind those that it feeds."""
    found = {}
    for i in range(len(plan) - 1, -1, -1):
        seq, count = plan[i]
        if seq.state is DECODING:  # all rows before this one decode too
            break
        if (top := seq.request.prompt_logprobs) is not None:
            first = max(seq.fed, seq.request.scored_from - 1)
            if targets := seq.to_feed[first + 1 : seq.fed + count + 1]:
                found[i] = ScoredRow(first - seq.fed, targets, top)
    return found


def mixed_rows(drawing: list[Sequence]) -> list[MixedRows]:
    """The mixtures among the sequences that draw in a step, which are whole."""
    mixtures = {seq.mixture for seq in drawing if seq.mixture}
    if not mixtures:
        return []
    places = {seq: place for place, seq in enumerate(drawing)}
    found = [MixedRows([places[seq] for seq in mixture.members], mixture.weights) for mixture in mixtures]
    return sorted(found, key=lambda mixture: mixture.rows)

"""Steps: as the runner takes them, and those that are queued on the device."""

from dataclasses import dataclass

from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.scheduling.counts import DrawMarks
from rwkv_batch.engine.scheduling.sequence import DECODING, Sequence
from rwkv_batch.runner.protocol import Batch, Draws, DrawUnder
from rwkv_batch.sampling.mixtures import MixedRows
from rwkv_batch.sampling.prompt_logprobs import ScoredRow
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import TokenLogprob


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
        text = tokenizer.token_name
        return {
            place: TokenLogprob(text(ids[place]), logprob, [(text(token), p) for token, p in top])
            for place, (logprob, top) in zip(self.logprob_places, found, strict=True)
        }

    def give_prompt_logprobs(self, tokenizer: Tokenizer) -> None:
        """To the sequences that want them. The draws have been waited for."""
        assert self.draws
        text = tokenizer.token_name
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

"""Steps: as the runner takes them, and those that are queued on the device."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.scheduling.counts import DrawMarks
from rwkv_batch.engine.scheduling.row import DECODING, Row
from rwkv_batch.runner.protocol import Batch, Draws, DrawUnder
from rwkv_batch.runner.speculation.protocol import VerifiedDraws
from rwkv_batch.sampling.logprobs import RowLogprobs
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.sampling.mixtures import MixedRows
from rwkv_batch.sampling.prompt_logprobs import ScoredRow
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import TokenLogprob


@dataclass
class StepInFlight:
    """A step whose draws are not known yet."""

    fed: list[Row]  # all rows that it feeds
    drawing: list[Row]  # those that draw
    logprob_places: list[int]  # places in `drawing` of those that want logprobs
    marks: DrawMarks
    scored: list[tuple[Row, ScoredRow]]  # those that get logprobs of their prompts
    draws: Draws | None
    draw: DrawUnder | None = None  # in place of `draws`, until the masks of its rows are known
    drafts: Mapping[int, int] = field(default_factory=dict)  # as of Verifier.feed
    verified: VerifiedDraws | None = None  # the draws, where there are drafts

    def draw_under(self, masks: MaskMaker) -> Draws:
        """The draws, which are queued now if they waited for masks."""
        if self.draw:
            self.draws, self.draw = self.draw(masks_of(self.drawing, masks)), None
        assert self.draws
        return self.draws

    def logprobs(self, ids: list[int], tokenizer: Tokenizer) -> dict[int, TokenLogprob]:
        """Logprobs of what was drawn, for the rows that want them, by their place in `drawing`."""
        found = self.draws.logprobs() if self.draws and self.logprob_places else []
        return {
            place: token_logprob(ids[place], entry, tokenizer)
            for place, entry in zip(self.logprob_places, found, strict=True)
        }

    def give_prompt_logprobs(self, tokenizer: Tokenizer) -> None:
        """To the rows that want them. The draws have been waited for."""
        assert self.draws
        text = tokenizer.token_name
        for (row, scored), found in zip(self.scored, self.draws.prompt_logprobs(), strict=True):
            row.text.prompt_logprobs += [
                TokenLogprob(text(target), logprob, [(text(token), p) for token, p in top])
                for target, (logprob, top) in zip(scored.targets, found, strict=True)
            ]


def masks_of(drawing: list[Row], masks: MaskMaker) -> RowMasks:
    """Those of the rows that draw in a step, as soon as they are there."""
    bound = [(i, row.draws.constraint) for i, row in enumerate(drawing) if row.generating]
    return masks.of([(i, each) for i, each in bound if each])


def token_logprob(token: int, entry: RowLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
    """What a reader gets of a drawn token's logprobs."""
    (logprob, top), text = entry, tokenizer.token_name
    return TokenLogprob(text(token), logprob, [(text(each), p) for each, p in top])


def batch_of(plan: list[tuple[Row, int]], adapters: list[int]) -> tuple[Batch, list[Row]]:
    """A planned step as the runner takes it, and the rows that draw in it. adapters: as of Batch."""
    draws = [i for i, (row, count) in enumerate(plan) if row.draws_after(count)]
    drawing = [plan[i][0] for i in draws]
    tops = {
        i: n for i, row in enumerate(drawing) if (n := row.request.top_logprobs) is not None and row.leads
    }
    batch = Batch(
        tokens=[token for row, count in plan for token in row.next_tokens(count)],
        counts=[count for _, count in plan],
        slots=[row.slot for row, _ in plan if row.slot is not None],
        draws=draws,
        top_logprobs=tops,
        mixtures=mixed_rows(drawing),
        adapters=adapters,
        scored=scored_in(plan),
    )
    return batch, drawing


def scored_in(plan: list[tuple[Row, int]]) -> dict[int, ScoredRow]:
    """The rows of a planned step that want logprobs of the prompt's tokens behind those that it feeds."""
    found = {}
    for i in range(len(plan) - 1, -1, -1):
        row, count = plan[i]
        if row.state is DECODING:  # all rows before this one decode too
            break
        if (top := row.request.prompt_logprobs) is not None:
            first = max(row.input.fed, row.request.scored_from - 1)
            if targets := row.input.tokens[first + 1 : row.input.fed + count + 1]:
                found[i] = ScoredRow(first - row.input.fed, targets, top)
    return found


def mixed_rows(drawing: list[Row]) -> list[MixedRows]:
    """The mixtures among the rows that draw in a step, which are whole."""
    mixtures = {row.draws for row in drawing if row.draws.members}
    if not mixtures:
        return []
    places = {row: place for place, row in enumerate(drawing)}
    found = [MixedRows([places[row] for row in each.members], list(each.weights)) for each in mixtures]
    return sorted(found, key=lambda mixture: mixture.rows)

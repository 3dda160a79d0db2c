"""What becomes of draws: the text of their rows, its deltas, and the ends of rows."""

import logging
import math
from collections.abc import Iterable, Mapping

from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.rows.beginnings import Beginnings
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import Refusal
from rwkv_batch.engine.scheduling.row import Row
from rwkv_batch.engine.scheduling.steps import StepInFlight, token_logprob
from rwkv_batch.runner.speculation.protocol import MoreDraws
from rwkv_batch.sampling.reference import BROKEN
from rwkv_batch.wire.protocol import TokenLogprob

NOT_FINITE = "The logits of this text are not finite numbers, so it cannot go on; nothing of it is stored."
log = logging.getLogger(__name__)


class Landing:
    """For the engine's thread."""

    def __init__(self, parts: EngineParts, beginnings: Beginnings, masks: MaskMaker) -> None:
        self._parts, self._beginnings, self._masks = parts, beginnings, masks

    def take(self, step: StepInFlight, ids: list[int], more: Mapping[int, MoreDraws] | None = None) -> None:
        """Give what a step has drawn, as of Draws.wait, to its rows, and emit their deltas.

        more: what it has drawn behind drafts, as of VerifiedDraws; None: there are none. A row whose logits
        are not finite has no next token: it ends with an error, and others go on.
        """
        counts, shown, tokenizer = self._parts.counts, self._parts.rows, self._parts.tokenizer
        marks = step.marks
        rows, steps = len(step.drawing), marks.steps
        if len(ids) != rows * steps:
            raise ValueError(f"{steps} steps of {rows} rows came with {len(ids)} ids; the runner is wrong.")
        counts.land(marks, step.drawing, ids)
        if step.scored:
            step.give_prompt_logprobs(tokenizer)
            for row, _ in step.scored:
                if row.generating and not _finite(row.text.prompt_logprobs):
                    self._fail(row)
        logprobs = step.logprobs(ids, tokenizer)
        broken = {place for place, entry in logprobs.items() if not _finite([entry])}
        if BROKEN in ids:
            broken |= {i % rows for i, token in enumerate(ids) if token == BROKEN}
        for place, row in enumerate(step.drawing):
            bound = row.draws.constraint
            if place in broken or (bound and bound.error) or not row.generating:
                row.in_flight -= steps
                counts.lack(marks, row, place, steps)
                if not row.generating:  # it finished at a draw before, or was dropped meanwhile
                    continue
                if place in broken:
                    self._fail(row)
                elif bound:
                    why = bound.error if bound.broken else Refusal("invalid", bound.error, bound.field)
                    shown.fail(row.key, why)
                continue
            if steps == 1:
                row.in_flight -= 1
                taken, token = 1, ids[place]
                row.take_drawn(token, tokenizer.token_bytes(token), logprobs.get(place))
                # Where there is more the first token is one of the draft, and so no stop id.
                if more and place in more and not self._take_more(step, place, more[place]):
                    continue
            else:
                drawn = ids[place::rows]
                taken = row.take_several(drawn, tokenizer)
                token = drawn[taken - 1]
            delta = row.text.next_delta(row.drawn)
            if delta and delta.finish_reason:
                lacking = steps - taken + (token in row.request.stop_ids)
                counts.lack(marks, row, place, lacking)
                counts.text_ended(row)
                row.life.text_ended(row, delta)
                continue
            if delta:
                shown.show(row, delta)
            if bound and row.leads:
                behind = more.get(place, ()) if more else ()
                self._masks.drawn(bound, [token, *(drawn for drawn, _ in behind)])
        self._masks.submit()
        shown.gather()

    def _take_more(self, step: StepInFlight, place: int, more: MoreDraws) -> bool:
        """Give a row what it has drawn behind its draft, after a first token. Whether it has not failed.

        Its text may end before the last of these, at a stop string; its state has then seen more than the
        text, as where steps are queued ahead.
        """
        row, tokenizer = step.drawing[place], self._parts.tokenizer
        before = len(row.drawn)
        for drawn, entry in more:
            if not row.generating:
                break
            logprob = None if entry is None else token_logprob(drawn, entry, tokenizer)
            if drawn == BROKEN or (logprob and not _finite([logprob])):
                self._fail(row)
                return False
            row.take_drawn(drawn, tokenizer.token_bytes(drawn), logprob)
        drafted, taken = step.drafts[place], len(row.drawn) - before
        accepted = min(len(more), 1 + taken)  # those behind the end of the text are not of it
        row.text.count_draft(drafted, accepted)
        self._parts.counts.verified(drafted, accepted, taken)
        return True

    def _fail(self, row: Row) -> None:
        log.error("logits that are not finite have ended a row")
        self._parts.counts.corrupted += 1
        for each in row.together:
            self._beginnings.forget(each)
        self._parts.rows.fail_row(row, NOT_FINITE)


def _finite(entries: Iterable[TokenLogprob]) -> bool:
    """Whether the logits of which these were made were that."""
    return not any(math.isnan(entry.logprob) for entry in entries)

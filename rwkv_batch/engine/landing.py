"""What becomes of draws: the text of their sequences, its deltas, and the ends of rows."""

import logging
import math
from collections.abc import Callable, Iterable

from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.mixed_turns import MixedTurns
from rwkv_batch.engine.scheduling.counts import EngineCounts
from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.engine.scheduling.sequence import Outbox, RequestKey
from rwkv_batch.engine.scheduling.steps import StepInFlight
from rwkv_batch.sampling.reference import BROKEN
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import Failed, Progress, Rejected, RowDelta, TokenLogprob

NOT_FINITE = (
    "The logits of this text are not finite numbers, so it cannot go on; nothing of the request is stored."
)
log = logging.getLogger(__name__)


class Landing:
    """For the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        mixed_turns: MixedTurns,
        masks: MaskMaker,
        tokenizer: Tokenizer,
        outbox: Outbox,
        cancel: Callable[[RequestKey, str], None],
        counts: EngineCounts,
    ) -> None:
        self._scheduler, self._mixed_turns, self._masks = scheduler, mixed_turns, masks
        self._tokenizer, self._outbox, self._cancel, self._counts = tokenizer, outbox, cancel, counts

    def take(self, step: StepInFlight, ids: list[int]) -> None:
        """Give what a step has drawn, as of Draws.wait, to its sequences, and emit their deltas.

        A request of which a row has logits that are not finite fails.
        """
        counts, marks = self._counts, step.marks
        rows, steps = len(step.drawing), marks.steps
        if len(ids) != rows * steps:
            raise ValueError(f"{steps} steps of {rows} rows came with {len(ids)} ids; the runner is wrong.")
        counts.land(marks, step.drawing, ids)
        if step.scored:
            step.give_prompt_logprobs(self._tokenizer)
            for seq, _ in step.scored:
                if seq.generating and not _finite(seq.prompt_logprobs):
                    self._fail(seq.key)
        logprobs, any_broken = step.logprobs(ids, self._tokenizer), BROKEN in ids
        deltas: dict[RequestKey, list[RowDelta]] = {}
        for place, seq in enumerate(step.drawing):
            if not seq.generating:  # it finished at a draw before, or was dropped meanwhile
                seq.in_flight -= steps
                counts.lack(marks, seq, place, steps)
                continue
            broken = any_broken and BROKEN in ids[place::rows]
            if broken or (place in logprobs and not _finite([logprobs[place]])):
                seq.in_flight -= steps
                counts.lack(marks, seq, place, steps)
                deltas.pop(seq.key, None)
                self._fail(seq.key)
                continue
            if seq.constraint and seq.constraint.error:
                seq.in_flight -= 1
                counts.lack(marks, seq, place)
                self._cancel(seq.key, "error")
                deltas.pop(seq.key, None)
                why = seq.constraint.error, seq.constraint.field
                self._outbox.append((seq.key, Rejected(seq.key[1], "invalid", *why)))
                continue
            if steps == 1:
                seq.in_flight -= 1
                taken, token = 1, ids[place]
                seq.take_drawn(token, self._tokenizer.token_bytes(token), logprobs.get(place))
            else:
                drawn = ids[place::rows]
                taken = seq.take_several(drawn, self._tokenizer)
                token = drawn[taken - 1]
            delta = seq.take_delta()
            if delta and seq.finish_reason:
                lacking = steps - taken + (token in seq.request.stop_ids)
                counts.lack(marks, seq, place, lacking)
                if seq.request.turn:
                    self._mixed_turns.finish(seq, delta)
                    continue
                counts.finish(seq, seq.finish_reason)
                self._scheduler.release(seq)
            if delta and seq.leads:
                deltas.setdefault(seq.key, []).append(delta)
            if seq.constraint and seq.leads and not seq.finish_reason:
                self._masks.drawn(seq.constraint, token)
        self._masks.submit()
        for key, found in deltas.items():
            self._outbox.append((key, Progress(key[1], found)))

    def _fail(self, key: RequestKey) -> None:
        """A row of this request has logits that are not finite, so that it has no next token."""
        log.error("logits that are not finite have ended a request")
        self._counts.corrupted += 1
        self._cancel(key, "error")
        self._outbox.append((key, Failed(key[1], NOT_FINITE)))


def _finite(entries: Iterable[TokenLogprob]) -> bool:
    """Whether the logits of which these were made were that."""
    return not any(math.isnan(entry.logprob) for entry in entries)

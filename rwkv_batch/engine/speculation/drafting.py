"""Which rows of a step have drafts, and how long these are.

A token more in a step is worth its time if the step then draws tokens faster. What it costs is measured
(`cost.py`); with what chance it is accepted follows from what the row has drawn (`text/lookup.py`). With more
rows a step draws more in the same time without drafts, so they become shorter, and end. Where a row's text
has none, or none that is as likely, a draft model may guess (`guessing.py`).
"""

import logging
from dataclasses import replace

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.scheduling.row import DECODING, Row
from rwkv_batch.engine.speculation.cost import DraftCost, draft_cost
from rwkv_batch.engine.speculation.guessing import Guessing
from rwkv_batch.runner.protocol import Batch
from rwkv_batch.runner.speculation.draft_model import DraftModel
from rwkv_batch.runner.speculation.protocol import Verifier
from rwkv_batch.runner.speculation.torch_verifier import verifier_of
from rwkv_batch.text.lookup import MOST_LOOKED_UP, Lookup

log = logging.getLogger(__name__)

MOST_TOGETHER = 64  # of all rows: their logits are in memory at once
MOST_EXPECTED = 4 * MOST_LOOKED_UP  # characters that are read of a prediction
LEAST_GAIN = 2.0  # what drafts are expected to gain, in multiples of their cost: both are not known well


def drafting_of(
    parts: EngineParts, config: EngineConfig, draft_model: DraftModel | None = None
) -> "Drafting | None":
    """Drafts as configured, with their cost measured; None: rows have none."""
    most = config.speculate
    if not most or (verifier := verifier_of(parts.runner)) is None:
        return None
    guessing = None
    if draft_model:
        slots, shape = len(parts.runner.states), draft_model.checkpoint
        guessing = Guessing(draft_model, slots)
        log.info(
            "draft model: %s, %d layers of width %d, %.1f MiB; %.1f MiB for the states of %d slots",
            shape.name,
            shape.layers,
            shape.width,
            draft_model.weight_bytes / 2**20,
            draft_model.slot_bytes * slots / 2**20,
            slots,
        )
    cost = draft_cost(parts.runner, verifier, most, draft_model)
    log.info(
        "drafts of up to %d tokens: one costs %.2f of a step, and each of its tokens %.2f",
        most,
        cost.fixed,
        cost.each,
    )
    if guessing:
        log.info(
            "the draft model: a guess costs %.2f of a step, a token read %.2f",
            cost.guess,
            cost.read,
        )
    return Drafting(verifier, most, cost, parts, guessing)


class Drafting:
    """The drafts of one model's rows. For the engine's thread."""

    def __init__(
        self, verifier: Verifier, most: int, cost: DraftCost, parts: EngineParts, guessing: Guessing | None
    ) -> None:
        """most: tokens of a draft. guessing: None: there is no draft model."""
        self.verifier, self._most, self._cost, self._guessing = verifier, most, cost, guessing
        self._tokenizer, self._vocab = parts.tokenizer, parts.weights.vocab

    def extended(self, batch: Batch, drawing: list[Row]) -> tuple[Batch, dict[int, int]]:
        """A step with the drafts of its rows, and how many tokens these have, by place in the draws.

        drawing: the rows that draw in it, which have not advanced yet.
        """
        drafts = self._drafts(drawing, len(batch.tokens)) if batch.steps == 1 else {}
        if not drafts:
            return batch, {}
        tokens, counts, rows = list[int](), list(batch.counts), 0
        for place, row in enumerate(drawing):  # those that decode come first
            if row.state is not DECODING:
                break
            rows = place + 1
            draft = drafts.get(place, ())
            tokens += [batch.tokens[place], *draft]
            counts[place] += len(draft)
        extended = replace(batch, tokens=tokens + batch.tokens[rows:], counts=counts)
        return extended, {place: len(draft) for place, draft in drafts.items()}

    def _drafts(self, drawing: list[Row], tokens: int) -> dict[int, list[int]]:
        """The drafts by place. tokens: of the step without them."""
        rows = sum(row.state is DECODING for row in drawing)
        cost, drafts = self._cost, dict[int, list[int]]()
        if not rows:
            return drafts
        # What a step draws in the time of a step of one token: with less a draft slows it down.
        pace = rows / cost.of_step(tokens)
        least = cost.each * pace * LEAST_GAIN
        if least >= 1:
            return drafts
        room, gained, unlikely = MOST_TOGETHER, 0.0, dict[int, tuple[Row, int]]()
        found: dict[int, tuple[list[int], float]] = {}
        for place, row in enumerate(drawing[:rows]):
            most = min(self._most, row.known_draws_left - 1, room)
            lookup = self._lookup(row)
            if lookup is None or most < 1:
                continue
            lookup.follow(row.drawn)
            draft, expected = lookup.draft(most, least)
            if draft:
                stops = row.text.stop_ids
                if not stops.isdisjoint(draft):
                    draft = draft[: next(i for i, token in enumerate(draft) if token in stops)]
                if draft:
                    found[place] = draft, expected
            if self._guessing and (not draft or expected < self._guessing.of(row).rate):
                unlikely[place] = row, most
                room -= most
            else:
                room -= len(draft)
        if self._guessing and unlikely:
            found |= self._guessing.drafts(unlikely, cost, pace)
        for place in sorted(found):
            draft, expected = found[place]
            drafts[place] = draft
            gained += expected - least * len(draft)
        return drafts if gained > cost.fixed * pace * LEAST_GAIN else {}

    def _lookup(self, row: Row) -> Lookup | None:
        """Of a row that may have drafts: it has no mask, is in no mixture and has drawn all that it will."""
        draws = row.draws
        if draws.lookup is None:
            if draws.members or draws.constraint:
                return None
            # One that is as long as a body may be would hold up all rows, once for each row of its request.
            prediction = row.request.prediction[:MOST_EXPECTED]
            expected = self._tokenizer.encode(prediction) if prediction else []
            draws.lookup = Lookup(row.prompt, [token for token in expected if token < self._vocab])
        return None if row.in_flight else draws.lookup

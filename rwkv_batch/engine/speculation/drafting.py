"""Which rows of a step have drafts, and how long these are.

A token more in a step is worth its time if the step then draws tokens faster. What it costs is measured
(`cost.py`); with what chance it is accepted follows from what the row has drawn (`text/lookup.py`). With more
rows a step draws more in the same time without drafts, so they become shorter, and end.
"""

import logging
from dataclasses import replace

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.scheduling.row import DECODING, Row
from rwkv_batch.engine.speculation.cost import DraftCost, draft_cost
from rwkv_batch.runner.protocol import Batch
from rwkv_batch.runner.speculation.protocol import Verifier
from rwkv_batch.runner.speculation.torch_verifier import verifier_of
from rwkv_batch.text.lookup import MOST_LOOKED_UP, Lookup
from rwkv_batch.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_TOGETHER = 64  # of all rows: their logits are in memory at once
MOST_EXPECTED = 4 * MOST_LOOKED_UP  # characters that are read of a prediction
LEAST_GAIN = 2.0  # what drafts are expected to gain, in multiples of their cost: both are not known well


def drafting_of(parts: EngineParts, config: EngineConfig) -> "Drafting | None":
    """Drafts as configured, with their cost measured; None: rows have none."""
    most = config.speculate
    if not most or (verifier := verifier_of(parts.runner)) is None:
        return None
    cost = draft_cost(parts.runner, verifier, most)
    log.info(
        "drafts of up to %d tokens: one costs %.2f of a step, and each of its tokens %.2f",
        most,
        cost.fixed,
        cost.each,
    )
    return Drafting(verifier, most, cost, parts.tokenizer, parts.weights.vocab)


class Drafting:
    """The drafts of one model's rows. For the engine's thread."""

    def __init__(
        self, verifier: Verifier, most: int, cost: DraftCost, tokenizer: Tokenizer, vocab: int
    ) -> None:
        """most: tokens of a draft. vocab: ids that the model has."""
        self.verifier, self._most, self._cost = verifier, most, cost
        self._tokenizer, self._vocab = tokenizer, vocab

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
        pace = rows / cost.of_step(tokens) * LEAST_GAIN
        least = cost.each * pace
        if least >= 1:
            return drafts
        together, gained = 0, 0.0
        for place, row in enumerate(drawing[:rows]):
            most = min(self._most, row.known_draws_left - 1, MOST_TOGETHER - together)
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
                    drafts[place] = draft
                    together += len(draft)
                    gained += expected - least * len(draft)
        return drafts if gained > cost.fixed * pace else {}

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

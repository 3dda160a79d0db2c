"""Which rows of a step have drafts, and how long these are.

A token more in a step is worth its time if the step then draws tokens faster. What it costs is measured
(`cost.py`); with what chance it is accepted follows from what the row has drawn (`text/lookup.py`). With more
rows a step draws more in the same time without drafts, so they become shorter, and end. Where a row's text
has none, or none that is as likely, a draft model may guess (`guessing.py`).
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.constraints.ahead import MasksAhead
from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.scheduling.row import DECODING, Row
from rwkv_batch.engine.speculation.cost import DraftCost, draft_cost
from rwkv_batch.engine.speculation.guessing import LEAST_GAIN as LEAST_GUESSED
from rwkv_batch.engine.speculation.guessing import Draft, Guessing, Hope, WantedGuesses, hope_of
from rwkv_batch.ops.device import out_of_memory_as_error
from rwkv_batch.runner.protocol import Batch
from rwkv_batch.runner.speculation.draft_model import DraftModel
from rwkv_batch.runner.speculation.protocol import MasksBehind, Verifier
from rwkv_batch.runner.speculation.verifiers import verifier_of
from rwkv_batch.text.lookup import MOST_LOOKED_UP, Lookup

log = logging.getLogger(__name__)

MOST_EXPECTED = 4 * MOST_LOOKED_UP  # characters that are read of a prediction
LEAST_GAIN = 2.0  # what drafts are expected to gain, in multiples of their cost: both are not known well
WAIT = 0.1  # of a step, for which a device does nothing while the host waits for what it has drawn


def drafting_of(
    parts: EngineParts, config: EngineConfig, masks: MaskMaker, draft_model: DraftModel | None = None
) -> "Drafting | None":
    """Drafts as configured, with their cost measured; None: rows have none. masks: as of Drafting."""
    if not config.speculate or (verifier := verifier_of(parts.runner)) is None:
        return None
    most = min(config.speculate, verifier.most_drafted)
    guessing = None
    if draft_model:
        slots, shape = len(parts.runner.states), draft_model.checkpoint
        with out_of_memory_as_error("the states of the draft model", parts.runner.device):
            guessing = Guessing(draft_model, slots)
        log.info(
            "draft model: %s, %d layers of width %d, %.1f MiB; %.1f MiB for its states beside %d slots",
            config.draft_model,
            shape.layers,
            shape.width,
            draft_model.weight_bytes / 2**20,
            draft_model.state_bytes(slots) / 2**20,
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
        if cost.chained:
            log.info("a guess that is queued together with the first costs %.2f of a step", cost.chained)
        best = hope_of({0: (1.0, most)}, cost, 1.0, guessing.model.most_chained)
        if parts.runner.run_ahead_stop_ids and not pays_for_waiting(best, cost, 1.0):
            log.warning(
                "the draft model is off: here its guesses take longer than they save, even if all are right"
            )
            guessing = None
    drafting = Drafting(verifier, most, cost, parts, masks)
    drafting.guessing = guessing
    return drafting


def pays_for_waiting(hope: Hope, cost: DraftCost, pace: float) -> bool:
    """Whether guesses are worth that a device waits for the host, and what a step takes more with drafts.

    pace: what a step draws in the time of a step of one token, as drafts and waiting hold that up.
    """
    waiting = (cost.fixed + WAIT) * pace
    gained = hope.expected - cost.each * pace * LEAST_GAIN * hope.guesses
    return hope.gain > waiting * LEAST_GUESSED and gained > waiting * LEAST_GAIN


class Extended(NamedTuple):
    """A step with drafts."""

    batch: Batch
    drafts: Mapping[int, int]  # how many tokens these have, by place in the draws
    behind: MasksBehind


class Drafting:
    """The drafts of one model's rows. For the engine's thread."""

    def __init__(
        self, verifier: Verifier, most: int, cost: DraftCost, parts: EngineParts, masks: MaskMaker
    ) -> None:
        """most: tokens of a draft. masks: of rows that a grammar binds."""
        self.verifier, self._most, self._cost, self._masks = verifier, most, cost, masks
        self._tokenizer, self._vocab = parts.tokenizer, parts.weights.vocab
        self.guessing: Guessing | None = None  # where there is a draft model

    def extended(self, batch: Batch, drawing: list[Row]) -> Extended:
        """A step with the drafts of its rows. drawing: those that draw in it, which have not advanced yet."""
        decoding = 0
        for row in drawing:  # those that decode come first
            if row.state is not DECODING:
                break
            decoding += 1
        drafts: dict[int, Draft] = {}
        if batch.steps == 1 and decoding and self.verifier.takes(batch):
            drafts = self._drafts(drawing[:decoding], len(batch.tokens))
        if not drafts:
            return Extended(batch, {}, {})
        tokens, counts = list[int](), list(batch.counts)
        for place in range(decoding):
            draft = drafts[place].tokens if place in drafts else ()
            tokens += [batch.tokens[place], *draft]
            counts[place] += len(draft)
        return Extended(
            replace(batch, tokens=tokens + batch.tokens[decoding:], counts=counts),
            {place: len(draft.tokens) for place, draft in drafts.items()},
            {place: draft.ahead.mask for place, draft in drafts.items() if draft.ahead},
        )

    def worth_waiting(self, running: Collection[Row]) -> bool:
        """Whether rows will have drafts that pay once it is known what they have drawn in steps in flight.

        running: all rows that have slots.
        """
        cost, pace = self._cost, float(len(running))
        if pace > self.verifier.most_rows or any(row.state is not DECODING for row in running):
            return False
        least, gained = cost.each * pace * LEAST_GAIN, 0.0
        for row in running:
            if not row.in_flight or least >= 1 or (lookup := self._lookup(row)) is None:
                continue
            lookup.follow(row.drawn)
            tokens, expected = lookup.draft(self._most + row.in_flight, least)
            behind = len(tokens) - row.in_flight
            if behind > 0:  # the first ones are those in flight
                gained += expected - row.in_flight - least * behind
        return gained > (cost.fixed + WAIT) * pace * LEAST_GAIN or self._worth_guessing(running, pace)

    def _worth_guessing(self, running: Collection[Row], pace: float) -> bool:
        """Whether rows will have guesses that pay then; see `worth_waiting`."""
        if self.guessing is None:
            return False
        wanted = dict[int, WantedGuesses]()
        for place, row in enumerate(running):
            most = min(self._most, row.request.max_tokens - len(row.drawn) - row.in_flight - 1)
            if row.in_flight and most > 0 and self._lookup(row) is not None:
                wanted[place] = WantedGuesses(row, most)
        if not wanted:
            return False
        if pays_for_waiting(self.guessing.hope(wanted, self._cost, pace), self._cost, pace):
            return True
        self.guessing.rest(wanted)
        return False

    def _drafts(self, decoding: list[Row], tokens: int) -> dict[int, Draft]:
        """The drafts of the rows that decode, by place. tokens: of the step without them."""
        cost = self._cost
        # What a step draws in the time of a step of one token: with less a draft slows it down.
        pace = len(decoding) / cost.of_step(tokens)
        least = cost.each * pace * LEAST_GAIN
        if least >= 1:
            return {}
        room, found, unlikely = self.verifier.most_drafted, dict[int, Draft](), dict[int, WantedGuesses]()
        for place, row in enumerate(decoding):
            if row.in_flight or (lookup := self._lookup(row)) is None:
                continue
            most, ahead = min(self._most, row.request.max_tokens - len(row.drawn) - 1, room), None
            if bound := row.draws.constraint:
                ahead = self._masks.ahead(bound)
            if most < 1 or (bound and not ahead):
                continue
            lookup.follow(row.drawn)
            draft = self._of_text(row, lookup, most, least, ahead)
            if draft.tokens:
                found[place] = draft
            if self.guessing and draft.expected < self.guessing.of(row).rate:
                unlikely[place] = WantedGuesses(row, most, ahead)
                room -= most
            else:
                room -= len(draft.tokens)
        if self.guessing and unlikely:
            for place, guess in self.guessing.drafts(unlikely, cost, pace).items():
                # Where a grammar binds the row, its masks ahead are those behind the guesses by now.
                if place not in found or guess.ahead or guess.gain(least) > found[place].gain(least):
                    found[place] = guess
        for draft in found.values():
            if draft.ahead:
                draft.ahead.follow(draft.tokens)
        gained = sum(draft.gain(least) for draft in found.values())
        return found if gained > cost.fixed * pace * LEAST_GAIN else {}

    def _of_text(self, row: Row, lookup: Lookup, most: int, least: float, ahead: MasksAhead | None) -> Draft:
        """What the grammar leaves no choice about, or what stands in the row's text."""
        if ahead and (forced := ahead.forced()[:most]):
            return Draft(forced, float(len(forced)), ahead)
        tokens, expected = lookup.draft(most, least)
        count = len(tokens)
        stops = row.text.stop_ids
        if tokens and not stops.isdisjoint(tokens):
            count = next(i for i, token in enumerate(tokens) if token in stops)
        if count and ahead:
            count = ahead.fitting(tokens[:count])
        if count < len(tokens):
            tokens, expected = lookup.draft(count, least)
        return Draft(tokens, expected, ahead)

    def _lookup(self, row: Row) -> Lookup | None:
        """Of a row that may have drafts: it is in no mixture."""
        draws = row.draws
        if draws.lookup is None and not draws.members:
            # One that is as long as a body may be would hold up all rows, once for each row of its request.
            prediction = row.request.prediction[:MOST_EXPECTED]
            expected = self._tokenizer.encode(prediction) if prediction else []
            draws.lookup = Lookup(row.prompt, [token for token in expected if token < self._vocab])
        return draws.lookup

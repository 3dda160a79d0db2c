"""How rows come into slots, and their slots get the states in which they begin.

A row that comes in takes the host about 0.1 ms. So many that arrive at once come in portions, one before
each step: those that run already wait for one portion, and the first of them draw while the others wait.
"""

import logging

from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.giving_way import GivingWay
from rwkv_batch.engine.rows.adapters import Adapters
from rwkv_batch.engine.rows.lives import SharedPrompt
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import Refusal, could_not_run
from rwkv_batch.engine.scheduling.row import Beginning, Row
from rwkv_batch.runner.protocol import NewRow

PORTION = 128  # prompts that come in before a step,
MOST_AT_ONCE = 512  # or up to so many short ones, until they fill the step

log = logging.getLogger(__name__)


class Portion:
    """The rows that come in before one step.

    `budget`: prompt tokens that fill it. Rows of one prompt that share its state come in together: they cost
    little, and one that comes later might have to feed the prompt again.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._prompts = self._tokens = 0
        self._shared: SharedPrompt | None = None  # the prompt of the last one

    def takes(self, row: Row) -> bool:
        """Whether this one, which is next, comes in too."""
        shared = row.life if isinstance(row.life, SharedPrompt) else None
        if shared is None or shared is not self._shared:
            if self._prompts >= (MOST_AT_ONCE if self._tokens < self._budget else PORTION):
                return False
            self._prompts, self._tokens = self._prompts + 1, self._tokens + row.input.left
            self._shared = shared
        return True


class Admission:
    """For the engine's thread."""

    def __init__(self, parts: EngineParts, adapters: Adapters, masks: MaskMaker) -> None:
        self._parts, self._adapters, self._masks = parts, adapters, masks
        self._giving = GivingWay(parts)

    def admit(self) -> None:
        """Give a portion of the waiting rows free slots, and these the states they begin with."""
        beginnings: Beginning = {}
        scheduler = self._parts.scheduler
        if scheduler.batch:
            self._giving.make_room(self._adapters.has_slot)
        takes = Portion(scheduler.prefill_tokens).takes
        for row in scheduler.admit(self._adapters.has_slot, takes):
            if row.slot is None:  # of a request that has just been refused
                continue
            try:
                beginnings |= self._beginning(row, row.slot)
            except Refusal as refusal:
                self._parts.rows.fail(row.key, refusal)
            except Exception as error:
                log.exception("a row could not begin")
                self._parts.rows.fail(row.key, could_not_run(error))
        try:
            self._parts.runner.states.replace(beginnings)
        except Exception as error:
            log.exception("the states of rows could not be written")
            begun = [scheduler.running[slot] for slot in beginnings if slot in scheduler.running]
            self._parts.rows.fail_step(begun, could_not_run(error))

    def _beginning(self, row: Row, slot: int) -> Beginning:
        """What its slot begins with. Raises Refusal."""
        if row.input.kept is not None:
            kept = row.come_back()
            self._begin_again(row, slot)
            return {slot: kept}
        self._parts.counts.admit(row)
        beginning = row.life.begin(row)
        if row.slot is not None:  # otherwise it has been refused
            self._begin(row, slot)
        return beginning

    def _begin(self, row: Row, slot: int) -> None:
        self._begin_again(row, slot)
        if row.draws.constraint and row.leads:
            self._masks.begin(row.draws.constraint, row.drawn)

    def _begin_again(self, row: Row, slot: int) -> None:
        """What binds it goes on from where it was."""
        runner, sampling, stops = self._parts.runner, row.request.sampling, row.request.stop_ids
        prompt = row.prompt if sampling.repetition_penalty != 1 else ()
        runner.begin(slot, NewRow(sampling, row.draws.seed, row.number, stops, row.drawn, prompt))
        row.draws.ahead = len(stops) <= runner.run_ahead_stop_ids

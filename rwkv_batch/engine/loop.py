"""The step loop: what runs next is launched, and what the step before it has drawn is landed meanwhile."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from rwkv_batch.engine.admission import Admission
from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.landing import Landing
from rwkv_batch.engine.rows.adapters import Adapters
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import could_not_run
from rwkv_batch.engine.rows.stored_turns import Turns
from rwkv_batch.engine.scheduling.pace import Pace
from rwkv_batch.engine.scheduling.row import FINALIZING, Row
from rwkv_batch.engine.scheduling.steps import StepInFlight, batch_of, masks_of
from rwkv_batch.engine.speculation.drafting import Drafting
from rwkv_batch.runner.protocol import Draws
from rwkv_batch.runner.speculation.protocol import VerifiedDraws
from rwkv_batch.wire.protocol import RequestKey

NO_DRAFTS: Mapping[int, int] = MappingProxyType({})
log = logging.getLogger(__name__)


class StepLoop:
    """The steps of one model, of which the newest may be in flight on the device."""

    def __init__(
        self,
        parts: EngineParts,
        turns: Turns,
        adapters: Adapters,
        masks: MaskMaker,
        drafting: Drafting | None = None,
    ) -> None:
        """drafting: where rows have drafts, of a runner with a verifier."""
        self._parts, self._turns, self._adapters, self._masks = parts, turns, adapters, masks
        self._admission = Admission(parts, adapters, masks)
        self._landing = Landing(parts, turns.beginnings, masks)
        self._in_flight: deque[StepInFlight] = deque()  # oldest first
        self._left = 0  # of them, those that `land` leaves
        self._pace, self._drafting = Pace(parts.runner.most_steps), drafting

    @property
    def awaited(self) -> bool:
        """Whether draws are in flight that count."""
        return any(row.generating for step in self._in_flight for row in step.drawing)

    def stores(self, key: RequestKey) -> bool:
        """Whether it is a turn that is being stored."""
        return self._turns.stores(key)

    def launch(self) -> None:
        """Have the device begin with a step."""
        if self._drafting and self._in_flight:
            running = self._parts.scheduler.running.values()
            if self._drafting.worth_waiting(running):
                self.settle()
        self._admission.admit()
        plan = self._parts.scheduler.plan()
        self._left = 0
        fed = [row for row, _ in plan]
        with self._failing(fed):
            if plan:
                self._launch(plan, fed)
                known = self._in_flight[-1].verified  # the next drafts begin behind what it has drawn
                self._left = 1 if self._parts.runner.run_ahead_stop_ids and not known else 0

    def land(self) -> None:
        """Take what has been drawn. The device runs the step launched last meanwhile, where that may be."""
        while len(self._in_flight) > self._left:
            self._land()
        if self._in_flight and self._in_flight[0].draw:  # now what its rows have drawn before is known
            with self._failing((step := self._in_flight.pop()).fed):
                step.draw_under(self._masks)
                self._in_flight.append(step)

    def settle(self) -> None:
        """Land all: behind the end of the last row there may be a step without it."""
        self._left = 0
        self.land()

    def _launch(self, plan: list[tuple[Row, int]], fed: list[Row]) -> None:
        """Run or queue a step. fed: the rows of the plan."""
        self._turns.save()
        runner, counts = self._parts.runner, self._parts.counts
        finalizing = [row for row, count in plan if row.state is FINALIZING and row.input.left == count]
        batch, drawing = batch_of(plan, self._adapters.slots_of(fed))
        running = self._parts.scheduler.running.values()
        if (steps := self._pace.steps_of(batch, drawing, running)) > 1:
            batch = replace(batch, steps=steps)
        verified: VerifiedDraws | None = None
        draws: Draws | None
        drafts: Mapping[int, int] = NO_DRAFTS
        if self._drafting and (drafted := self._drafting.extended(batch, drawing)).drafts:
            batch, drafts = drafted.batch, drafted.drafts
            # Drawn at once: nobody has the slots before their states have moved on.
            verify = self._drafting.verifier.feed(batch, drafts)
            verified = verify(masks_of(drawing, self._masks), drafted.behind)
            draws, draw = verified, None
        else:
            bound = any(row.draws.constraint for row in drawing)
            draws, draw = (None, runner.feed(batch)) if bound else (runner.run(batch), None)
        marks = counts.launch(plan, batch, drawing, sum(drafts.values()) if drafts else 0)
        scored = [(plan[i][0], each) for i, each in batch.scored.items()]
        for row, count in plan:
            if row.advance(count * steps):
                row.life.reached(row)
        for row in drawing:
            row.in_flight += steps
        if verified:
            for place, more in verified.more().items():
                drawing[place].drawn_fed += len(more)
        if finalizing:
            self._turns.finalize(finalizing)
        wanted = list(batch.top_logprobs)
        step = StepInFlight(fed, drawing, wanted, marks, scored, draws, draw, drafts, verified)
        self._in_flight.append(step)

    def _land(self) -> None:
        """Give the draws of the oldest step in flight to its rows."""
        step = self._in_flight.popleft()
        # The others have been answered, or will be by the state pool.
        with self._failing([row for row in step.fed if row.slot is not None]):
            draws = step.draw_under(self._masks)
            self._pace.wait()
            ids = draws.wait()
            self._pace.land(step.marks.steps)
            self._landing.take(step, ids, step.verified.more() if step.verified else None)

    @contextmanager
    def _failing(self, fed: Iterable[Row]) -> Iterator[None]:
        """An error inside fails the requests of these rows, and nothing else."""
        try:
            yield
        except Exception as error:
            log.exception("a step failed")
            self._parts.rows.fail_step(fed, could_not_run(error))

"""How sequences come into slots, and their slots get the states in which they begin.

A sequence that comes in takes the host about 0.1 ms. So many that arrive at once come in portions, one before
each step: those that run already wait for one portion, and the first of them draw while the others wait.
"""

from collections.abc import Callable

from torch import Tensor

from rwkv_batch.engine.beginnings import Beginnings, StartStateMissing
from rwkv_batch.engine.constraints.masks import MaskMaker
from rwkv_batch.engine.mixed_turns import MixedTurns
from rwkv_batch.engine.rollouts import Rollouts
from rwkv_batch.engine.row_adapters.adapters import Adapters
from rwkv_batch.engine.scheduling.counts import EngineCounts
from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.engine.scheduling.sequence import Outbox, RequestKey, Sequence
from rwkv_batch.runner.protocol import NewRow, Runner
from rwkv_batch.state.shared_prompts import SharedPrompt
from rwkv_batch.wire.protocol import Rejected

PORTION = 128  # prompts that come in before a step,
MOST_AT_ONCE = 512  # or up to so many short ones, until they fill the step


class Portion:
    """The sequences that come in before one step.

    `budget`: prompt tokens that fill it. Rows of one prompt that share its state come in together: they cost
    little, and one that comes later might have to feed the prompt again.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._prompts = self._tokens = 0
        self._shared: SharedPrompt | None = None

    def takes(self, seq: Sequence) -> bool:
        """Whether this one, which is next, comes in too."""
        if seq.shared is None or seq.shared is not self._shared:
            if self._prompts >= (MOST_AT_ONCE if self._tokens < self._budget else PORTION):
                return False
            self._prompts, self._tokens = self._prompts + 1, self._tokens + seq.tokens_left
            self._shared = seq.shared
        return True


class Admission:
    """For the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        adapters: Adapters,
        masks: MaskMaker,
        beginnings: Beginnings,
        rollouts: Rollouts,
        mixed_turns: MixedTurns,
        outbox: Outbox,
        cancel: Callable[[RequestKey, str], None],
        counts: EngineCounts,
    ) -> None:
        self._scheduler, self._runner, self._adapters, self._masks = scheduler, runner, adapters, masks
        self._beginnings, self._rollouts, self._mixed_turns = beginnings, rollouts, mixed_turns
        self._outbox, self._cancel, self._counts = outbox, cancel, counts

    def admit(self) -> None:
        """Give a portion of the waiting sequences free slots, and these the states they begin with."""
        beginnings: dict[int, Tensor | None] = {}
        takes = Portion(self._scheduler.prefill_tokens).takes
        for seq in self._scheduler.admit(self._adapters.has_slot, takes):
            if seq.slot is None:  # of a request that has just been refused
                continue
            self._counts.admit(seq)
            if seq.request.turn is None:
                try:
                    beginnings |= self._rollouts.begin(seq, self._beginning)
                except StartStateMissing as missing:
                    self._outbox.append((seq.key, Rejected(seq.key[1], "not_found", str(missing))))
                    self._cancel(seq.key, "error")
            else:
                beginnings |= self._mixed_turns.begin(seq, seq.request.turn)
            if seq.slot is not None:  # otherwise its session has been deleted
                self._begin(seq, seq.slot)
        self._runner.states.replace(beginnings)

    def _beginning(self, seq: Sequence) -> Tensor | None:
        """Of a row that shares no state with others. Raises StartStateMissing."""
        state = self._beginnings.begin(seq)
        self._counts.begin(seq)
        return state

    def _begin(self, seq: Sequence, slot: int) -> None:
        how, stops = seq.request.sampling, seq.request.stop_ids
        prompt = seq.prompt if how.repetition_penalty != 1 else ()
        self._runner.begin(slot, NewRow(how, seq.seed, seq.row, stops, seq.drawn, prompt))
        seq.runs_ahead = len(stops) <= self._runner.run_ahead_stop_ids
        if seq.constraint and seq.leads:
            self._masks.begin(seq.constraint, seq.drawn)

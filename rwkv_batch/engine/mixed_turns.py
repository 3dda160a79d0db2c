"""Turns of sessions in a mixture of states: the sequences beside the first, which is the session's own.

They are not stored. Each begins in its start state with all tokens of the session, and its state at the end
of a turn is kept where those after prefixes of prompts are, so that the next turn feeds what is new.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from rwkv_batch.engine.beginnings import Beginnings, StartStateMissing
from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.engine.scheduling.sequence import Outbox, Sequence
from rwkv_batch.engine.scheduling.turns import Turns
from rwkv_batch.state.entries import Session, Turn
from rwkv_batch.state.slots import States
from rwkv_batch.wire.protocol import Failed, Rejected, RowDelta, SessionTurn
from state_pool import StatePool


class MixedTurns:
    """Turns, in a mixture or not. `drop` ends the sequences for which its argument is true."""

    def __init__(
        self,
        pool: StatePool,
        scheduler: Scheduler,
        turns: Turns,
        outbox: Outbox,
        beginnings: Beginnings,
        states: States,
        drop: Callable[[Callable[[Sequence], bool]], None],
    ) -> None:
        self._pool, self._scheduler, self._turns, self._outbox = pool, scheduler, turns, outbox
        self._beginnings, self._states, self._drop = beginnings, states, drop

    def begin(self, sequence: Sequence, turn: SessionTurn) -> dict[int, Tensor | None]:
        """As Turns.begin; the first sequence of a mixture comes first."""
        if sequence.leads:
            return self._turns.begin(sequence, turn)
        first = sequence.together[0]
        if first.slot is None or sequence.request.max_tokens == 0:  # it was refused, or draws nothing
            self._scheduler.release(sequence)
            return {}
        source = self._turns.source(first)
        if source is None or source.key != turn.source:  # the session begins here
            self._start(sequence, first.prompt)
            return {}
        sequence.begin_loading()
        numbers = range(source.head.number + 1)
        self._pool.turns(source, numbers, partial(self._read, sequence, source))
        return {}

    def finish(self, sequence: Sequence, last_delta: RowDelta) -> None:
        """As Turns.finish."""
        if sequence.leads:
            self._turns.finish(sequence, last_delta)
            return
        self._beginnings.keep_end(sequence)
        self._scheduler.release(sequence)

    def _read(self, sequence: Sequence, source: Session, turns: list[Turn] | None, error: str | None) -> None:
        """The turns of its session are known, number 0 among them if it did not begin with a text."""
        if sequence.slot is None:  # it has been dropped meanwhile
            return
        if turns is None:
            self._outbox.append((sequence.key, Failed(sequence.key[1], error or "")))
            self._drop(lambda seq: seq.key == sequence.key)
            return
        began = turns[0].digest if turns and turns[0].number == 0 else b""
        if began != self._pool.starts.digest([sequence.together[0].start_state]):
            message = f"The session {source.key} did not begin in the first state of this mixture."
            self._refuse(sequence, "conflict", message)
            return
        sequence.loaded([])
        history = [token for turn in turns for token in (*turn.prompt, *turn.completion)]
        self._start(sequence, history + sequence.together[0].prompt)

    def _start(self, sequence: Sequence, prompt: list[int]) -> None:
        assert sequence.slot is not None
        sequence.begin_turn(prompt)
        try:
            state = self._beginnings.begin(sequence)
        except StartStateMissing as missing:
            self._refuse(sequence, "not_found", str(missing))
            return
        self._states.replace({sequence.slot: state})

    def _refuse(self, sequence: Sequence, reason: str, message: str) -> None:
        self._outbox.append((sequence.key, Rejected(sequence.key[1], reason, message)))
        self._drop(lambda seq: seq.key == sequence.key)

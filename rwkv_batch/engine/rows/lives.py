"""The lives of rows: what their slots begin with, and what becomes of them when their texts end.

A row has one from its request on. Turns of sessions have theirs in `stored_turns.py`.
"""

import logging
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from rwkv_batch.engine.rows.beginnings import Beginnings
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import Refusal, could_not_run
from rwkv_batch.engine.rows.stored_turns import StoredTurn
from rwkv_batch.engine.scheduling.row import Beginning, Life, Row
from rwkv_batch.state.entries import Session, Turn
from rwkv_batch.wire.protocol import RowDelta

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Fresh(Life):
    """Rows of their own: they go on from no session, and their states are forgotten."""

    parts: EngineParts
    beginnings: Beginnings

    def cached_tokens(self, row: Row) -> int:
        return self.beginnings.cached_tokens(row)

    def begin(self, row: Row) -> Beginning:
        assert row.slot is not None
        state = self.beginnings.begin(row)
        self.parts.counts.begin(row)
        return {row.slot: state}

    def reached(self, row: Row) -> None:
        self.beginnings.keep(row)

    def text_ended(self, row: Row, delta: RowDelta) -> None:
        assert delta.finish_reason
        self.parts.rows.show(row, delta)
        self.parts.rows.end(row, delta.finish_reason)

    def drop(self, row: Row, reason: str) -> None:
        self.parts.rows.end(row, reason)


@dataclass(eq=False)
class SharedPrompt(Fresh):
    """Several rows of one prompt, which is fed once, whether all of them run at once or in turns.

    The first of them feeds it; the others begin with a copy of its state before the prompt's last token. Each
    row feeds that itself, and draws its first token then.
    """

    tokens: int  # that the state has seen, all of the prompt but the last
    outside: int  # rows that have had no slot yet
    _own_cut: bool = False  # whether nothing else wants the state there
    _leader: Row | None = None  # feeds the prompt
    _waiting: list[Row] = field(default_factory=list)  # in slots, for the leader
    _state: Tensor | None = None  # in host memory, for the rows that are outside

    def begin(self, row: Row) -> Beginning:
        assert row.slot is not None
        self.outside -= 1
        if self._state is not None:
            row.input.fed = self.tokens
            return {row.slot: self._state}
        leader = self._leader
        if leader and leader.slot is not None and leader.input.fed < self.tokens:
            row.begin_loading()
            self._waiting.append(row)
            return {}
        beginning = super().begin(row)
        if row.input.fed < self.tokens:
            self._leader, self._own_cut = row, self.tokens not in row.input.cuts
            row.input.cuts = sorted({*row.input.cuts, self.tokens})
        return beginning

    def reached(self, row: Row) -> None:
        here = row.input.fed == self.tokens
        if not (self._own_cut and here):
            super().reached(row)
        if not here or self._leader is not row:
            return
        assert row.slot is not None
        waiting = {other.slot: other for other in self._waiting if other.slot is not None}
        self.parts.runner.states.spread(row.slot, list(waiting))
        for other in waiting.values():
            other.input.fed = self.tokens
            other.loaded([])
        self._waiting.clear()
        if self.outside:
            self.parts.pool.copies.copy_out(row.slot, partial(setattr, self, "_state"))


@dataclass(eq=False)
class MixtureMember(Fresh):
    """A row of a session's turn in a mixture of states, beside the first, which is the session's own.

    It is not stored. It begins in its start state with all tokens of the session, and its state at the end of
    a turn is kept where those after prefixes of prompts are, so that the next turn feeds what is new.
    """

    def begin(self, row: Row) -> Beginning:
        first = row.together[0]
        if first.slot is None or row.request.max_tokens == 0:  # it was refused, or draws nothing
            self.parts.rows.end(row)
            return {}
        assert isinstance(first.life, StoredTurn)
        source = first.life.source
        if source is None or not first.life.continued:  # the session begins here
            return self._start(row, first.prompt)
        row.begin_loading()
        numbers = range(source.head.number + 1)
        self.parts.pool.turns(source, numbers, partial(self._read, row, source))
        return {}

    def text_ended(self, row: Row, delta: RowDelta) -> None:
        self.beginnings.keep_end(row)
        self.parts.rows.end(row)

    def _read(self, row: Row, source: Session, turns: list[Turn] | None, error: str | None) -> None:
        """The turns of its session are known, number 0 among them if it did not begin with a text."""
        if row.slot is None:  # it has been dropped meanwhile
            return
        first, rows = row.together[0], self.parts.rows
        if turns is None:
            rows.fail(row.key, error or "")
            return
        began = turns[0].digest if turns and turns[0].number == 0 else b""
        if began != self.parts.pool.starts.digest([first.life.start_state]):
            message = f"The session {source.key} did not begin in the first state of this mixture."
            rows.fail(row.key, Refusal("conflict", message))
            return
        row.loaded([])
        history = [token for turn in turns for token in (*turn.prompt, *turn.completion)]
        try:
            self.parts.runner.states.replace(self._start(row, history + first.prompt))
        except Refusal as refusal:
            rows.fail(row.key, refusal)
        except Exception as error:
            log.exception("a row of a mixture could not begin")
            rows.fail(row.key, could_not_run(error))

    def _start(self, row: Row, prompt: list[int]) -> Beginning:
        assert row.slot is not None
        row.begin_turn(prompt)
        return {row.slot: self.beginnings.begin(row)}

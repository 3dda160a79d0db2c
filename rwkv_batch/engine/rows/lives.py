"""The lives of rows: what their slots begin with, and what becomes of them when their texts end.

A row has one from its request on. Turns of sessions have theirs in `stored_turns.py`.
"""

from functools import partial

from torch import Tensor

from rwkv_batch.engine.rows.beginnings import Beginnings
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.stored_turns import StoredTurn, Turns
from rwkv_batch.engine.scheduling.sequence import Beginning, Life, Sequence
from rwkv_batch.state.entries import Session, Turn
from rwkv_batch.wire.protocol import RowDelta

LEAST_TOKENS = 16  # of a prompt that is shared; a shorter one is fed as fast as its state is copied


class Fresh(Life):
    """A row of its own: it goes on from no session, and its state is forgotten."""

    def __init__(self, parts: EngineParts, beginnings: Beginnings) -> None:
        self.parts, self.beginnings = parts, beginnings

    def begin(self, row: Sequence) -> Beginning:
        assert row.slot is not None
        state = self.beginnings.begin(row)
        self.parts.counts.begin(row)
        return {row.slot: state}

    def reached(self, row: Sequence, cut: int) -> None:
        self.beginnings.keep(row, cut)

    def text_ended(self, row: Sequence, delta: RowDelta) -> None:
        assert delta.finish_reason
        self.parts.rows.show(row, delta)
        self.parts.rows.end(row, delta.finish_reason)

    def drop(self, row: Sequence, reason: str) -> None:
        self.parts.rows.end(row, reason)


class SharedPrompt(Fresh):
    """Several rows of one prompt, which is fed once, whether all of them run at once or in turns.

    The first of them feeds it; the others begin with a copy of its state before the prompt's last token. Each
    row feeds that itself, and draws its first token then.
    """

    def __init__(self, parts: EngineParts, beginnings: Beginnings, tokens: int, rows: int) -> None:
        """tokens: that the state has seen, all of the prompt but the last."""
        super().__init__(parts, beginnings)
        self.tokens = tokens
        self._outside = rows  # that have had no slot yet
        self._own_cut = False  # whether nothing else wants the state there
        self._leader: Sequence | None = None  # feeds the prompt
        self._waiting: list[Sequence] = []  # in slots, for the leader
        self._state: Tensor | None = None  # in host memory, for the rows that are outside

    def begin(self, row: Sequence) -> Beginning:
        assert row.slot is not None
        self._outside -= 1
        if self._state is not None:
            row.fed = self.tokens
            return {row.slot: self._state}
        leader = self._leader
        if leader and leader.slot is not None and leader.fed < self.tokens:
            row.waits_for_state = True
            self._waiting.append(row)
            return {}
        beginning = super().begin(row)
        if row.fed < self.tokens:
            self._leader, self._own_cut = row, self.tokens not in row.cuts
            row.cuts = sorted({*row.cuts, self.tokens})
        return beginning

    def reached(self, row: Sequence, cut: int) -> None:
        if not self._own_cut or cut != self.tokens:
            super().reached(row, cut)
        if self._leader is not row or cut != self.tokens:
            return
        assert row.slot is not None
        waiting = [other for other in self._waiting if other.slot is not None]
        self.parts.runner.states.spread(row.slot, [o.slot for o in waiting if o.slot is not None])
        for other in waiting:
            other.fed, other.waits_for_state = self.tokens, False
        self._waiting.clear()
        if self._outside:
            self.parts.pool.copies.copy_out(row.slot, partial(setattr, self, "_state"))


class MixtureMember(Fresh):
    """A sequence of a session's turn in a mixture of states, beside the first, which is the session's own.

    It is not stored. It begins in its start state with all tokens of the session, and its state at the end of
    a turn is kept where those after prefixes of prompts are, so that the next turn feeds what is new.
    """

    def begin(self, row: Sequence) -> Beginning:
        first = row.together[0]
        if first.slot is None or row.request.max_tokens == 0:  # it was refused, or draws nothing
            self.parts.rows.end(row)
            return {}
        turn, life = row.request.turn, first.life
        assert turn and isinstance(life, StoredTurn)
        source = life.source
        if source is None or source.key != turn.source:  # the session begins here
            return self._start(row, first.prompt)
        row.begin_loading()
        numbers = range(source.head.number + 1)
        self.parts.pool.turns(source, numbers, partial(self._read, row, source))
        return {}

    def text_ended(self, row: Sequence, delta: RowDelta) -> None:
        self.beginnings.keep_end(row)
        self.parts.rows.end(row)

    def _read(self, row: Sequence, source: Session, turns: list[Turn] | None, error: str | None) -> None:
        """The turns of its session are known, number 0 among them if it did not begin with a text."""
        if row.slot is None:  # it has been dropped meanwhile
            return
        first, rows = row.together[0], self.parts.rows
        if turns is None:
            rows.fail(row.key, error or "")
            return
        began = turns[0].digest if turns and turns[0].number == 0 else b""
        if began != self.parts.pool.starts.digest([first.start_state]):
            message = f"The session {source.key} did not begin in the first state of this mixture."
            rows.reject(row.key, "conflict", message)
            return
        row.loaded([])
        history = [token for turn in turns for token in (*turn.prompt, *turn.completion)]
        try:
            self.parts.runner.states.replace(self._start(row, history + first.prompt))
        except ValueError as missing:  # StartStateMissing
            rows.reject(row.key, "not_found", str(missing))

    def _start(self, row: Sequence, prompt: list[int]) -> Beginning:
        assert row.slot is not None
        row.begin_turn(prompt)
        return {row.slot: self.beginnings.begin(row)}


def give_lives(rows: list[Sequence], parts: EngineParts, beginnings: Beginnings, turns: Turns) -> None:
    """To the rows of one request."""
    request, fresh = rows[0].request, Fresh(parts, beginnings)
    if request.turn:
        member = MixtureMember(parts, beginnings)
        for row in rows:
            row.life = StoredTurn(turns, request.turn) if row.leads else member
        return
    scored = request.prompt_logprobs is not None  # they follow from feeding the prompt
    for first in range(0, len(rows), request.n):
        row, tokens = rows[first], len(rows[first].prompt) - 1
        alone = request.n == 1 or row.drawn or row.mixture or tokens < LEAST_TOKENS or scored
        life = fresh if alone else SharedPrompt(parts, beginnings, tokens, request.n)
        for each in rows[first : first + request.n]:
            each.life = life

"""Turns on stored sessions: how their states come into slots, and what is stored when they end.

A turn waits until its session is free (see Scheduler) and gets a slot. A state of the session's past is
brought there (`begin`); the tokens after it are fed again, then those of the turn. When its text has ended
(`finish`), its tokens are committed, and with that the reader gets the last delta. Meanwhile the state is
brought to exactly the end of the text (`finalize`) and stays in its slot; with both done the session's next
turn begins. Where it has seen more than the text, as at the end of a stop string, it first goes back to a
savepoint, or to where the turn began. Without a token log the state is stored in place of the tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from rwkv_batch.engine.scheduling.counts import EngineCounts
from rwkv_batch.engine.scheduling.prompts import PromptEncoder
from rwkv_batch.engine.scheduling.scheduler import Scheduler
from rwkv_batch.engine.scheduling.sequence import DECODING, LOADING, Outbox, RowAdapter, Sequence
from rwkv_batch.state.entries import EMPTY_DIGEST, NONE, Head, KeptState, Loaded, Session, StoreError
from rwkv_batch.state.pool.savepoints import RunningTurn
from rwkv_batch.state.slots import States
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import Event, Failed, Progress, Rejected, RowDelta, SessionTurn
from state_pool import StatePool


class _Refused(Exception):
    """A turn that cannot begin; the message is one sentence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class _ActiveTurn:
    """A turn from `begin` until it is stored."""

    source: Session | None  # the session that it continues, as it was when the turn began
    parent: Head | None  # the end of `source`, with what is known of its images
    completion: list[int] = field(default_factory=list)
    last_delta: RowDelta | None = None  # held back until the commit
    head: Head | None = None  # the end of this turn, once its commit is under way
    committed: bool = False
    kept: bool = False  # the state has been brought to the end of the text
    discarded: bool = False  # its session was deleted meanwhile: its text counts, its state does not
    abandoned: bool = False  # while its state was being loaded into the slot

    def before(self, target: str | None) -> int:
        """The turn that this one follows in the session, or NONE."""
        return self.source.head.turn if self.source and self.source.key == target else NONE


class Turns:
    """The turns of all sessions."""

    def __init__(
        self,
        pool: StatePool,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        begin_anew: Callable[[Sequence], Tensor | None],
        states: States,
        outbox: Outbox,
        counts: EngineCounts,
    ) -> None:
        """begin_anew: what a sequence begins with that goes on from no session, as of States.replace."""
        self._pool, self._scheduler, self._outbox = pool, scheduler, outbox
        self._begin_anew, self._counts = begin_anew, counts
        self._tokenizer, self._prompts, self._states = tokenizer, prompts, states
        self._active: dict[Sequence, _ActiveTurn] = {}
        self._overrunning: dict[Sequence, _ActiveTurn] = {}  # those with savepoints
        self._numbers: dict[str, int] = {}  # the last number given to each branching session

    def choose_target(self, turn: SessionTurn) -> str | None:
        """The key that this turn will be stored under; of a branch, one that is not in use."""
        if turn.branch is None:
            return turn.target
        if turn.branch not in self._numbers:
            tails = (key.removeprefix(f"{turn.branch}:") for key in self._pool.keys(f"{turn.branch}:"))
            self._numbers[turn.branch] = max((int(tail) for tail in tails if tail.isdecimal()), default=0)
        while True:  # a fork, an import or a turn may have taken the next one
            self._numbers[turn.branch] += 1
            key = f"{turn.branch}:{self._numbers[turn.branch]}"
            if key not in self._scheduler.queues and self._pool.find(key) is None:
                return key

    def has_source(self, turn: SessionTurn) -> bool:
        """Whether the turn's source is stored, or an earlier turn is going to store it."""
        return turn.source is not None and (
            turn.source in self._scheduler.queues or self._pool.find(turn.source) is not None
        )

    def refusal(self, turn: SessionTurn, adapter: RowAdapter | None) -> str | None:
        """Why the turn cannot go on from its source as that is now; None: it can, or others come before it.

        `begin` looks again. Raises StoreError.
        """
        source = self._pool.find(turn.source) if turn.source is not None else None
        if source is None or turn.source in self._scheduler.queues:
            return None
        return self._refusal(source.head, turn, adapter)

    def begin(self, sequence: Sequence, turn: SessionTurn) -> dict[int, Tensor | None]:
        """What the sequence's slot begins with, as of States.replace; nothing if that is being loaded."""
        try:
            source = self._find_source(sequence, turn)
        except (_Refused, StoreError) as error:
            self._counts.finish(sequence, "error")
            self._scheduler.release(sequence)
            self._scheduler.unlock(sequence.target)
            id_ = sequence.key[1]
            event: Event = Failed(id_, str(error))
            if isinstance(error, _Refused):
                event = Rejected(id_, error.reason, str(error))
            self._outbox.append((sequence.key, event))
            return {}
        active = self._active[sequence] = _ActiveTurn(source, source.head if source else None)
        continued = source is not None and source.key == turn.source
        sequence.begin_turn(self._prompts.encode_turn(sequence.request, continued))
        # A prompt that is only read is fed as any, as logits behind it show whether its state is sound; not
        # that of a mixture, whose other sequences do not run then.
        reads_only = sequence.request.max_tokens == 0
        if reads_only and sequence.mixture:
            active.last_delta = RowDelta(sequence.row, "", 0, "length")
            sequence.finalize(sequence.to_feed)
        if source:
            self._pool.pin(source.head)
        beginning = self._beginning(sequence, active)
        if source is None:
            self._counts.begin(sequence)
        if sequence.target is not None and sequence.may_overrun and not reads_only:
            self._overrunning[sequence] = active
            sequence.save_at = sequence.drawn_fed + self._pool.savepoints.first(sequence.tokens_left)
        return beginning

    def save(self) -> None:
        """Before a step: make the savepoints that are due."""
        due = [s for s in self._overrunning if s.drawn_fed >= s.save_at and s.state is DECODING]
        if not due:
            return
        running = []
        for seq in due:
            assert seq.slot is not None
            # A later one may have to be passed over: then the turn goes on from where it began.
            before = NONE if seq.drawn_fed else self._overrunning[seq].before(seq.target)
            running.append(RunningTurn(seq, seq.slot, seq.drawn_fed, before))
            seq.save_at = seq.drawn_fed + self._pool.savepoints.every
        self._pool.savepoints.save(running)

    def finish(self, sequence: Sequence, last_delta: RowDelta) -> None:
        """The text has finished with this delta: store the turn, and bring the state to exactly its end."""
        active = self._active[sequence]
        active.last_delta = last_delta
        if sequence.target is None or active.discarded:
            self._finish_unstored(sequence, active)
            return
        kept = active.completion = sequence.shown_tokens(self._tokenizer)
        if self._pool.token_log:
            self._commit(sequence, active, sequence.target)
        has_drawn = partial(sequence.has_drawn, kept)
        if has_drawn(sequence.drawn_fed):
            sequence.finalize(kept[sequence.drawn_fed :])
        elif saved := self._pool.savepoints.find(sequence, has_drawn):
            assert sequence.slot is not None
            sequence.finalize(kept[saved[0] :])
            self._states.replace({sequence.slot: saved[1]})
        else:  # feed the turn again from its start
            self._drop_savepoint(sequence)
            sequence.finalize(sequence.prompt + kept)
            self._states.replace(self._beginning(sequence, active))
            return
        self._drop_savepoint(sequence)
        if not sequence.tokens_left:
            self.finalize([sequence])

    def finalize(self, sequences: list[Sequence]) -> None:
        """Keep the states of turns that have seen all of their text."""
        ended, kept = [], []
        for sequence in sequences:
            active = self._active[sequence]
            if active.head is None and (sequence.target is None or active.discarded):
                self._finish_unstored(sequence, active)
                continue
            assert sequence.target is not None
            if not self._pool.token_log:
                self._save(sequence, active, sequence.target)
                continue
            if active.head is None:
                self._commit(sequence, active, sequence.target)
            assert active.head is not None
            slot = self._scheduler.detach(sequence)
            if active.discarded:
                self._scheduler.free(slot)
            else:
                kept.append(KeptState(sequence.target, active.head, slot, active.before(sequence.target)))
            ended.append((sequence, active))
        self._pool.keep(kept)
        for sequence, active in ended:
            active.kept = True
            self._end_if_stored(sequence, active)

    def ended(self, sequence: Sequence) -> bool:
        """Whether its text has ended and its turn is stored, whatever becomes of the state."""
        active = self._active.get(sequence)
        return active is not None and active.head is not None

    def abandoned(self, sequence: Sequence) -> bool:
        """Whether it was dropped and is there only until its state has been loaded."""
        active = self._active.get(sequence)
        return active is not None and active.abandoned

    def source(self, sequence: Sequence) -> Session | None:
        """What a turn that has begun continues."""
        return self._active[sequence].source

    def source_digest(self, sequence: Sequence) -> bytes:
        """Of what its turn continues; empty if it has not begun."""
        active = self._active.get(sequence)
        if active is None:
            return b""
        return active.source.head.digest if active.source else EMPTY_DIGEST

    def abandon(self, sequence: Sequence) -> None:
        """Drop a running sequence that has failed or was cancelled, or the state of a turn that has `ended`.

        The session of a turn that has not ended is what it was before.
        """
        active = self._active.get(sequence)
        if active and sequence.state is LOADING:
            active.abandoned = True  # its slot is being written to
            return
        self._drop_savepoint(sequence)
        self._scheduler.release(sequence)
        if active is None:
            self._scheduler.unlock(sequence.target)
        elif active.head:
            active.kept = True
            self._end_if_stored(sequence, active)
        else:
            self._end(sequence, active)

    def discard(self, key: str, prefix: bool) -> int:
        """The session is deleted, with `prefix` all below it: turns under way are not stored.

        Returns how many of these would have begun a session.
        """
        begun = 0
        for sequence, active in self._active.items():
            target = sequence.target
            if target is not None and (target == key or (prefix and target.startswith(f"{key}:"))):
                begun += not active.discarded and self._pool.find(target) is None
                active.discarded = True
        return begun

    def _find_source(self, sequence: Sequence, turn: SessionTurn) -> Session | None:
        """What the turn continues: a session, or that of its start state. Raises _Refused, StoreError."""
        start_state, adapter = sequence.start_state, sequence.adapter
        source = self._pool.find(turn.source) if turn.source is not None else None
        if source is None and turn.required:
            raise _Refused("not_found", f"The session {turn.source} has been deleted meanwhile.")
        if source is not None and (refusal := self._refusal(source.head, turn, adapter)):
            raise _Refused("conflict", refusal)
        if source is None and start_state:
            start = self._pool.starts.find(start_state)
            if start is None:
                raise _Refused("not_found", f"There is no start state {start_state}.")
            source = start.session
        if turn.source_digest not in (b"", source.head.digest if source else EMPTY_DIGEST):
            message = f"The session {turn.source} is not what it was when this turn was paused."
            raise _Refused("conflict", message)
        return source

    def _refusal(self, head: Head, turn: SessionTurn, adapter: RowAdapter | None) -> str | None:
        served = self._pool.adapted
        made_by, wanted = served.digest(head), adapter.digest if adapter else ""
        # From a start state that no adapter has made any may go on.
        if made_by != wanted and (made_by or head.tokens):
            return _other_adapter(turn, adapter)
        if served.is_of_this_model(head):
            return None
        return served.refusal(head.model, past_unknown=head.number == 0)

    def _beginning(self, sequence: Sequence, active: _ActiveTurn) -> dict[int, Tensor | None]:
        """As of `begin`."""
        assert sequence.slot is not None
        source = active.source
        if source is None:
            return {sequence.slot: self._begin_anew(sequence)}
        last = active.before(sequence.target) != NONE and not sequence.may_overrun
        if found := self._pool.begin(source.head, last):
            state, active.parent = found
            return {sequence.slot: state}
        sequence.begin_loading()
        self._pool.load(source, sequence.slot, partial(self._loaded, sequence))
        return {}

    def _loaded(self, sequence: Sequence, loaded: Loaded | None, error: str | None) -> None:
        sequence.loaded(loaded.replay if loaded else [])
        active = self._active[sequence]
        if active.abandoned:
            self.abandon(sequence)
        elif loaded is None:
            assert error
            self._fail(sequence, error)
        else:
            active.parent = loaded.head

    def _commit(self, sequence: Sequence, active: _ActiveTurn, target: str) -> None:
        active.head = self._pool.commit(
            target,
            active.parent,
            sequence.prompt,
            active.completion,
            partial(self._committed, sequence),
            _model(sequence),
        )

    def _save(self, sequence: Sequence, active: _ActiveTurn, target: str) -> None:
        """Store the state in place of the tokens."""
        before = active.parent.tokens if active.parent else 0
        tokens = before + len(sequence.prompt) + len(active.completion)
        active.kept = True
        slot, done = self._scheduler.detach(sequence), partial(self._committed, sequence)
        self._pool.save(target, slot, tokens, done, _model(sequence))

    def _committed(self, sequence: Sequence, error: str | None) -> None:
        active = self._active[sequence]
        active.committed = True
        if error:
            self._counts.finish(sequence, "error")
            self._outbox.append((sequence.key, Failed(sequence.key[1], error)))
        else:
            self._send_last_delta(sequence, active)
        if error and not active.kept:
            self.abandon(sequence)
        else:
            self._end_if_stored(sequence, active)

    def _end_if_stored(self, sequence: Sequence, active: _ActiveTurn) -> None:
        """The turn is over when it is stored and its state is at its end."""
        if active.committed and active.kept:
            sequence.end()
            self._end(sequence, active)

    def _end(self, sequence: Sequence, active: _ActiveTurn) -> None:
        """The session's next turn may begin."""
        del self._active[sequence]
        if active.source:
            self._pool.unpin(active.source.head)
        self._scheduler.unlock(sequence.target)

    def _drop_savepoint(self, sequence: Sequence) -> None:
        """It is over, or nothing is drawn any more."""
        if self._overrunning.pop(sequence, None):
            self._pool.savepoints.drop(sequence)

    def _finish_unstored(self, sequence: Sequence, active: _ActiveTurn) -> None:
        self.abandon(sequence)
        self._send_last_delta(sequence, active)

    def _send_last_delta(self, sequence: Sequence, active: _ActiveTurn) -> None:
        assert active.last_delta and active.last_delta.finish_reason
        self._counts.finish(sequence, active.last_delta.finish_reason)
        self._outbox.append((sequence.key, Progress(sequence.key[1], [active.last_delta])))

    def _fail(self, sequence: Sequence, message: str) -> None:
        if not self.ended(sequence):
            self._counts.finish(sequence, "error")
            self._outbox.append((sequence.key, Failed(sequence.key[1], message)))
        for seq in sequence.together:
            if seq.slot is not None:
                self.abandon(seq)


def _model(sequence: Sequence) -> int | None:
    """What makes its turn, as of StatePool.commit."""
    return sequence.adapter.model if sequence.adapter else None


def _other_adapter(turn: SessionTurn, adapter: RowAdapter | None) -> str:
    if adapter is None:
        return (
            f"The session {turn.source} was made with an adapter, or in a start state with a time_offset; "
            "name that in this turn too."
        )
    return (
        f"The session {turn.source} was not made with {adapter.name}; continue it with the adapter or start "
        "state that it began with, or without one."
    )

"""Turns on stored sessions: how their states come into slots, and from there back into the state pool.

A turn waits until its session is free (see Scheduler) and gets a slot. The state that it continues is brought
there (`begin`) and its sequence runs. Then the state is brought to exactly the end of the text (`finish`) and
saved (`finalize`). Only when that is committed, the reader gets the last delta and the session's next turn
begins.
"""

from dataclasses import dataclass
from functools import partial

from rwkv_batch.engine.scheduler import Scheduler
from rwkv_batch.engine.sequence import FINISHED, LOADING, Outbox, PromptEncoder, Sequence
from rwkv_batch.state.entries import SessionEntry
from rwkv_batch.state.slots import States
from rwkv_batch.text.tokenizer import Tokenizer
from rwkv_batch.wire.protocol import Failed, Progress, Rejected, RowDelta, SessionTurn
from state_pool import StatePool


@dataclass
class _ActiveTurn:
    """A turn from `begin` until its state is saved."""

    source: SessionEntry | None  # the session that it continues, as it was when the turn began
    length: int  # tokens that the state to save has seen: those of the source, the prompt and the text
    last_delta: RowDelta | None = None  # held back until the commit
    discarded: bool = False  # its session was deleted meanwhile: its text counts, its state does not
    abandoned: bool = False  # while its state was being loaded into the slot


class Turns:
    """The turns of all sessions."""

    def __init__(
        self,
        pool: StatePool,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        states: States,
        outbox: Outbox,
    ) -> None:
        self._pool, self._scheduler, self._outbox = pool, scheduler, outbox
        self._tokenizer, self._prompts, self._states = tokenizer, prompts, states
        self._active: dict[Sequence, _ActiveTurn] = {}
        self._numbers: dict[str, int] = {}  # the last number given to each branching session

    def choose_target(self, turn: SessionTurn) -> str | None:
        """The key under which this turn's state will be stored; of a branch, one that is not in use."""
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

    def begin(self, sequence: Sequence, turn: SessionTurn) -> bool:
        """Bring the state that the turn continues into the sequence's slot, or the sequence into the state's.

        True: there is no such state, and the caller zeroes the slot.
        """
        source = self._pool.find(turn.source) if turn.source is not None else None
        if source is None and turn.required:
            self._scheduler.release(sequence)
            self._scheduler.unlock(sequence.target)
            message = f"The session {turn.source} has been deleted meanwhile."
            self._outbox.append((sequence.key, Rejected(sequence.key[1], "not_found", message)))
            return False
        sequence.prompt = self._prompts.encode_turn(sequence.request, source is not None)
        length = len(sequence.prompt) + (source.tokens if source else 0)
        active = self._active[sequence] = _ActiveTurn(source, length)
        if sequence.request.max_tokens == 0:  # the prompt is only read
            active.last_delta = RowDelta(sequence.row, "", 0, "length")
            sequence.finalize(sequence.prompt)
        if source is None:
            return True
        slot = self._pool.take(source.key) if source.key == sequence.target else None
        if slot is not None:
            self._scheduler.move(sequence, slot)
        else:
            self._load(sequence, source.key)
        return False

    def finish(self, sequence: Sequence, last_delta: RowDelta) -> None:
        """The text has finished with this delta: bring the state to exactly its end."""
        active = self._active[sequence]
        active.last_delta = last_delta
        if sequence.target is None or active.discarded:
            self._finish_unsaved(sequence, active)
            return
        kept = sequence.shown_tokens(self._tokenizer)
        active.length += len(kept)
        if kept[: sequence.drawn_fed] == sequence.drawn[: sequence.drawn_fed]:
            sequence.finalize(kept[sequence.drawn_fed :])
            self.finalize(sequence)
            return
        # the state has run past the end of the text: feed the turn again from its start
        sequence.finalize(sequence.prompt + kept)
        assert sequence.slot is not None
        if active.source is None:
            self._states.clear([sequence.slot])
            return
        key = active.source.key
        source = self._pool.find(key)
        if source and source.updated == active.source.updated:
            self._load(sequence, key)
        else:
            self._fail(sequence, f"The session {key} was changed or deleted while this turn ran from it.")

    def finalize(self, sequence: Sequence) -> None:
        """Save the state once it has seen all of its text."""
        active = self._active[sequence]
        if sequence.tokens_left:
            return
        if sequence.target is None or active.discarded:
            self._finish_unsaved(sequence, active)
            return
        slot = self._scheduler.detach(sequence)
        self._pool.save(sequence.target, slot, active.length, partial(self._saved, sequence))

    def abandon(self, sequence: Sequence) -> None:
        """Drop a running sequence that has failed or was cancelled. What was stored before its turn stays."""
        active = self._active.get(sequence)
        if active and sequence.state is LOADING:
            active.abandoned = True  # its slot is being written to
            return
        self._active.pop(sequence, None)
        self._scheduler.release(sequence)
        self._scheduler.unlock(sequence.target)

    def discard(self, key: str, prefix: bool) -> None:
        """The session is deleted, with `prefix` all below it: turns under way do not save their states."""
        for sequence, active in self._active.items():
            target = sequence.target
            if target is not None and (target == key or (prefix and target.startswith(f"{key}:"))):
                active.discarded = True

    def _load(self, sequence: Sequence, key: str) -> None:
        assert sequence.slot is not None
        sequence.state = LOADING
        self._pool.load(key, sequence.slot, partial(self._loaded, sequence))

    def _loaded(self, sequence: Sequence, error: str | None) -> None:
        sequence.start()
        if self._active[sequence].abandoned:
            self.abandon(sequence)
        elif error:
            self._fail(sequence, error)

    def _saved(self, sequence: Sequence, error: str | None) -> None:
        active = self._active.pop(sequence)
        sequence.state = FINISHED
        self._scheduler.unlock(sequence.target)
        if error:
            self._outbox.append((sequence.key, Failed(sequence.key[1], error)))
        else:
            self._send_last_delta(sequence, active)

    def _finish_unsaved(self, sequence: Sequence, active: _ActiveTurn) -> None:
        self.abandon(sequence)
        self._send_last_delta(sequence, active)

    def _send_last_delta(self, sequence: Sequence, active: _ActiveTurn) -> None:
        assert active.last_delta
        self._outbox.append((sequence.key, Progress(sequence.key[1], [active.last_delta])))

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._outbox.append((sequence.key, Failed(sequence.key[1], message)))
        self.abandon(sequence)

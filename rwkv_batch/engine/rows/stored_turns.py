"""Turns on stored sessions: how their states come into slots, and what is stored when they end.

A turn waits until its session is free (see Scheduler) and gets a slot. A state of the session's past is
brought there (`begin`); the tokens after it are fed again, then those of the turn. When its text has ended
(`text_ended`), its tokens are committed, and with that the reader gets the last delta. Meanwhile the state is
brought to exactly the end of the text (`Turns.finalize`) and stays in its slot; with both done the session's
next turn begins. Where it has seen more than the text, as at the end of a stop string, it first goes back to
a savepoint, or to where the turn began. Without a token log the state is stored in place of the tokens.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from rwkv_batch.engine.rows.beginnings import Beginnings
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.repeats import OTHER_BODY, StoredReply, stored_with
from rwkv_batch.engine.rows.rows import Refusal, failure
from rwkv_batch.engine.scheduling.row import DECODING, LOADING, Beginning, Life, Row, RowAdapter
from rwkv_batch.state.entries import (
    EMPTY_DIGEST,
    NONE,
    Head,
    KeptState,
    Loaded,
    Session,
    SessionAt,
    StoreError,
    message,
    moved,
)
from rwkv_batch.state.pool.savepoints import RunningTurn
from rwkv_batch.wire.protocol import GenerateRequest, Progress, RequestKey, RowDelta, SessionTurn

log = logging.getLogger(__name__)

MOST_NUMBERED = 10_000  # branching sessions whose last numbers are remembered


@dataclass(eq=False)
class StoredTurn(Life):
    """A turn from its request until it is stored."""

    keeps_state = True
    turns: "Turns"
    turn: SessionTurn
    continued: bool = False  # its session is there already, or will be when the turns before it have ended
    source: Session | None = None  # the session that it continues, as it was when the turn began
    at: SessionAt | None = None  # the session under which it is stored, as that was when the turn began
    parent: Head | None = None  # the end of `source`, with what is known of its images
    completion: list[int] = field(default_factory=list)
    last_delta: RowDelta | None = None  # held back until the commit
    head: Head | None = None  # the end of this turn, once its commit is under way
    committed: bool = False
    kept: bool = False  # the state has been brought to the end of the text
    discarded: bool = False  # its session was deleted meanwhile: its text counts, its state does not
    overtaken: bool = False  # ... after another server's turn of it, which this one does not know
    save_at: int = 0  # drawn tokens that the state has seen when the next savepoint is due

    @property
    def stored(self) -> bool:
        """Whether its text has ended and its turn is stored, with its state or without."""
        return self.head is not None

    def cached_tokens(self, row: Row) -> int:
        goes_on = self.continued or self.start_state
        return 0 if goes_on else self.turns.beginnings.cached_tokens(row)

    def prompt(self, request: GenerateRequest) -> list[int]:
        """The tokens of its prompt, as far as is known what it follows. Raises ValueError."""
        separator = self.turn.separator if self.continued else None
        return self.turns.parts.prompts.encode_turn(request, separator)

    def paused(self, row: Row) -> GenerateRequest:
        if row not in self.turns.begun:
            return row.request
        digest = self.source.head.digest if self.source else EMPTY_DIGEST
        return replace(row.request, turn=replace(self.turn, source_digest=digest))

    def begin(self, row: Row) -> Beginning:
        turns, parts = self.turns, self.turns.parts
        try:
            if reply := turns.stored_reply(self.turn):
                self._answer_again(row, reply)
                return {}
            self.source = turns.find_source(self)
            self.at = self._find_target()
        except (Refusal, StoreError) as error:
            parts.rows.end(row, "error", failure(row.key[1], error))
            return {}
        turns.begun[row], self.parent = self, self.source.head if self.source else None
        self.continued = self.source is not None and self.source.key == self.turn.source
        row.begin_turn(self.prompt(row.request))
        # A prompt that is only read is fed as any, as logits behind it show whether its state is sound; not
        # that of a mixture, whose other rows do not run then.
        reads_only = row.request.max_tokens == 0
        if reads_only and row.draws.members:
            row.finish("length")
            self.last_delta = row.text.take(row.drawn)
            row.finalize(row.input.tokens)
        if self.source:
            parts.pool.pin(self.source.head)
        beginning = self._beginning(row)
        if self.source is None:
            parts.counts.begin(row)
        if self.target is not None and row.text.may_stop and not reads_only:
            turns.overrunning[row] = self
            self.save_at = row.drawn_fed + parts.pool.savepoints.first(row.input.left)
        return beginning

    def reached(self, row: Row) -> None:
        self.turns.beginnings.keep(row)

    def text_ended(self, row: Row, delta: RowDelta) -> None:
        pool, self.last_delta = self.turns.parts.pool, delta
        if self.target is None or self.discarded:
            self.finish_unstored(row)
            return
        kept = self.completion = row.text.shown_tokens(row.drawn, self.turns.parts.tokenizer)
        if pool.token_log:
            self.commit(row)

        def has_drawn(count: int) -> bool:
            """Whether so many tokens of what is kept are those that were drawn."""
            return count <= len(kept) and kept[:count] == row.drawn[:count]

        states = self.turns.parts.runner.states
        if has_drawn(row.drawn_fed):
            row.finalize(kept[row.drawn_fed :])
        elif saved := pool.savepoints.find(row, has_drawn):
            assert row.slot is not None
            row.finalize(kept[saved[0] :])
            states.replace({row.slot: saved[1]})
        else:  # feed the turn again from its start
            self._drop_savepoint(row)
            row.finalize(row.prompt + kept)
            states.replace(self._beginning(row))
            return
        self._drop_savepoint(row)
        if not row.input.left:
            self.turns.finalize([row])

    def drop(self, row: Row, reason: str) -> None:
        """Of a turn that has not ended the session is what it was before; of another the state goes."""
        if not self.stored:
            self.turns.parts.rows.answer(row, reason)
        self._abandon(row)

    @property
    def before(self) -> int:
        """The turn that this one follows in its session, or NONE."""
        return self.source.head.turn if self.source and self.source.key == self.target else NONE

    def commit(self, row: Row) -> None:
        """Store its tokens."""
        assert self.at and self.last_delta
        done, model = partial(self._committed, row), self._model
        request = stored_with(self.turn, row.request, self.last_delta, len(row.drawn))
        self.head = self.turns.parts.pool.commit(
            self.at, self.parent, row.prompt, self.completion, done, model, request
        )

    def save(self, row: Row) -> None:
        """Store its state in place of the tokens."""
        assert self.at is not None
        before = self.parent.tokens if self.parent else 0
        tokens = before + len(row.prompt) + len(self.completion)
        self.kept = True
        scheduler, done = self.turns.parts.scheduler, partial(self._committed, row)
        slot = scheduler.detach(row)
        try:
            self.turns.parts.pool.save(self.at, slot, tokens, done, self._model)
        except Exception as error:
            log.exception("the state of a turn could not be stored")
            scheduler.free(slot)
            done(message(error))

    def finish_unstored(self, row: Row) -> None:
        """Nothing of it is stored.

        Where its session is being deleted, it counts as a turn before that: the reader gets its end only when
        the session is gone. If that stays as it was, the turn has not been; nor if another server had been
        faster before.
        """
        if not self.discarded or self.target is None:
            self._send_last_delta(row)
            self._abandon(row)
            return
        self._drop_savepoint(row)
        self.turns.parts.rows.leave(row)
        if self.turns.parts.pool.settled([self.target], partial(self._deleted, row)):
            self._deleted(row)

    def end_if_stored(self, row: Row) -> None:
        """The turn is over when it is stored and its state is at its end."""
        if self.committed and self.kept:
            self._end(row)

    def _answer_again(self, row: Row, reply: StoredReply) -> None:
        """It was stored before: its reader gets the text of then. Raises Refusal."""
        if not reply.answers(self.turn, row.request):
            raise Refusal("invalid", OTHER_BODY)
        text = self.turns.parts.tokenizer.decode(reply.turn.completion)
        last = reply.delta(row.number, text, row.request.return_ids)
        answer = Progress(row.key[1], [last], repeated=True)
        self.turns.parts.rows.end(row, last.finish_reason or "stop", answer)

    def _find_target(self) -> SessionAt | None:
        """The session that it is stored in, as it finds that now. Raises StoreError."""
        if self.target is None:
            return None
        if self.target == self.turn.source or self.turn.branch is not None:
            return SessionAt(self.target, self.before)
        return self.turns.parts.pool.at(self.target)  # which it replaces

    def _beginning(self, row: Row) -> Beginning:
        """What its slot begins with; nothing while a state of its session is being loaded."""
        assert row.slot is not None
        pool, source = self.turns.parts.pool, self.source
        if source is None:
            return {row.slot: self.turns.beginnings.begin(row)}
        last = self.before != NONE and not row.text.may_stop
        if found := pool.begin(source.head, last):
            state, self.parent = found
            return {row.slot: state}
        row.begin_loading()
        pool.load(source, row.slot, partial(self._loaded, row))
        return {}

    def _loaded(self, row: Row, loaded: Loaded | None, error: str | None) -> None:
        row.loaded(loaded.replay if loaded else [])
        if self.abandoned:
            self._abandon(row)
        elif loaded:
            self.parent = loaded.head
        else:
            if not self.stored:
                answer = failure(row.key[1], error or "")
                self.turns.parts.rows.answer(row, "error", answer)
            self.turns.parts.rows.end_together(row, "error")

    def _committed(self, row: Row, error: str | None) -> None:
        self.committed = True
        if error:
            self.turns.parts.rows.answer(row, "error", failure(row.key[1], error))
        else:
            self._send_last_delta(row)
        if error and not self.kept:
            self._abandon(row)
        else:
            self.end_if_stored(row)

    def _deleted(self, row: Row) -> None:
        """The session that it was to be stored in is gone, or could not be deleted."""
        assert self.target is not None
        try:
            found = self.turns.parts.pool.find(self.target)
        except StoreError as error:
            self.turns.parts.rows.answer(row, "error", failure(row.key[1], error))
            self._end(row)
            return
        if found and found.head.turn == self.before:
            sentence = f"The session {self.target} could not be deleted, and this turn of it was not stored."
            self.turns.parts.rows.answer(row, "error", failure(row.key[1], sentence))
        elif self.overtaken:
            self.turns.parts.rows.answer(row, "error", failure(row.key[1], message(moved(self.target)) or ""))
        else:
            self._send_last_delta(row)
        self._end(row)

    def _send_last_delta(self, row: Row) -> None:
        assert self.last_delta and self.last_delta.finish_reason
        last = Progress(row.key[1], [self.last_delta])
        self.turns.parts.rows.answer(row, self.last_delta.finish_reason, last)

    def _abandon(self, row: Row) -> None:
        """Its state is not kept."""
        begun = row in self.turns.begun
        if begun and row.state is LOADING:
            self.abandoned = True  # its slot is being written to
            return
        self._drop_savepoint(row)
        if begun and self.head:
            self.turns.parts.rows.leave(row)
            self.kept = True
            self.end_if_stored(row)
        else:
            self._end(row)

    def _end(self, row: Row) -> None:
        if self.turns.begun.pop(row, None) and self.source:
            self.turns.parts.pool.unpin(self.source.head)
        self.turns.parts.rows.end(row)
        self.turns.go_on_behind(self.target)

    @property
    def _model(self) -> int | None:
        """What makes it, as of StatePool.commit."""
        return self.adapter.model if self.adapter else None

    def _drop_savepoint(self, row: Row) -> None:
        """It is over, or nothing is drawn any more."""
        if self.turns.overrunning.pop(row, None):
            self.turns.parts.pool.savepoints.drop(row)


class Turns:
    """The turns of all sessions."""

    def __init__(self, parts: EngineParts, beginnings: Beginnings) -> None:
        self.parts, self.beginnings = parts, beginnings
        self.begun: dict[Row, StoredTurn] = {}  # those under way
        self.overrunning: dict[Row, StoredTurn] = {}  # of them, those with savepoints
        self._behind: dict[str, list[Callable[[], None]]] = {}  # what waits for the end of one, by sessions
        self._numbers: dict[str, int] = {}  # the last number given to a branching session

    def choose_target(self, turn: SessionTurn) -> str | None:
        """The key that this turn will be stored under; of a branch, one that is not in use."""
        if turn.branch is None:
            return turn.target
        pool = self.parts.pool
        if node := self._node_of(turn.request, f"{turn.branch}:"):
            return node
        if turn.branch not in self._numbers or pool.store.remote:  # where others number them, too
            tails = (key.removeprefix(f"{turn.branch}:") for key in pool.keys(f"{turn.branch}:"))
            used = max((int(tail) for tail in tails if tail.isdecimal()), default=0)
            self._numbers[turn.branch] = max(used, self._numbers.get(turn.branch, 0))
            while len(self._numbers) > MOST_NUMBERED:  # its number is that of the last node again
                del self._numbers[next(iter(self._numbers))]
        while True:  # a fork, an import or a turn may have taken the next one
            self._numbers[turn.branch] += 1
            key = f"{turn.branch}:{self._numbers[turn.branch]}"
            if key not in self.parts.scheduler.queues and pool.find(key) is None:
                return key

    def _node_of(self, request: bytes, prefix: str) -> str | None:
        """The node of this branching session that ends with the turn of the request."""
        if not request or (found := self.parts.pool.find_request(request)) is None:
            return None
        key, turn = found
        if key.startswith(prefix):
            return key
        for key in self.parts.pool.keys(prefix):  # a fork of it has been named
            node = self.parts.pool.find(key)
            if node and node.head.turn == turn.id:
                return key
        return None

    def over(self, key: str, done: Callable[[], None]) -> bool:
        """Whether each turn of the session that is answered is over, too; otherwise `done` is called then.

        For a step or two behind an answer the state is still brought to its end.
        """
        if not any(turn.committed and turn.target == key for turn in self.begun.values()):
            return True
        self._behind.setdefault(key, []).append(done)
        return False

    def go_on_behind(self, key: str | None) -> None:
        """A turn of the session is over."""
        for done in self._behind.pop(key, ()) if key else ():
            done()

    def stores(self, key: RequestKey) -> bool:
        """Whether the turn of that request is being stored, so that a last event of it comes."""
        return any(row.key == key and turn.stored for row, turn in self.begun.items())

    def stored_reply(self, turn: SessionTurn) -> StoredReply | None:
        """What is stored of this turn, if it has been sent before. Raises StoreError."""
        found = self.parts.pool.find_request(turn.request) if turn.request else None
        return StoredReply(*found) if found else None

    def life_of(self, request: GenerateRequest, turn: SessionTurn, adapter: RowAdapter | None) -> StoredTurn:
        """The life of a request's only row, so far as that can be said before it begins.

        Raises Refusal, StoreError.
        """
        if len(request.prompts) != 1 or request.n != 1:
            message = f"A turn has one prompt, not {len(request.prompts)} times {request.n}."
            raise Refusal("invalid", message)
        if request.prompt_logprobs is not None:
            message = "The prompt of a session's turn has no logprobs; send it without a session."
            raise Refusal("invalid", message)
        reply, source = self.stored_reply(turn), self._source(turn)
        others = turn.source in self.parts.scheduler.queues  # that come before it, and store what it follows
        if reply and not reply.answers(turn, request):
            raise Refusal("invalid", OTHER_BODY)
        continued = reply.continued if reply else others or source is not None
        if turn.required and not continued:
            raise Refusal("not_found", f"There is no session {turn.source}.")
        if source and not reply and not others:
            self._check(source.head, turn, adapter)
        return StoredTurn(self, turn, continued, target=self.choose_target(turn))

    def find_source(self, life: StoredTurn) -> Session | None:
        """What the turn continues: a session, or that of its start state. Raises Refusal, StoreError."""
        turn, source = life.turn, self._source(life.turn)
        if turn.source not in (None, life.target) and self.parts.pool.undecided(turn.source):
            message = f"The session {turn.source} is being changed; send the request again in a moment."
            raise Refusal("conflict", message)
        if source is None and turn.required:
            raise Refusal("not_found", f"The session {turn.source} has been deleted meanwhile.")
        if source is not None:
            self._check(source.head, turn, life.adapter)
        elif life.start_state:
            start = self.parts.pool.starts.find(life.start_state)
            if start is None:
                raise Refusal("not_found", f"There is no start state {life.start_state}.")
            source = start.session
        if turn.source_digest not in (b"", source.head.digest if source else EMPTY_DIGEST):
            message = f"The session {turn.source} is not what it was when this turn was paused."
            raise Refusal("conflict", message)
        return source

    def save(self) -> None:
        """Before a step: make the savepoints that are due."""
        running = []
        for row, turn in self.overrunning.items():
            if row.drawn_fed < turn.save_at or row.state is not DECODING:
                continue
            assert row.slot is not None
            # A later one may have to be passed over: then the turn goes on from where it began.
            before = NONE if row.drawn_fed else turn.before
            running.append(RunningTurn(row, row.slot, row.drawn_fed, before))
            turn.save_at = row.drawn_fed + self.parts.pool.savepoints.every
        if running:
            self.parts.pool.savepoints.save(running)

    def finalize(self, rows: list[Row]) -> None:
        """Keep the states of turns that have seen all of their text."""
        ended, kept = [], []
        for row in rows:
            turn = self.begun[row]
            if turn.head is None and (turn.target is None or turn.discarded):
                turn.finish_unstored(row)
                continue
            if not self.parts.pool.token_log:
                turn.save(row)
                continue
            if turn.head is None:
                turn.commit(row)
            assert turn.head is not None and turn.target is not None
            if turn.discarded:
                self.parts.rows.leave(row)
            else:
                slot = self.parts.scheduler.detach(row)
                kept.append(KeptState(turn.target, turn.head, slot, turn.before))
            ended.append((row, turn))
        try:
            self.parts.pool.keep(kept)
        except Exception:  # its tokens are stored, and bring it back
            log.exception("the states of turns could not be kept")
            self.parts.scheduler.free(*(state.slot for state in kept))
        for row, turn in ended:
            turn.kept = True
            turn.end_if_stored(row)

    def discard(self, key: str, prefix: bool) -> int:
        """The session is deleted, with `prefix` all below it: turns under way are not stored.

        Returns how many of these would have begun a session.
        """
        begun = 0
        for turn in self.begun.values():
            target = turn.target
            if target is not None and (target == key or (prefix and target.startswith(f"{key}:"))):
                found = self.parts.pool.find(target)
                begun += not turn.discarded and found is None
                turn.overtaken |= bool(found and turn.at and found.head.turn != turn.at.turn)
                turn.discarded = True
        return begun

    def _source(self, turn: SessionTurn) -> Session | None:
        return None if turn.source is None else self.parts.pool.find(turn.source)

    def _check(self, head: Head, turn: SessionTurn, adapter: RowAdapter | None) -> None:
        """Raises Refusal if the turn cannot go on from this end of its source."""
        served = self.parts.pool.adapted
        made_by, wanted = served.digest(head), adapter.digest if adapter else ""
        # From a start state that no adapter has made any may go on.
        if made_by != wanted and (made_by or head.tokens):
            raise Refusal("conflict", _other_adapter(turn, adapter))
        foreign = not served.is_of_this_model(head)
        if foreign and (why := served.refusal(head.model, past_unknown=head.number == 0)):
            raise Refusal("conflict", why)


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

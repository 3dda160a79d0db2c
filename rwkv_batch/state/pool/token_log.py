"""Sessions and their turns, as they are stored and as they will be when all commits under way are done."""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rwkv_batch.state.entries import (
    HIDDEN,
    NONE,
    REQUEST_ID,
    Collect,
    Done,
    Head,
    Operation,
    PutTurn,
    Removed,
    Session,
    SessionAt,
    Shrink,
    Start,
    Turn,
    ignore_result,
    message,
)
from rwkv_batch.state.log.adapted import AdaptedModels
from rwkv_batch.state.log.protocol import CommitQueue, Committed, SessionStore
from rwkv_batch.state.log.sessions import Sessions

log = logging.getLogger(__name__)

ROW_BYTES = 300  # that a turn takes in the database beside its tokens
SHRINK_AT = 100  # the limit is looked at whenever the database has grown by this part of it

Cleaner = Callable[[Removed], None]


class TokenLog:
    """All methods are for the pool's thread, and none waits for a commit.

    `durable`: a turn is done when it is committed, otherwise at once. `clean` gets what commits have removed.
    """

    def __init__(
        self,
        store: SessionStore,
        writer: CommitQueue,
        sessions: Sessions,
        models: AdaptedModels,
        *,
        durable: bool,
        clean: Cleaner,
        report: Callable[[Callable[[], None]], None],
    ) -> None:
        self._limit, self._writer, self._models = store.limit, writer, models
        self.sessions, self._durable, self._clean, self._report = sessions, durable, clean, report
        self._ids = store.turn_numbers()
        self._unstored: dict[int, Turn] = {}  # turns that are not committed yet
        # Those of them whose commit waits until a state is stored, and what waits for the commit.
        self._announced: dict[int, list[Callable[[], None]]] = {}
        self._pins: Counter[int] = Counter()  # turns that are being continued
        self._unused: set[int] = set()  # turns that nothing used any longer while they were pinned
        self._grown = 0  # bytes since the limit was last looked at

    # Turns

    def new_turn(
        self,
        parent: Head | None,
        prompt: Sequence[int],
        completion: Sequence[int],
        model: int | None = None,
        request: bytes = b"",
    ) -> Turn:
        """The next turn after `parent`; None: at the beginning. model: None: without an adapter."""
        turn = Turn.from_parent(self.new_id(), parent, prompt, completion, model or self._models.plain.id)
        return replace(turn, request=request) if request else turn

    def find_request(self, request: bytes) -> tuple[str, Turn] | None:
        """The turn of a request that is done, as SessionStore has it. Raises StoreError."""
        if not self._durable:
            for turn in self._unstored.values():
                if turn.request[:REQUEST_ID] == request[:REQUEST_ID]:
                    return "", turn
        return self.sessions.find_request(request)

    def unknown_past(self, tokens: int, model: int | None = None) -> Turn:
        """A turn in place of a past that is not known."""
        made_by, digest = model or self._models.plain.id, secrets.token_bytes(16)
        return Turn(self.new_id(), NONE, 0, tokens, [], [], time.time(), made_by, digest)

    def new_id(self) -> int:
        """The id of a new turn."""
        return next(self._ids)

    def is_stored(self, turn: int) -> bool:
        """Whether the turn is committed, or there is none."""
        return turn not in self._unstored

    def newest_turns(self, head: Head, held: Callable[[int], bool] | None = None) -> Start:
        """Back from a head through the turns that are not committed yet.

        With `held` no further than to a turn whose state is in memory, or has to be.
        """
        start = Start([], head.turn)
        while turn := self._unstored.get(start.turn):
            if held and (held(turn.id) or turn.past_unknown):
                break
            start.go_back(turn)
        return start

    def awaits_its_state(self, turn: int) -> bool:
        """Whether the turn is committed only when a state of it, or of its past, is stored."""
        return turn in self._announced

    def pin(self, turn: int) -> None:
        """The turn stays until `unpin`, also if its sessions are deleted."""
        self._pins[turn] += 1

    def unpin(self, turn: int) -> None:
        """Undo one `pin`; the turn may be removed after the last."""
        self._pins[turn] -= 1
        if not self._pins[turn]:
            del self._pins[turn]
            if turn in self._unused:
                self._unused.remove(turn)
                self._collect([turn])

    # Sessions

    def put(self, at: SessionAt, turn: Turn, head: Head, done: Done) -> None:
        """A session ends with a new turn. After an error it ends where it did before."""
        session, size = Session(at.key, head, turn.created), 2 * len(turn.tokens) + ROW_BYTES
        if not self._durable:
            self._report(lambda: done(None))
        if turn.parent in self._announced:  # which has to be in the log first
            finish = done if self._durable else ignore_result
            followers = self._announced[turn.parent]
            followers.append(lambda: self.put_announced(session, [turn], self.shrink(size), finish))
            self._announce(session, [turn], at.turn)
            return
        self._unstored[turn.id] = turn

        def committed(removed: Removed | None, error: Exception | None) -> None:
            del self._unstored[turn.id]
            if not error:
                self._models.noted(turn.model)
            self._clean_up(removed or Removed(turns=[turn.id]))
            if self._durable:
                done(message(error))

        self.sessions.announce(session, at.turn)
        self.sessions.put(
            session,
            committed,
            before=[*self._models.noting(turn.model), PutTurn(turn), *self.shrink(size)],
            pinned=self._pinned(),
            retry=not self._durable,
        )

    def point(self, at: SessionAt, head: Head, done: Done) -> None:
        """Let a session end with a turn that is in the log, or will be."""
        if head.turn in self._announced:
            self._announced[head.turn].append(lambda: self.point(at, head, done))
            return

        def committed(removed: Removed | None, error: Exception | None) -> None:
            self._clean_up(removed)
            done(message(error))

        session = Session(at.key, head, time.time())
        self.sessions.announce(session, at.turn)
        self.sessions.put(session, committed, pinned=self._pinned())

    def announce(self, at: SessionAt, turns: Sequence[Turn], imaged: int) -> Session:
        """A session ends with the last of these turns. `put_announced` or `lose` follows."""
        session = Session(at.key, turns[-1].head(imaged), time.time())
        self._announce(session, turns, at.turn)
        return session

    def put_announced(
        self, session: Session, turns: Sequence[Turn], operations: Sequence[Operation], done: Done
    ) -> None:
        """Store the session with its turns, and then carry out the operations."""
        followers = self._committing(turns)
        wanted = self.sessions.find(session.key) is session
        if not wanted:  # deleted or replaced meanwhile
            self.sessions.withdraw(session, None)
            continued = [turn.id for turn in turns if turn.id in self._pins]
            self._unused.update(continued)  # unless what continues them is stored
            if not followers and not continued:
                self._forget(turns)
                # Done with the commit of what came after it: before that the session is what it was.
                self._writer.put([], lambda removed, error: done(message(error)))
                return

        def committed(removed: Removed | None, error: Exception | None) -> None:
            for turn in turns:
                del self._unstored[turn.id]
                if not error:
                    self._models.noted(turn.model)
            self._clean_up(removed or _all_of(turns))
            done(message(error))

        notes = [note for model in {turn.model for turn in turns} for note in self._models.noting(model)]
        before, retry = [*notes, *map(PutTurn, turns), *operations], not self._durable
        if wanted:
            self.sessions.put(session, committed, before=before, pinned=self._pinned(), retry=retry)
        else:
            self._writer.put(before, committed, retry)
        for follower in followers:
            follower()

    def lose(self, session: Session, turns: Sequence[Turn], error: Exception) -> None:
        """What was announced cannot be stored."""
        log.error("The session %s could not be stored: %s", session.key.removeprefix(HIDDEN), error)
        self.sessions.withdraw(session, error)
        self._forget(turns)
        for follower in self._committing(turns):
            follower()

    def undecided(self, key: str) -> bool:
        """Whether what `find` says of the session may be refused still; see StatePool."""
        if not self._durable or not self.sessions.changing([key]):
            return False
        session = self.sessions.find(key)
        return session is None or session.head.turn not in self._unstored

    def delete(self, ends: Mapping[str, int], committed: Callable[[Exception | None], None]) -> None:
        """Delete sessions, and the turns that nothing else uses. `ends`: the turns that they end with."""

        def deleted(removed: Removed | None, error: Exception | None) -> None:
            self._clean_up(removed)
            committed(error)

        self.sessions.delete(ends, deleted, pinned=self._pinned(), retry=not self._durable)

    def commit(
        self, operations: Sequence[Operation], committed: Committed = lambda removed, error: None
    ) -> None:
        """Carry out operations that change no session."""

        def done(removed: Removed | None, error: Exception | None) -> None:
            self._clean_up(removed)
            committed(removed, error)

        self._writer.put(operations, done)

    def shrink(self, size: int) -> list[Operation]:
        """What keeps the database to its limit when so many bytes come."""
        self._grown += size
        if self._limit is None or self._grown < self._limit // SHRINK_AT:
            return []
        self._grown = 0
        return [Shrink(self._limit, self._pinned())]

    def _announce(self, session: Session, turns: Sequence[Turn], follows: int) -> None:
        self._unstored |= {turn.id: turn for turn in turns}
        followers: list[Callable[[], None]] = []  # of all of them
        self._announced |= {turn.id: followers for turn in turns}
        self.sessions.announce(session, follows)

    def _committing(self, turns: Sequence[Turn]) -> list[Callable[[], None]]:
        """The commit of announced turns need not wait any longer; what waits for it."""
        return [self._announced.pop(turn.id) for turn in turns][-1]

    def _pinned(self) -> frozenset[int]:
        return frozenset(self._pins)

    def _collect(self, turns: Sequence[int]) -> None:
        """Tried until it succeeds: nothing else would remove them, which may be those of deleted sessions."""
        self._writer.put(
            [Collect(turns, self._pinned())], lambda removed, error: self._clean_up(removed), retry=True
        )

    def _forget(self, turns: Sequence[Turn]) -> None:
        """They will not be in the log."""
        for turn in turns:
            del self._unstored[turn.id]
        self._clean(_all_of(turns))

    def _clean_up(self, removed: Removed | None) -> None:
        if removed is None:
            return
        self._clean(removed)
        if removed.sessions:
            log.warning("%d sessions were removed, to keep the database to its limit", len(removed.sessions))
        self._unused.update(turn for turn in removed.pinned if turn in self._pins)
        unpinned = [turn for turn in removed.pinned if turn not in self._pins]
        if unpinned:
            self._collect(unpinned)


def _all_of(turns: Sequence[Turn]) -> Removed:
    ids = [turn.id for turn in turns]
    return Removed(turns=ids, images=ids)

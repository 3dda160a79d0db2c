"""Which sessions there are: the database's, with the changes that are not committed yet."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from rwkv_batch.state.entries import (
    DAMAGED,
    HIDDEN,
    NONE,
    Conflict,
    DeleteSessions,
    Operation,
    PutSession,
    Removed,
    RowDamaged,
    Session,
    SessionAt,
    StoreError,
    Turn,
    Unread,
)
from rwkv_batch.state.jobs import JobThread
from rwkv_batch.state.log.protocol import CommitQueue, Committed, SessionStore
from rwkv_batch.state.sql.tables import encoded

log = logging.getLogger(__name__)

ALL = 1 << 62  # sessions in a list without a limit


@dataclass
class _Change:
    """The newest change of a session."""

    session: Session | None  # None: deleted
    under_way: int = 0  # changes of this session that are not committed
    # Of turns with which it is to end whose commit has not been asked for, the turns that they follow. Those
    # whose commit never is stay here, as what came later names them.
    before: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)  # the same of those whose commit has failed


class Sessions:
    """Sessions by key. All methods are for the pool's thread, and none waits for a commit."""

    def __init__(self, store: SessionStore, reader: JobThread, writer: CommitQueue) -> None:
        self._store, self._reader, self._writer = store, reader, writer
        self._changes: dict[str, _Change] = {}

    def find(self, key: str) -> Session | None:
        """None if there is no such session, or its row is damaged. Raises StoreError."""
        change = self._changes.get(key)
        return change.session if change else self._stored(key)

    def changing(self, keys: Sequence[str]) -> bool:
        """Whether a change of one of these is under way, which may be refused still."""
        return any(key in self._changes for key in keys)

    def deleting(self, key: str, prefix: bool) -> bool:
        """Whether this one, or with `prefix` one below it, is being deleted, which may be refused still."""
        return any(
            change.session is None and (name == key or (prefix and name.startswith(f"{key}:")))
            for name, change in self._changes.items()
        )

    def find_request(self, request: bytes) -> tuple[str, Turn] | None:
        """The committed turn of a request; see SessionStore. Raises StoreError."""
        return self._store.find_request(request)

    def at(self, key: str) -> SessionAt:
        """The session as a change finds it that begins now. Raises StoreError."""
        found = self.find(key)
        return SessionAt(key, found.head.turn if found else NONE)

    def announce(self, session: Session, follows: int) -> None:
        """The session is found from now on; `put` or `withdraw` follows.

        `follows`: the turn that it ends with until then, or NONE, ANY.
        """
        self._note(session.key, session).before[session.head.turn] = follows

    def withdraw(self, session: Session, error: Exception | None) -> None:
        """What was announced cannot be stored, or need not be any longer."""
        self._finish_change(session.key, session, error)

    def put(
        self,
        session: Session,
        committed: Committed,
        *,
        before: Sequence[Operation] = (),
        pinned: frozenset[int] = frozenset(),
        retry: bool = False,
    ) -> None:
        """Store a session that was announced, together with other operations that come before."""

        def done(removed: Removed | None, error: Exception | None) -> None:
            if error:
                change.failed[session.head.turn] = follows
            self._finish_change(session.key, session, error)
            committed(removed, error)

        change = self._changes[session.key]
        follows = change.before.pop(session.head.turn)
        operation = PutSession(session, pinned, _as_asked(change, follows))
        self._writer.put([*before, operation], done, retry)

    def delete(
        self, ends: Mapping[str, int], committed: Committed, *, pinned: frozenset[int], retry: bool
    ) -> None:
        """Delete the sessions. With `retry` that is tried again after an error, which is reported too.

        `ends`: the turns that they end with, by their keys. Where one of these cannot be stored, as it turns
        out, the session is deleted all the same.
        """
        keys = [*ends]
        changes = [self._note(key, None) for key in keys]

        def put(follows: list[int]) -> None:
            operation = DeleteSessions(keys, pinned, follows)

            def done(removed: Removed | None, error: Exception | None) -> None:
                if isinstance(error, Conflict):
                    stored = [_as_stored(*each) for each in zip(changes, follows, strict=True)]
                    if stored != follows:
                        put(stored)
                        return
                if error and retry:
                    self._writer.put([operation], again, retry=True)
                else:
                    again(removed, error)
                if error:
                    committed(None, error)

            self._writer.put([operation], done)

        def again(removed: Removed | None, error: Exception | None) -> None:
            for key in keys:
                self._finish_change(key, None, error)
            if not error:
                committed(removed, None)

        put([_as_asked(*each) for each in zip(changes, ends.values(), strict=True)])

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix`, which is not empty."""
        found = {session.key: True for session in self._store.list_sessions(None, ALL, prefix)}
        found |= {
            key: bool(change.session) for key, change in self._changes.items() if key.startswith(prefix)
        }
        return [key for key, exists in found.items() if exists]

    def list(
        self, after: str | None, limit: int | None, done: Callable[[list[Session], Exception | None], None]
    ) -> None:
        """`done` gets the sessions behind a key, in the order of their keys, at most so many."""
        changes = self._listed_changes()
        count = ALL if limit is None else limit + len(changes)

        def listed(found: list[Session] | None, error: Exception | None) -> None:
            newest = {session.key: session for session in found or []} | changes
            newest |= self._listed_changes()
            sessions = [newest[key] for key in sorted(newest, key=encoded) if newest[key]]
            if after is not None:
                sessions = [
                    session for session in sessions if session and encoded(session.key) > encoded(after)
                ]
            done([session for session in sessions if session][:limit], error)

        self._reader.put(partial(self._store.list_sessions, after, count), listed)

    def _listed_changes(self) -> dict[str, Session | None]:
        changes = self._changes.items()
        return {key: change.session for key, change in changes if not key.startswith(HIDDEN)}

    def _stored(self, key: str) -> Session | None:
        """A session of the database. If its row is damaged it is deleted, and lost. Raises StoreError.

        Where only reading fails, the same deletion finds out whether the file is damaged, as it is made
        anew then.
        """
        try:
            return self._store.find_session(key)
        except RowDamaged as error:
            operation = DeleteSessions([key], follows=[DAMAGED])
            self._writer.put([operation], lambda removed, error: None)
            if isinstance(error, Unread):
                raise
            log.error("The session %s is lost: %s", key.removeprefix(HIDDEN), error)
            return None

    def _note(self, key: str, session: Session | None) -> _Change:
        change = self._changes.setdefault(key, _Change(None))
        change.session = session
        change.under_way += 1
        return change

    def _finish_change(self, key: str, session: Session | None, error: Exception | None) -> None:
        """A change is committed, or has failed and has no effect."""
        change = self._changes[key]
        change.under_way -= 1
        if not change.under_way:
            del self._changes[key]
        elif error and change.session is session:
            with suppress(StoreError):  # then the changes under way decide
                change.session = self._stored(key)


def _as_asked(change: _Change, follows: int) -> int:
    """What the session ends with when all commits that have been asked for are done."""
    while follows in change.before:
        follows = change.before[follows]
    return follows


def _as_stored(change: _Change, follows: int) -> int:
    """What the session ends with behind this turn, or in place of it if its commit has failed."""
    while follows in change.failed:
        follows = change.failed[follows]
    return follows

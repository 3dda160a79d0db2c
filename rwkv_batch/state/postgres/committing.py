"""Transactions: all groups of operations in one, so that each is carried out once, or not at all.

As a rule all groups are turns of sessions that go on where they ended. These are stored together, in two
round trips (`_append`). All else in a group is carried out operation by operation.

A connection may be lost while a transaction is being committed. So each notes its number under the id of its
writer: the next connection looks there, and waits for the end of the one before, which holds that row.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psycopg
from psycopg import errors

from rwkv_batch.state.entries import (
    ANY,
    NONE,
    UNKNOWN,
    Dangling,
    Operation,
    PutSession,
    PutTurn,
    Refused,
    Removed,
    StoreAway,
)
from rwkv_batch.state.log.protocol import Outcome
from rwkv_batch.state.postgres.changes import GroupChanges, apply, conflict, lock_sessions
from rwkv_batch.state.postgres.database import rows
from rwkv_batch.state.postgres.database.connection import HELD, Database, PostgresConnection, Renew
from rwkv_batch.state.sql.tables import encoded

ATTEMPTS = 10  # of a transaction that others have kept from being carried out

_MARK = """
    INSERT INTO writers (id, last, seen, address) VALUES (%s, %s, now(), %s) ON CONFLICT (id) DO UPDATE
    SET last = excluded.last, seen = excluded.seen"""
_LAST = """
    INSERT INTO writers AS w (id, last, seen) VALUES (%s, 0, now()) ON CONFLICT (id) DO UPDATE
    SET last = w.last RETURNING last"""
# A server that is stopped between two messages of a pipeline is not idle in its transaction for PostgreSQL,
# whose own limit does not end it then.
_END_STOPPED = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()
    AND application_name = current_setting('application_name') AND wait_event = 'ClientRead'
    AND xact_start < clock_timestamp() - current_setting('idle_in_transaction_session_timeout')::interval"""
_HEADS = "SELECT key, turn FROM sessions WHERE key = ANY(%b) ORDER BY key FOR UPDATE"
_TURN_TYPES = ("bigint", "bigint", "bigint", "bigint", "bytea", "bytea", "float8", "bigint", "bytea", "bytea")
_SESSION_TYPES = ("bytea", "bigint", "bigint", "bigint", "bytea", "bigint", "float8")


def _unnested(types: Sequence[str]) -> str:
    return ", ".join(f"{'%b' if name == 'bytea' else '%s'}::{name}[]" for name in types)


_PUT_TURNS = f"""
    INSERT INTO turns ({rows.TURN}, writer)
    SELECT n.*, %s::bigint FROM unnest({_unnested(_TURN_TYPES)}) AS n"""
_BEGIN_SESSIONS = f"INSERT INTO sessions ({rows.SESSION}) SELECT * FROM unnest({_unnested(_SESSION_TYPES)})"
_MOVE_SESSIONS = f"""
    UPDATE sessions AS s SET turn = n.turn, number = n.number, tokens = n.tokens, digest = n.digest,
    model = n.model, updated = n.updated
    FROM unnest({_unnested(_SESSION_TYPES)}) AS n ({rows.SESSION}) WHERE s.key = n.key"""


class _NotSimple(Exception):
    """The groups are not what `_append` stores."""


class Transactions:
    """For the thread that commits. `image`: see GroupChanges. `address`: where others get states, or ""."""

    def __init__(
        self, connection: PostgresConnection, image: Callable[[int], bytes], address: str = ""
    ) -> None:
        self._connection, self._image, self._address = connection, image, address
        self._id = secrets.randbits(62)
        self._writer = self._id if address else None  # of turns
        self._number = 0
        self._one_by_one = False  # whether its groups are more than `_append` stores
        self._blocked = False  # whether another server holds what it needs, for longer than a commit takes
        # Of the transaction of this number, once its commit has been asked for.
        self._done: list[tuple[Outcome, GroupChanges]] | None = None

    def run(self, groups: Sequence[Sequence[Operation]]) -> list[tuple[Outcome, GroupChanges]]:
        """Carry out all groups. Raises StoreError, and then none of them is carried out.

        After a StoreAway that says UNKNOWN all of them may have been.
        """
        self._number += 1
        self._done = None
        self._one_by_one = False
        deadline = time.monotonic() + self._connection.patience

        def transaction(db: Database) -> list[tuple[Outcome, GroupChanges]]:
            for attempt in range(ATTEMPTS):
                try:
                    if self._blocked:
                        db.execute(_END_STOPPED)
                        self._blocked = False
                    if self._done is not None and self._is_committed(db):
                        return self._done
                    self._done = None
                    return self._carry_out(db, groups)
                except errors.LockNotAvailable:
                    self._blocked = True
                    if attempt == ATTEMPTS - 1 or time.monotonic() >= deadline:
                        raise StoreAway(HELD) from None
                except (errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation):
                    if attempt == ATTEMPTS - 1:
                        raise

            raise AssertionError

        try:
            return self._connection.run(transaction)
        except StoreAway as away:
            if self._done is None:  # its commit has not been asked for
                raise
            raise StoreAway(f"{away} {UNKNOWN}") from None

    def _carry_out(
        self, db: Database, groups: Sequence[Sequence[Operation]]
    ) -> list[tuple[Outcome, GroupChanges]]:
        if not self._one_by_one:
            self._one_by_one = True
            with suppress(_NotSimple):
                return self._append(db, groups)
        done: list[tuple[Outcome, GroupChanges]] = []
        try:
            db.execute("BEGIN")
            db.execute(_MARK, (self._id, self._number, self._address or None))
            lock_sessions(db, groups)
            for operations in groups:
                changes = GroupChanges(self._image, self._writer)
                done.append((_apply_apart(db, operations, changes), changes))
            self._done = done
            db.execute("COMMIT")
        except BaseException:
            _roll_back(db)
            raise
        return done

    def _append(
        self, db: Database, groups: Sequence[Sequence[Operation]]
    ) -> list[tuple[Outcome, GroupChanges]]:
        """Store turns that go on where their sessions end. Raises _NotSimple, Renew: then nothing is done."""
        turns, sessions = _simple(groups)
        done: list[tuple[Outcome, GroupChanges]] = [
            (Removed(), GroupChanges(self._image, self._writer)) for _ in groups
        ]
        try:
            with db.pipeline() as pipeline:
                db.execute("BEGIN")
                db.execute(_MARK, (self._id, self._number, self._address or None))
                found = db.execute(_HEADS, ([encoded(put.session.key) for put in sessions],))
                pipeline.sync()
                heads = {bytes(key): int(turn) for key, turn in found.fetchall()}
                before = dict(heads)
                for turn, put in zip(turns, sessions, strict=True):
                    key = encoded(put.session.key)
                    head = heads.get(key, NONE)
                    if put.follows not in (ANY, head) or turn.turn.parent != head:
                        raise _NotSimple
                    heads[key] = put.session.head.turn
                columns = [rows.turn_columns(put.turn) for put in turns]
                stored = [[*values] for values in zip(*columns, strict=True)]
                db.execute(_PUT_TURNS.encode(), [self._writer, *stored])
                newest = {encoded(put.session.key): rows.session_columns(put.session) for put in sessions}
                for statement, moves in ((_MOVE_SESSIONS, True), (_BEGIN_SESSIONS, False)):
                    chosen = [values for key, values in newest.items() if (key in before) == moves]
                    if chosen:
                        db.execute(statement.encode(), [[*values] for values in zip(*chosen, strict=True)])
                self._done = done
                db.execute("COMMIT")
        except _NotSimple:
            _roll_back(db)
            raise
        except psycopg.Error as error:
            if db.closed or db.broken:
                raise
            self._blocked = isinstance(error, errors.LockNotAvailable)
            # After an error psycopg does not know which statements of a pipeline PostgreSQL has prepared.
            raise Renew from error
        return done

    def _is_committed(self, db: Database) -> bool:
        """Whether the transaction of this number is, once it is over."""
        # Not a SELECT: that would pass over the row of a first transaction, which nobody sees before its end.
        row = db.execute(_LAST, (self._id,)).fetchone()
        return row is not None and row[0] == self._number


def _simple(groups: Sequence[Sequence[Operation]]) -> tuple[list[PutTurn], list[PutSession]]:
    """A turn and a session that ends with it for each group. Raises _NotSimple."""
    turns, sessions = list[PutTurn](), list[PutSession]()
    for operations in groups:
        match operations:
            case [PutTurn() as turn, PutSession() as put] if put.session.head.turn == turn.turn.id:
                turns.append(turn)
                sessions.append(put)
            case _:
                raise _NotSimple
    if not turns:
        raise _NotSimple
    return turns, sessions


def _apply_apart(db: Database, operations: Sequence[Operation], changes: GroupChanges) -> Outcome:
    """Carry out the operations, or none of them if they are refused."""
    db.execute("SAVEPOINT apart")
    try:
        for operation in operations:
            apply(operation, db, changes)
    except Refused as refused:
        db.execute("ROLLBACK TO apart")
        changes.images.clear()
        outcome: Outcome = refused
        if isinstance(refused, Dangling):  # as a rule because another server has changed the session
            outcome = conflict(db, operations) or refused
        return outcome
    db.execute("RELEASE apart")
    return changes.removed


def _roll_back(db: Database) -> None:
    with suppress(psycopg.Error):
        db.execute("ROLLBACK")

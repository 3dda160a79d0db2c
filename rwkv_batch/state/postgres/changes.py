"""Operations one after the other, each as rwkv_batch/state/sql/tables.py has it for SQLite.

Other servers change the same rows. What keeps them apart are locks on rows until the end of a transaction:

- on sessions that it changes (FOR UPDATE), all of them first and in the order of their keys, so that no two
  transactions wait for each other;
- on turns to which it refers from new rows (FOR KEY SHARE), so that nobody removes them;
- on turns that it may remove (FOR UPDATE). Whether anything refers to one is looked up when it is locked.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from itertools import chain

from rwkv_batch.state.entries import (
    ANY,
    DAMAGED,
    NONE,
    Collect,
    CommittedBefore,
    Conflict,
    Dangling,
    DeleteSessions,
    DropImages,
    Operation,
    PutImage,
    PutModel,
    PutSession,
    PutTurn,
    Removed,
    RemoveDocuments,
    Shrink,
    Stamp,
    StoreDocument,
    moved,
)
from rwkv_batch.state.postgres.database import rows
from rwkv_batch.state.postgres.database.connection import Database
from rwkv_batch.state.sql.tables import OF_THIS_KEY, encoded, id_of_model

CHAIN = 500  # turns that are looked at together when a session goes

_LOCK_SESSIONS = "SELECT key, turn FROM sessions WHERE key = ANY(%b) ORDER BY key FOR UPDATE"
_PUT_SESSION = f"""
    INSERT INTO sessions ({rows.SESSION}) VALUES (%b, %s, %s, %s, %b, %s, %s) ON CONFLICT (key) DO UPDATE SET
    turn = excluded.turn, number = excluded.number, tokens = excluded.tokens, digest = excluded.digest,
    model = excluded.model, updated = excluded.updated"""
_PUT_TURN = (
    f"INSERT INTO turns ({rows.TURN}, writer) VALUES (%s, %s, %s, %s, %b, %b, %s, %s, %b, %b, %s) "
    "ON CONFLICT DO NOTHING"
)
_PUT_MODEL = """
    INSERT INTO models AS m (id, fingerprint, vocabulary) VALUES (%s, %s, %s) ON CONFLICT (id) DO UPDATE
    SET fingerprint = excluded.fingerprint, vocabulary = greatest(m.vocabulary, excluded.vocabulary)
    WHERE m.fingerprint <> excluded.fingerprint OR m.vocabulary < excluded.vocabulary"""
# From a turn back as long as nothing else refers to the turns: `free` of the last one says whether that is.
_UNUSED = f"""
    WITH RECURSIVE past (id, parent, free, place) AS (
        SELECT id, parent, NOT EXISTS (SELECT 1 FROM sessions s WHERE s.turn = turns.id)
            AND NOT EXISTS (SELECT 1 FROM turns c WHERE c.parent = turns.id), 1
        FROM turns WHERE id = %s
        UNION ALL
        SELECT t.id, t.parent, NOT EXISTS (SELECT 1 FROM sessions s WHERE s.turn = t.id)
            AND NOT EXISTS (SELECT 1 FROM turns c WHERE c.parent = t.id AND c.id <> past.id), place + 1
        FROM past JOIN turns t ON t.id = past.parent WHERE past.free AND place < {CHAIN})
    SELECT id, parent FROM past WHERE free ORDER BY place"""

# Ends of what is left of deleted sessions. None that is so old is in use any more.
_LEFT = """
    SELECT id FROM turns t WHERE created < extract(epoch FROM now()) - 86400
    AND NOT EXISTS (SELECT 1 FROM turns c WHERE c.parent = t.id)
    AND NOT EXISTS (SELECT 1 FROM sessions s WHERE s.turn = t.id) LIMIT 1000"""


@dataclass
class GroupChanges:
    """Of one group: what it has removed, and operations on images, which are no matter of the database."""

    image: Callable[[int], bytes]  # the image of a turn, from this server's disk; raises Refused
    writer: int | None = None  # who has the states of its turns; None: nobody gets them from there
    removed: Removed = field(default_factory=Removed)
    images: list[PutImage | DropImages | Shrink] = field(default_factory=list)


def lock_sessions(db: Database, groups: Iterable[Sequence[Operation]]) -> None:
    """All that are going to be changed, and note models, which others may be noting too: in one order."""
    keys, models = set[str](), dict[int, PutModel]()
    for operation in chain.from_iterable(groups):
        if isinstance(operation, PutSession):
            keys.add(operation.session.key)
        elif isinstance(operation, DeleteSessions):
            keys.update(operation.keys)
        elif isinstance(operation, PutModel):
            models[id_of_model(operation.fingerprint)] = operation
    if keys:
        db.execute(_LOCK_SESSIONS, ([encoded(key) for key in keys],))
    for id_, model in sorted(models.items()):
        put_model(db, id_, model.fingerprint, model.vocabulary)


def conflict(db: Database, operations: Sequence[Operation]) -> Conflict | None:
    """Whether one of the sessions that these change has been changed before, as it is now."""
    for operation in operations:
        if isinstance(operation, PutSession) and operation.follows != ANY:
            key = operation.session.key
            if (_turn_of(db, key) or NONE) != operation.follows:
                return moved(key)
    return None


def collect(db: Database, turn: int, pinned: frozenset[int], removed: Removed) -> None:
    """Remove a turn if nothing uses it, and then those before it that nothing uses any longer."""
    while turn != NONE:
        found = _unused(db, turn, pinned)
        if found:  # of these others may have made use before they are locked
            db.execute("SELECT 1 FROM turns WHERE id = ANY(%s) ORDER BY id FOR UPDATE", ([*found],))
            found = _unused(db, turn, pinned)
        if found:
            ids = [*found]
            db.execute("DELETE FROM turns WHERE id = ANY(%s)", (ids,))
            db.execute("DELETE FROM states WHERE turn = ANY(%s)", (ids,))
            db.execute("UPDATE objects SET gone = true WHERE turn = ANY(%s)", (ids,))
            removed.turns += ids
            turn = found[ids[-1]]
        if turn in pinned and _is_unused(db, turn):
            removed.pinned.append(turn)
            return
        if len(found) < CHAIN:
            return


def collect_left(db: Database) -> None:
    """Remove turns of deleted sessions that were in use then, if who would have done it was killed."""
    with db.transaction():
        for (turn,) in db.execute(_LEFT).fetchall():
            collect(db, int(turn), frozenset(), Removed())


def _unused(db: Database, turn: int, pinned: frozenset[int]) -> dict[int, int]:
    """The turns from this one back that can go, the newest first, with their parents."""
    found: dict[int, int] = {}
    for id_, parent in db.execute(_UNUSED.encode(), (turn,)):
        if id_ in pinned:
            break
        found[id_] = parent
    return found


def _is_unused(db: Database, turn: int) -> bool:
    row = db.execute(_UNUSED.encode(), (turn,)).fetchone()
    return row is not None


@singledispatch
def apply(operation: Operation, db: Database, changes: GroupChanges) -> None:
    """Carry out the operation, and note what it removes. Raises psycopg.Error, StoreError."""
    raise TypeError(f"not an operation: {operation}")


@apply.register
def _put_turn(operation: PutTurn, db: Database, changes: GroupChanges) -> None:
    turn = operation.turn
    if turn.parent != NONE and not _hold(db, turn.parent):
        raise Dangling("The turn that this one continues could not be stored.")
    if db.execute(_PUT_TURN.encode(), (*rows.turn_columns(turn), changes.writer)).rowcount:
        return
    found = db.execute("SELECT digest FROM turns WHERE id = %s", (turn.id,)).fetchone()
    if found and bytes(found[0]) == turn.digest:
        raise CommittedBefore("This turn is stored already.")
    if turn.request and not found:
        raise Conflict(OF_THIS_KEY)
    raise Conflict("Another turn has the number of this one; send the request again.")


@apply.register
def _put_session(operation: PutSession, db: Database, changes: GroupChanges) -> None:
    key, head = operation.session.key, operation.session.head
    if not _hold(db, head.turn):
        raise Dangling("The turn that the session ends with could not be stored.")
    before = _turn_of(db, key)
    if operation.follows != ANY and (before or NONE) != operation.follows:
        raise moved(key)
    columns = rows.session_columns(operation.session)
    if before is None:
        # Another server may be making the session, too: then this waits for it.
        made = db.execute(_PUT_SESSION.encode() + b" WHERE false", columns).rowcount
        if made:
            return
        before = _turn_of(db, key)
        if operation.follows != ANY:
            raise moved(key)
    db.execute(_PUT_SESSION.encode(), columns)
    if before is not None and before != head.turn:
        collect(db, before, operation.pinned, changes.removed)


@apply.register
def _delete_sessions(operation: DeleteSessions, db: Database, changes: GroupChanges) -> None:
    for place, key in enumerate(operation.keys):
        follows = operation.follows[place] if operation.follows else ANY
        turn = _turn_of(db, key)
        if turn is None or follows == DAMAGED:  # no row is damaged here
            continue
        if follows not in (ANY, turn):
            raise moved(key)
        db.execute("DELETE FROM sessions WHERE key = %b", (encoded(key),))
        collect(db, turn, operation.pinned, changes.removed)


@apply.register
def _collect_turns(operation: Collect, db: Database, changes: GroupChanges) -> None:
    for turn in operation.turns:
        collect(db, turn, operation.pinned, changes.removed)


@apply.register
def _put_image(operation: PutImage, db: Database, changes: GroupChanges) -> None:
    found = db.execute("SELECT number FROM turns WHERE id = %s", (operation.turn,)).fetchone()
    if found is None:
        changes.removed.images.append(operation.turn)
        return
    changes.images.append(operation)
    if found[0] == 0:
        data = changes.image(operation.turn)
        db.execute(
            "INSERT INTO states (turn, model, data) VALUES (%s, %s, %b) ON CONFLICT (turn) DO UPDATE "
            "SET model = excluded.model, data = excluded.data",
            (operation.turn, operation.model, data),
        )


@apply.register(DropImages)
@apply.register(Shrink)
def _change_images(operation: DropImages | Shrink, db: Database, changes: GroupChanges) -> None:
    changes.images.append(operation)


@apply.register
def _put_document(operation: StoreDocument, db: Database, changes: GroupChanges) -> None:
    db.execute(
        "INSERT INTO documents (key, updated, data) VALUES (%b, %s, %b) ON CONFLICT (key) DO UPDATE "
        "SET updated = excluded.updated, data = excluded.data",
        rows.document_columns(operation),
    )


@apply.register
def _delete_documents(operation: RemoveDocuments, db: Database, changes: GroupChanges) -> None:
    if not operation.damaged:  # none is here
        wanted = [encoded(key) for key in operation.keys]
        removed = db.execute("DELETE FROM documents WHERE key = ANY(%b)", (wanted,))
        changes.removed.documents += removed.rowcount


def put_model(db: Database, id_: int, fingerprint: str, vocabulary: int) -> None:
    """Note a model. Raises psycopg.Error."""
    db.execute(_PUT_MODEL, (id_, fingerprint, vocabulary))


@apply.register
def _nothing_more(operation: PutModel | Stamp, db: Database, changes: GroupChanges) -> None:
    """Models have been noted (lock_sessions), and engines write to this database themselves."""


def _turn_of(db: Database, key: str) -> int | None:
    """The turn that a session ends with; None: there is no such session."""
    query = "SELECT turn FROM sessions WHERE key = %b FOR UPDATE"
    row = db.execute(query, (encoded(key),)).fetchone()
    return int(row[0]) if row else None


def _hold(db: Database, turn: int) -> bool:
    """Whether there is this turn, which nobody removes then."""
    query = "SELECT 1 FROM turns WHERE id = %s FOR KEY SHARE"
    return db.execute(query, (turn,)).fetchone() is not None

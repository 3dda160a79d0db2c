"""Reading the tables."""

from collections.abc import Sequence
from typing import Any

from rwkv_batch.state.entries import REQUEST_ID, Head, RowDamaged, Session, StoreDocument, Turn, pack, unpack
from rwkv_batch.state.log.protocol import Wanted
from rwkv_batch.state.postgres.database.connection import Database
from rwkv_batch.state.sql.tables import behind, decoded, encoded

SESSION = "key, turn, number, tokens, digest, model, updated"
TURN = "id, parent, number, start, prompt, completion, created, model, digest, request"
LISTED = r"(key < '\x00' OR key >= '\x01')"  # a key that does not begin with HIDDEN
COUNTED = 50_000  # rows that are counted one by one; of more PostgreSQL's estimate is taken
ALL = 1 << 62  # sessions of a list
AHEAD = 64  # turns of a session that are read together

# A turn and those before it, the newest first, each with the model of its state where that is stored.
_PAST = f"""
    WITH RECURSIVE past AS (
        SELECT {TURN}, 1 AS place FROM turns WHERE id = %s
        UNION ALL
        SELECT {", ".join("t." + name for name in TURN.split(", "))}, place + 1
        FROM past JOIN turns t ON t.id = past.parent WHERE place < {AHEAD})
    SELECT {TURN}, (SELECT model FROM states WHERE states.turn = past.id) FROM past ORDER BY place"""
_TURN_IDS = """
    WITH RECURSIVE past (id, parent, number) AS (
        SELECT id, parent, number FROM turns WHERE id = %s
        UNION ALL
        SELECT t.id, t.parent, t.number FROM turns AS t JOIN past ON t.id = past.parent
        WHERE past.number > %s)
    SELECT id FROM past WHERE number BETWEEN %s AND %s ORDER BY number"""


def find_sessions(db: Database, keys: Sequence[str]) -> dict[str, Session]:
    """Those of these keys that there are."""
    wanted = [encoded(key) for key in keys]
    rows = db.execute(f"SELECT {SESSION} FROM sessions WHERE key = ANY(%b)", (wanted,))
    return {session.key: session for session in map(as_session, rows)}


def read_wanted(
    db: Database, wanted: Wanted
) -> tuple[
    dict[str, Session],
    dict[str, list[Session]],
    dict[str, bytes | None],
    dict[bytes, tuple[str, Turn] | None],
]:
    """Sessions by key and by prefix, documents, and turns by their requests."""
    sessions = find_sessions(db, wanted.keys) if wanted.keys else {}
    lists = {prefix: list_sessions(db, None, ALL, prefix) for prefix in wanted.prefixes}
    documents = {key: read_document(db, key) for key in wanted.documents}
    requests = {request[:REQUEST_ID]: find_request(db, request) for request in wanted.requests}
    return sessions, lists, documents, requests


def list_sessions(db: Database, after: str | None, limit: int, prefix: str) -> list[Session]:
    """Up to `limit` sessions behind a key, in the order of their keys as bytes."""
    conditions, values = ["key >= %b"], [encoded(prefix)]
    if prefix:
        conditions.append("key < %b")
        values.append(behind(prefix))
    else:
        conditions.append(LISTED)
    if after is not None:
        conditions.append("key > %b")
        values.append(encoded(after))
    query = f"SELECT {SESSION} FROM sessions WHERE {' AND '.join(conditions)} ORDER BY key LIMIT %s"
    return [as_session(row) for row in db.execute(query.encode(), (*values, limit))]


def count_sessions(db: Database) -> int:
    """How many there are that are listed; about, where these are many."""
    estimate = one(db, "SELECT reltuples::bigint FROM pg_class WHERE oid = 'sessions'::regclass")
    if estimate > COUNTED:
        return estimate
    return one(db, f"SELECT count(*) FROM sessions WHERE {LISTED}")


def count_ends(db: Database, turns: Sequence[int]) -> int:
    """How many sessions end with these turns."""
    return one(db, "SELECT count(*) FROM sessions WHERE turn = ANY(%s::bigint[])", [*turns]) if turns else 0


def read_turn(db: Database, turn: int) -> Turn:
    """Raises RowDamaged, also if there is no such turn."""
    row = db.execute(f"SELECT {TURN} FROM turns WHERE id = %s", (turn,)).fetchone()
    if row is None:
        raise RowDamaged("A part of the session is missing from the database.")
    return as_turn(row)


def find_request(db: Database, request: bytes) -> tuple[str, Turn] | None:
    """The turn of this request, and the key of a session that ends with it, or ""."""
    query = f"SELECT {TURN} FROM turns WHERE substr(request, 1, {REQUEST_ID}) = %b AND request IS NOT NULL"
    row = db.execute(query.encode(), (request[:REQUEST_ID],)).fetchone()
    if row is None:
        return None
    turn = as_turn(row)
    query = "SELECT key FROM sessions WHERE turn = %s ORDER BY key LIMIT 1"
    named = db.execute(query.encode(), (turn.id,)).fetchone()
    return decoded(bytes(named[0])) if named else "", turn


def read_past(db: Database, turn: int) -> list[tuple[Turn, int | None]]:
    """The turn and some before it, the newest first, each with the model of its state if that is stored."""
    return [(as_turn(row[:-1]), row[-1]) for row in db.execute(_PAST.encode(), (turn,))]


def turn_ids(db: Database, turn: int, numbers: range) -> list[int]:
    """Of the turns up to this one that have these numbers, the oldest first."""
    values = turn, numbers.start, numbers.start, numbers.stop - 1
    return [int(id_) for (id_,) in db.execute(_TURN_IDS, values)]


def has_turns(db: Database, first: int, after: int) -> bool:
    """Whether there are turns with ids from the first number on and before the second."""
    query = "SELECT 1 FROM turns WHERE id >= %s AND id < %s LIMIT 1"
    return db.execute(query, (first, after)).fetchone() is not None


def read_document(db: Database, key: str) -> bytes | None:
    """None if there is no such document."""
    row = db.execute("SELECT data FROM documents WHERE key = %b", (encoded(key),)).fetchone()
    return bytes(row[0]) if row else None


def document_keys(db: Database, prefix: str) -> list[str]:
    """Those that begin with `prefix`, which is not empty, in their order."""
    query = "SELECT key FROM documents WHERE key >= %b AND key < %b ORDER BY key"
    return [decoded(bytes(key)) for (key,) in db.execute(query, (encoded(prefix), behind(prefix)))]


def one(db: Database, query: str, *values: Any) -> int:
    """The number that a query gives."""
    row = db.execute(query.encode(), values).fetchone()
    assert row
    return int(row[0])


def as_session(row: Sequence[Any]) -> Session:
    """Of the columns of SESSION."""
    key, turn, number, tokens, digest, model, updated = row
    return Session(decoded(bytes(key)), Head(turn, number, tokens, bytes(digest), model), updated)


def session_columns(session: Session) -> tuple[Any, ...]:
    head = session.head
    return encoded(session.key), head.turn, head.number, head.tokens, head.digest, head.model, session.updated


def as_turn(row: Sequence[Any]) -> Turn:
    """Of the columns of TURN. Raises RowDamaged."""
    id_, parent, number, start, prompt, completion, created, model, digest, request = row
    try:
        asked, said = unpack(bytes(prompt)), unpack(bytes(completion))
    except ValueError as error:
        raise RowDamaged("A part of the session is stored damaged.") from error
    return Turn(id_, parent, number, start, asked, said, created, model, bytes(digest), bytes(request or b""))


def turn_columns(turn: Turn) -> tuple[Any, ...]:
    return (
        *(turn.id, turn.parent, turn.number, turn.start, pack(turn.prompt), pack(turn.completion)),
        *(turn.created, turn.model, turn.digest, turn.request or None),
    )


def document_columns(document: StoreDocument) -> tuple[Any, ...]:
    return encoded(document.key), document.updated, document.data

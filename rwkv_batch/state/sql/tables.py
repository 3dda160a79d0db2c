"""The tables of the database: their SQL, and how each operation changes them.

Every row carries a checksum over its columns. A row that fails it is RowDamaged for whoever reads it, and is
left out of lists.
"""

import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from functools import singledispatch

from rwkv_batch.state.entries import (
    ANY,
    DAMAGED,
    NONE,
    REQUEST_ID,
    Collect,
    CommittedBefore,
    Conflict,
    Dangling,
    DeleteSessions,
    DropImages,
    Head,
    Operation,
    PutImage,
    PutModel,
    PutSession,
    PutTurn,
    Removed,
    RemoveDocuments,
    RowDamaged,
    Session,
    Shrink,
    Stamp,
    StoreDocument,
    StoreError,
    Turn,
    moved,
    pack,
    unpack,
)
from rwkv_batch.state.sql import clients

SCHEMA = 3
OF_THIS_KEY = (
    "The turn of this Idempotency-Key has been stored meanwhile; send the request again to get its reply."
)
SHRUNK = 0.95  # of its limit: what a database keeps when something has to go

TABLES = """
    CREATE TABLE models (
        id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, vocabulary INTEGER NOT NULL);
    CREATE TABLE turns (
        id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL,
        prompt BLOB NOT NULL, completion BLOB NOT NULL, created REAL NOT NULL, model INTEGER NOT NULL,
        digest BLOB NOT NULL, checksum INTEGER NOT NULL, request BLOB);
    CREATE INDEX turns_by_parent ON turns (parent);
    CREATE TABLE sessions (
        key BLOB PRIMARY KEY, turn INTEGER NOT NULL, number INTEGER NOT NULL, tokens INTEGER NOT NULL,
        digest BLOB NOT NULL, model INTEGER NOT NULL, imaged INTEGER NOT NULL, updated REAL NOT NULL,
        checksum INTEGER NOT NULL) WITHOUT ROWID;
    CREATE INDEX sessions_by_turn ON sessions (turn);
    CREATE INDEX sessions_by_age ON sessions (updated);
    CREATE TABLE images (
        turn INTEGER PRIMARY KEY, model INTEGER NOT NULL, saves INTEGER NOT NULL, size INTEGER NOT NULL,
        used REAL NOT NULL);
    CREATE TABLE documents (
        id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, updated REAL NOT NULL, checksum INTEGER NOT NULL,
        data BLOB NOT NULL);
    CREATE INDEX documents_by_age ON documents (updated);"""
# Turn.request is NULL where it is empty: most turns are in no index of it.
BY_REQUEST = f"""
    CREATE UNIQUE INDEX turns_by_request ON turns (substr(request, 1, {REQUEST_ID}))
        WHERE request IS NOT NULL;"""
# What makes a database of each schema one of the next.
MIGRATIONS = {2: f"ALTER TABLE turns ADD COLUMN request BLOB; {BY_REQUEST}"}

SESSION = "key, turn, number, tokens, digest, model, imaged, updated, checksum"
TURN = "id, parent, number, start, prompt, completion, created, model, digest, request, checksum"
IMAGE_SIZE = "coalesce(CAST(size AS INTEGER), 0)"  # a number, also of a damaged row
LISTED = "(key < x'00' OR key >= x'01')"  # a key that does not begin with HIDDEN
DOCUMENT = "key, updated, data, checksum"
_REFERENCED = "SELECT 1 FROM sessions WHERE turn = ? UNION ALL SELECT 1 FROM turns WHERE parent = ? LIMIT 1"
_UNUSED = """
    SELECT id FROM turns AS t WHERE NOT EXISTS (SELECT 1 FROM turns WHERE parent = t.id)
    AND NOT EXISTS (SELECT 1 FROM sessions WHERE turn = t.id)"""
_OLDEST = f"""
    SELECT * FROM (SELECT key, 1, updated FROM sessions WHERE {LISTED} AND turn NOT IN ({{pinned}})
    ORDER BY updated LIMIT 1)
    UNION ALL SELECT * FROM (SELECT key, 0, updated FROM documents WHERE {LISTED} ORDER BY updated LIMIT 1)
    ORDER BY updated LIMIT 1"""


def prepare(connection: sqlite3.Connection, path: object) -> None:
    """Check the schema, make it of an older one, or in an empty file. Raises StoreError for any other."""
    schema = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    if schema != SCHEMA and schema not in MIGRATIONS and (schema or tables):
        raise StoreError(
            f"The database {path} has schema {schema}, but this server uses {SCHEMA}; "
            "name another file, or move this one away."
        )
    if tables and not {("sessions",), ("turns",), ("images",), ("documents",), ("models",)} <= set(tables):
        raise StoreError(f"The database {path} has schema {schema} of another program; name another file.")
    if not tables:
        connection.executescript(
            f"BEGIN IMMEDIATE; {TABLES} {BY_REQUEST} PRAGMA user_version = {SCHEMA}; COMMIT;"
        )
        return
    while schema in MIGRATIONS:
        connection.executescript(
            f"BEGIN IMMEDIATE; {MIGRATIONS[schema]} PRAGMA user_version = {schema + 1}; COMMIT;"
        )
        schema += 1


def id_of_model(fingerprint: str) -> int:
    """It follows from the fingerprint, so that nothing depends on the row but what people read."""
    return zlib.crc32(fingerprint.encode()) | zlib.adler32(fingerprint.encode()) << 31


def model_id(connection: sqlite3.Connection, fingerprint: str, vocabulary: int) -> int:
    """The id of a model, which is noted if need be. `vocabulary` 0: not known."""
    id_ = id_of_model(fingerprint)
    connection.execute(
        "INSERT INTO models (id, fingerprint, vocabulary) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE "
        "SET fingerprint = excluded.fingerprint, vocabulary = max(vocabulary, excluded.vocabulary) "
        "WHERE fingerprint <> excluded.fingerprint OR vocabulary < excluded.vocabulary",
        (id_, fingerprint, vocabulary),
    )
    return id_


def find_session(connection: sqlite3.Connection, key: str) -> Session | None:
    """Raises RowDamaged."""
    row = connection.execute(f"SELECT {SESSION} FROM sessions WHERE key = ?", (encoded(key),)).fetchone()
    return as_session(row) if row else None


def list_sessions(
    connection: sqlite3.Connection, after: str | None, limit: int, prefix: str = ""
) -> list[Session]:
    """Up to `limit` sessions behind a key, in the order of their keys as bytes. Damaged rows are left out."""
    query, bounds = f"SELECT {SESSION} FROM sessions WHERE key >= ?", [encoded(prefix)]
    if not prefix:
        query += f" AND {LISTED}"
    else:
        query += " AND key < ?"
        bounds.append(behind(prefix))
    if after is not None:
        query += " AND key > ?"
        bounds.append(encoded(after))
    found = []
    for row in connection.execute(f"{query} ORDER BY key LIMIT ?", (*bounds, limit)):
        try:
            found.append(as_session(row))
        except RowDamaged:
            continue
    return found


def count_sessions(connection: sqlite3.Connection, turns: Sequence[int] | None = None) -> int:
    """How many sessions there are, or how many of them end with one of these turns."""
    if turns is None:
        return int(connection.execute(f"SELECT count(*) FROM sessions WHERE {LISTED}").fetchone()[0])
    ends = "SELECT value FROM json_each(?)"
    counted = connection.execute(f"SELECT count(*) FROM sessions WHERE turn IN ({ends})", (str([*turns]),))
    return int(counted.fetchone()[0])


def read_turn(connection: sqlite3.Connection, turn: int) -> Turn:
    """Raises RowDamaged, also if there is no such turn."""
    row = connection.execute(f"SELECT {TURN} FROM turns WHERE id = ?", (turn,)).fetchone()
    if row is None:
        raise RowDamaged("A part of the session is missing from the database.")
    return as_turn(row)


def turn_ids(connection: sqlite3.Connection, turn: int, first: int, last: int) -> list[int]:
    """Of the turns up to this one whose numbers are from `first` to `last`, the oldest first."""
    rows = connection.execute(
        "WITH RECURSIVE past (id, parent, number) AS (SELECT id, parent, number FROM turns WHERE id = ? "
        "UNION ALL SELECT t.id, t.parent, t.number FROM turns AS t JOIN past ON t.id = past.parent "
        "WHERE past.number > ?) SELECT id FROM past WHERE number BETWEEN ? AND ? ORDER BY number",
        (turn, first, first, last),
    )
    return [int(row[0]) for row in rows]


def find_request(connection: sqlite3.Connection, request: bytes) -> tuple[str, Turn] | None:
    """The turn of this request, and the key of a session that ends with it, or "". Raises RowDamaged."""
    query = f"SELECT {TURN} FROM turns WHERE substr(request, 1, {REQUEST_ID}) = ? AND request IS NOT NULL"
    row = connection.execute(query, (request[:REQUEST_ID],)).fetchone()
    if row is None:
        return None
    turn = as_turn(row)
    key = connection.execute("SELECT min(key) FROM sessions WHERE turn = ?", (turn.id,)).fetchone()[0]
    return decoded(key) if key is not None else "", turn


def as_turn(row: Sequence[object]) -> Turn:
    """Raises RowDamaged."""
    *columns, request, checksum = row
    if _checksum(columns if request is None else [*columns, request]) != checksum:
        raise RowDamaged("A part of the session is stored damaged.")
    id_, parent, number, start, prompt, completion, created, model, digest = columns
    asked, said = unpack(prompt), unpack(completion)  # type: ignore[arg-type]
    return Turn(id_, parent, number, start, asked, said, created, model, digest, request or b"")  # type: ignore[arg-type]


def image_model(connection: sqlite3.Connection, turn: int) -> int | None:
    """The model whose state the turn's image holds; None: there is no image."""
    found = connection.execute("SELECT model FROM images WHERE turn = ?", (turn,)).fetchone()
    return found[0] if found and isinstance(found[0], int) else None


def image_turns(connection: sqlite3.Connection) -> Iterator[int]:
    """Ids of all turns that have images."""
    return (turn for (turn,) in connection.execute("SELECT turn FROM images"))


def unused_turns(connection: sqlite3.Connection) -> list[int]:
    """Ids of turns that no session ends with and no turn continues. 0.3 s for a million turns."""
    return [turn for (turn,) in connection.execute(_UNUSED)]


def read_document(connection: sqlite3.Connection, key: str) -> bytes | None:
    """Raises RowDamaged."""
    query = f"SELECT {DOCUMENT} FROM documents WHERE key = ?"
    row = connection.execute(query, (encoded(key),)).fetchone()
    return as_document(row).data if row else None


def document_keys(connection: sqlite3.Connection, prefix: str) -> list[str]:
    """Those that begin with `prefix`, which is not empty, in their order."""
    query = "SELECT key FROM documents WHERE key >= ? AND key < ? ORDER BY key"
    return [decoded(key) for (key,) in connection.execute(query, (encoded(prefix), behind(prefix)))]


def behind(prefix: str) -> bytes:
    """The first key that is behind all that begin with `prefix`."""
    return encoded(prefix)[:-1] + bytes([encoded(prefix)[-1] + 1])


def as_document(row: Sequence[object]) -> StoreDocument:
    """Raises RowDamaged."""
    *columns, checksum = row
    if _checksum(columns) != checksum:
        raise RowDamaged("A document is stored damaged: its checksum is wrong.")
    key, updated, data = columns
    return StoreDocument(decoded(key), updated, data)  # type: ignore[arg-type]


def insert_turn(connection: sqlite3.Connection, turn: Turn) -> None:
    """Add a turn, whether or not its parent is there."""
    columns = (
        turn.id,
        turn.parent,
        turn.number,
        turn.start,
        pack(turn.prompt),
        pack(turn.completion),
        turn.created,
        turn.model,
        turn.digest,
    )
    places = ", ".join("?" * (len(columns) + 2))
    checksum = _checksum([*columns, turn.request] if turn.request else columns)
    values = *columns, turn.request or None, checksum
    connection.execute(f"INSERT INTO turns ({TURN}) VALUES ({places})", values)


@singledispatch
def apply(operation: Operation, connection: sqlite3.Connection, removed: Removed) -> None:
    """Carry out the operation, and note what it removes. Raises sqlite3.Error, StoreError."""
    raise TypeError(f"not an operation: {operation}")


@apply.register
def _put_turn(operation: PutTurn, connection: sqlite3.Connection, removed: Removed) -> None:
    turn = operation.turn
    if turn.parent != NONE and not _exists(connection, turn.parent):
        raise Dangling("The turn that this one continues could not be stored.")
    try:
        insert_turn(connection, turn)
    except sqlite3.IntegrityError:
        found = connection.execute("SELECT digest FROM turns WHERE id = ?", (turn.id,)).fetchone()
        if found and found[0] == turn.digest:
            raise CommittedBefore("This turn is stored already.") from None
        if turn.request and not found:
            raise Conflict(OF_THIS_KEY) from None
        raise


@apply.register
def _put_session(operation: PutSession, connection: sqlite3.Connection, removed: Removed) -> None:
    session, key = operation.session, encoded(operation.session.key)
    head = session.head
    if not _exists(connection, head.turn):
        raise Dangling("The turn that the session ends with could not be stored.")
    before = connection.execute("SELECT turn FROM sessions WHERE key = ?", (key,)).fetchone()
    if operation.follows != ANY and (before[0] if before else NONE) != operation.follows:
        raise moved(session.key)
    checked = key, head.turn, head.number, head.tokens, head.digest, head.model, session.updated
    columns = *checked[:6], head.imaged, session.updated, _checksum(checked)
    connection.execute(
        f"INSERT OR REPLACE INTO sessions ({SESSION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", columns
    )
    if before:
        _collect(connection, before[0], operation.pinned, removed)


@apply.register
def _delete_sessions(operation: DeleteSessions, connection: sqlite3.Connection, removed: Removed) -> None:
    for place, key in enumerate(operation.keys):
        follows = operation.follows[place] if operation.follows else ANY
        if follows == DAMAGED and not _is_damaged(connection, key):
            continue
        if follows not in (ANY, DAMAGED):
            found = connection.execute("SELECT turn FROM sessions WHERE key = ?", (encoded(key),)).fetchone()
            if found and found[0] != follows:
                raise moved(key)
        _delete_session(connection, encoded(key), operation.pinned, removed)


def _is_damaged(connection: sqlite3.Connection, key: str) -> bool:
    try:
        find_session(connection, key)
    except RowDamaged:
        return True
    return False


def conflict(connection: sqlite3.Connection, operations: Sequence[Operation]) -> Conflict | None:
    """Whether one of the sessions that these change has been changed before, as it is now."""
    for operation in operations:
        if isinstance(operation, PutSession) and operation.follows != ANY:
            key = operation.session.key
            found = connection.execute("SELECT turn FROM sessions WHERE key = ?", (encoded(key),)).fetchone()
            if (found[0] if found else NONE) != operation.follows:
                return moved(key)
    return None


def _delete_session(
    connection: sqlite3.Connection, key: object, pinned: frozenset[int], removed: Removed
) -> None:
    """`key`: as it is stored, damaged or not."""
    for (turn,) in connection.execute("DELETE FROM sessions WHERE key = ? RETURNING turn", (key,)).fetchall():
        _collect(connection, turn, pinned, removed)


@apply.register
def _collect_turns(operation: Collect, connection: sqlite3.Connection, removed: Removed) -> None:
    for turn in operation.turns:
        _collect(connection, turn, operation.pinned, removed)


@apply.register
def _put_image(operation: PutImage, connection: sqlite3.Connection, removed: Removed) -> None:
    if not _exists(connection, operation.turn):
        removed.images.append(operation.turn)
        return
    connection.execute(
        "INSERT OR REPLACE INTO images (turn, model, saves, size, used) VALUES (?, ?, ?, ?, ?)",
        (operation.turn, operation.model, operation.saves, operation.size, operation.used),
    )
    connection.execute("UPDATE sessions SET imaged = ? WHERE turn = ?", (operation.tokens, operation.turn))


@apply.register
def _drop_images(operation: DropImages, connection: sqlite3.Connection, removed: Removed) -> None:
    connection.executemany("DELETE FROM images WHERE turn = ?", [(turn,) for turn in operation.turns])
    removed.images += operation.turns


@apply.register
def _shrink(operation: Shrink, connection: sqlite3.Connection, removed: Removed) -> None:
    """What an image is worth: the tokens that it saves, over the time for which nobody has needed it."""
    if size(connection) <= operation.limit:
        return
    target = int(operation.limit * SHRUNK)
    excess = size(connection) - target
    newest = connection.execute("SELECT max(CAST(used AS REAL)) FROM images").fetchone()[0]
    rows = connection.execute(
        f"SELECT images.turn, {IMAGE_SIZE} FROM images JOIN turns ON turns.id = images.turn "
        "WHERE turns.number > 0 ORDER BY saves / (? - CAST(used AS REAL) + 60.0)",
        (newest,),
    )
    victims = []
    for turn, size_ in rows:
        if excess <= 0:
            break
        victims.append(turn)
        excess -= size_
    if victims:
        _drop_images(DropImages(victims), connection, removed)
    pinned = ", ".join(map(str, sorted(operation.pinned))) or "-1"
    while size(connection) > target:
        oldest = connection.execute(_OLDEST.format(pinned=pinned)).fetchone()
        if oldest is None:
            return
        key, is_session, _ = oldest
        if is_session:
            _delete_session(connection, key, operation.pinned, removed)
            removed.sessions.append(key.decode(errors="replace") if isinstance(key, bytes) else str(key))
        else:
            _delete_document(connection, key, removed)


@apply.register
def _put_document(operation: StoreDocument, connection: sqlite3.Connection, removed: Removed) -> None:
    columns = encoded(operation.key), operation.updated, operation.data
    connection.execute(
        f"INSERT OR REPLACE INTO documents ({DOCUMENT}) VALUES (?, ?, ?, ?)",
        (*columns, _checksum(columns)),
    )


@apply.register
def _delete_documents(operation: RemoveDocuments, connection: sqlite3.Connection, removed: Removed) -> None:
    for key in operation.keys:
        if operation.damaged:
            try:
                read_document(connection, key)
                continue
            except RowDamaged:
                pass
        _delete_document(connection, encoded(key), removed)


@apply.register
def _put_model(operation: PutModel, connection: sqlite3.Connection, removed: Removed) -> None:
    model_id(connection, operation.fingerprint, operation.vocabulary)


@apply.register
def _stamp(operation: Stamp, connection: sqlite3.Connection, removed: Removed) -> None:
    clients.stamp(operation, connection)


def _delete_document(connection: sqlite3.Connection, key: object, removed: Removed) -> None:
    """`key`: as it is stored, damaged or not."""
    removed.documents += connection.execute("DELETE FROM documents WHERE key = ?", (key,)).rowcount


def size(connection: sqlite3.Connection) -> int:
    """Bytes of all images, and of the pages of the database that hold something."""
    pages, free, page = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    images = connection.execute(f"SELECT coalesce(sum({IMAGE_SIZE}), 0) FROM images").fetchone()[0]
    return (pages - free) * page + int(images)


def encoded(key: str) -> bytes:
    """A session's key as the database has and orders it."""
    return key.encode("utf-8", "surrogatepass")


def decoded(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")


def as_session(row: Sequence[object]) -> Session:
    """Raises RowDamaged."""
    key, turn, number, tokens, digest, model, imaged, updated, checksum = row
    if _checksum((key, turn, number, tokens, digest, model, updated)) != checksum:
        raise RowDamaged("The session is stored damaged: its checksum is wrong.")
    imaged = imaged if isinstance(imaged, int) else 0  # it changes with images, and may be wrong
    return Session(decoded(key), Head(turn, number, tokens, digest, model, imaged), updated)  # type: ignore[arg-type]


def _exists(connection: sqlite3.Connection, turn: int) -> bool:
    return connection.execute("SELECT 1 FROM turns WHERE id = ?", (turn,)).fetchone() is not None


def _collect(connection: sqlite3.Connection, turn: int, pinned: frozenset[int], removed: Removed) -> None:
    """Remove a turn if nothing uses it, and then those before it that nothing uses any longer."""
    while turn != NONE and connection.execute(_REFERENCED, (turn, turn)).fetchone() is None:
        if turn in pinned:
            removed.pinned.append(turn)
            return
        found = connection.execute("DELETE FROM turns WHERE id = ? RETURNING parent", (turn,)).fetchall()
        if not found:
            return
        removed.turns.append(turn)
        if connection.execute("DELETE FROM images WHERE turn = ?", (turn,)).rowcount:
            removed.images.append(turn)
        ((turn,),) = found


def _checksum(columns: Sequence[object]) -> int:
    checksum = 0
    for value in columns:
        data = value if isinstance(value, bytes | memoryview) else repr(value).encode()
        checksum = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), checksum))
    return checksum

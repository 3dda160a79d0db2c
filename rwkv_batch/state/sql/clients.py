"""Which commits of clients are in the database, where one process writes it for several.

A client that has had no reply, as that process has ended, sends its commit again. It is carried out once, and
the reply says what it removed then: files of images, and documents that somebody asked to delete.
"""

import sqlite3
import struct
from collections.abc import Sequence

import msgspec

from rwkv_batch.state.entries import CommittedBefore, Operation, Removed, Stamp

# `missing`: of the numbers up to `last`, those that have not been carried out, each 8 bytes. `removed`: by a
# commit of which the client may not know yet; those that removed nothing have no row. Databases without these
# tables are of the same schema.
TABLES = """
    CREATE TABLE IF NOT EXISTS clients (
        id INTEGER PRIMARY KEY, last INTEGER NOT NULL, missing BLOB NOT NULL);
    CREATE TABLE IF NOT EXISTS outcomes (
        client INTEGER NOT NULL, number INTEGER NOT NULL, removed BLOB NOT NULL,
        PRIMARY KEY (client, number)) WITHOUT ROWID;"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Removed).decode


def prepare(connection: sqlite3.Connection) -> None:
    """Make the tables if need be."""
    connection.executescript(TABLES)


def forget(connection: sqlite3.Connection) -> None:
    """What was committed for clients is not asked again."""
    connection.execute("DELETE FROM clients")
    connection.execute("DELETE FROM outcomes")


def stamp(operation: Stamp, connection: sqlite3.Connection) -> None:
    """Note a commit before its other operations. Raises CommittedBefore, with what it removed then."""
    client, number, known = operation.client, operation.number, operation.known
    row = connection.execute("SELECT last, missing FROM clients WHERE id = ?", (client,)).fetchone()
    last, missing = row or (0, b"")
    if number <= last or number > last + 1 or missing:
        numbers = {value for (value,) in struct.iter_unpack("<q", missing)} | {
            *range(max(last, known) + 1, number)
        }
        if number <= last and number not in numbers:
            raise CommittedBefore("This change is stored already.", _removed(connection, client, number))
        left = sorted(value for value in numbers - {number} if value > known)
        missing = struct.pack(f"<{len(left)}q", *left)
    connection.execute(
        "INSERT OR REPLACE INTO clients (id, last, missing) VALUES (?, ?, ?)",
        (client, max(last, number), missing),
    )
    connection.execute("DELETE FROM outcomes WHERE client = ? AND number <= ?", (client, known))


def keep(operations: Sequence[Operation], removed: Removed, connection: sqlite3.Connection) -> None:
    """Keep what a commit has removed, if it has a number, for a client that will ask again."""
    if operations and isinstance(operations[0], Stamp) and removed != Removed():
        commit = operations[0]
        values = commit.client, commit.number, _encode(removed)
        connection.execute("INSERT INTO outcomes (client, number, removed) VALUES (?, ?, ?)", values)


def _removed(connection: sqlite3.Connection, client: int, number: int) -> Removed:
    query = "SELECT removed FROM outcomes WHERE client = ? AND number = ?"
    row = connection.execute(query, (client, number)).fetchone()
    return _decode(row[0]) if row else Removed()

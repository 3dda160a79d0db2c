"""The tables, version by version. A server brings a database to its own version when it starts."""

import logging
import re
import secrets
import time
import zlib

from psycopg import errors, sql

from rwkv_batch.state.entries import StoreError
from rwkv_batch.state.postgres.database.connection import Database

DEFAULT = "rwkv"  # the schema of the first model's sessions
MIGRATING = 7_210_868  # of the advisory lock: one server at a time
# Who waits to change a table has all others wait behind it, even those that only read. So each wait is short.
WAIT_MS, PAUSE = 1000, 1.0  # for a table, and seconds until that is tried again
MOST_SECONDS = 60.0  # of all tries
LONGEST = 40  # characters of a schema's name that are taken from a model's

# Keys are bytes, as SQLite's are: they may hold what PostgreSQL's text does not, and are ordered as bytes.
# `states`: those of turns whose past is not known, which nothing else could bring back. `writers`: the last
# transaction of each, by which one that lost its connection knows whether it was committed.
MIGRATIONS = (
    """
    CREATE TABLE about (identity text NOT NULL);
    CREATE TABLE models (id bigint PRIMARY KEY, fingerprint text NOT NULL, vocabulary bigint NOT NULL);
    CREATE TABLE turns (
        id bigint PRIMARY KEY, parent bigint NOT NULL, number bigint NOT NULL, start bigint NOT NULL,
        prompt bytea NOT NULL, completion bytea NOT NULL, created double precision NOT NULL,
        model bigint NOT NULL, digest bytea NOT NULL, request bytea);
    CREATE INDEX turns_by_parent ON turns (parent);
    CREATE UNIQUE INDEX turns_by_request ON turns (substr(request, 1, 16)) WHERE request IS NOT NULL;
    CREATE TABLE sessions (
        key bytea PRIMARY KEY, turn bigint NOT NULL, number bigint NOT NULL, tokens bigint NOT NULL,
        digest bytea NOT NULL, model bigint NOT NULL, updated double precision NOT NULL);
    CREATE INDEX sessions_by_turn ON sessions (turn);
    CREATE TABLE states (turn bigint PRIMARY KEY, model bigint NOT NULL, data bytea NOT NULL);
    ALTER TABLE states ALTER COLUMN data SET STORAGE EXTERNAL;
    CREATE TABLE documents (
        key bytea PRIMARY KEY, updated double precision NOT NULL, data bytea NOT NULL);
    CREATE TABLE writers (id bigint PRIMARY KEY, last bigint NOT NULL, seen timestamptz NOT NULL);
    """,
    # `writer` made a turn, and may have its state; `address`: of its server. `objects`: states in a store
    # that servers share. Servers of the version before go on with these tables.
    """
    ALTER TABLE turns ADD COLUMN writer bigint;
    ALTER TABLE writers ADD COLUMN address text;
    CREATE TABLE objects (
        turn bigint PRIMARY KEY, place text NOT NULL, size bigint NOT NULL, stored boolean NOT NULL,
        gone boolean NOT NULL, changed timestamptz NOT NULL);
    CREATE INDEX objects_to_remove ON objects (place) WHERE gone OR NOT stored;
    """,
)

log = logging.getLogger(__name__)


def schema_of(model: str) -> str:
    """The schema of a further model's sessions; empty: of the first model's."""
    readable = re.sub("[^a-z0-9]+", "_", model.lower())[:LONGEST]
    if readable != model:
        readable = f"{readable}_{zlib.crc32(model.encode()):08x}"
    return f"{DEFAULT}_{readable}" if model else DEFAULT


def settings(schema: str, stopped_ms: int) -> str:
    """SQL that each connection begins with."""
    return (
        f'SET search_path TO "{schema}"; SET idle_in_transaction_session_timeout = {stopped_ms}; '
        f"SET lock_timeout = {2 * stopped_ms}; "
        "SET client_encoding TO 'UTF8'; SET bytea_output TO 'hex'; "
        # A role's own default may be one in which what another server has just committed is an error.
        "SET default_transaction_isolation TO 'read committed';"
    )


def check(db: Database, schema: str) -> None:
    """Raises StoreError if there are no tables, or those of a later version. Changes nothing."""
    found = db.execute("SELECT to_regclass(%s)", (f'"{schema}".migrations',)).fetchone()
    if found is None or found[0] is None:
        raise StoreError(
            f"There is no schema {schema} of this server in the database; name the one that has the sessions."
        )
    _version(db)


def _version(db: Database) -> int:
    """That of the tables. Raises StoreError if it is a later one."""
    row = db.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()
    version = int(row[0]) if row else 0
    if version > len(MIGRATIONS):
        raise StoreError(
            f"The database has version {version} of the tables, and this server uses {len(MIGRATIONS)}; "
            "start a newer server."
        )
    return version


def migrate(db: Database, schema: str) -> str:
    """Bring the tables to this version; the database's identity. Raises StoreError, psycopg.Error."""
    began, has_waited = time.monotonic(), False
    while True:
        try:
            return _migrate(db, schema)
        except errors.LockNotAvailable:
            if time.monotonic() - began >= MOST_SECONDS:
                raise StoreError(
                    f"The tables of the database cannot be changed, as a transaction has held them for "
                    f"{MOST_SECONDS:.0f} s; pg_stat_activity shows it; end it, or start this server later."
                ) from None
        if not has_waited:
            log.warning("A transaction holds the tables of the database, which are changed when it ends.")
        has_waited = True
        time.sleep(PAUSE)


def _migrate(db: Database, schema: str) -> str:
    """Try `migrate` once. Raises LockNotAvailable where somebody else holds a table, too."""
    name = sql.Identifier(schema)
    with db.transaction():
        db.execute("SET LOCAL lock_timeout = 0")  # another server migrates, however long that takes
        db.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATING,))
        db.execute(f"SET LOCAL lock_timeout = {WAIT_MS}".encode())
        found = db.execute("SELECT to_regclass(%s)", (f'"{schema}".migrations',)).fetchone()
        if found is None or found[0] is None:
            db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
            db.execute(
                sql.SQL(
                    "CREATE TABLE {}.migrations (version int PRIMARY KEY, applied timestamptz NOT NULL)"
                ).format(name)
            )
        version = _version(db)
        for number, statements in enumerate(MIGRATIONS[version:], version + 1):
            db.execute(statements.encode())
            db.execute("INSERT INTO migrations (version, applied) VALUES (%s, now())", (number,))
        if not version:
            db.execute("INSERT INTO about (identity) VALUES (%s)", (secrets.token_hex(8),))
        identity = db.execute("SELECT identity FROM about").fetchone()
        db.execute("DELETE FROM writers WHERE seen < now() - interval '30 days'")
    assert identity
    return str(identity[0])

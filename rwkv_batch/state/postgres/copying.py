"""All that a database in PostgreSQL holds, to be copied."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import psycopg

from rwkv_batch.state.entries import Session, StoreDocument, Turn
from rwkv_batch.state.log.contents import Contents, Counted, Model, State, not_empty
from rwkv_batch.state.postgres.changes import put_model
from rwkv_batch.state.postgres.database import rows, schema
from rwkv_batch.state.postgres.database.connection import Database, explained, with_waits
from rwkv_batch.state.sql.tables import decoded

T = TypeVar("T")


class PostgresContents:
    """In one transaction, as it was at its beginning. Raises StoreError.

    empty: it is to be filled, and gets its tables if need be. Otherwise nothing of it is changed.
    """

    left_out = 0

    def __init__(self, url: str, model: str, *, empty: bool) -> None:
        name = schema.schema_of(model)
        try:
            self._database: Database = psycopg.connect(with_waits(url), autocommit=True)
            try:
                self._database.execute(schema.settings(name, 0).encode())
                # Servers end transactions of others that stay open; a copy is one, and has another name.
                self._database.execute(b"SET application_name TO 'rwkv-batch copy'")
                (schema.migrate if empty else schema.check)(self._database, name)
                self._database.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            except BaseException:
                self._database.close()
                raise
        except psycopg.Error as error:
            raise explained(error) from None

    def close(self) -> None:
        """What is not committed is not in it."""
        self._database.close()

    def models(self) -> Iterator[Model]:
        """Id, fingerprint and vocabulary."""
        query = "SELECT id, fingerprint, vocabulary FROM models"
        return self._rows(query, lambda row: (row[0], row[1], row[2]))

    def turns(self) -> Iterator[Turn]:
        """In any order."""
        return self._rows(f"SELECT {rows.TURN} FROM turns", rows.as_turn)

    def sessions(self) -> Iterator[Session]:
        """Those that are hidden too."""
        return self._rows(f"SELECT {rows.SESSION} FROM sessions", rows.as_session)

    def documents(self) -> Iterator[StoreDocument]:
        """All of them."""
        return self._rows(
            "SELECT key, updated, data FROM documents",
            lambda row: StoreDocument(decoded(bytes(row[0])), row[1], bytes(row[2])),
        )

    def states(self) -> Iterator[State]:
        """Turn, model and image."""
        return self._rows("SELECT turn, model, data FROM states", lambda row: (row[0], row[1], bytes(row[2])))

    def fill(self, source: Contents) -> Counted:
        """Put all of another one in; nobody writes meanwhile. Raises StoreError."""
        counted = Counted()
        self._run(lambda db: db.execute("LOCK TABLE sessions, turns, documents, states IN EXCLUSIVE MODE"))
        present = "SELECT (EXISTS (SELECT 1 FROM sessions) OR EXISTS (SELECT 1 FROM documents))::int"
        if self._run(partial(rows.one, query=present)):
            raise not_empty("this PostgreSQL")
        for id_, fingerprint, vocabulary in source.models():  # beside those of servers that have been started
            self._run(partial(put_model, id_=id_, fingerprint=fingerprint, vocabulary=vocabulary))
        self._put("turns", rows.TURN, map(rows.turn_columns, counted.count("turns", source.turns())))
        sessions = counted.count("sessions", source.sessions())
        self._put("sessions", rows.SESSION, map(rows.session_columns, sessions))
        documents = counted.count("documents", source.documents())
        self._put("documents", "key, updated, data", map(rows.document_columns, documents))
        self._put("states", "turn, model, data", source.states())
        self._run(lambda db: db.execute("COMMIT"))
        return counted

    def _put(self, table: str, columns: str, values: Iterable[Sequence[Any]]) -> None:
        def write(db: Database) -> None:
            with db.cursor().copy(f"COPY {table} ({columns}) FROM STDIN".encode()) as copied:
                for row in values:
                    copied.write_row(row)

        self._run(write)

    def _rows(self, query: str, parse: Callable[[Sequence[Any]], T]) -> Iterator[T]:
        with self._database.cursor("rows", scrollable=False) as cursor:
            cursor.itersize = 500
            try:
                for row in cursor.execute(query.encode()):
                    yield parse(row)
            except psycopg.Error as error:
                raise explained(error) from None

    def _run(self, work: Callable[[Database], T]) -> T:
        try:
            return work(self._database)
        except psycopg.Error as error:
            raise explained(error) from None

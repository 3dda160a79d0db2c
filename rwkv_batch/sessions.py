"""Databases of sessions without a server:

    python -m rwkv_batch.sessions copy sessions.db postgresql://user@host/database
    python -m rwkv_batch.sessions copy postgresql://user@host/database sessions.db

`copy` puts all that is in the first into the second, which must be empty. A file must not be in use. In
PostgreSQL servers may go on with the first; what they change while it is copied is left out. Stored states
are not copied, but for those that nothing else could bring back.
"""

import argparse
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rwkv_batch import packages
from rwkv_batch.config import is_url
from rwkv_batch.disk.syncing import sync
from rwkv_batch.state import images
from rwkv_batch.state.entries import (
    PutImage,
    PutSession,
    Removed,
    RowDamaged,
    Session,
    StoreDocument,
    StoreError,
    Turn,
    Unread,
)
from rwkv_batch.state.log.contents import Contents, Counted, Model, State, not_empty
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.sql import sqlite, tables

T = TypeVar("T")


class FileContents:
    """A SQLite file, which no server uses."""

    def __init__(self, path: str, *, empty: bool) -> None:
        if not empty:
            _check_tables(path)
        self._store, self.left_out = Store(path), 0
        assert self._store.path
        self._path = self._store.path
        self._database = sqlite.connect(self._path, log_bytes=0)

    def close(self) -> None:
        self._database.close()
        self._store.close()

    def models(self) -> Iterator[Model]:
        query = "SELECT id, fingerprint, vocabulary FROM models"
        return self._rows(query, lambda row: (row[0], row[1], row[2]))

    def turns(self) -> Iterator[Turn]:
        return self._rows(f"SELECT {tables.TURN} FROM turns", tables.as_turn)

    def sessions(self) -> Iterator[Session]:
        def without_image(row: Sequence[Any]) -> Session:
            session = tables.as_session(row)
            return replace(session, head=replace(session.head, imaged=0))

        return self._rows(f"SELECT {tables.SESSION} FROM sessions", without_image)

    def documents(self) -> Iterator[StoreDocument]:
        return self._rows(f"SELECT {tables.DOCUMENT} FROM documents", tables.as_document)

    def states(self) -> Iterator[State]:
        folder = images.folder(self._path)

        def read(row: Sequence[Any]) -> State:
            return row[0], row[1], images.read(folder, row[0], pinned=False).numpy().tobytes()

        wanted = "SELECT turn, images.model FROM images JOIN turns ON turns.id = turn WHERE number = 0"
        return self._rows(wanted, read)

    def fill(self, source: Contents) -> Counted:
        counted, folder = Counted(), images.folder(self._path)
        present = "SELECT EXISTS (SELECT 1 FROM sessions) OR EXISTS (SELECT 1 FROM documents)"
        self._database.execute("BEGIN IMMEDIATE")
        if self._database.execute(present).fetchone()[0]:
            raise not_empty(str(self._path))
        for id_, fingerprint, vocabulary in source.models():
            if tables.model_id(self._database, fingerprint, vocabulary) != id_:
                raise StoreError(f"The model {fingerprint} has another number than it ought to have.")
        ends = {}
        for turn in counted.count("turns", source.turns()):
            tables.insert_turn(self._database, turn)
            if turn.past_unknown:
                ends[turn.id] = turn
        for session in counted.count("sessions", source.sessions()):
            tables.apply(PutSession(session), self._database, Removed())
        for document in counted.count("documents", source.documents()):
            tables.apply(document, self._database, Removed())
        for id_, model, data in source.states():
            images.write(images.prepared_folder(folder), id_, _tensor(data))
            image = PutImage(id_, model, ends[id_].end, ends[id_].end, len(data), time.time())
            tables.apply(image, self._database, Removed())
        if ends:
            sync(folder)
        self._database.execute("COMMIT")
        return counted

    def _rows(self, query: str, parse: Callable[[Sequence[Any]], T]) -> Iterator[T]:
        for row in self._database.execute(query):
            try:
                yield parse(row)
            except Unread:  # it may be whole
                raise
            except RowDamaged:
                self.left_out += 1


def _check_tables(path: str) -> None:
    """Raises StoreError for a file in which a server would begin a database."""
    found, url = True, f"{Path(path).absolute().as_uri()}?mode=ro"
    # Errors are those that `Store` says in better words.
    with suppress(sqlite3.Error), closing(sqlite3.connect(url, uri=True)) as database:
        found = bool(database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if not found:
        raise StoreError(f"There are no sessions in {path}; name the database that has them.")


def _tensor(data: bytes) -> Any:
    import torch  # most databases have no such states

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def opened(name: str, model: str, *, empty: bool = False) -> Iterator[Contents]:
    """The database of this path or URL. empty: it is to be filled. Raises StoreError."""
    if not is_url(name):
        with closing(FileContents(name, empty=empty)) as file:
            yield file
        return
    try:
        packages.load("A URL needs", packages.CLUSTER, "psycopg")
    except packages.PackageError as error:
        raise StoreError(f"{error}.") from None
    from rwkv_batch.state.postgres.copying import PostgresContents

    with closing(PostgresContents(name, model, empty=empty)) as database:
        yield database


def copy(source: str, target: str, model: str) -> None:
    """Raises StoreError."""
    if model and not (is_url(source) or is_url(target)):
        raise StoreError("--model is for a database in PostgreSQL, and neither of these is; leave it out.")
    if not is_url(source) and not Path(source).exists():
        raise StoreError(f"There is no database {source}; name a file or a URL.")
    with ExitStack() as both:
        contents = both.enter_context(opened(source, model))
        counted = both.enter_context(opened(target, model, empty=True)).fill(contents)
        print(f"{counted.sessions} sessions of {counted.turns} turns, {counted.documents} documents", end="")
        print(f"; {contents.left_out} damaged rows are left out" if contents.left_out else "")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rwkv_batch.sessions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("copy", help="all of a database into an empty one")
    command.add_argument("source", help="a file, or the URL of a PostgreSQL")
    command.add_argument("target", help="the same")
    command.add_argument("--model", default="", help="whose sessions they are in PostgreSQL: a further one")
    options = parser.parse_args(argv)
    try:
        copy(options.source, options.target, options.model)
    except (StoreError, sqlite3.Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

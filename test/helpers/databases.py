"""Databases in PostgreSQL for tests: each has a schema of its own."""

import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from postgres_proxy import PostgresProxy
from postgres_server import PostgresServer

from rwkv_batch.state.postgres.store import PostgresStore

_numbers = count(1)


def new_name() -> str:
    """Of a schema that there is not yet."""
    return f"test_{next(_numbers)}"


def open_new(url: str, folder: Path, **options: Any) -> PostgresStore:
    """An empty database."""
    return PostgresStore(url, folder, name=new_name(), **options)


class PostgresHost:
    """A database of several servers. As Host (hosts.py) for its tests."""

    def __init__(self, server: PostgresServer) -> None:
        self._proxy, self._name = PostgresProxy(server.folder), new_name()
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = count()

    def open(self) -> PostgresStore:
        """The database as one more server sees it, with a disk of its own."""
        folder = Path(self._folder.name) / str(next(self._numbers))
        return PostgresStore(self._proxy.url, folder, name=self._name)

    def lose_the_next_answer(self) -> None:
        """Something is committed, and the connection lost before that is said."""
        self._proxy.cut_next_commit("after")

    def answer_again(self) -> None:
        """When that has been."""
        assert self._proxy.was_cut.wait(120), "nothing is committed"

    def close(self) -> None:
        """When the stores are closed."""
        self._proxy.close()
        self._folder.cleanup()

"""Databases of the first version, as 0.1.0 wrote them."""

import contextlib
import random
import sqlite3
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stores import sealed, tiny_layout

COLUMNS = """(id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, updated REAL NOT NULL,
              tokens INTEGER NOT NULL, size INTEGER NOT NULL, checksum INTEGER NOT NULL,
              data BLOB NOT NULL)"""


@dataclass(frozen=True)
class Old:
    """A row of the first version."""

    key: str
    updated: float
    tokens: int
    data: bytes
    checksum: int | None = None  # that a damaged row has

    @property
    def columns(self) -> tuple[object, ...]:
        size = len(self.data)
        checked = repr((self.key, self.updated, self.tokens, size)).encode("utf-8", "backslashreplace")
        checksum = zlib.crc32(checked, zlib.crc32(self.data)) if self.checksum is None else self.checksum
        key = self.key.encode("utf-8", "surrogatepass")
        return key, self.updated, self.tokens, size, checksum, self.data


def old_session(key: str, number: int) -> Old:
    return Old(
        key, 100.5 + number, 10 + number, sealed(tiny_layout(), 10 + number, seed=number).numpy().tobytes()
    )


SESSIONS = [old_session(key, number) for number, key in enumerate(("a", "b", "é \ud800", ""))]
DOCUMENTS = [
    Old("d", 7.5, 0, b"text"),
    Old("large", 8.5, 0, random.Random(0).randbytes(60_000)),
    Old("no", 9.5, 0, b""),
]


def make_old(path: Path, sessions: Iterable[Old] = SESSIONS, documents: Iterable[Old] = DOCUMENTS) -> None:
    """Write a database as the first version did."""
    with contextlib.closing(open_old(path)) as database:
        for table, rows in (("sessions", sessions), ("documents", documents)):
            statement = (
                f"INSERT INTO {table} (key, updated, tokens, size, checksum, data) VALUES (?, ?, ?, ?, ?, ?)"
            )
            database.executemany(statement, [row.columns for row in rows])


def open_old(path: Path) -> sqlite3.Connection:
    """An empty database of the first version."""
    database = sqlite3.connect(path, isolation_level=None)
    database.executescript(f"""
        PRAGMA page_size = 16384;
        PRAGMA journal_mode = WAL;
        BEGIN;
        CREATE TABLE sessions {COLUMNS};
        CREATE TABLE documents {COLUMNS};
        PRAGMA user_version = 1;
        COMMIT;""")
    return database

"""Databases for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path
from sqlite3 import Connection

import pytest

from rwkv_batch.state.log.store import Store
from rwkv_batch.state.sql import sqlite


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """Those to databases that a test opens."""
    made: list[Connection] = []
    connect = sqlite.connect

    def noted(path: Path | str, log_bytes: int) -> Connection:
        made.append(connect(path, log_bytes))
        return made[-1]

    monkeypatch.setattr(sqlite, "connect", noted)
    return made


@pytest.fixture(params=["in a file", "in memory"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    """An empty database."""
    database = Store(path if request.param == "in a file" else None)
    yield database
    database.close()

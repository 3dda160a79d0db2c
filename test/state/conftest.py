"""Databases for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rwkv_batch.state.log.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture(params=["in a file", "in memory"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    """An empty database."""
    database = Store(path if request.param == "in a file" else None)
    yield database
    database.close()

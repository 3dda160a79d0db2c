"""The database file: one user at a time, its schema, and damage of every kind."""

import random
import sqlite3
from pathlib import Path

import pytest
import torch

from rwkv_batch.state.entries import (
    DOCUMENTS,
    SESSIONS,
    Delete,
    Put,
    Row,
    RowDamaged,
    StoreBroken,
    StoreError,
)
from rwkv_batch.state.store import Store

SIZE = 40_000
COUNT = 12


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def contents(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def put(key: str, data: bytes, table: str = SESSIONS, updated: float = 1.0) -> Put:
    return Put(table, key, Row(updated, 3, len(data)), data)


@pytest.fixture
def filled(path: Path) -> Path:
    """A closed database with some sessions and a document."""
    store = Store(path)
    store.commit([put(f"s{i}", contents(i)) for i in range(COUNT)])
    store.commit([put("d", b"text", DOCUMENTS)])
    store.close()
    return path


def bytes_of(tensor: torch.Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.numpy().tobytes()


def test_rows_outlive_the_process_and_are_known_at_the_start(filled: Path) -> None:
    store = Store(filled)
    assert store.rows == {
        SESSIONS: {f"s{i}": Row(1.0, 3, SIZE) for i in range(COUNT)},
        DOCUMENTS: {"d": Row(1.0, 3, 4)},
    }
    assert all(bytes_of(store.read(SESSIONS, f"s{i}")) == contents(i) for i in range(COUNT))
    assert bytes_of(store.read(DOCUMENTS, "d")) == b"text" and store.read(SESSIONS, "d") is None
    store.commit([put("s1", b"new"), Delete(SESSIONS, ["s2", "nobody"])])
    assert bytes_of(store.read(SESSIONS, "s1")) == b"new" and store.read(SESSIONS, "s2") is None
    store.close()


def test_a_second_server_cannot_use_the_file(path: Path) -> None:
    store = Store(path)
    with pytest.raises(StoreError, match="in use by another server"):
        Store(path)
    store.close()
    store.close()
    Store(path).close()
    assert [file.name for file in path.parent.iterdir()] == ["sessions.db"]


def test_a_transaction_is_carried_out_whole_or_not_at_all(path: Path) -> None:
    store = Store(path)
    store.commit([put("a", b"old")])
    with pytest.raises(StoreError):
        store.commit([put("a", b"new"), Delete(SESSIONS, ["a"]), put("b", bytes(10), "no_such_table")])
    store.commit([put("c", b"more")])
    assert bytes_of(store.read(SESSIONS, "a")) == b"old" and bytes_of(store.read(SESSIONS, "c")) == b"more"
    store.close()


@pytest.mark.parametrize("statement", ["PRAGMA user_version = 7", "CREATE TABLE accounts (id)"])
def test_a_database_of_something_else_is_refused_and_left_alone(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as other:
        other.execute(statement)
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"has schema \d"):
        Store(path)
    assert path.read_bytes()[100:] == before[100:] and [file.name for file in path.parent.iterdir()] == [
        "sessions.db"
    ]


def test_places_where_there_can_be_no_database(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no directory"):
        Store(tmp_path / "nowhere" / "x.db")
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "folder.db")


def test_the_log_is_moved_into_the_file_when_it_has_grown(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rwkv_batch.state.store.CHECKPOINT_BYTES", 4 * SIZE)
    store = Store(path)
    for i in range(20):
        store.commit([put("a", contents(i))])
        store.checkpoint(quiet=i % 2 == 0)
    assert path.with_name("sessions.db-wal").stat().st_size < 10 * SIZE
    store.close()


def survivors(path: Path) -> int:
    """Open the file; every session in it is right, or is reported as damaged, or is gone. How
    many are right.
    """
    store = Store(path)
    right = 0
    for i in range(COUNT):
        try:
            data = bytes_of(store.read(SESSIONS, f"s{i}"))
        except RowDamaged:
            continue
        assert data in (contents(i), None)
        right += data is not None
    try:
        store.commit([put("new", b"state")])
    except StoreBroken:  # the writer does the same
        store.restart()
        store.commit([put("new", b"state")])
    assert bytes_of(store.read(SESSIONS, "new")) == b"state"
    store.close()
    return right


def test_a_file_cut_anywhere_opens_with_what_is_whole(filled: Path, tmp_path: Path) -> None:
    chance, whole = random.Random(1), filled.read_bytes()
    found = []
    for number, length in enumerate(
        [0, 1, 99, 100, 4096, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(12))]
    ):
        cut = tmp_path / f"cut{number}.db"
        cut.write_bytes(whole[:length])
        found.append(survivors(cut))
        assert length in (0, 1, len(whole) - 1) or cut.with_name(f"{cut.name}.damaged-1").exists()
    assert found[5] >= COUNT - 1  # only its end was missing
    assert found[0] == 0


def test_a_flipped_bit_anywhere_costs_at_most_what_it_hits(filled: Path, tmp_path: Path) -> None:
    chance, whole = random.Random(2), filled.read_bytes()
    flips = [chance.randrange(8 * len(whole)) for _ in range(40)] + [
        chance.randrange(8 * 2 * 16384) for _ in range(20)
    ]
    found, refused = [], 0
    for number, position in enumerate(flips):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        copy = tmp_path / f"flip{number}.db"
        copy.write_bytes(data)
        try:
            found.append(survivors(copy))
        except StoreError as error:
            assert "has schema" in str(error)
            refused += 1
    assert refused <= 2 and sum(found[:40]) >= 40 * (COUNT - 1) - COUNT


def test_a_row_whose_key_was_changed_is_not_served_under_the_new_one(filled: Path) -> None:
    with sqlite3.connect(filled) as database:
        database.execute("UPDATE sessions SET key = ? WHERE key = ?", (b"other", b"s3"))
    database.close()
    store = Store(filled)
    with pytest.raises(RowDamaged):
        store.read(SESSIONS, "other")
    store.close()


def test_a_file_that_breaks_is_moved_aside_again_and_again(path: Path) -> None:
    for number in (1, 2):
        path.write_bytes(b"not a database at all" * 1000)
        Store(path).close()
        assert path.with_name(f"sessions.db.damaged-{number}").read_bytes()[:3] == b"not"

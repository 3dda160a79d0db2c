"""The state pool when the disk is full, damaged or gone: what was answered stays, and others are served."""

import sqlite3
import threading
from pathlib import Path

import pytest
from pools import SLOTS, Bench, keys

from rwkv_batch.state import sqlite
from rwkv_batch.state.entries import Delete, Put
from rwkv_batch.state.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


class FullDisk:
    """While `full`, transactions that write something fail, as on a disk without room; those that write `big`
    fail always.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        apply = sqlite.apply

        def failing(connection: sqlite3.Connection, operation: Put | Delete) -> None:
            apply(connection, operation)
            if isinstance(operation, Put) and (self.full or operation.key == "big"):
                error = sqlite3.OperationalError("database or disk is full")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
                raise error

        monkeypatch.setattr(sqlite, "apply", failing)


def test_a_full_disk_fails_the_save_keeps_the_old_state_and_hurts_nobody_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    bench = Bench(path)
    old, other = bench.put("a"), bench.put("b")
    bench.put("gone")
    disk.full = True
    for key in ("a", "c"):
        slot = bench.slot()
        bench.fill(slot)
        bench.pool.save(key, slot, 2, bench.callback(key))
    bench.pool.delete("gone", False, bench.callback("gone"))
    assert all("is full" in bench.wait(key).error for key in "ac")
    assert bench.holds("a", old) and bench.holds("b", other) and bench.pool.find("c") is None
    assert "is full" in bench.do(bench.pool.fork, "a", "d").error and bench.pool.find("d") is None
    assert len(bench.free) == SLOTS - sum(tier == "L1" for _, tier in keys(bench))
    disk.full = False
    new = bench.put("a")
    bench.crash(path.with_name("copy.db"))
    again = Bench(path.with_name("copy.db"))
    assert (
        again.holds("a", new)
        and again.holds("b", other)
        and sorted(key for key, _ in keys(again)) == ["a", "b"]
    )
    again.close()


def test_the_limit_of_sqlite_itself_is_reported_as_a_full_disk(path: Path) -> None:
    bench = Bench(path)
    state = bench.put("a")
    bench.pool._store._writer.execute("PRAGMA max_page_count = 1")  # means: as many as there are
    slot = bench.slot()
    bench.pool.save("b", slot, 1, bench.callback("b"))
    assert "is full" in bench.wait("b").error and bench.holds("a", state)
    bench.close()


def test_what_was_answered_before_its_commit_failed_is_written_when_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    disk.full = True
    bench = Bench(path, l1=0, l2=0, durable=False)
    states = {"a": bench.put("a"), "b": bench.put("b")}
    assert bench.do(bench.pool.documents.put, "d", b"").error  # comes after the commits
    assert all(bench.holds(key, state) for key, state in states.items()) and "tried again" in caplog.text
    states["a"] = bench.put("a")
    bench.pool.delete("b", False, bench.callback("delete b"))
    assert bench.do(bench.pool.documents.put, "d", b"").error
    disk.full = False
    states["c"] = bench.put("c")
    for _ in range(2):  # c's commit, then those that follow from it
        assert bench.do(bench.pool.documents.put, "d", b"").error is None
    bench.crash(path.with_name("copy.db"))
    again = Bench(path.with_name("copy.db"))
    assert again.holds("a", states["a"]) and again.holds("c", states["c"]) and again.pool.find("b") is None
    again.close()


def test_closing_writes_what_could_not_be_written_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    disk.full = True
    bench = Bench(path, durable=False)
    states = {key: bench.put(key) for key in "aba"}
    assert bench.do(bench.pool.documents.put, "d", b"").error
    disk.full = False
    bench.close()
    again = Bench(path)
    assert all(again.holds(key, state) for key, state in states.items())
    again.close()


def test_a_session_that_does_not_fit_leaves_the_others_of_its_transaction_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch)
    gate, commit = threading.Event(), Store.commit
    monkeypatch.setattr(Store, "commit", lambda *arguments: (gate.wait(), commit(*arguments)))
    bench = Bench(path)
    for key in ("a", "b", "big", "c"):
        slot = bench.slot()
        bench.pool.save(key, slot, 1, bench.callback(key))
    gate.set()
    assert "is full" in bench.wait("big").error
    assert [bench.wait(key).error for key in "abc"] == [None] * 3
    bench.close()


def test_a_state_whose_commit_failed_is_not_written_over_a_newer_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(path, l1=0, l2=0, durable=False)
    disk = FullDisk(monkeypatch)
    disk.full = True
    bench.put("s", 1)
    assert bench.do(bench.pool.documents.put, "d", b"").error  # comes after the commit
    disk.full = False
    newer = bench.put("s", 2)
    for _ in range(3):
        assert bench.do(bench.pool.documents.put, "d", b"").error is None
    assert bench.holds("s", newer)
    bench.close()
    again = Bench(path)
    assert again.holds("s", newer)
    again.close()


def test_a_damaged_row_is_reported_and_dropped_and_the_others_are_served(path: Path) -> None:
    bench = Bench(path)
    states = {key: bench.put(key) for key in "abc"}
    bench.close()
    with sqlite3.connect(path) as database:
        data = bytearray(database.execute("SELECT data FROM sessions WHERE key = ?", (b"b",)).fetchone()[0])
        data[len(data) // 2] ^= 4
        database.execute("UPDATE sessions SET data = ? WHERE key = ?", (data, b"b"))
    database.close()
    bench = Bench(path)
    assert "damaged" in bench.load("b")[0].error
    assert bench.pool.find("b") is None and bench.load("b")[0].error == "There is no session b."
    assert bench.holds("a", states["a"]) and bench.holds("c", states["c"])
    states["b"] = bench.put("b")
    bench.close()
    again = Bench(path)
    assert all(again.holds(key, state) for key, state in states.items())
    again.close()


def test_a_database_that_breaks_while_in_use_is_replaced_and_what_is_in_memory_written_again(
    path: Path,
) -> None:
    bench = Bench(path, l1=1, l2=1)
    states = {key: bench.put(key) for key in "abcd"}
    bench.pool._store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with path.open("r+b") as file:
        file.seek(0)
        file.write(b"?" * 50_000)
    bench.pool._store._writer.execute("PRAGMA cache_size = 0")
    bench.pool._store._writer.execute("PRAGMA shrink_memory")
    states["e"] = bench.put("e")
    states["f"] = bench.put("f")
    assert path.with_name("sessions.db.damaged-1").exists()
    bench.close()
    again = Bench(path)
    for key in "def":
        assert again.holds(key, states[key])
    again.close()


def test_what_is_deleted_stays_deleted_after_a_crash(path: Path, tmp_path: Path) -> None:
    bench = Bench(path)
    bench.put("gone")
    assert bench.delete("gone") == 1
    bench.crash(tmp_path / "copy")
    assert Store(tmp_path / "copy").rows["sessions"] == {}

"""The state pool when the disk is full or the database is damaged."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from pools import SLOTS, Bench, Result, after

from rwkv_batch.state import images
from rwkv_batch.state.entries import Collect, Operation, PutImage, PutSession, Removed, StoreDocument
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.sql import tables
from rwkv_batch.state.starts.contents import StartContents

BEGINNING = bytes(16)


def seen(*tokens: int) -> bytes:
    """The state after these tokens."""
    return after(BEGINNING, tokens)


def full_disk() -> sqlite3.Error:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


class FullDisk:
    """While `full`, SQLite reports a full disk for what is put; for the session "big" always."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        apply, write = tables.apply, images.write

        def failing(operation: Operation, connection: sqlite3.Connection, removed: Removed) -> None:
            apply(operation, connection, removed)
            big = isinstance(operation, PutSession) and operation.session.key == "big"
            if big or (self.full and isinstance(operation, Collect | PutSession | StoreDocument)):
                raise full_disk()

        def failing_write(*arguments) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            write(*arguments)

        monkeypatch.setattr(tables, "apply", failing)
        monkeypatch.setattr(images, "write", failing_write)


@pytest.mark.parametrize("token_log", [True, False])
def test_a_full_disk_fails_the_turn_keeps_the_session_and_hurts_nobody_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, token_log: bool
) -> None:
    disk = FullDisk(monkeypatch)
    bench = Bench(path, token_log=token_log)
    for key in ("a", "b", "gone"):
        bench.turn(key, [1])
    bench.settle()
    disk.full = True
    names = [bench.turn(key, [2], wait=False) for key in "ac"]
    errors = [bench.wait(name).error for name in names]
    assert all("is full" in error or "make room" in error for error in errors)
    if not token_log:  # the slot was given up before the error was known, and the image was not written
        bench.settle()
    assert bench.look("b") == seen(1) and bench.pool.find("c") is None
    assert bench.fork("b", "d") and bench.pool.find("d") is None
    disk.full = False
    bench.settle()
    assert len(bench.free) == SLOTS - [tier for _, tier in bench.tiers()].count("L1")
    if token_log:
        assert bench.look("a") == seen(1)
        bench.turn("a", [3])
        assert bench.look("a") == seen(1, 3)
    bench.crash(path.with_name("copy.db"))
    again = Bench(path.with_name("copy.db"))
    assert again.look("b") == seen(1) and again.pool.find("a") and again.pool.find("c") is None
    again.close()


def test_the_limit_of_sqlite_itself_is_reported_as_a_full_disk(
    path: Path, connections: list[sqlite3.Connection]
) -> None:
    bench = Bench(path)
    bench.turn("a", [1])
    for connection in connections:
        connection.execute("PRAGMA max_page_count = 1")  # means: as many as there are
    name = bench.turn("b", list(range(20_000)), wait=False)
    assert "is full" in bench.wait(name).error and bench.look("a") == seen(1)
    bench.close()


def test_images_that_cannot_be_written_cost_no_session(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images, "write", full)
    bench = Bench(path, l1=0, l2=0)
    for key in "abc":
        bench.turn(key, [1, 2])
    bench.settle()
    assert "No space left" in caplog.text
    assert [bench.look(key) for key in "abc"] == [seen(1, 2)] * 3
    bench.close()
    again = Bench(path)
    assert [again.look(key) for key in "abc"] == [seen(1, 2)] * 3
    again.close()


@pytest.mark.parametrize("fails", ["the second file", "the commit"])
def test_no_file_stays_of_images_that_cannot_be_stored_at_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    apply, write, written = tables.apply, images.write, list[int]()

    def failing(operation: Operation, connection: sqlite3.Connection, removed: Removed) -> None:
        apply(operation, connection, removed)
        if isinstance(operation, PutImage) and fails == "the commit":
            raise full_disk()

    def failing_write(folder: Path, turn: int, image: torch.Tensor) -> None:
        if written and fails == "the second file":
            raise OSError(28, "No space left on device")
        write(folder, turn, image)
        written.append(turn)

    bench = Bench(path)
    for key in "ab":
        bench.turn(key, [1, 2])
    monkeypatch.setattr(tables, "apply", failing)
    monkeypatch.setattr(images, "write", failing_write)
    bench.close()
    assert written and "tokens are" in caplog.text
    with closing(sqlite3.connect(path)) as database:
        rows = [f"{turn}.state" for (turn,) in database.execute("SELECT turn FROM images")]
    assert [file.name for file in images.folder(path).iterdir()] == rows
    assert len(rows) == (fails == "the second file"), "what was written before is of use"


def test_what_was_answered_before_its_commit_failed_is_written_when_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    disk.full = True
    bench = Bench(path, l1=0, l2=0, durable=False)
    for key in "ab":
        bench.turn(key, [1])
    assert bench.do(bench.pool.documents.put, "d", b"").error  # comes after the commits
    assert [bench.look(key) for key in "ab"] == [seen(1)] * 2 and "tried again" in caplog.text
    bench.turn("a", [2])
    bench.pool.delete("b", False, bench.callback("delete b"))
    disk.full = False
    bench.turn("c", [3])
    bench.settle()
    assert bench.pool.find("b") is None
    bench.crash(path.with_name("copy.db"))
    again = Bench(path.with_name("copy.db"))
    assert again.look("a") == seen(1, 2) and again.look("c") == seen(3) and again.pool.find("b") is None
    again.close()


def test_closing_writes_what_could_not_be_written_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch)
    disk.full = True
    bench = Bench(path, durable=False)
    for number, key in enumerate("aba"):
        bench.turn(key, [number])
    assert bench.do(bench.pool.documents.put, "d", b"").error
    disk.full = False
    bench.close()
    again = Bench(path)
    assert again.look("a") == seen(0, 2) and again.look("b") == seen(1)
    again.close()


def test_a_turn_that_does_not_fit_leaves_the_others_of_its_transaction_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch)
    gate, commit = threading.Event(), Store.commit
    bench = Bench(path, l1=4)
    monkeypatch.setattr(Store, "commit", lambda *arguments: (gate.wait(), commit(*arguments))[1])
    names = {key: bench.turn(key, [1], wait=False) for key in ("a", "b", "big", "c")}
    gate.set()
    assert "is full" in bench.wait(names.pop("big")).error
    assert [bench.wait(name).error for name in names.values()] == [None] * 3
    bench.close()


@pytest.mark.parametrize("turns", [1, 2])
def test_a_session_is_deleted_though_its_last_turns_could_not_be_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """They were on their way when the deletion was asked for."""
    disk, gate, commit = FullDisk(monkeypatch), threading.Event(), Store.commit
    with closing(Bench(path)) as bench:
        bench.turn("a", [1])
        monkeypatch.setattr(Store, "commit", lambda *arguments: (gate.wait(), commit(*arguments))[1])
        disk.full = True
        names = [bench.turn("a", [number], wait=False) for number in range(turns)]
        deletion = bench.ask(bench.pool.delete, "a", False)
        gate.set()
        assert all(bench.wait(name).error for name in names)
        assert bench.wait(deletion) == Result(1, None)
        assert bench.pool.find("a") is None
    with closing(Bench(path)) as bench:
        assert bench.pool.find("a") is None


@pytest.mark.parametrize("table", ["sessions", "turns"])
def test_damaged_rows_are_reported_and_cost_their_sessions_only(path: Path, table: str) -> None:
    bench = Bench(path)
    for key in "abc":
        bench.turn(key, [1, 2])
    bench.close()
    for file in Path(f"{path}.images").iterdir():
        file.unlink()
    with sqlite3.connect(path) as database:
        column, where = {
            "sessions": ("tokens = 77", "key = x'62'"),
            "turns": ("prompt = x'020900'", "id = 2"),
        }[table]
        assert database.execute(f"UPDATE {table} SET {column} WHERE {where}").rowcount == 1
    database.close()
    again = Bench(path)
    if table == "turns":
        with pytest.raises(LookupError, match="damaged"):
            again.look("b")
    assert again.pool.find("b") is None
    assert [again.look(key) for key in "ac"] == [seen(1, 2)] * 2
    again.turn("b", [5])
    again.close()
    last = Bench(path)
    assert [last.look(key) for key in "abc"] == [seen(1, 2), seen(5), seen(1, 2)]
    last.close()


def test_a_database_that_breaks_while_in_use_is_replaced_and_what_is_in_memory_written_again(
    path: Path, connections: list[sqlite3.Connection]
) -> None:
    bench = Bench(path, l1=1, l2=1)
    for number, key in enumerate("abcd"):
        bench.turn(key, [number])
    bench.settle()
    destroy_database(path, connections)
    bench.wait(bench.turn("e", [9], wait=False))
    bench.turn("f", [10])
    assert path.with_name("sessions.db.damaged-1").exists()
    bench.settle()
    bench.close()
    again = Bench(path)
    assert [again.look(key) for key in "def"] == [seen(3), seen(9), seen(10)]
    again.close()


def test_a_session_that_was_deleted_in_its_turn_does_not_come_back_with_a_new_database(
    path: Path, connections: list[sqlite3.Connection]
) -> None:
    bench = Bench(path, l1=3)
    bench.turn("a", [1])
    session, _, slot = bench.begin("a")
    bench.delete("a")
    bench.settle()
    destroy_database(path, connections)
    bench.wait(bench.turn("e", [9], wait=False))
    bench.settle()
    assert bench.pool.find("a") is None
    bench.pool.unpin(session.head)
    bench.release(slot)
    bench.close()


@pytest.mark.parametrize("durable", [True, False])
def test_what_was_deleted_in_its_turn_goes_from_a_disk_that_was_full_then(
    path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    disk = FullDisk(monkeypatch)
    bench = Bench(path, durable=durable)
    bench.turn("a", [1])
    session, _, slot = bench.begin("a")
    bench.delete("a")
    bench.settle()
    disk.full = True
    bench.pool.unpin(session.head)
    bench.release(slot)
    bench.settle()
    disk.full = False
    with closing(sqlite3.connect(path)) as database:
        bench.wait_until(lambda: database.execute("SELECT count(*) FROM turns").fetchone() == (0,))
    bench.turn("b", [2])
    assert bench.look("b") == seen(2)
    bench.close()


@pytest.mark.parametrize("fails", ["image", "description"])
def test_a_start_state_that_cannot_be_stored_leaves_the_one_before(
    path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    bench, write, apply = Bench(path), images.write, tables.apply
    zeros = StartContents(torch.zeros(1, 2, 64), torch.zeros(1, 1, 64, 64), None, b"start".ljust(16))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def applied(operation: Operation, connection: sqlite3.Connection, removed: Removed) -> None:
        apply(operation, connection, removed)
        if isinstance(operation, StoreDocument):
            raise full_disk()

    assert bench.do(bench.pool.starts.put, "old", lambda: zeros, b"one").error is None
    if fails == "image":
        monkeypatch.setattr(images, "write", full)
    else:
        monkeypatch.setattr(tables, "apply", applied)
    for name in ("old", "new"):
        assert bench.do(bench.pool.starts.put, name, lambda: zeros, b"two").error
    monkeypatch.setattr(images, "write", write)
    monkeypatch.setattr(tables, "apply", apply)
    bench.settle()
    bench.close()
    again = Bench(path)
    assert again.pool.starts.names() == ["old"] and again.pool.starts.find("old").description == b"one"
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM documents").fetchone() == (1,)
    again.close()


def destroy_database(path: Path, connections: list[sqlite3.Connection]) -> None:
    """Overwrite its beginning, and have SQLite forget what it has read of it."""
    for connection in connections:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute("PRAGMA cache_size = 0")
        connection.execute("PRAGMA shrink_memory")
    with path.open("r+b") as file:
        file.write(b"?" * 100_000)

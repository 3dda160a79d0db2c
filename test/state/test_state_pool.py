"""The state pool against what its users rely on: tiers, private copies, failures of the disk, and a plain
dictionary as its model.
"""

import sqlite3
import threading
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from pools import SLOTS, SNAPSHOT_BYTES, Bench, Result

from rwkv_batch.state import sqlite
from rwkv_batch.state.entries import Delete, Put
from rwkv_batch.state.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def keys(bench: Bench) -> list[tuple[str, str]]:
    return [(info.key, info.tier) for info in bench.pool.status()]


def test_sessions_move_down_in_the_order_of_their_last_use(path: Path) -> None:
    bench = Bench(path)
    states = {key: bench.put(key, tokens) for tokens, key in enumerate("abcdef")}
    assert keys(bench) == [("e", "L1"), ("f", "L1"), ("c", "L2"), ("d", "L2"), ("b", "L3"), ("a", "L3")]
    assert bench.holds("c", states["c"])  # a use: d is L2's oldest now
    assert bench.holds("e", states["e"])
    assert keys(bench) == [("f", "L1"), ("e", "L1"), ("d", "L2"), ("c", "L2"), ("b", "L3"), ("a", "L3")]
    assert bench.holds("a", states["a"])
    assert keys(bench) == [("f", "L1"), ("e", "L1"), ("c", "L2"), ("a", "L2"), ("d", "L3"), ("b", "L3")]
    for tokens, (key, state) in enumerate(states.items()):
        result, found = bench.load(key)
        assert torch.equal(found, state) and result.value == tokens
    bench.close()


def test_a_turn_on_a_hot_session_goes_on_in_its_slot_and_a_failed_one_changes_nothing(path: Path) -> None:
    for store in (path, None):
        bench = Bench(store)
        before = bench.put("a")
        slot = bench.pool.take("a")
        assert slot is not None and torch.equal(bench.states._memory[slot], before)
        bench.fill(slot)
        bench.release(slot)  # the turn has failed
        assert bench.pool.take("a") is None
        assert bench.holds("a", before)
        bench.close()


def test_a_copy_is_private(path: Path) -> None:
    bench = Bench(path, l1=1, l2=1)
    states = {key: bench.put(key) for key in "abc"}
    for key in "abc":
        slot = bench.slot()
        assert bench.do(bench.pool.load, key, slot).error is None
        bench.fill(slot)
        bench.release(slot)
        assert bench.holds(key, states[key])
    assert bench.do(bench.pool.fork, "c", "d").error is None
    after = bench.put("c")
    assert bench.holds("d", states["c"]) and bench.holds("c", after)
    bench.close()


def test_writes_that_the_device_has_deferred_are_in_what_is_saved_and_copied(path: Path) -> None:
    deferred: set[int] = set()

    def flush(slots: Collection[int]) -> None:
        for slot in deferred.intersection(slots):
            bench.fill(slot)
            deferred.remove(slot)

    bench = Bench(path, flush=flush)
    slot, copies = bench.slot(), list[torch.Tensor]()
    before = bench.states._memory[slot].clone()
    deferred.add(slot)
    bench.pool.copy_out(slot, copies.append)
    assert not torch.equal(copies[0], before) and torch.equal(copies[0], bench.states._memory[slot])
    deferred.add(slot)
    assert bench.do(bench.pool.save, "a", slot, 1).error is None
    saved = bench.states._memory[slot].clone()
    assert not torch.equal(saved, copies[0]) and bench.holds("a", saved)
    bench.close()


def test_without_upper_tiers_everything_comes_from_the_database(path: Path) -> None:
    bench = Bench(path, l1=0, l2=0)
    states = {key: bench.put(key) for key in "abc"}
    assert keys(bench) == [("c", "L3"), ("b", "L3"), ("a", "L3")] and len(bench.free) == SLOTS
    assert all(bench.holds(key, state) for key, state in states.items())
    bench.close()


def test_without_a_database_the_oldest_session_goes() -> None:
    bench = Bench(l1=1, l2=1)
    states = {key: bench.put(key) for key in "abc"}
    assert keys(bench) == [("c", "L1"), ("b", "L2")]
    assert bench.load("a")[0].error == "There is no session a."
    slot = bench.pool.take("c")
    assert slot is not None and bench.holds("b", states["b"])  # a turn costs nobody else's state
    bench.pool.save("c", slot, 2, bench.callback("again"))
    assert bench.wait("again").error is None and keys(bench) == [("c", "L1"), ("b", "L2")]
    bench.close()


def test_a_session_is_readable_before_its_commit_and_saves_wait_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, commit = threading.Event(), Store.commit
    monkeypatch.setattr(Store, "commit", lambda *arguments: (gate.wait(), commit(*arguments)))
    bench = Bench(path, l1=0, l2=0)
    slot = bench.slot()
    state = bench.fill(slot)
    bench.pool.save("a", slot, 1, bench.callback("save"))
    assert bench.holds("a", state)
    bench.poll()
    assert "save" not in bench.results
    gate.set()
    assert bench.wait("save").error is None
    bench.close()


def test_saves_that_need_not_be_durable_do_not_wait_and_are_written_at_the_latest_by_close(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, commit = threading.Event(), Store.commit
    monkeypatch.setattr(Store, "commit", lambda *arguments: (gate.wait(), commit(*arguments)))
    bench = Bench(path, durable=False)
    states = {key: bench.put(key) for key in "abcdef"}
    gate.set()
    bench.close()
    again = Bench(path)
    assert all(again.holds(key, state) for key, state in states.items())
    again.close()


def test_delete_reaches_every_tier_and_saves_under_way(path: Path) -> None:
    bench = Bench(path, l1=1, l2=1)
    for key in ("a", "a:1", "a:2", "ab", "b"):
        bench.put(key)
    slot = bench.slot()
    bench.fill(slot)
    bench.pool.save("a:3", slot, 1, bench.callback("late"))
    assert bench.delete("a", prefix=True) == 4 and bench.wait("late").error is None
    assert {key for key, _ in keys(bench)} == {"ab", "b"}
    assert bench.delete("a") == 0
    bench.close()
    assert len(bench.free) + 1 >= SLOTS  # one may be b's
    again = Bench(path)
    assert {key for key, _ in keys(again)} == {"ab", "b"}
    again.close()


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


def test_a_state_that_was_on_its_way_from_the_disk_does_not_come_back_to_a_session_that_has_changed(
    path: Path,
) -> None:
    bench = Bench(path, l1=0, l2=2)
    for key in "abcd":
        bench.put(key)
    slot, other = bench.slot(), bench.slot()
    bench.pool.load("a", slot, bench.callback("load a"))
    bench.pool.load("b", other, bench.callback("load b"))
    bench.pool.delete("a", False, bench.callback("delete a"))
    state = bench.put("b")
    bench.wait("load a")
    assert bench.wait("load b").error is None
    assert bench.pool.find("a") is None and bench.holds("b", state)
    bench.close()


def test_the_oldest_leave_a_database_that_is_over_its_limit(path: Path) -> None:
    bench = Bench(path, l1=1, l2=1, limit=3 * SNAPSHOT_BYTES)
    states = {key: bench.put(key) for key in "abc"}
    assert bench.holds("a", states["a"])  # used last, though saved first
    states["d"] = bench.put("d")
    assert bench.pool.find("b") is None
    assert bench.load("b")[0].error == "There is no session b."
    for key in "acd":
        assert bench.holds(key, states[key])
    bench.close()
    again = Bench(path)
    assert {key for key, _ in keys(again)} == {"a", "c", "d"}
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


def test_a_session_of_another_model_is_refused_and_kept(path: Path) -> None:
    bench = Bench(path)
    state = bench.put("a")
    data = bench.do(bench.pool.export, "a").value
    bench.close()
    other = Bench(path, fingerprint="fedcba9876543210")
    assert "another model" in other.load("a")[0].error
    assert "another model" in other.do(other.pool.fork, "a", "b").error
    assert "another model" in other.do(other.pool.import_, "c", data).error and other.pool.find("c") is None
    other.close()
    again = Bench(path)
    assert again.holds("a", state)
    again.close()


def test_an_exported_session_goes_on_elsewhere(path: Path) -> None:
    bench = Bench(path, l1=1, l2=1)
    states = {key: bench.put(key, 7) for key in "abc"}
    files = {key: bench.do(bench.pool.export, key).value for key in "abc"}
    assert bench.do(bench.pool.export, "nobody").error == "There is no session nobody."
    elsewhere = Bench(l2=9)
    for key, data in files.items():
        assert elsewhere.do(elsewhere.pool.import_, key, data).error is None
        assert elsewhere.holds(key, states[key]) and elsewhere.pool.find(key).tokens == 7
    for wrong in (b"", b"hello", files["a"][:-1], files["a"][:600] + b"!" + files["a"][601:]):
        assert elsewhere.do(elsewhere.pool.import_, "a", wrong).error
    assert elsewhere.holds("a", states["a"])
    half = Bench(wkv=torch.float16)
    assert half.do(half.pool.import_, "a", files["a"]).error is None
    half.load("a")
    slot = half.slot()
    assert half.do(half.pool.load, "a", slot).error is None
    wkv = states["a"][bench.states.shift[0].nbytes :].view(torch.float32)
    assert torch.equal(half.states.wkv[slot].flatten(), wkv.half())
    for other in (bench, elsewhere, half):
        other.close()


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


def test_documents(path: Path) -> None:
    for store in (path, None):
        bench = Bench(store)
        documents = bench.pool.documents
        assert bench.do(documents.get, "r") == Result(None, None)
        assert bench.do(documents.put, "r", b"one").error is None
        assert bench.do(documents.put, "r", b"two").error is None
        assert bench.do(documents.put, "empty", b"").error is None
        state = bench.put("r")  # has nothing to do with the document of that key
        if store:
            bench.close()
            bench = Bench(store)
            documents = bench.pool.documents
        assert bench.do(documents.get, "r") == Result(b"two", None)
        assert bench.do(documents.get, "empty") == Result(b"", None)
        assert bench.do(documents.remove, "r").value == 1 and bench.do(documents.remove, "r").value == 0
        assert bench.do(documents.get, "r").value is None and bench.holds("r", state)
        bench.close()


def test_any_text_is_a_key(path: Path) -> None:
    names = ["", "a'b\"; DROP TABLE sessions", "\0", "a\0b", "早上好", "\ud800", "x" * 512]
    bench = Bench(path)
    states = {key: bench.put(key) for key in names}
    bench.close()
    again = Bench(path)
    assert sorted(key for key, _ in keys(again)) == sorted(names)
    assert all(again.holds(key, state) for key, state in states.items())
    again.close()


def test_what_is_deleted_stays_deleted_after_a_crash(path: Path, tmp_path: Path) -> None:
    bench = Bench(path)
    bench.put("gone")
    assert bench.delete("gone") == 1
    bench.crash(tmp_path / "copy")
    assert Store(tmp_path / "copy").rows["sessions"] == {}


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


def test_closing_twice_is_closing_once(path: Path) -> None:
    bench = Bench(path)
    bench.put("a")
    bench.close()
    bench.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["sessions.db"]

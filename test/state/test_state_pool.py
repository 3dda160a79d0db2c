"""The state pool against what its users rely on: tiers, private copies, commits, files, documents."""

import threading
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from pools import SLOTS, SNAPSHOT_BYTES, Bench, Result, keys

from rwkv_batch.state.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


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


def test_closing_twice_is_closing_once(path: Path) -> None:
    bench = Bench(path)
    bench.put("a")
    bench.close()
    bench.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["sessions.db"]

"""The state pool: where states are, what is stored, and what a session is continued from."""

import threading
from pathlib import Path

import pytest
from pools import NEVER, SLOTS, Bench, after, files

from rwkv_batch.state.entries import KeptState, pack
from rwkv_batch.state.log.store import Store

BEGINNING = bytes(16)


def seen(*tokens: int) -> bytes:
    """The state after these tokens."""
    return after(BEGINNING, tokens)


def images(path: Path) -> set[str]:
    return {file.name for file in Path(f"{path}.images").glob("*")}


def test_sessions_move_down_in_the_order_of_their_last_use(path: Path) -> None:
    bench = Bench(path)
    for number, key in enumerate("abcdef"):
        bench.turn(key, [number])
    bench.settle()
    assert bench.tiers() == [("e", "L1"), ("f", "L1"), ("c", "L2"), ("d", "L2"), ("b", "L3"), ("a", "L3")]
    assert bench.look("e") == seen(4) and bench.look("c") == seen(2)
    bench.turn("a", [9])
    bench.settle()
    assert [key for key, tier in bench.tiers() if tier == "L1"] == ["e", "a"]
    assert len(bench.free) == SLOTS - 2
    bench.close()


def test_a_turn_begins_in_a_copy_and_then_takes_the_place_of_its_session(path: Path) -> None:
    bench = Bench(path)
    bench.turn("a", [1, 2])
    session, head, slot = bench.begin("a")
    assert head and head.tokens == 2 and bench.state(slot) == seen(1, 2)
    bench.feed(slot, [3])
    assert bench.look("a") == seen(1, 2) and bench.tier("a") == "L1"
    end = bench.pool.commit(bench.pool.at("a"), head, [3], [], bench.callback("a"))
    bench.pool.keep([KeptState("a", end, slot, session.head.turn)])
    assert len(bench.free) == SLOTS - 1, "the state before is not kept"
    assert bench.wait("a").error is None
    bench.pool.unpin(session.head)
    assert bench.look("a") == seen(1, 2, 3)
    bench.close()


def test_idle_sessions_stay_before_what_turns_go_on_from(path: Path) -> None:
    bench = Bench(path, l1=2)
    bench.turn("a", [1])
    bench.turn("b", [2])
    session, _, slot = bench.begin("a")
    bench.turn("c", [3])
    assert dict(bench.tiers()) == {"a": "L3", "b": "L1", "c": "L1"}
    bench.pool.unpin(session.head)
    bench.release(slot)
    assert bench.look("a") == seen(1)
    bench.close()


def test_what_a_turn_began_in_stays_if_others_share_it(path: Path) -> None:
    bench = Bench(path)
    bench.turn("a", [1])
    assert bench.fork("a", "b") is None
    bench.turn("a", [2])
    assert [bench.tier(key) for key in "ab"] == ["L1", "L1"]
    assert [bench.look(key) for key in "ab"] == [seen(1, 2), seen(1)]
    bench.close()


@pytest.mark.parametrize("over", [False, True])
def test_a_state_that_was_gone_on_from_leaves_for_the_host_if_the_turn_has_failed(
    path: Path, over: bool
) -> None:
    bench = Bench(path, l1=1)
    bench.turn("a", [1])
    session, _, slot = bench.begin("a")
    if over:
        bench.pool.unpin(session.head)
    bench.turn("b", [2])
    bench.settle()
    assert bench.tiers() == [("b", "L1"), ("a", "L2" if over else "L3")]
    if not over:
        bench.pool.unpin(session.head)
    bench.release(slot)
    assert bench.look("a") == seen(1)
    bench.close()


@pytest.mark.parametrize("token_log", [True, False])
def test_a_turn_that_fails_changes_nothing(path: Path, token_log: bool) -> None:
    bench = Bench(path, token_log=token_log)
    bench.turn("a", [1, 2])
    bench.settle()
    session, _, slot = bench.begin("a")
    bench.feed(slot, [3])
    bench.pool.unpin(session.head)
    bench.release(slot)
    assert bench.look("a") == seen(1, 2)
    bench.turn("a", [4])
    assert bench.look("a") == seen(1, 2, 4)
    bench.close()


def test_forks_and_branches_are_private(path: Path) -> None:
    bench = Bench(path)
    bench.turn("a", [1])
    assert bench.fork("a", "b") is None
    bench.turn("a", [2], "branch")
    bench.turn("b", [3])
    bench.turn("a", [4])
    expected = {"a": seen(1, 4), "b": seen(1, 3), "branch": seen(1, 2)}
    assert {key: bench.look(key) for key in expected} == expected
    bench.close()
    again = Bench(path)
    assert {key: again.look(key) for key in expected} == expected
    again.close()


def test_writes_that_the_device_has_deferred_are_in_what_is_kept_and_copied(path: Path) -> None:
    deferred: dict[int, list[int]] = {}

    def flush(slots) -> None:
        for slot in slots:
            if slot in deferred:
                bench.feed(slot, deferred.pop(slot))

    bench = Bench(path, l1=1, l2=1, flush=flush)
    for key in "abc":
        _, head, slot = bench.begin(key)
        deferred[slot] = [7]
        end = bench.pool.commit(bench.pool.at(key), head, [7], [], bench.callback(key))
        bench.pool.keep([KeptState(key, end, slot)])
        assert not deferred  # the session's next turn may begin in the slot at once
        assert bench.wait(key).error is None
    bench.settle()
    assert [bench.look(key) for key in "abc"] == [seen(7)] * 3
    copies: list = []
    slot = bench.slot()
    bench.states.memory[slot] = 0
    deferred[slot] = [8]
    bench.pool.copies.copy_out(slot, copies.append)
    assert copies[0][:16].numpy().tobytes() == seen(8)
    bench.close()


@pytest.mark.parametrize("token_log", [True, False])
@pytest.mark.parametrize("replay_rate", [1e-9, NEVER])
def test_without_upper_tiers_everything_comes_from_the_disk(
    path: Path, token_log: bool, replay_rate: float
) -> None:
    bench = Bench(path, l1=0, l2=0, token_log=token_log, replay_rate=replay_rate)
    for turn in range(3):
        for number in range(5):
            bench.turn(f"s{number}", [number, turn])
    bench.settle()
    assert {tier for _, tier in bench.tiers()} == {"L3"}
    assert bench.look("s3") == seen(3, 0, 3, 1, 3, 2)
    bench.close()


def test_without_a_database_sessions_are_remembered_by_their_tokens() -> None:
    bench = Bench(None, l1=1, l2=1)
    for number in range(5):
        bench.turn(f"s{number}", [number])
    assert [bench.look(f"s{number}") for number in range(5)] == [seen(number) for number in range(5)]
    bench.close()


def test_without_a_database_and_a_token_log_the_oldest_session_goes() -> None:
    bench = Bench(None, l1=1, l2=1, token_log=False)
    for number in range(3):
        bench.turn(f"s{number}", [number])
        bench.settle()
    assert bench.tiers() == [("s2", "L1"), ("s1", "L2")]
    assert bench.look("s1") == seen(1) and bench.pool.find("s0") is None
    bench.close()


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_turn_waits_for_its_commit_and_can_be_continued_before(
    path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    gate, commit = threading.Event(), Store.commit
    bench = Bench(path, durable=durable)
    monkeypatch.setattr(Store, "commit", lambda *arguments: (gate.wait(), commit(*arguments))[1])
    name = bench.turn("a", [1], wait=False)
    assert bench.look("a") == seen(1)
    bench.poll()
    assert (name in bench.results) != durable
    gate.set()
    assert bench.wait(name).error is None
    bench.close()
    again = Bench(path)
    assert again.look("a") == seen(1)
    again.close()


def test_turns_that_end_together_are_one_transaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, commit, sizes = threading.Event(), Store.commit, []
    bench = Bench(path, l1=8)

    def counted(store: Store, groups):
        gate.wait()
        sizes.append(len(groups))
        return commit(store, groups)

    monkeypatch.setattr(Store, "commit", counted)
    names = [bench.turn(f"s{number}", [number], wait=False) for number in range(8)]
    gate.set()
    assert [bench.wait(name).error for name in names] == [None] * 8
    assert len(sizes) <= 2 and sum(sizes) == 8, "what came while the first was written is one transaction"
    bench.close()


def test_delete_reaches_every_tier_and_turns_under_way(path: Path) -> None:
    bench = Bench(path, l1=1, l2=1)
    for key in ("a", "a:1", "ab", "a:2", "b"):
        bench.turn(key, [1])
    bench.turn("a:3", [1], wait=False)
    assert bench.delete("a", prefix=True) == 4
    assert sorted(key for key, _ in bench.tiers()) == ["ab", "b"]
    assert bench.delete("a") == 0
    bench.settle()
    bench.turn("a", [5])
    assert bench.look("a") == seen(5)
    bench.close()
    again = Bench(path)
    assert sorted(key for key, _ in again.tiers()) == ["a", "ab", "b"]
    assert len(images(path)) <= 3
    again.close()


def test_what_is_deleted_is_not_in_the_files(path: Path) -> None:
    secret = list(range(31_000, 31_064))
    bench = Bench(path, l1=0, l2=0)
    bench.turn("secret", secret)
    bench.settle()
    assert any(pack(secret)[1:65] in data for data in files(path).values())
    bench.delete("secret")
    bench.settle()
    bench.close()
    assert not any(pack(secret)[1:65] in data for data in files(path).values())
    assert images(path) == set()


def test_a_branch_keeps_what_it_needs_when_its_parent_is_deleted(path: Path) -> None:
    bench = Bench(path, l1=0, l2=0, replay_rate=NEVER)
    bench.turn("parent", [1])
    bench.turn("parent", [2])
    bench.turn("parent", [3], "child")
    assert bench.delete("parent") == 1
    assert bench.look("child") == seen(1, 2, 3)
    bench.close()


def test_a_parent_may_be_deleted_while_a_turn_goes_on_from_it(path: Path) -> None:
    bench = Bench(path, l1=0, l2=0)
    bench.turn("parent", [1])
    _, head, slot = bench.begin("parent", last=False)
    bench.delete("parent")
    bench.feed(slot, [2])
    end = bench.pool.commit(bench.pool.at("child"), head, [2], [], bench.callback("child"))
    bench.pool.keep([KeptState("child", end, slot)])
    assert bench.wait("child").error is None
    bench.pool.unpin(head)
    bench.settle()
    assert bench.look("child") == seen(1, 2)
    _, head, slot = bench.begin("child", last=False)
    bench.delete("child")
    bench.pool.unpin(head)  # nobody has continued it
    bench.release(slot)
    bench.settle()
    bench.close()
    store = Store(path)
    with pytest.raises(Exception, match="missing"):
        store.read_turn(head.turn)
    store.close()


def test_2000_forks_take_little_room(path: Path) -> None:
    bench = Bench(path, l1=1, l2=1)
    bench.turn("origin", list(range(4000)))
    bench.settle()
    before, head = sum(map(len, files(path).values())), bench.pool.find("origin").head
    for number in range(2000):
        bench.pool.point(bench.pool.at(f"copy {number}"), head, bench.callback(number))
    for number in range(2000):
        assert bench.wait(number).error is None
    bench.turn("copy 77", [1])
    assert bench.look("copy 78") == seen(*range(4000)) and bench.look("copy 77") == seen(*range(4000), 1)
    bench.close()
    database = {file: data for file, data in files(path).items() if file.parent == path.parent}
    assert sum(map(len, database.values())) - before < 1_000_000


def test_documents(path: Path) -> None:
    bench = Bench(path)
    documents = bench.pool.documents
    assert bench.do(documents.get, "a").value is None
    for data in (b"one", b"", b"two" * 100_000):
        assert bench.do(documents.put, "a", data).error is None
        assert bench.do(documents.get, "a").value == data
    bench.turn("a", [1])
    bench.close()
    again = Bench(path)
    assert again.do(again.pool.documents.get, "a").value == b"two" * 100_000
    assert [again.do(again.pool.documents.remove, "a").value for _ in range(2)] == [1, 0]
    assert again.look("a") == seen(1), "sessions have keys of their own"
    again.close()


def test_any_text_is_a_key(path: Path) -> None:
    keys = ["", " ", "ключ", "🦄", "a\0b", "\ud800", "'; DROP TABLE sessions; --", "%", "x" * 10_000]
    bench = Bench(path)
    for number, key in enumerate(keys):
        bench.turn(key, [number])
    bench.close()
    again = Bench(path)
    assert {key for key, _ in again.tiers()} == set(keys)
    assert [again.look(key) for key in keys] == [seen(number) for number in range(len(keys))]
    again.close()


def test_sessions_are_listed_in_pages(path: Path) -> None:
    bench = Bench(path, l1=2, l2=2)
    keys = [f"s{number:03}" for number in range(50)]
    for key in keys:
        bench.turn(key, [1])
    bench.delete("s010")
    keys.remove("s010")
    found: list[str] = []
    while True:
        status = bench.do(bench.pool.status, found[-1] if found else None, 7).value
        assert (status.total, status.l1, status.l2) == (49, 2, 2)
        if not status.sessions:
            break
        found += [entry.key for entry in status.sessions]
    assert found == keys
    bench.close()


def test_closing_twice_is_closing_once(path: Path) -> None:
    bench = Bench(path)
    bench.turn("a", [1])
    bench.close()
    bench.close()

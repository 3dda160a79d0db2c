"""The database: what it keeps, transactions, and what goes with what is deleted."""

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
from stores import (
    MODEL,
    VOCABULARY,
    chain,
    do,
    has,
    keys,
    next_turn,
    put_all,
    put_image,
    session,
    unknown_past,
)

from rwkv_batch.state.entries import (
    NONE,
    Collect,
    Dangling,
    DeleteSessions,
    DiskFailed,
    DropImages,
    PutSession,
    PutTurn,
    Removed,
    RemoveDocuments,
    RowDamaged,
    StoreBroken,
    StoreDocument,
    StoreError,
)
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.sql.sqlite import connect, explain, unreadable

SHARED_BYTES = (1 << 30) + 2, 510  # which SQLite locks while a file is in use

# What it keeps


def test_a_backup_is_taken_while_it_is_written(path: Path, tmp_path: Path) -> None:
    """As docs/sessions.md says it, by SQLite's own means; what comes later is not in it."""
    with closing(Store(path)) as store:
        store.model_id(MODEL, VOCABULARY)
        (one,) = chain(1, [10])
        put_all(store, one)
        do(store, PutSession(session("a", one)))
        with closing(sqlite3.connect(path)) as running, closing(sqlite3.connect(tmp_path / "backup")) as copy:
            running.backup(copy)
        do(store, PutSession(session("b", one)))
        assert store.find_session("b") == session("b", one)
    with closing(Store(tmp_path / "backup")) as restored:
        assert restored.find_session("a") == session("a", one) and has(restored, one)
        assert restored.find_session("b") is None


def test_everything_outlives_the_process(path: Path) -> None:
    store = Store(path)
    model = store.model_id(MODEL, VOCABULARY)
    one, two = chain(1, [10, 20])
    put_all(store, one, two)
    do(store, PutSession(session("a", two)), StoreDocument("d", 1.5, b"text"), put_image(one))
    store.close()
    store = Store(path)
    assert store.find_session("a") == session("a", two) and store.find_session("d") is None
    assert has(store, one) and has(store, two) and store.read_document("d") == b"text"
    assert store.last_turn() == 2 and store.image_turns() == {1}
    assert store.model_id(MODEL, VOCABULARY) == model and store.model(model) == (MODEL, VOCABULARY)
    store.close()


def test_its_files_are_for_their_owner_alone(path: Path) -> None:
    store = Store(path)
    do(store, StoreDocument("d", 1.5, b"text"))
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.glob(f"{path.name}*")}
    assert {path.name, f"{path.name}-wal"} <= set(modes) and set(modes.values()) == {0o600}, modes
    store.close()


def test_a_commit_is_on_the_disk_when_it_returns(path: Path, connections: list[sqlite3.Connection]) -> None:
    store = Store(path)
    do(store, StoreDocument("d", 1.5, b"text"))
    # only a loss of power would tell it from a lesser setting
    for connection in connections:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL: sync at each commit
    store.close()


def test_an_empty_database_has_nothing(store: Store) -> None:
    assert keys(store) == [] and store.last_turn() == NONE and store.image_turns() == set()
    assert store.find_session("a") is None and store.read_document("d") is None
    with pytest.raises(RowDamaged, match="missing"):
        store.read_turn(1)
    with pytest.raises(StoreError, match="missing"):
        store.model(1)


def test_a_database_in_memory_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(None)
    put_all(store, turn := next_turn(1))
    store.checkpoint(quiet=True)
    assert has(store, turn) and store.images_folder is None
    store.close()
    assert list(tmp_path.iterdir()) == []
    again = Store(None)
    assert not has(again, turn)
    again.close()


def test_turns_come_back_as_they_were_with_every_kind_of_token(store: Store) -> None:
    turns = [
        next_turn(1, None, [], [0]),
        next_turn(2, None, [65535], []),
        next_turn(3, None, [65536, 1], [2**32 - 1]),
        unknown_past(7, 123),
    ]
    put_all(store, *turns)
    assert all(has(store, turn) for turn in turns) and store.last_turn() == 7


def test_a_session_ends_where_it_was_last_put(store: Store) -> None:
    one, two = chain(1, [10, 20])
    put_all(store, one)
    do(store, PutSession(session("a", one)))
    do(store, PutTurn(two), PutSession(session("a", two, 2.5)))
    assert store.find_session("a") == session("a", two, 2.5)
    assert keys(store) == ["a"]


def test_each_model_has_its_own_id(store: Store) -> None:
    first, second = store.model_id("first", 10), store.model_id("second", 20)
    assert first != second and store.model_id("first", 10) == first
    assert store.model(second) == ("second", 20)


def test_the_vocabulary_of_a_model_is_known_once_a_server_has_told_it(store: Store) -> None:
    model = store.model_id(MODEL, 0)  # as an older database knows its models
    assert store.model_id(MODEL, VOCABULARY) == model
    assert store.model(model) == (MODEL, VOCABULARY)


def test_documents_are_replaced_and_deleted_and_are_no_sessions(store: Store) -> None:
    do(store, StoreDocument("d", 1.5, b"old"), StoreDocument("e", 1.5, memoryview(b"kept")))
    do(store, StoreDocument("d", 2.5, b"new"))
    assert store.read_document("d") == b"new" and keys(store) == []
    assert do(store, RemoveDocuments(["d", "nobody"])).documents == 1
    assert store.read_document("d") is None and store.read_document("e") == b"kept"


# Transactions


def test_a_group_is_carried_out_whole_or_not_at_all(store: Store) -> None:
    one, two, other, three = next_turn(1), next_turn(2), next_turn(5, next_turn(4)), next_turn(3)
    do(store, PutTurn(one), PutSession(session("a", one)))
    outcomes = store.commit(
        [
            [PutTurn(two), PutSession(session("b", two))],
            [DeleteSessions(["a"]), StoreDocument("d", 1.5, b""), PutTurn(other)],
            [PutTurn(three), PutSession(session("c", three))],
        ]
    )
    assert [type(outcome) for outcome in outcomes] == [Removed, Dangling, Removed]
    assert keys(store) == ["a", "b", "c"] and has(store, one) and store.read_document("d") is None
    with pytest.raises(TypeError):
        store.commit([[DeleteSessions(["a"])], [None]])
    assert keys(store) == ["a", "b", "c"]


def test_every_group_is_told_what_it_has_removed(store: Store) -> None:
    one, two, three = (next_turn(number) for number in (1, 2, 3))
    put_all(store, one, two, three)
    do(store, *(PutSession(session(key, turn)) for key, turn in zip("abc", (one, two, three), strict=True)))
    removed = store.commit(
        [[DeleteSessions(["a"])], [StoreDocument("d", 1.5, b"")], [DeleteSessions(["c", "b", "nobody"])]]
    )
    assert [group.turns for group in removed] == [[1], [], [3, 2]]


def test_a_turn_whose_parent_is_missing_is_refused(store: Store) -> None:
    one, two, three = chain(1, [5, 5, 5])
    with pytest.raises(Dangling):
        put_all(store, two)
    put_all(store, one, two)
    do(store, Collect([2]))
    with pytest.raises(Dangling):
        put_all(store, three)
    assert not has(store, three) and store.last_turn() == NONE


def test_a_session_whose_turn_is_missing_is_refused(store: Store) -> None:
    one, two = chain(1, [5, 5])
    do(store, PutTurn(one), PutSession(session("a", one)))
    with pytest.raises(Dangling):
        do(store, PutSession(session("a", two)))
    assert store.find_session("a") == session("a", one)


# What goes with a session


def test_deleting_a_session_removes_the_turns_that_nothing_else_uses(store: Store) -> None:
    turns = chain(1, [5, 5, 5])
    put_all(store, *turns)
    do(store, PutSession(session("a", turns[2])), put_image(turns[0]), put_image(turns[2]))
    removed = do(store, DeleteSessions(["a"]))
    assert removed.turns == [3, 2, 1] and sorted(removed.images) == [1, 3] and removed.pinned == []
    assert not any(has(store, turn) for turn in turns) and store.image_turns() == set()
    assert store.find_session("a") is None


def test_turns_that_forks_and_their_children_use_stay(store: Store) -> None:
    root, left, right = next_turn(1), next_turn(2, next_turn(1)), next_turn(3, next_turn(1), [7])
    leaf = next_turn(4, left)
    put_all(store, root, left, right, leaf)
    ends = {"deep": leaf, "middle": left, "same": left, "side": right}
    do(store, *(PutSession(session(key, turn)) for key, turn in ends.items()))
    assert do(store, DeleteSessions(["middle"])).turns == []  # a fork and a child use it
    assert do(store, DeleteSessions(["same"])).turns == []  # a child uses it
    assert do(store, DeleteSessions(["deep"])).turns == [4, 2]  # the root has another child
    assert has(store, root) and has(store, right)
    assert do(store, DeleteSessions(["side"])).turns == [3, 1]


def test_a_session_that_is_put_elsewhere_leaves_nothing_behind(store: Store) -> None:
    one, two = chain(1, [5, 5])
    other = next_turn(3)
    put_all(store, one, two, other)
    do(store, PutSession(session("a", two)))
    assert do(store, PutSession(session("a", other))).turns == [2, 1]
    assert do(store, PutSession(session("a", other, 2.5))).turns == [] and has(store, other)


def test_pinned_turns_stay_and_are_named_and_can_be_removed_later(store: Store) -> None:
    turns = chain(1, [5, 5, 5])
    put_all(store, *turns)
    do(store, PutSession(session("a", turns[2])), put_image(turns[1]))
    removed = do(store, DeleteSessions(["a"], frozenset({2, 9})))
    assert (removed.turns, removed.pinned, removed.images) == ([3], [2], [])
    assert has(store, turns[0]) and has(store, turns[1]) and store.image_turns() == {2}
    assert do(store, Collect([2], frozenset({2}))).pinned == [2] and has(store, turns[1])
    removed = do(store, Collect([2]))
    assert (removed.turns, removed.images) == ([2, 1], [2])


def test_turns_of_deleted_sessions_that_were_in_use_when_the_process_was_killed_go_at_the_next_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, turns = next_turn(9), chain(1, [5, 5, 5])
    with closing(Store(path)) as store:
        put_all(store, kept, *turns)
        do(store, PutSession(session("a", turns[2])), PutSession(session("b", kept)), put_image(turns[1]))
        do(store, DeleteSessions(["a"], frozenset({2})))
    with monkeypatch.context() as patch:  # while there is no room for it, the database is used all the same
        patch.setattr(Store, "commit", raises(DiskFailed("The disk is full.")))
        with closing(Store(path)) as store:
            assert store.find_session("b") and has(store, turns[1])
    with closing(Store(path)) as store:
        assert [has(store, turn) for turn in (*turns, kept)] == [False, False, False, True]
        assert store.image_turns() == set() and store.find_session("b")


def raises(error: Exception) -> Callable[..., NoReturn]:
    def function(*_: object) -> NoReturn:
        raise error

    return function


def test_only_turns_that_nothing_uses_are_collected(store: Store) -> None:
    one, two = chain(1, [5, 5])
    put_all(store, one, two)
    do(store, PutSession(session("a", two)))
    removed = do(store, Collect([1, 2, 77]))
    assert removed == Removed() and has(store, one) and has(store, two)


def test_a_pinned_end_stays_when_its_session_goes_on_elsewhere(store: Store) -> None:
    one, other = next_turn(1), next_turn(2)
    put_all(store, one, other)
    do(store, PutSession(session("a", one)))
    removed = do(store, PutSession(session("a", other), frozenset({1})))
    assert removed.pinned == [1] and has(store, one)


# Images


def test_an_image_is_known_with_its_model_until_it_is_dropped(store: Store) -> None:
    one, two = chain(1, [5, 5])
    put_all(store, one, two)
    do(store, put_image(one, model=3), put_image(two, model=4))
    assert (store.image_model(1), store.image_model(2), store.image_model(9)) == (3, 4, None)
    assert do(store, DropImages([1])).images == [1]
    assert store.image_model(1) is None and store.image_turns() == {2} and has(store, one)


def test_a_session_knows_the_newest_image_of_its_end(store: Store) -> None:
    one, two = chain(1, [5, 5])
    put_all(store, one, two)
    do(store, PutSession(session("a", one)), PutSession(session("b", two)))
    do(store, put_image(one))
    found = {key: store.find_session(key) for key in "ab"}
    assert found["a"] and found["a"].head == one.head(one.end)
    assert found["b"] and found["b"].head.imaged == 0


def test_the_image_of_a_turn_that_has_gone_is_to_be_removed(store: Store) -> None:
    removed = do(store, put_image(next_turn(1)))
    assert removed.images == [1] and store.image_turns() == set()


def test_the_size_counts_images_and_what_the_database_holds(store: Store) -> None:
    before = store.size()
    put_all(store, turn := next_turn(1))
    do(store, put_image(turn, 5_000_000))
    assert store.size() - before >= 5_000_000
    do(store, StoreDocument("d", 1.5, bytes(1_000_000)))
    assert store.size() - before >= 5_990_000  # some of the pages were there
    do(store, RemoveDocuments(["d"]), DropImages([1]))
    assert store.size() - before < 100_000


def test_a_value_that_a_table_does_not_take_is_no_damage(tmp_path: Path) -> None:
    connection = connect(tmp_path / "x.db", 0)
    connection.execute("CREATE TABLE t (a REAL NOT NULL)")
    with pytest.raises(sqlite3.IntegrityError) as refused:
        connection.execute("INSERT INTO t VALUES (?)", (float("nan"),))
    connection.close()
    assert not isinstance(explain(refused.value, tmp_path / "x.db"), StoreBroken)


def test_looking_for_damage_keeps_the_locks_of_connections(path: Path) -> None:
    """Another process would take the log away under a connection whose lock has gone."""
    with closing(Store(path)) as store:
        do(store, StoreDocument("d", 1.5, b"text"))
        assert store.read_document("d") == b"text"
        assert unreadable(path) == unreadable(path) == ""
        first, size = SHARED_BYTES
        program = (
            "import fcntl, sys; file = open(sys.argv[1], 'r+b'); "
            f"fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, {size}, {first})"
        )
        said = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
        assert "BlockingIOError" in said.stderr

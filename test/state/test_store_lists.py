"""The database: its limit, lists of sessions, and one user at a time."""

import contextlib
import os
import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from stores import (
    chain,
    do,
    has,
    in_order,
    keys,
    next_turn,
    put_all,
    put_image,
    random_tokens,
    session,
    unknown_past,
)

from rwkv_batch.state.entries import (
    HIDDEN,
    PutSession,
    Removed,
    SessionEntry,
    Shrink,
    Status,
    StoreDocument,
    StoreError,
)
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.sql import tables

# The limit


BIG = 1_000_000


def shrink(store: Store, steps: int, pinned: frozenset[int] = frozenset()) -> Removed:
    """Shrink by so many things of BIG bytes."""
    kept = store.size() - steps * BIG + BIG // 2
    return do(store, Shrink(int(kept / tables.SHRUNK), pinned))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_images_that_are_least_worth_go_first(store: Store, steps: int) -> None:
    """What an image is worth: the tokens that it saves, and how long ago they were last wanted."""
    turns = {name: next_turn(number) for number, name in enumerate(("new", "old", "long"), 1)}
    state = unknown_past(9)
    put_all(store, *turns.values(), state)
    ends = {**turns, "state": state}
    do(store, *(PutSession(session(key, turn, 0.5)) for key, turn in ends.items()))
    do(
        store,
        put_image(turns["new"], BIG, saves=100, used=10_000.0),
        put_image(turns["old"], BIG, saves=100, used=0.0),
        put_image(turns["long"], BIG, saves=100_000, used=0.0),
        put_image(state, BIG, saves=0, used=0.0),  # the only copy of that session
    )
    removed = shrink(store, steps)
    gone = [turns[name].id for name in ("old", "new", "long")][:steps]
    assert removed.images == gone and store.image_turns() == {1, 2, 3, 9} - set(gone)
    assert removed.sessions == [] and removed.turns == [] and len(keys(store)) == 4
    assert all(has(store, turn) for turn in ends.values())


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_when_no_image_can_go_the_oldest_sessions_and_documents_do(store: Store, steps: int) -> None:
    ages = {"s1": 1.5, "d2": 2.5, "s3": 3.5, "d4": 4.5, "s5": 5.5}
    rows = {key: unknown_past(number) for number, key in enumerate(("s5", "s1", "s3"), 1)}
    put_all(store, *rows.values())
    for key, turn in rows.items():
        do(store, PutSession(session(key, turn, ages[key])), put_image(turn, BIG, used=-ages[key]))
    do(store, *(StoreDocument(key, ages[key], bytes(BIG)) for key in ("d4", "d2")))
    removed = shrink(store, steps)
    gone, left = list(ages)[:steps], list(ages)[steps:]
    sessions = [key for key in gone if key in rows]
    assert removed.sessions == sessions and removed.documents == steps - len(sessions)
    assert removed.turns == removed.images == [rows[key].id for key in sessions]
    assert keys(store) == [key for key in left if key in rows]
    assert [key for key in ages if store.read_document(key)] == [key for key in left if key not in rows]


def test_images_go_before_sessions_even_if_the_sessions_are_older(store: Store) -> None:
    old, new = unknown_past(1), next_turn(2)
    put_all(store, old, new)
    do(store, PutSession(session("old", old, 1.5)), PutSession(session("new", new, 9.5)))
    do(store, put_image(old, BIG, used=1.5), put_image(new, BIG, saves=10**9, used=9.5))
    assert shrink(store, 1).images == [2] and keys(store) == ["new", "old"]
    assert shrink(store, 1).sessions == ["old"] and keys(store) == ["new"] and has(store, new)


def test_hidden_sessions_and_documents_stay_and_are_not_listed(store: Store) -> None:
    hidden, plain = unknown_past(1), unknown_past(2)
    put_all(store, hidden, plain)
    name = f"{HIDDEN}start:a"
    do(store, PutSession(session(name, hidden, 0.5)), PutSession(session("b", plain, 9.5)))
    do(store, StoreDocument(name, 0.5, b"x"), StoreDocument("c", 9.5, b"x"))
    do(store, put_image(hidden, BIG, used=0.0), put_image(plain, BIG, used=0.0))
    assert (keys(store), store.status([], [], []).total) == (["b"], 1)
    removed = do(store, Shrink(0))
    assert (removed.sessions, removed.documents) == (["b"], 1)
    assert store.find_session(name) and store.read_document(name) and has(store, hidden)


def test_nothing_goes_while_the_limit_is_met(store: Store) -> None:
    put_all(store, turn := next_turn(1))
    do(store, PutSession(session("a", turn)), put_image(turn, BIG))
    assert do(store, Shrink(store.size())) == Removed()
    assert do(store, Shrink(store.size() - 1)).images == [1]


def test_a_limit_that_cannot_be_met_leaves_an_empty_database(store: Store) -> None:
    put_all(store, one := next_turn(1), two := unknown_past(2))
    do(
        store,
        PutSession(session("a", one, 2.5)),
        PutSession(session("b", two)),
        StoreDocument("d", 3.5, b"x"),
    )
    removed = do(store, Shrink(0))
    assert (removed.sessions, removed.turns, removed.documents) == (["b", "a"], [2, 1], 1)
    assert keys(store) == [] and store.read_document("d") is None


def test_a_session_that_is_being_continued_stays_though_the_limit_is_not_met(store: Store) -> None:
    old, new = unknown_past(1), unknown_past(2)
    put_all(store, old, new)
    do(store, PutSession(session("old", old, 1.5)), PutSession(session("new", new, 2.5)))
    do(store, put_image(old, BIG), put_image(new, BIG))
    removed = shrink(store, 1, frozenset({1}))
    assert (removed.sessions, removed.pinned, removed.turns) == (["new"], [], [2])
    assert has(store, old) and store.image_turns() == {1}


# Lists

NAMES = [
    "",
    "a",
    "a:",
    "a:1",
    "a:2",
    "a:é",
    "a:\U0001f600",
    "a:\ud800",
    "aa",
    "b",
    "é",
    "\uffff",
    "\U0001f600",
]


@pytest.fixture
def listed(store: Store) -> Store:
    put_all(store, turn := next_turn(1))
    do(store, *(PutSession(session(name, turn)) for name in random.Random(0).sample(NAMES, len(NAMES))))
    return store


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
def test_sessions_are_listed_page_by_page_in_the_order_of_their_bytes(listed: Store, limit: int) -> None:
    found: list[str] = []
    after = None
    while page := keys(listed, after, limit):
        assert len(page) <= limit and len(found) < len(NAMES)
        found += page
        after = page[-1]
    assert found == in_order(NAMES)
    assert keys(listed, "a:1!", 2) == ["a:2", "a:é"]  # there need be no such session


@pytest.mark.parametrize("prefix", ["a", "a:", "a:é", "\U0001f600", "\ud800", "nobody"])
def test_sessions_are_listed_by_the_beginning_of_their_keys(listed: Store, prefix: str) -> None:
    wanted = in_order([name for name in NAMES if name.startswith(prefix)])
    assert keys(listed, None, 1000, prefix) == wanted and keys(listed, None, 2, prefix) == wanted[:2]
    for number, name in enumerate(wanted, 1):
        assert keys(listed, name, 1000, prefix) == wanted[number:]


def test_a_page_that_begins_before_the_prefix_has_only_keys_with_the_prefix(listed: Store) -> None:
    wanted = in_order([name for name in NAMES if name.startswith("a:")])
    assert keys(listed, "", 1000, "a:") == wanted
    assert keys(listed, "b", 1000, "a:") == []


def test_a_list_comes_with_the_numbers_of_all_sessions(store: Store) -> None:
    one, two, three = (next_turn(number) for number in (1, 2, 3))
    put_all(store, one, two, three)
    ends = {"a": one, "b": two, "fork of b": two, "c": three}
    do(store, *(PutSession(session(key, turn)) for key, turn in ends.items()))
    entry = SessionEntry("c", 3, "L3", 1.5, 3)
    assert store.status([entry], [2], [1, 9]) == Status([entry], 4, 2, 1)


# Who may use a file


def test_a_second_server_cannot_use_the_file(path: Path) -> None:
    store = Store(path)
    with pytest.raises(StoreError, match="in use by another server"):
        Store(path)
    store.close()
    store.close()
    Store(path).close()
    assert [file.name for file in path.parent.iterdir()] == ["sessions.db"]


@pytest.mark.parametrize(
    "statements",
    [
        "PRAGMA user_version = 7",
        "CREATE TABLE accounts (id)",
        "CREATE TABLE accounts (id); PRAGMA user_version = 1",
        "CREATE TABLE sessions (id); CREATE TABLE documents (id); PRAGMA user_version = 1",  # of 0.1 and 0.2
    ],
)
def test_a_database_of_something_else_is_refused_and_left_alone(path: Path, statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.executescript(statements)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"has schema \d"):
        Store(path)
    assert path.read_bytes()[100:] == before[100:]
    assert [file.name for file in path.parent.iterdir()] == ["sessions.db"]


def make_older(path: Path) -> None:
    """What schema 3 has added goes."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript(
            "DROP INDEX turns_by_request; ALTER TABLE turns DROP COLUMN request; PRAGMA user_version = 2"
        )


def test_a_database_of_schema_2_is_made_one_of_schema_3(path: Path) -> None:
    one, two = chain(1, [5, 5])
    with contextlib.closing(Store(path)) as store:
        put_all(store, one)
        do(store, PutSession(session("a", one)))
    make_older(path)
    with contextlib.closing(Store(path)) as store:
        assert store.find_session("a") == session("a", one) and store.read_turn(one.id) == one
        named = replace(two, request=bytes(range(20)))
        put_all(store, named)
        assert store.find_request(named.request) == ("", named)
    Store(path).close()


def test_places_where_there_can_be_no_database(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no directory"):
        Store(tmp_path / "nowhere" / "x.db")
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(StoreError, match=r"folder\.db is a directory; name a file"):
        Store(tmp_path / "folder.db")
    os.mkfifo(tmp_path / "pipe.db")  # to read it would wait for a writer
    (tmp_path / "link.db").symlink_to("/dev/null")
    for name, is_what in (("pipe.db", "pipe.db"), ("link.db", "/dev/null")):
        with pytest.raises(StoreError, match=f"{is_what} is no file on a disk; name one"):
            Store(tmp_path / name)


Grow = Callable[[Store, int], object]
STEP = 100_000


@pytest.fixture(params=["turns", "documents"])
def grow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Grow:
    """Writes STEP bytes, or twice that. A log of four times that is long."""
    monkeypatch.setattr("rwkv_batch.state.log.store.CHECKPOINT_BYTES", 4 * STEP)
    if request.param == "documents":
        return lambda store, number: do(store, StoreDocument("d", 1.5, random.Random(number).randbytes(STEP)))
    return lambda store, number: put_all(store, next_turn(number + 1, None, random_tokens(number, STEP // 2)))


def test_the_log_is_moved_into_the_file_when_it_has_grown(path: Path, grow: Grow) -> None:
    store = Store(path)
    for number in range(30):
        grow(store, number)
        store.checkpoint(quiet=number % 2 == 0)
    assert path.with_name("sessions.db-wal").stat().st_size < 20 * STEP
    store.close()


def test_a_busy_server_lets_the_log_grow_longer(path: Path, grow: Grow) -> None:
    store = Store(path)
    before = path.stat().st_size
    for number in range(6):
        grow(store, number)
        store.checkpoint(quiet=False)
    assert path.stat().st_size == before
    store.checkpoint(quiet=True)
    assert path.stat().st_size > before
    store.close()


def test_a_log_that_has_been_moved_is_left_to_grow_again(path: Path, grow: Grow) -> None:
    store = Store(path)
    for number in range(8):
        grow(store, number)
    store.checkpoint(quiet=True)
    for number in range(3):  # each move writes and syncs the file, which commits should not wait for
        before = path.read_bytes()
        do(store, StoreDocument("small", number + 0.5, b"text"))
        store.checkpoint(quiet=True)
        assert path.read_bytes() == before
    store.close()

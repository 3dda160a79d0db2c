"""What every database of sessions and documents has to do (rwkv_batch/state/log/protocol.py).

A further one is one more line of OPEN: a context with a database that is open.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from databases import open_new
from hosts import ThreadHost
from stores import chain, do, has, keys, next_turn, put_all, put_image, session

from rwkv_batch.state.entries import (
    ANY,
    DAMAGED,
    NONE,
    REQUEST_ID,
    Conflict,
    Dangling,
    DeleteSessions,
    DropImages,
    PutModel,
    PutSession,
    PutTurn,
    Refused,
    RemoveDocuments,
    RowDamaged,
    Shrink,
    StoreDocument,
    Turn,
)
from rwkv_batch.state.log.protocol import Outcome, SessionStore
from rwkv_batch.state.log.store import Store


@contextmanager
def of_several_engines(path: Path) -> Iterator[SessionStore]:
    with ThreadHost(path) as host:
        yield host.open()


OPEN: dict[str, Callable[[Path, pytest.FixtureRequest], AbstractContextManager[SessionStore]]] = {
    "a file": lambda path, _: closing(Store(path)),
    "memory": lambda path, _: closing(Store(None)),
    "a file of several engines": lambda path, _: of_several_engines(path),
    "PostgreSQL": lambda path, request: closing(
        open_new(request.getfixturevalue("postgres").url, path.parent)
    ),
}


@pytest.fixture(params=OPEN)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionStore]:
    with OPEN[request.param](tmp_path / "sessions.db", request) as store:
        yield store


def append(store: SessionStore, key: str, turn: Turn, follows: int) -> Outcome:
    """One turn of a session, in a transaction of its own."""
    (outcome,) = store.commit([[PutTurn(turn), PutSession(session(key, turn), follows=follows)]])
    return outcome


# Compare and set


def test_a_turn_is_stored_if_the_session_ends_where_it_says(store: SessionStore) -> None:
    one, two = chain(1, [5, 5])
    assert not isinstance(append(store, "a", one, NONE), Refused)
    assert not isinstance(append(store, "a", two, one.id), Refused)
    assert store.find_session("a") == session("a", two) and has(store, one) and has(store, two)


@pytest.mark.parametrize("follows", [NONE, 1, 77])
def test_a_turn_is_refused_if_the_session_has_gone_on(store: SessionStore, follows: int) -> None:
    one, two = chain(1, [5, 5])
    put_all(store, one, two)
    do(store, PutSession(session("a", two)))
    late = next_turn(3, one)
    refused = append(store, "a", late, follows)
    assert isinstance(refused, Conflict)
    assert str(refused) == (
        "The session a has been changed meanwhile; send the request again to go on from what it is now."
    )
    assert store.find_session("a") == session("a", two) and not has(store, late)


def test_a_turn_is_refused_if_the_session_has_been_deleted(store: SessionStore) -> None:
    one, two = chain(1, [5, 5])
    append(store, "a", one, NONE)
    do(store, DeleteSessions(["a"], follows=[one.id]))
    assert isinstance(append(store, "a", two, one.id), Conflict)
    assert keys(store) == [] and not has(store, two)


def test_any_end_of_a_session_can_be_replaced(store: SessionStore) -> None:
    one, two = next_turn(1), next_turn(2)
    append(store, "a", one, ANY)
    append(store, "a", two, ANY)
    assert store.find_session("a") == session("a", two) and not has(store, one)


def test_a_fork_and_a_rewind_are_refused_as_turns_are(store: SessionStore) -> None:
    one, two, three = chain(1, [5, 5, 5])
    put_all(store, one, two, three)
    do(store, PutSession(session("a", three)), PutSession(session("b", two)))
    back, over = PutSession(session("a", one), follows=two.id), PutSession(session("b", three), follows=NONE)
    assert [type(outcome) for outcome in store.commit([[back], [over]])] == [Conflict, Conflict]
    assert store.find_session("a") == session("a", three)
    assert store.find_session("b") == session("b", two)
    do(store, PutSession(session("a", one), follows=three.id))
    assert store.find_session("a") == session("a", one)


def test_sessions_are_deleted_together_or_not_at_all(store: SessionStore) -> None:
    one, two = next_turn(1), next_turn(2)
    append(store, "a", one, NONE)
    append(store, "b", two, NONE)
    with pytest.raises(Conflict, match="The session b has been changed"):
        do(store, DeleteSessions(["a", "b"], follows=[one.id, one.id]))
    assert keys(store) == ["a", "b"] and has(store, one)
    do(store, DeleteSessions(["a", "nobody", "b"], follows=[one.id, 7, two.id]))
    assert keys(store) == [] and not has(store, one)


def test_what_is_whole_is_not_deleted_as_damaged(store: SessionStore) -> None:
    append(store, "a", next_turn(1), NONE)
    do(store, StoreDocument("d", 1.5, b"text"))
    do(store, DeleteSessions(["a", "nobody"], follows=[DAMAGED, DAMAGED]))
    do(store, RemoveDocuments(["d", "nobody"], damaged=True))
    assert keys(store) == ["a"] and store.read_document("d") == b"text"


def test_one_refused_group_leaves_the_others_of_its_transaction(store: SessionStore) -> None:
    one, two, three = (next_turn(number) for number in (1, 2, 3))
    append(store, "a", one, NONE)
    outcomes = store.commit(
        [
            [PutTurn(two), PutSession(session("b", two), follows=NONE)],
            [StoreDocument("d", 1.5, b"lost"), PutTurn(three), PutSession(session("a", three), follows=NONE)],
            [PutTurn(next_turn(4, one)), PutSession(session("a", next_turn(4, one)), follows=one.id)],
            [PutTurn(next_turn(6, next_turn(5)))],
        ]
    )
    assert [type(outcome) for outcome in outcomes if isinstance(outcome, Refused)] == [Conflict, Dangling]
    assert keys(store) == ["a", "b"] and store.read_document("d") is None and not has(store, three)
    assert store.find_session("a") == session("a", next_turn(4, one))


def test_groups_see_what_those_before_them_have_done(store: SessionStore) -> None:
    one, two, late = *chain(1, [5, 5]), next_turn(3)
    outcomes = store.commit(
        [
            [PutTurn(turn), PutSession(session("a", turn), follows=follows)]
            for turn, follows in ((one, NONE), (late, NONE), (two, one.id))
        ]
    )
    assert [isinstance(outcome, Refused) for outcome in outcomes] == [False, True, False]
    assert store.find_session("a") == session("a", two)


def test_a_turn_that_has_lost_its_past_to_others_is_a_conflict(store: SessionStore) -> None:
    one, two = chain(1, [5, 5])
    append(store, "a", one, NONE)
    do(store, DeleteSessions(["a"]))
    refused = append(store, "a", two, one.id)  # its parent is gone, because the session is
    assert isinstance(refused, Conflict)


# What else the pool asks


# Requests that are sent again


def of_request(turn: Turn, name: bytes) -> Turn:
    return replace(turn, request=name.ljust(REQUEST_ID, b".") + b"more")


def test_a_turn_is_found_by_its_request(store: SessionStore) -> None:
    one, two = (of_request(turn, name) for turn, name in zip(chain(1, [5, 5]), (b"k1", b"k2"), strict=True))
    append(store, "a", one, NONE)
    append(store, "a", two, one.id)
    append(store, "b", next_turn(3), NONE)
    assert store.find_request(two.request) == ("a", two) and store.read_turn(two.id) == two
    assert store.find_request(one.request[:REQUEST_ID]) == ("", one), "no session ends with it"
    assert store.find_request(b"k3".ljust(REQUEST_ID, b".")) is None
    do(store, DeleteSessions(["a"]))
    assert store.find_request(two.request) is None


def test_a_request_is_stored_once(store: SessionStore) -> None:
    one, late = of_request(next_turn(1), b"k"), of_request(next_turn(2), b"k")
    append(store, "tree:1", one, NONE)
    outcomes = store.commit(
        [
            [PutTurn(late), PutSession(session("tree:2", late), follows=NONE)],
            [PutTurn(next_turn(3)), PutSession(session("b", next_turn(3)), follows=NONE)],
        ]
    )
    assert isinstance(outcomes[0], Conflict) and not isinstance(outcomes[1], Refused)
    assert "Idempotency-Key has been stored meanwhile" in str(outcomes[0])
    assert keys(store) == ["b", "tree:1"] and store.find_request(late.request) == ("tree:1", one)


def test_turns_are_stored_behind_those_that_were_refused(store: SessionStore) -> None:
    """However often: databases prepare statements that come again."""
    ids = count(2)
    append(store, "a", of_request(next_turn(1), b"k"), NONE)
    for round_ in range(12):
        again = [of_request(next_turn(next(ids)), b"k") for _ in range(round_ % 3)]
        new = [next_turn(next(ids)) for _ in range(2)]
        outcomes = store.commit(
            [
                [PutTurn(turn), PutSession(session(f"s{turn.id}", turn), follows=NONE)]
                for turn in (*new, *again)
            ]
        )
        assert [isinstance(outcome, Refused) for outcome in outcomes] == [False, False] + [True] * len(again)


def test_ids_of_turns_come_once(store: SessionStore) -> None:
    put_all(store, *chain(1, [5, 5]))
    ids = store.turn_numbers()
    found = [next(ids) for _ in range(1000)]
    assert len(set(found)) == 1000 and not {1, 2} & set(found) and found == sorted(found)
    assert found[0] > 0 and found[-1] < 1 << 62


def test_documents_and_models_are_found(store: SessionStore) -> None:
    model = store.model_id("m", 70_000)
    assert store.model(model) == ("m", 70_000)
    do(store, PutModel("n", 5), StoreDocument("d:1", 1.5, b"one"), StoreDocument("d:2", 1.5, b""))
    assert store.model(store.model_id("n", 0)) == ("n", 5)
    assert store.document_keys("d:") == ["d:1", "d:2"] and store.read_document("d:2") == b""
    assert do(store, RemoveDocuments(["d:1", "nobody"])).documents == 1
    assert store.read_document("d:1") is None


def test_rows_of_images_go_with_their_turns(store: SessionStore) -> None:
    one, two = chain(1, [5, 5])
    put_all(store, one, two)
    do(store, PutSession(session("a", two)), put_image(one), put_image(two))
    assert store.image_turns() == {1, 2} and store.image_model(1) == one.model
    do(store, DropImages([1]))
    assert store.image_model(1) is None
    assert do(store, DeleteSessions(["a"])).images == [2]
    assert store.image_turns() == set()


def test_turns_are_read_by_their_numbers(store: SessionStore) -> None:
    turns = chain(1, [5, 6, 7, 8])
    put_all(store, *turns)
    do(store, PutSession(session("a", turns[-1])))
    assert store.turn_ids(turns[-1].id, range(2, 4)) == [2, 3]
    assert store.read_turn(3) == turns[2]
    with pytest.raises(RowDamaged):
        store.read_turn(9)


def test_sessions_are_listed_in_the_order_of_their_keys(store: SessionStore) -> None:
    for number, key in enumerate(("b", "a:1", "a", "a:10", "\0hidden"), 1):
        append(store, key, next_turn(number), NONE)
    assert keys(store) == ["a", "a:1", "a:10", "b"] and keys(store, after="a", limit=2) == ["a:1", "a:10"]
    assert keys(store, prefix="a:") == ["a:1", "a:10"] and keys(store, prefix="\0") == ["\0hidden"]
    status = store.status([], [1], [2, 3])
    assert (status.total, status.l1, status.l2) == (4, 1, 2)


# PostgreSQL holds as much as its disk: what a server's limit bounds are the states on its own.
@pytest.mark.parametrize("store", [name for name in OPEN if name != "PostgreSQL"], indirect=True)
def test_pinned_sessions_are_not_dropped_for_room(store: SessionStore) -> None:
    one, two = next_turn(1), next_turn(2)
    append(store, "a", one, NONE)
    append(store, "b", two, NONE)
    removed = do(store, Shrink(0, frozenset({one.id})))
    assert removed.sessions == ["b"] and keys(store) == ["a"]

"""Two pools on one database: what one changes the other goes on from, or is refused."""

import os
import queue
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from hosts import Host, ProcessHost, ThreadHost
from pools import ALWAYS, BEGINNING, NEVER, Bench, Result, after
from stores import PATIENCE, do, keys, next_turn, put_all, raw, session

from rwkv_batch.state.entries import (
    NONE,
    Conflict,
    DeleteSessions,
    Moved,
    Operation,
    PutSession,
    PutTurn,
    Removed,
    RemoveDocuments,
    Session,
    Stamp,
    StoreBroken,
    StoreDocument,
    StoreError,
    Unavailable,
)
from rwkv_batch.state.host import link
from rwkv_batch.state.host.link import UNKNOWN, Link
from rwkv_batch.state.log.protocol import Outcome
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.sql import sqlite
from rwkv_batch.state.starts.contents import StartContents

ROOT = Path(__file__).resolve().parents[2]
CHANGED = "The session {} has been changed meanwhile; send the request again to go on from what it is now."


def seen(*tokens: int) -> bytes:
    return after(BEGINNING, tokens)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ThreadHost]:
    with ThreadHost(tmp_path / "sessions.db") as host:
        yield host


class Pair:
    """Two pools, closed at the end."""

    def __init__(self, host: Host, **options: object) -> None:
        self.one, self.two = (Bench(store=host.open(), **options) for _ in range(2))

    def __enter__(self) -> tuple[Bench, Bench]:
        return self.one, self.two

    def __exit__(self, *_: object) -> None:
        self.one.close()
        self.two.close()


def test_turns_get_their_ids_though_the_database_cannot_be_read(host: ThreadHost, monkeypatch) -> None:
    """As where a process has no file left."""

    def no_file(path: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite, "connect_to_read", no_file)
    ids = host.open().turn_numbers()
    assert len({next(ids) for _ in range(3)}) == 3


# One goes on from what the other has stored


@pytest.mark.parametrize("replay_rate", [ALWAYS, NEVER], ids=["with images", "by its tokens"])
def test_a_session_goes_on_wherever_its_next_turn_comes(host: ThreadHost, replay_rate: float) -> None:
    with Pair(host, replay_rate=replay_rate, replay_tokens=1) as (one, two):
        told: list[int] = []
        for number, bench in enumerate((one, two, two, one, one, two, one)):
            bench.turn("a", [number, number])
            told += [number, number]
            assert one.look("a") == two.look("a") == seen(*told)


def test_a_state_that_is_not_the_last_one_any_more_is_not_gone_on_from(host: ThreadHost) -> None:
    with Pair(host, l1=4, l2=4) as (one, two):
        one.turn("a", [1])
        assert one.tier("a") == "L1"
        two.turn("a", [2])
        assert one.tier("a") == "L3" and two.tier("a") == "L1"
        one.turn("a", [3])
        assert one.look("a") == two.look("a") == seen(1, 2, 3)


def test_forks_rewinds_and_deletions_are_seen_by_others(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        two.turn("a", [2])
        assert one.fork("a", "b") is None and two.look("b") == seen(1, 2)
        assert two.fork("a", "a", turn=1) is None and one.look("a") == seen(1)
        assert one.delete("a") == 1 and two.look("a") is None
        two.turn("a", [9])
        assert one.look("a") == seen(9) and one.look("b") == seen(1, 2)
        assert sorted(key for key, _ in one.tiers()) == ["a", "b"]


def test_a_file_is_imported_for_all(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1, 2])
        exported = two.do(two.pool.files.export, "a", "both").value
        two.turn("a", [3])
        assert one.do(partial(one.import_, "a"), exported).error is None
        assert two.look("a") == seen(1, 2)


def test_documents_are_everybodys(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        assert one.do(one.pool.documents.put, "paused:x", b"text").error is None
        assert two.do(two.pool.documents.get, "paused:x").value == b"text"
        # who has removed it is the one that goes on with it
        assert two.do(two.pool.documents.remove, "paused:x").value == 1
        assert one.do(one.pool.documents.remove, "paused:x").value == 0


def start_of(bench: Bench, number: float) -> StartContents:
    shift, wkv = bench.states.shift[0], bench.states.wkv[0]
    digest = str(number).encode().ljust(16, b".")
    return StartContents(torch.full_like(shift, number), torch.full_like(wkv, number), None, digest)


def test_start_states_are_everybodys(host: ThreadHost) -> None:
    with Pair(host) as (one, two):

        def put(bench: Bench, number: float) -> None:
            name = object()
            contents = partial(start_of, bench, number)
            bench.pool.starts.put("poet", contents, str(number).encode(), bench.callback(name))
            assert bench.wait(name).error is None

        def found(bench: Bench) -> list[tuple[bytes, int, bytes]]:
            starts = [start for name in bench.pool.starts.names() if (start := bench.pool.starts.find(name))]
            return [(start.description, start.turn, start.image.numpy().tobytes()) for start in starts]

        put(one, 1.0)
        assert found(two) == found(one) and len(found(one)) == 1
        put(two, 2.0)
        assert found(one) == found(two) and found(one)[0][0] == b"2.0"
        assert one.do(one.pool.starts.describe, "poet", b"again").error is None
        assert found(two)[0][0] == b"again"
        assert two.pool.starts.digest(["poet"]) == one.pool.starts.digest(["poet"]) != b""
        assert two.do(two.pool.starts.remove, ["poet"]).value == 1
        assert found(one) == [] and one.pool.starts.find("poet") is None


# One is refused because of what the other has stored


def test_the_turn_that_ends_first_is_stored_and_the_other_refused(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        late, early = one.begin_turn("a"), two.begin_turn("a")
        assert two.wait(two.end_turn(early, [2])).error is None
        refused = one.wait(one.end_turn(late, [3])).error
        assert refused == CHANGED.format("a") and isinstance(refused, Moved)
        assert one.look("a") == two.look("a") == seen(1, 2)
        one.turn("a", [4])
        assert two.look("a") == seen(1, 2, 4)


def test_one_of_two_first_turns_is_refused(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        turns = one.begin_turn("a"), two.begin_turn("a")
        names = one.end_turn(turns[0], [1]), two.end_turn(turns[1], [2])
        errors = one.wait(names[0]).error, two.wait(names[1]).error
        assert {*errors} == {None, CHANGED.format("a")}
        assert one.look("a") == two.look("a") == seen(1 if errors[0] is None else 2)


def test_turns_behind_a_refused_one_are_refused_too(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        late = one.begin_turn("a")
        two.turn("a", [2])
        first = one.end_turn(late, [3])
        second = one.turn("a", [4], wait=False)  # it goes on from the first before that is refused
        assert {one.wait(first).error, one.wait(second).error} == {CHANGED.format("a")}
        assert one.look("a") == seen(1, 2)


def test_a_turn_is_refused_when_its_session_was_deleted_elsewhere(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        late = one.begin_turn("a")
        assert two.delete("a") == 1
        assert isinstance(one.wait(one.end_turn(late, [2])).error, Moved)
        assert one.look("a") is None and two.look("a") is None


def test_a_deletion_waits_for_one_before_it_which_may_be_refused(
    host: ThreadHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        begun, gate, commit = threading.Event(), threading.Event(), host.store.commit

        def slow(groups: Sequence[Sequence[Operation]]) -> list[Outcome]:
            begun.set()
            gate.wait(PATIENCE)
            return commit(groups)

        monkeypatch.setattr(host.store, "commit", slow)
        turn = two.turn("a", [2], wait=False)
        assert begun.wait(PATIENCE)
        deletions = [one.ask(one.pool.delete, "a", False) for _ in range(2)]
        gate.set()
        assert two.wait(turn).error is None
        assert one.wait(deletions[0]).error == CHANGED.format("a")
        assert one.wait(deletions[1]) == Result(1, None)
        assert one.look("a") is two.look("a") is None


def test_changes_without_a_turn_are_refused_too(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        one.turn("a", [2])
        found, at = one.pool.find("a"), one.pool.at("a")
        first = one.do(one.pool.turns, found, range(1, 2)).value[0]
        two.turn("a", [3])
        assert isinstance(one.do(one.pool.point, at, first.head(0)).error, Moved)
        assert two.look("a") == seen(1, 2, 3)


def test_turns_that_are_removed_while_they_are_read_are_a_conflict(host: ThreadHost) -> None:
    with Pair(host, l1=0, l2=0, replay_rate=NEVER) as (one, two):
        two.turn("a", [1])
        found = one.pool.find("a")
        assert two.delete("a") == 1
        slot = one.slot()
        error = one.do(one.pool.load, found, slot).error
        assert error == "The session a has been changed meanwhile; send the request again."
        assert isinstance(error, Moved)
        one.release(slot)


@pytest.mark.parametrize("durable", [True, False])
def test_a_state_without_tokens_is_refused_as_a_turn_is(host: ThreadHost, durable: bool) -> None:
    with Pair(host, token_log=False, durable=durable) as (one, two):
        one.turn("a", [1])
        one.settle()
        late = one.begin_turn("a")
        two.turn("a", [2])
        two.settle()
        error = one.wait(one.end_turn(late, [3])).error
        one.settle()
        assert isinstance(error, Moved) or not durable
        assert one.look("a") == two.look("a") == seen(1, 2)


# The process that writes


def test_a_file_of_one_engine_is_one_of_several_and_back(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    alone = Bench(path)
    alone.turn("a", [1])
    alone.close()
    with ThreadHost(path) as host, Pair(host) as (one, two):
        one.turn("a", [2])
        two.turn("a", [3])
        two.turn("b", [4])
    alone = Bench(path)
    assert (alone.look("a"), alone.look("b")) == (seen(1, 2, 3), seen(4))
    alone.turn("a", [5])
    alone.turn("b", [6])
    alone.close()
    with ThreadHost(path) as host, Pair(host) as (one, two):
        assert (one.look("a"), two.look("b")) == (seen(1, 2, 3, 5), seen(4, 6))


def test_a_broken_database_is_replaced_for_all(host: ThreadHost, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        two.turn("b", [2])
        commit, left = host.store.commit, [1, 2]  # tried twice, as a disk that fails once looks the same

        def broken(groups: object) -> None:
            left.pop()
            if not left:
                monkeypatch.setattr(host.store, "commit", commit)
            raise StoreBroken("The database is damaged.")

        monkeypatch.setattr(host.store, "commit", broken)
        one.turn("a", [3])
        one.turn("b", [4])
        two.turn("a", [5])
        assert one.look("a") == two.look("a") == seen(1, 3, 5)
        assert one.look("b") == two.look("b") == seen(2, 4)
        assert len([*host.path.parent.glob("*.damaged-1")]) == 1


def test_a_state_of_before_does_not_take_the_place_of_a_session_that_is_whole(
    host: ThreadHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        old = one.pool.find("a")
        two.turn("a", [2])
        found = two.pool.find("a")
        assert old and found and one.pool.tier(old) == "L1"  # as of a turn before
        raw(host.path, "DELETE FROM turns WHERE id = ?", old.head.turn)
        commit, left = host.store.commit, [1, 2]  # tried twice, as a disk that fails once looks the same

        def broken(groups: object) -> None:
            left.pop()
            if not left:
                monkeypatch.setattr(host.store, "commit", commit)
            raise StoreBroken("The database is damaged.")

        monkeypatch.setattr(host.store, "commit", broken)
        two.turn("b", [3])
        one.turn("b", [4])  # behind what the pool stores once more
        one.settle()
        assert one.pool.find("a") == two.pool.find("a") == found
        assert two.look("a") == seen(1, 2)


def test_what_was_under_way_when_it_died_is_done_once(tmp_path: Path) -> None:
    with ProcessHost(tmp_path / "sessions.db") as host, Pair(host) as (one, two):
        told: dict[str, list[int]] = {f"{number}": [] for number in range(8)}
        for number in range(3):
            names = []
            for key, tokens in told.items():
                bench = (one, two)[(int(key) + number) % 2]
                names.append((bench, bench.turn(key, [number], wait=False)))
                tokens.append(number)
            host.kill()
            host.start(first=False)
            assert [bench.wait(name).error for bench, name in names] == [None] * len(names)
        for key, tokens in told.items():
            assert one.look(key) == two.look(key) == seen(*tokens)
            found = two.pool.find(key)
            assert isinstance(found, Session)
            turns = two.do(two.pool.turns, found, range(1, 100)).value
            assert [turn.tokens for turn in turns] == [[token] for token in tokens]


def test_a_commit_whose_outcome_was_lost_is_not_done_again(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        host.lose_the_next_answer()
        name = one.turn("a", [1], wait=False)
        host.answer_again()
        assert one.wait(name).error is None
        two.turn("a", [2])
        assert one.look("a") == two.look("a") == seen(1, 2)


def test_what_a_commit_removed_is_known_though_its_outcome_was_lost(host: ThreadHost) -> None:
    """A document says who removed it: what has been paused goes on there. Files of images are removed."""
    folder = Path(f"{host.path}.images")
    with Pair(host, l1=0, l2=0, replay_rate=ALWAYS, replay_tokens=1) as (one, two):
        one.do(one.pool.documents.put, "paused:x", b"text")
        one.turn("a", [1, 2, 3])
        one.settle()
        assert [*folder.glob("*.state")]
        host.lose_the_next_answer()
        removing = one.ask(one.pool.documents.remove, "paused:x")
        host.answer_again()
        assert one.wait(removing).value == 1
        host.lose_the_next_answer()
        deleting = one.ask(one.pool.delete, "a", False)
        host.answer_again()
        assert one.wait(deleting).value == 1
        one.settle()
        assert not [*folder.glob("*.state")]
        assert two.do(two.pool.documents.remove, "paused:x").value == 0


def test_engines_still_store_when_the_supervisor_has_died(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        host.orphan()
        two.turn("a", [2])
        assert one.look("a") == seen(1, 2)
    for store in host.stores:
        store.close()
    host.join()


def test_one_that_no_engine_needs_any_more_ends(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        host.lose_the_next_answer()
        name = one.turn("a", [1], wait=False)
        host.unused = 0.0
        host.answer_again()
        assert one.wait(name).error is None
        two.turn("a", [2])
    for store in host.stores:
        store.close()
    host.join()


def test_what_cannot_be_stored_fails_at_once_and_is_stored_when_it_can(host: ThreadHost) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        host.lose_the_next_answer()
        names = [one.turn("a", [2], wait=False)]
        host.join()
        names.append(two.turn("b", [3], wait=False))
        with host.refused("The disk has gone."):
            errors = [each.wait(name).error for each, name in zip((one, two), names, strict=True)]
        assert all(isinstance(each, Unavailable) for each in errors), "another process is started"
        assert errors[0] == f"The disk has gone. {UNKNOWN}", "it was sent to the process before"
        assert errors[1].startswith("The disk has gone.")
        host.answer_again()
        two.turn("a", [4])
        assert one.look("a") == two.look("a") == seen(1, 2, 4)


def test_what_nobody_stores_for_long_fails(host: ThreadHost, monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(host) as (one, _):
        host.lose_the_next_answer()
        with monkeypatch.context() as hasty:
            hasty.setattr(link, "SILENCE", 0.1)
            name = one.turn("a", [1], wait=False)
            host.join()
            assert str(one.wait(name).error) == f"{link.SILENT} {UNKNOWN}"
        host.answer_again()
        one.turn("b", [2])


def test_why_a_database_cannot_be_used_is_said_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process says it for a second, and another one once more to an engine that has not asked by then."""
    monkeypatch.setattr(link, "PATIENCE", 120.0)
    host, said = ProcessHost(tmp_path), list[str]()

    def ask() -> None:
        try:
            Link(host.address, lambda: None)
        except StoreError as error:
            said.append(str(error))

    engine = threading.Thread(target=ask)
    engine.start()
    while engine.is_alive():
        with pytest.raises(AssertionError, match="is a directory"):
            host.start()
        host.process.join()
    host.close()
    assert len(said) == 1 and "is a directory; name a file for the database" in said[0]


def test_an_outcome_that_cannot_be_handed_on_holds_no_other_up(host: ThreadHost) -> None:
    client, outcomes = Link(host.address, lambda: None), queue.SimpleQueue()

    def broken(*outcome: object) -> None:
        raise KeyError

    client.put([StoreDocument("d", 1.5, b"")], broken)
    client.put([StoreDocument("e", 1.5, b"")], lambda *outcome: outcomes.put(outcome))
    removed, error = outcomes.get(timeout=60)
    assert isinstance(removed, Removed) and error is None
    client.close()


@pytest.mark.parametrize("call", ["encode", "decode_to_engine"])
def test_a_message_for_which_there_is_no_memory_is_asked_for_again(
    host: ThreadHost, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with Pair(host) as (one, two):
        one.turn("a", [1])
        fail(monkeypatch, call, times=1)
        one.turn("a", [2])
        one.turn("a", [3])
        assert one.look("a") == two.look("a") == seen(1, 2, 3)


def test_a_link_without_memory_for_any_message_says_so_and_stores_when_there_is_some(
    host: ThreadHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "REST", 0.0)
    with Pair(host) as (one, _):
        with monkeypatch.context() as patch:
            fail(patch, "decode_to_engine", times=1000)
            name = one.turn("a", [1], wait=False)
            error = one.wait(name).error
            assert isinstance(error, Unavailable) and link.BROKEN in error
        one.turn("b", [2])


def fail(patch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """Let the function fail that links use."""
    works, left = getattr(link, name), iter(range(times))

    def function(message: bytes) -> object:
        if next(left, None) is not None:
            raise MemoryError
        return works(message)

    patch.setattr(link, name, function)


def test_a_link_that_has_ended_stores_nothing_and_says_so(host: ThreadHost) -> None:
    client, outcomes = Link(host.address, lambda: None), queue.SimpleQueue()
    client.close()
    client.put([StoreDocument("d", 1.5, b"")], lambda *outcome: outcomes.put(outcome))
    assert isinstance(outcomes.get(timeout=60)[1], StoreError)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "sessions.db", serves_others=True)) as store:
        yield store


def numbered(number: int, *operations: Operation, known: int = 0, client: int = 7) -> list[Operation]:
    return [Stamp(client, number, known), *operations]


def test_a_number_is_carried_out_once_with_anything_in_between(store: Store) -> None:
    turn = next_turn(1)
    first = numbered(1, PutTurn(turn), PutSession(session("a", turn), follows=NONE))
    assert store.commit([first, first]) == [Removed(), Removed()]
    do(store, DeleteSessions(["a"]))
    assert store.commit([first]) == [Removed()]  # which could be done
    assert keys(store) == []
    do(store, *numbered(1, StoreDocument("d", 1.5, b""), client=8))
    assert store.read_document("d") == b""


def test_what_a_number_removed_is_said_again_until_it_is_known(store: Store) -> None:
    turn = next_turn(1)
    put_all(store, turn)
    do(store, PutSession(session("a", turn), follows=NONE), StoreDocument("d", 1.5, b""))
    commits = [numbered(1, DeleteSessions(["a"])), numbered(2, RemoveDocuments(["d", "e"]))]
    removed = [Removed(turns=[turn.id]), Removed(documents=1)]
    assert store.commit(commits) == store.commit(commits) == removed
    do(store, *numbered(3, StoreDocument("d", 1.5, b"")))
    assert store.commit(commits) == removed
    do(store, *numbered(4, StoreDocument("d", 1.5, b""), known=2))
    with closing(sqlite3.connect(store.path)) as database:
        assert database.execute("SELECT * FROM outcomes").fetchall() == []


def test_what_was_refused_or_has_not_arrived_may_come_again(store: Store) -> None:
    put_all(store, next_turn(1))
    first, again = (
        {n: numbered(n, StoreDocument(f"d{n}", 1.5, data)) for n in range(1, 9)} for data in (b"1", b"2")
    )
    refused = numbered(2, PutSession(session("a", next_turn(1)), follows=99))
    outcomes = store.commit([first[1], refused, first[3], first[6]])
    assert [type(outcome) for outcome in outcomes] == [Removed, Conflict, Removed, Removed]
    assert store.commit([again[n] for n in (6, 2, 4, 5, 3, 7, 2)]) == [Removed()] * 7
    stored = {n: store.read_document(f"d{n}") for n in range(1, 8)}
    assert stored == {1: b"1", 2: b"2", 3: b"1", 4: b"2", 5: b"2", 6: b"1", 7: b"2"}
    do(store, *numbered(1_000_000, StoreDocument("last", 1.5, b""), known=999_998))
    do(store, *numbered(999_999, StoreDocument("but one", 1.5, b""), known=999_998))
    store.forget_processes()
    do(store, *again[1])
    assert store.read_document("d1") == b"2"


def test_images_of_engines_stay_when_another_one_begins(host: ThreadHost) -> None:
    one = Bench(store=host.open(), l1=0, l2=0, replay_tokens=1)
    one.turn("a", [1, 2, 3])
    one.settle()
    folder = Path(f"{host.path}.images")
    images = {file.name for file in folder.iterdir()}
    (folder / "77.state").write_bytes(b"of an engine that has not committed it yet")
    for name in ("78.state", "79.part"):
        (folder / name).write_bytes(b"of one that was killed two days ago")
        os.utime(folder / name, (time.time() - 2 * 86400,) * 2)
    os.utime(folder / min(images), (time.time() - 2 * 86400,) * 2)  # it has a row
    two = Bench(store=host.open(), l1=0, l2=0, replay_tokens=1)
    assert two.look("a") == seen(1, 2, 3)
    one.close()
    two.close()
    assert {file.name for file in folder.iterdir()} == images | {"77.state"}


def test_the_process_that_writes_loads_no_torch() -> None:
    code = "import sys, rwkv_batch.state.host.service; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0

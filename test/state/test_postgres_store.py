"""What only a database that servers share has to do. What all have to do is in test_store_contract.py."""

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from databases import new_name, open_new
from postgres_proxy import PostgresProxy
from postgres_server import PostgresServer
from postgres_writer import KEY
from serving import until
from stores import PATIENCE, chain, do, has, next_turn, put_image, session, unknown_past

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.startup import open_store
from rwkv_batch.state import images
from rwkv_batch.state.elsewhere import keeping
from rwkv_batch.state.elsewhere.image_index import ImageIndex
from rwkv_batch.state.entries import (
    HIDDEN,
    NONE,
    Conflict,
    DeleteSessions,
    PutModel,
    PutSession,
    PutTurn,
    Refused,
    Shrink,
    StoreAway,
    StoreDocument,
    StoreError,
)
from rwkv_batch.state.postgres.database import schema
from rwkv_batch.state.postgres.database.schema import schema_of
from rwkv_batch.state.postgres.store import PostgresStore
from rwkv_batch.state.sql.tables import id_of_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def name() -> str:
    return new_name()


@pytest.fixture
def store(postgres: PostgresServer, tmp_path: Path, name: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(postgres.url, tmp_path, name=name)) as opened:
        yield opened


@pytest.fixture
def database(postgres: PostgresServer, name: str) -> Iterator[psycopg.Connection]:
    """A connection of somebody else."""
    with psycopg.connect(postgres.url, autocommit=True, options=f"-c search_path={name}") as connection:
        yield connection


# Tables


def test_servers_that_start_at_once_make_the_tables_once(postgres: PostgresServer, tmp_path: Path) -> None:
    name, opened, errors = new_name(), list[PostgresStore](), list[Exception]()

    def start() -> None:
        try:
            opened.append(PostgresStore(postgres.url, tmp_path, name=name))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(opened) == 4
    assert len({each.images_folder for each in opened}) == 1, "it is one database"
    for each in opened:
        each.close()


def test_a_database_of_a_later_version_is_refused(
    postgres: PostgresServer, tmp_path: Path, name: str, store: PostgresStore, database: psycopg.Connection
) -> None:
    database.execute("INSERT INTO migrations VALUES (99, now())")
    with pytest.raises(StoreError, match=r"version 99 of the tables.*start a newer server"):
        PostgresStore(postgres.url, tmp_path, name=name)


def at_the_first_version(database: psycopg.Connection, name: str) -> None:
    """The tables as an earlier server has left them."""
    database.execute(
        f"""
        CREATE SCHEMA {name};
        CREATE TABLE migrations (version int PRIMARY KEY, applied timestamptz NOT NULL);
        INSERT INTO migrations VALUES (1, now());
        {schema.MIGRATIONS[0]}
        INSERT INTO about VALUES ('1');""".encode()
    )


def test_others_go_on_while_a_server_waits_to_change_tables(
    postgres: PostgresServer, tmp_path: Path, name: str, database: psycopg.Connection
) -> None:
    at_the_first_version(database, name)
    opened = list[PostgresStore]()
    server = threading.Thread(target=lambda: opened.append(PostgresStore(postgres.url, tmp_path, name=name)))
    with psycopg.connect(postgres.url, options=f"-c search_path={name}") as reader:
        reader.execute("SELECT 1 FROM turns")  # a long transaction, as of a backup
        server.start()
        until(lambda: database.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None)
        database.execute("SET lock_timeout = '20s'")
        assert database.execute("SELECT count(*) FROM turns").fetchone() == (0,)
    server.join()
    (store,) = opened
    with closing(store):
        do(store, PutTurn(next_turn(1)))


def test_a_server_does_not_wait_for_ever_to_change_tables(
    postgres: PostgresServer,
    tmp_path: Path,
    name: str,
    database: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_the_first_version(database, name)
    for limit, value in {"WAIT_MS": 10, "PAUSE": 0.0, "MOST_SECONDS": 0.1}.items():
        monkeypatch.setattr(schema, limit, value)
    with (
        psycopg.connect(postgres.url, options=f"-c search_path={name}") as reader,
        pytest.raises(StoreError, match=r"transaction has held them .* pg_stat_activity"),
    ):
        reader.execute("SELECT 1 FROM turns")
        PostgresStore(postgres.url, tmp_path, name=name)


def test_models_have_tables_of_their_own(postgres: PostgresServer, tmp_path: Path) -> None:
    names = [schema_of(model) for model in ("", "7b", "RWKV 7b", "rwkv-7b", "x" * 100)]
    assert len(set(names)) == len(names) and all(len(name) < 64 for name in names)
    with closing(open_new(postgres.url, tmp_path)) as one, closing(open_new(postgres.url, tmp_path)) as two:
        do(one, StoreDocument("d", 1.5, b"text"))
        assert two.read_document("d") is None and one.images_folder != two.images_folder


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql://ben:geheim@[::1", "The URL of the database is not understood"),
        ("postgresql://ben:geheim@127.0.0.1:1/x", "cannot be reached"),
        ("postgresql://ben:geheim@127.0.0.1/x?sslmode=maybe", "cannot be used"),
    ],
)
def test_what_cannot_be_reached_is_said_without_its_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, url: str, sentence: str
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreError, match=sentence) as refused:
        PostgresStore(url, tmp_path, patience=0 if "127.0.0.1:1" in url else 1e9)
    assert isinstance(refused.value, StoreAway) == (sentence == "cannot be reached")
    assert "geheim" not in str(refused.value) + caplog.text


def test_a_database_that_refuses_a_server_is_not_waited_for(postgres: PostgresServer, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match='role "nobody"') as refused:
        PostgresStore(postgres.url.replace("postgres@", "nobody@"), tmp_path, patience=1e9)
    assert not isinstance(refused.value, StoreAway)


def test_without_psycopg_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("rwkv_batch.state.postgres")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"needs psycopg; pip install -r requirements-cluster\.txt\.$"):
        open_store(EngineConfig(state_db="postgresql://h/d"))


# What others do at the same time


def test_a_server_that_was_stopped_is_refused_and_nothing_is_lost(
    postgres: PostgresServer, tmp_path: Path, name: str, store: PostgresStore
) -> None:
    program = ROOT / "test" / "helpers" / "postgres_writer.py"
    command = [sys.executable, str(program), postgres.url, name, str(tmp_path / "other")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/test/helpers"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == "ready\n"
        ids, acknowledged, refused = store.turn_numbers(), set[int](), 0
        for _ in range(10):
            acknowledged.add(int(other.stdout.readline()))
            other.send_signal(signal.SIGSTOP)
            mine = _append(store, next(ids))
            other.send_signal(signal.SIGCONT)
            acknowledged.add(mine)
            while (line := other.stdout.readline()) != "refused\n":
                acknowledged.add(int(line))
            refused += 1
        other.stdin.close()
        rest = other.stdout.read().split()
    acknowledged |= {int(line) for line in rest if line != "refused"}
    assert refused == 10
    found = store.find_session(KEY)
    assert found
    assert set(store.turn_ids(found.head.turn, range(1, 1 << 40))) == acknowledged


def test_a_server_that_stops_within_a_message_holds_no_session_for_long(
    postgres: PostgresServer, tmp_path: Path, name: str
) -> None:
    with closing(PostgresStore(postgres.url, tmp_path, name=name, stopped_ms=200)) as store:
        first = next_turn(1, None)
        do(store, PutTurn(first), PutSession(session(KEY, first), follows=NONE))
        stopped = psycopg.connect(
            postgres.url,
            autocommit=True,
            options=f"-c search_path={name}",
            application_name="rwkv-batch",
        )
        with pytest.raises(psycopg.OperationalError), stopped, stopped.pipeline():
            stopped.execute("BEGIN")
            assert stopped.execute("SELECT key FROM sessions FOR UPDATE").fetchall()
            assert _append(store, 2) == 2
            stopped.execute("SELECT 1").fetchall()
    assert stopped.closed


def _append(store: PostgresStore, id_: int) -> int:
    """A turn behind those that there are; its id."""
    while True:
        found = store.find_session(KEY)
        assert found
        turn = next_turn(id_, store.read_turn(found.head.turn))
        (outcome,) = store.commit([[PutTurn(turn), PutSession(session(KEY, turn), follows=found.head.turn)]])
        if not isinstance(outcome, Refused):
            return id_


def test_a_server_that_stops_in_a_transaction_holds_nobody_up_for_long(
    postgres: PostgresServer, tmp_path: Path, name: str, store: PostgresStore, database: psycopg.Connection
) -> None:
    one, two = chain(1, [5, 5])
    do(store, PutTurn(one), PutSession(session("a", one)))
    database.execute("SET idle_in_transaction_session_timeout = 100")
    database.execute("BEGIN; SELECT 1 FROM sessions FOR UPDATE")  # together, as the time begins at once
    do(store, PutTurn(two), PutSession(session("a", two), follows=one.id))
    with pytest.raises(psycopg.Error, match="idle-in-transaction timeout"):
        database.execute("COMMIT")


def test_of_two_servers_that_begin_a_session_one_is_refused(
    store: PostgresStore, database: psycopg.Connection
) -> None:
    one, two = next_turn(1), next_turn(2)
    database.execute("BEGIN")
    do_it = threading.Thread(target=lambda: outcomes.append(_begin(store, two)))
    outcomes: list[object] = []
    columns = "key, turn, number, tokens, digest, model, updated"
    database.execute(f"INSERT INTO sessions ({columns}) VALUES ('a', 1, 1, 3, '', 1, 1.5)")
    do_it.start()
    while not database.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
        pass  # until the store waits
    database.execute("COMMIT")
    do_it.join()
    assert isinstance(outcomes[0], Conflict) and not has(store, two)
    found = store.find_session("a")
    assert found and found.head.turn == one.id


def _begin(store: PostgresStore, turn) -> object:
    (outcome,) = store.commit([[PutTurn(turn), PutSession(session("a", turn), follows=NONE)]])
    return outcome


def test_a_turn_that_another_server_refers_to_is_not_removed(
    store: PostgresStore, database: psycopg.Connection
) -> None:
    one = next_turn(1)
    do(store, PutTurn(one), PutSession(session("a", one)))
    database.execute("BEGIN")
    database.execute("SELECT 1 FROM turns WHERE id = 1 FOR KEY SHARE")
    columns = "key, turn, number, tokens, digest, model, updated"
    database.execute(f"INSERT INTO sessions ({columns}) VALUES ('b', 1, 1, 3, '', 1, 1.5)")
    deletes = threading.Thread(target=lambda: do(store, DeleteSessions(["a"])))
    deletes.start()
    while not database.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
        pass  # until the store waits
    database.execute("COMMIT")
    deletes.join()
    assert has(store, one) and store.find_session("a") is None


def test_servers_that_note_the_same_models_in_any_order_do_not_wait_for_each_other(
    store: PostgresStore, database: psycopg.Connection
) -> None:
    low, high = sorted(["scale 0.5", "scale 0.7"], key=id_of_model)
    insert = "INSERT INTO models (id, fingerprint, vocabulary) VALUES (%s, %s, 1)"
    database.execute("BEGIN")
    database.execute(insert, (id_of_model(low), low))
    notes = threading.Thread(target=lambda: store.commit([[PutModel(high, 1)], [PutModel(low, 1)]]))
    notes.start()
    while not database.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
        pass  # until the store waits
    database.execute("SET lock_timeout = 1")
    database.execute(insert, (id_of_model(high), high))  # which would be a deadlock, if it held this one
    database.execute("COMMIT")
    notes.join()
    assert database.execute("SELECT count(*) FROM models WHERE vocabulary = 1").fetchone() == (2,)


# Failures of the database


@pytest.mark.parametrize(
    ("code", "reason", "sentence"),
    [
        ("53100", "could not extend file: No space left on device", "The disk of the database is full"),
        ("53000", "could not open file: Too many open files", r"\(could not open .*\); try again later\.$"),
        ("53200", "out of memory", r"\(out of memory\); try again later\.$"),
        ("57014", "canceling statement due to statement timeout", r"\(canceling .*\); try again later\.$"),
        ("58030", "could not read block: Input/output error", r"\(could not read .*\); try again later\.$"),
    ],
)
def test_nothing_is_stored_while_the_disk_fails_and_everything_then(
    store: PostgresStore, database: psycopg.Connection, code: str, reason: str, sentence: str
) -> None:
    """PostgreSQL reports it by these codes (errcodes-appendix of its manual)."""
    one, two = chain(1, [5, 5])
    do(store, PutTurn(one), PutSession(session("a", one)))
    database.execute(
        f"""
        CREATE FUNCTION fails() RETURNS trigger AS $$ BEGIN
            RAISE EXCEPTION '{reason}' USING ERRCODE = '{code}';
        END $$ LANGUAGE plpgsql;
        CREATE TRIGGER fails BEFORE INSERT ON turns EXECUTE FUNCTION fails();""".encode()
    )
    append = [PutTurn(two), PutSession(session("a", two), follows=one.id)]
    with pytest.raises(StoreAway, match=sentence):
        do(store, *append)
    assert store.find_session("a") == session("a", one)
    database.execute("DROP TRIGGER fails ON turns")
    do(store, *append)
    assert store.find_session("a") == session("a", two)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("follows", [NONE, 1])
def test_what_became_of_each_change_is_known_though_the_answer_is_lost(
    postgres: PostgresServer, tmp_path: Path, when, follows: int
) -> None:
    """Some of the changes that are committed together may be refused."""
    proxy = PostgresProxy(postgres.folder)
    with closing(proxy), closing(open_new(proxy.url, tmp_path)) as store:
        one, two, other = *chain(1, [5, 5]), next_turn(3)
        do(store, PutTurn(one), PutSession(session("a", one)))
        proxy.cut_next_commit(when)
        outcomes = store.commit(
            [
                [PutTurn(two), PutSession(session("a", two), follows=follows)],
                [PutTurn(other), PutSession(session("b", other), follows=NONE)],
            ]
        )
        assert proxy.was_cut.is_set()
        assert [isinstance(outcome, Refused) for outcome in outcomes] == [follows == NONE, False]
        assert has(store, other) and has(store, two) == (follows == one.id)


QUESTIONS = {
    "a session": lambda store: store.find_session("a"),
    "sessions by prefix": lambda store: store.list_sessions(None, 9, "a:"),
    "a request": lambda store: store.find_request(b"k"),
    "the description of a start state": lambda store: store.read_document(f"{HIDDEN}start:a"),
    "a model": lambda store: store.model(5),
    "numbers": lambda store: store.status([], [], []),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_must_not_wait_fails_at_once_while_the_database_is_away(
    postgres: PostgresServer, tmp_path: Path, question: str
) -> None:
    proxy = PostgresProxy(postgres.folder)
    with closing(proxy), closing(open_new(proxy.url, tmp_path, patience=1e9)) as store:
        proxy.go_away()
        with pytest.raises(
            StoreAway, match=r"^The database of sessions cannot be reached; try again later\.$"
        ):
            QUESTIONS[question](store)


# States


def test_a_state_without_tokens_is_brought_from_the_database(
    postgres: PostgresServer, tmp_path: Path, name: str, store: PostgresStore
) -> None:
    past, data = unknown_past(1), bytes(range(256)) * 100
    images.write(store.images_folder, past.id, images_of(data))
    do(store, PutTurn(past), PutSession(session("a", past)), put_image(past, len(data), model=7))
    with closing(PostgresStore(postgres.url, tmp_path / "other", name=name)) as other:
        assert other.image_model(past.id) == 7
        assert images.read(other.images_folder, past.id, False).numpy().tobytes() == data
        removed = do(other, DeleteSessions(["a"]))
        assert removed.images == [past.id]
    with closing(PostgresStore(postgres.url, tmp_path / "third", name=name)) as third:
        assert third.image_model(past.id) is None


def images_of(data: bytes):
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_a_limit_is_that_of_the_states_on_the_disk(store: PostgresStore) -> None:
    turns = chain(1, [5, 5, 5])
    do(store, *map(PutTurn, turns), PutSession(session("a", turns[-1])))
    do(store, *(put_image(turn, size=1000, saves=turn.id) for turn in turns))
    assert store.size() == 3000
    assert do(store, Shrink(2000)).images == [1, 2], "those that save least"
    assert store.image_turns() == {3} and has(store, turns[0])


def test_states_of_an_earlier_run_without_rows_are_removed(
    postgres: PostgresServer, tmp_path: Path, name: str
) -> None:
    one = next_turn(1)
    with closing(PostgresStore(postgres.url, tmp_path, name=name)) as store:
        do(store, PutTurn(one), PutSession(session("a", one)), put_image(one))
        for turn in (1, 2):
            images.write(store.images_folder, turn, images_of(b"state"))
        with closing(PostgresStore(postgres.url, tmp_path, name=name)):
            assert len([*store.images_folder.iterdir()]) == 2, "another server may be writing it"
    with closing(PostgresStore(postgres.url, tmp_path, name=name)) as store:
        assert [file.name for file in store.images_folder.iterdir()] == ["1.state"]


def test_an_image_that_cannot_be_noted_goes(store: PostgresStore) -> None:
    """Otherwise files would come without end, of which no limit knows."""
    one = next_turn(1)
    do(store, PutTurn(one), PutSession(session("a", one)))
    with closing(sqlite3.connect(store.images_folder.parent / "index.db")) as index:
        index.execute("DROP TABLE images")
    assert do(store, put_image(one)).images == [1]
    assert has(store, one)


def test_an_index_that_can_only_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ImageIndex(tmp_path).close()
    connect = sqlite3.connect

    def read_only(path: Path, **more: Any) -> sqlite3.Connection:
        """As SQLite opens a file by itself that it may not write."""
        return connect(f"file:{path}?mode=ro", uri=True, **more)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    with pytest.raises(StoreError, match=r"cannot hold states \(attempt to write a readonly database\)"):
        ImageIndex(tmp_path)
    monkeypatch.undo()
    ImageIndex(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_refused(postgres: PostgresServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot hold states .*--image-store"):
        open_new(postgres.url, tmp_path / "file")


@pytest.mark.parametrize("age", [0.0, 2 * 86400.0])
def test_what_a_killed_server_left_of_a_deleted_session_goes_in_time(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, age: float
) -> None:
    """Turns that were in use when their session was deleted, once no server can be using them any more."""
    monkeypatch.setattr(keeping, "SWEEP_ROWS", -1.0)
    kept, left = chain(1, [5, 5, 5]), chain(11, [5, 5, 5], created=time.time() - age)
    do(
        store,
        *map(PutTurn, [*kept, *left]),
        PutSession(session("a", kept[2])),
        PutSession(session("b", left[2])),
    )
    do(store, DeleteSessions(["b"], frozenset({12})))  # the second one is in use
    store.keeper.sweep()
    assert store.keeper.settle(PATIENCE)
    assert [has(store, turn) for turn in kept] == [True, True, True]
    assert [has(store, turn) for turn in left] == ([False] * 3 if age else [True, True, False])

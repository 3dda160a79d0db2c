"""What a server does when its PostgreSQL, the way to it or its own disk fails."""

import io
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from errno import EIO, EMFILE, ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from databases import new_name, open_new
from pools import Bench
from postgres_proxy import PostgresProxy
from postgres_server import PostgresServer
from stores import PATIENCE, chain, do, has, next_turn, session

from rwkv_batch.state import images
from rwkv_batch.state.entries import (
    NONE,
    UNKNOWN,
    DeleteSessions,
    PutSession,
    PutTurn,
    Removed,
    RowDamaged,
    StoreAway,
    StoreDocument,
    StoreError,
    Unavailable,
)
from rwkv_batch.state.jobs import JobThread
from rwkv_batch.state.log.protocol import Wanted
from rwkv_batch.state.log.refreshing import Refresher
from rwkv_batch.state.postgres.copying import PostgresContents
from rwkv_batch.state.postgres.database import connection
from rwkv_batch.state.postgres.database.connection import Database, Outage, PostgresConnection, with_waits
from rwkv_batch.state.postgres.database.schema import schema_of, settings
from rwkv_batch.state.postgres.store import PostgresStore

GATE = 77  # of the advisory lock for which commits wait
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"


def until(database: psycopg.Connection, query: str, count: int) -> None:
    end = time.monotonic() + 60  # a deadline, not a wait
    while (row := database.execute(query).fetchone()) and row[0] != count:
        assert time.monotonic() < end, f"{row[0]} in place of {count}: {query}"


# Connections


def test_a_copy_goes_on_while_a_server_ends_what_holds_its_rows(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    name, one = new_name(), next_turn(1)
    schema = schema_of(name)
    # It goes on trying where this process stands still, and PostgreSQL ends its transaction for that.
    waits = {"patience": 1e9, "stopped_ms": 50}
    with (
        closing(PostgresStore(postgres.url, tmp_path, name=schema, **waits)) as store,
        psycopg.connect(postgres.url, autocommit=True) as database,
    ):
        do(store, PutTurn(one), PutSession(session("a", one)))
        with closing(PostgresContents(postgres.url, name, empty=False)) as copied, database.transaction():
            assert [*copied.sessions()] == [session("a", one)]
            database.execute(f'SELECT 1 FROM "{schema}".sessions FOR UPDATE'.encode())
            with pytest.raises(StoreAway):
                store.commit([[DeleteSessions(["a"])]])  # which ends what is stopped before it gives up
            assert [*copied.turns()] == [one]


def test_what_a_transaction_holds_for_too_long_is_asked_for_later(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """As a change of a table by hand does, for which reads wait as well."""
    name, one = new_name(), next_turn(1)
    with (
        closing(PostgresStore(postgres.url, tmp_path, name=name, stopped_ms=50)) as store,
        psycopg.connect(postgres.url, autocommit=True, options=f"-c search_path={name}") as database,
    ):
        do(store, PutTurn(one), PutSession(session("a", one)))
        with database.transaction():
            database.execute("LOCK TABLE sessions, turns, documents, models IN ACCESS EXCLUSIVE MODE")
            asks: dict[str, Callable[[], object]] = {
                "a session": lambda: store.find_session("a"),
                "a list": lambda: store.list_sessions(None, 10),
                "what has arrived": lambda: store.refresh(Wanted(["a"])),
                "a turn": lambda: store.read_turn(one.id),
                "a document": lambda: store.read_document("d"),
                "a model": lambda: store.model_id("m", 1),
            }
            for what, ask in asks.items():
                with pytest.raises(StoreAway, match=r"holds what is needed .*; try again later"):
                    pytest.fail(f"{what} is {ask()}")
        assert store.find_session("a") == session("a", one)


def test_a_copy_that_cannot_begin_leaves_no_connection(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, connect = list[psycopg.Connection](), psycopg.connect

    def noted(*arguments: Any, **named: Any) -> psycopg.Connection:
        opened.append(connect(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(psycopg, "connect", noted)
    only_reads = f"{postgres.url}&options=-c%20default_transaction_read_only%3Don"
    for url, empty in ((only_reads, True), (postgres.url, False)):  # without the tables that it needs
        with pytest.raises(StoreError):
            PostgresContents(url, new_name(), empty=empty)
    assert len(opened) == 2 and all(each.closed for each in opened)


def test_a_connection_that_was_idle_for_too_long_is_made_again(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    one, document = next_turn(1), StoreDocument("d", 1.5, b"text")
    with (
        closing(open_new(f"{postgres.url}&application_name=idle", tmp_path, patience=0)) as store,
        psycopg.connect(postgres.url, autocommit=True) as database,
    ):
        assert store.keeper.settle(PATIENCE)  # its thread has a connection of its own
        for _ in range(2):
            end_idle(postgres, database, lambda: store.find_session("a"))
            assert store.find_session("a") is None
        end_idle(postgres, database, lambda: do(store, document))
        do(store, PutTurn(one), PutSession(session("a", one), follows=NONE))
        assert has(store, one)


def end_idle(postgres: PostgresServer, database: psycopg.Connection, use: Callable[[], object]) -> None:
    """The connection that `use` has is ended, as it has been idle for too long; no other one is.

    One that is idle already learns of the limit when it is used again.
    """
    use()
    database.execute("SET idle_session_timeout = 0")
    limit_idle(postgres, database, 100)
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'idle'"
    (count,) = database.execute(query).fetchone() or (0,)
    use()
    until(database, query, count - 1)
    limit_idle(postgres, database, 0)


def limit_idle(postgres: PostgresServer, database: psycopg.Connection, milliseconds: int) -> None:
    """From when this returns, of connections that are made."""
    database.execute(f"ALTER SYSTEM SET idle_session_timeout = {milliseconds}".encode())
    database.execute("SELECT pg_reload_conf()")
    query = "SELECT setting FROM pg_settings WHERE name = 'idle_session_timeout'"
    while True:
        with suppress(psycopg.OperationalError), psycopg.connect(postgres.url, autocommit=True) as new:
            if new.execute(query).fetchone() == (str(milliseconds),):
                return


def test_what_a_role_has_by_default_does_not_count(postgres: PostgresServer) -> None:
    url = f"{postgres.url}&options=-c%20default_transaction_isolation%3Dserializable"
    connection = PostgresConnection(url, settings("x", 1000), Outage(0))
    with closing(connection):
        found = connection.run(lambda db: db.execute("SHOW transaction_isolation").fetchone())
    assert found == ("read committed",)


class _Refusing:
    """A host that ends each connection; `asked`: how many there were."""

    def __init__(self) -> None:
        self._listener, self.asked = socket.create_server(("127.0.0.1", 0)), 0
        self.url = f"postgresql://postgres@127.0.0.1:{self._listener.getsockname()[1]}/x"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.asked += 1  # before its client sees the end
                connection.close()

    def close(self) -> None:
        self._listener.close()


def test_who_must_not_wait_leaves_it_to_others_to_look_whether_the_database_is_back() -> None:
    with closing(_Refusing()) as host, closing(_Refusing()) as other:
        outage = Outage(patience=1e9)
        patient, hasty = (PostgresConnection(each.url, "", outage) for each in (host, other))
        errors = list[Exception]()

        def wait() -> None:
            try:
                patient.run(lambda db: None)
            except StoreAway as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while host.asked < 2:
            pass
        with pytest.raises(StoreAway):
            hasty.run(lambda db: None, waits=False)
        assert not other.asked
        patient.close()
        waiting.join()
        with pytest.raises(StoreAway):
            hasty.run(lambda db: None, waits=False)
        assert other.asked and errors


class SlowLock:
    """One that `first` has before whoever asks for it next."""

    first: Callable[[], object] | None = None

    def __enter__(self) -> None:
        first, SlowLock.first = SlowLock.first, None
        if first:
            first()

    def __exit__(self, *_: object) -> None: ...


def test_the_end_of_an_outage_that_two_see_at_once_is_said_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(connection, "Lock", SlowLock)
    caplog.set_level("INFO")
    outage = Outage(30.0)
    assert not outage.lasts(OSError("it is away"))
    SlowLock.first = outage.ended
    outage.ended()
    assert len([each for each in caplog.messages if "reached again" in each]) == 1


def test_what_costs_each_connection_fails_though_others_are_answered(postgres: PostgresServer) -> None:
    outage, asked = Outage(patience=0.1), list[int]()
    one, other = (PostgresConnection(postgres.url, "", outage) for _ in range(2))

    def fatal(database: Database) -> None:
        asked.append(1)
        assert len(asked) < 20, "it is asked again and again"
        other.run(lambda db: db.execute("SELECT 1"))  # so there is no outage
        database.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    with closing(one), closing(other), pytest.raises(StoreAway):
        one.run(fatal)
    assert len(asked) > 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://a,b/x", "read-write"),
        ("postgresql:///x?host=a,b", "read-write"),
        ("postgresql://a,b/x?target_session_attrs=any", "any"),
        ("postgresql://a/x", None),
    ],
)
def test_of_several_hosts_the_one_that_writes_is_used(url: str, expected: str | None) -> None:
    assert psycopg.conninfo.conninfo_to_dict(with_waits(url)).get("target_session_attrs") == expected


# Commits without an answer


def slow_commits(database: psycopg.Connection, name: str) -> None:
    """Transactions that add turns end when the lock is free."""
    database.execute(f"""
        SET search_path TO {name};
        CREATE FUNCTION wait() RETURNS trigger AS $$ BEGIN
            PERFORM pg_advisory_xact_lock({GATE}); RETURN NULL; END $$ LANGUAGE plpgsql;
        CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON turns DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION wait();""")
    database.execute("SELECT pg_advisory_lock(%s)", (GATE,))


@pytest.mark.parametrize("before", [0, 1])
def test_a_commit_that_goes_on_after_its_connection_is_waited_for(
    postgres: PostgresServer, tmp_path: Path, before: int
) -> None:
    """The first commit of a server is waited for, too."""
    proxy, name, turns = PostgresProxy(postgres.folder), new_name(), chain(1, [5, 5])
    with (
        closing(proxy),
        closing(PostgresStore(proxy.url, tmp_path, name=name)) as store,
        psycopg.connect(postgres.url, autocommit=True) as database,
    ):
        for turn in turns[:before]:
            do(store, PutTurn(turn), PutSession(session("a", turn), follows=turn.parent))
        slow_commits(database, name)
        turn, outcomes = turns[before], list[object]()
        group = [PutTurn(turn), PutSession(session("a", turn), follows=turn.parent)]
        commits = threading.Thread(target=lambda: outcomes.extend(store.commit([group])))
        commits.start()
        until(database, WAITING, 1)
        proxy.go_away()
        proxy.come_back()
        until(database, WAITING, 2)
        database.execute("SELECT pg_advisory_unlock(%s)", (GATE,))
        commits.join()
        assert [type(outcome) for outcome in outcomes] == [Removed] and has(store, turn)


def test_it_is_said_that_a_turn_may_have_been_stored(postgres: PostgresServer, tmp_path: Path) -> None:
    proxy, name, (one, two) = PostgresProxy(postgres.folder), new_name(), chain(1, [5, 5])
    with (
        closing(proxy),
        closing(PostgresStore(proxy.url, tmp_path, name=name, patience=0)) as store,
        psycopg.connect(postgres.url, autocommit=True) as database,
    ):
        slow_commits(database, name)
        errors = list[Exception]()

        def commit() -> None:
            try:
                do(store, PutTurn(one), PutSession(session("a", one), follows=NONE))
            except StoreAway as error:
                errors.append(error)

        commits = threading.Thread(target=commit)
        commits.start()
        until(database, WAITING, 1)
        proxy.go_away()
        commits.join()
        database.execute("SELECT pg_advisory_unlock(%s)", (GATE,))
        with pytest.raises(StoreAway, match=r"cannot be reached; try again later\.$"):
            do(store, PutTurn(two), PutSession(session("a", two), follows=one.id))
        assert [str(error).endswith(UNKNOWN) for error in errors] == [True]


class Appending:
    """A server whose thread appends turns to sessions, each behind what the database has."""

    def __init__(self, store: PostgresStore, keys: Sequence[str]) -> None:
        self._store, self._keys = store, keys
        self.acknowledged: dict[str, list[int]] = {key: [] for key in keys}
        self.doubtful, self.refused = set[int](), threading.Event()
        self.back, self._stop, self._changed = threading.Event(), threading.Event(), threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait(self, more: int) -> None:
        """Until so many more turns of each session have been acknowledged."""
        wanted = {key: len(ids) + more for key, ids in self.acknowledged.items()}
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(len(self.acknowledged[key]) >= count for key, count in wanted.items()), 120
            )

    def stop(self) -> None:
        self._stop.set()
        self.back.set()
        self._thread.join()

    def _run(self) -> None:
        ids = self._store.turn_numbers()
        while not self._stop.is_set():
            for key in self._keys:
                id_ = next(ids)
                try:
                    self._append(key, id_)
                except StoreAway as error:
                    if UNKNOWN in str(error):
                        self.doubtful.add(id_)
                    if "cannot be reached" in str(error):  # else the other server holds the session
                        self.refused.set()
                        self.back.wait()

    def _append(self, key: str, id_: int) -> None:
        found = self._store.find_session(key)
        turn = next_turn(id_, self._store.read_turn(found.head.turn) if found else None)
        put = PutSession(session(key, turn), follows=turn.parent)
        (outcome,) = self._store.commit([[PutTurn(turn), put]])
        if isinstance(outcome, Removed):  # else the other server was first
            with self._changed:
                self.acknowledged[key].append(id_)
                self._changed.notify_all()


def test_kill_9_of_the_database_loses_no_turn_and_leaves_one_history_of_each_session(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    name = new_name()
    with ExitStack() as at_end:
        stores = [
            at_end.enter_context(closing(PostgresStore(postgres.url, tmp_path / each, name=name, patience=0)))
            for each in ("one", "two")
        ]
        servers = [
            Appending(store, ["both", each]) for store, each in zip(stores, ("one", "two"), strict=True)
        ]
        for server in servers:
            at_end.callback(server.stop)
        for server in servers:
            server.wait(3)
        postgres.kill()
        try:
            assert all(server.refused.wait(120) for server in servers)
        finally:
            postgres.start()
        for server in servers:
            server.back.set()
        for server in servers:
            server.wait(3)
            server.stop()
        for key in ("both", "one", "two"):
            found = stores[0].find_session(key)
            assert found
            history = stores[0].turn_ids(found.head.turn, range(1, 1 << 40))
            acknowledged = {id_ for server in servers for id_ in server.acknowledged.get(key, ())}
            assert len(history) == len(set(history)) == found.head.number
            assert acknowledged <= {*history} <= acknowledged | servers[0].doubtful | servers[1].doubtful


# What is missing


def test_what_others_have_removed_is_seen_as_soon_as_it_is_missed(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    name, (one, two) = new_name(), chain(1, [5, 5])
    with (
        closing(PostgresStore(postgres.url, tmp_path, name=name)) as store,
        closing(PostgresStore(postgres.url, tmp_path, name=name)) as other,
    ):
        do(store, PutTurn(one), PutTurn(two), PutSession(session("a", two)))
        store.refresh(Wanted(["a"]))
        do(other, DeleteSessions(["a"]))
        assert store.find_session("a") == session("a", two), "as it has just been read"
        with pytest.raises(RowDamaged):
            store.read_turn(two.id)
        assert store.find_session("a") is None


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "of another state": lambda file: file.write_bytes(bytes(len(file.read_bytes()))),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("full", [False, True])
def test_a_state_that_this_disk_has_lost_comes_from_the_database(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, full: bool
) -> None:
    """The disk may be full meanwhile."""
    name = new_name()
    with closing(Bench(store=PostgresStore(postgres.url, tmp_path, name=name))) as bench:
        bench.begin_in("a", b"past", 5)
        expected = bench.look("a")
    store = PostgresStore(postgres.url, tmp_path, name=name)
    (file,) = store.images_folder.iterdir()
    DAMAGE[damage](file)
    with closing(Bench(store=store)) as bench:
        if full:
            with monkeypatch.context() as patched, pytest.raises(LookupError, match="No space left"):
                patched.setattr(images, "write", _no_room)
                bench.look("a")
        assert bench.look("a") == expected


def test_a_session_whose_turns_are_not_found_stays(postgres: PostgresServer, tmp_path: Path) -> None:
    """A database that only reads, and lags behind, does not find them."""
    name = new_name()
    with closing(Bench(store=PostgresStore(postgres.url, tmp_path, name=name))) as bench:
        bench.turn("a", [1, 2, 3])
        expected = bench.look("a")
    with (
        closing(Bench(store=PostgresStore(postgres.url, tmp_path / "other", name=name))) as bench,
        psycopg.connect(postgres.url, autocommit=True, options=f"-c search_path={name}") as database,
    ):
        database.execute("UPDATE turns SET id = id + 1")
        with pytest.raises(LookupError, match="missing"):
            bench.look("a")
        bench.settle()
        database.execute("UPDATE turns SET id = id - 1")
        assert bench.look("a") == expected


# Files of states


class FailingFiles:
    """While `errno` is set, files of states cannot be opened so, to be read or to be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
        self.errno = 0
        for owner in (os, io):
            monkeypatch.setattr(owner, "open", partial(self._open, owner.open, suffix))

    def _open(self, real: Callable[..., Any], suffix: str, path: Any, *arguments: Any, **named: Any) -> Any:
        if self.errno and str(path).endswith(suffix):
            raise OSError(self.errno, os.strerror(self.errno))
        return real(path, *arguments, **named)


@pytest.mark.parametrize("errno", [EMFILE, EIO, ENOSPC])
@pytest.mark.parametrize("suffix", [".part", ".state"])
def test_a_state_whose_file_cannot_be_used_now_is_refused_for_now(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, errno: int
) -> None:
    """Where it is written, and where it is read again for the database."""
    name, files = new_name(), FailingFiles(monkeypatch, suffix)
    with closing(Bench(store=PostgresStore(postgres.url, tmp_path, name=name))) as bench:
        bench.begin_in("a", b"past", 5)
        data = bench.do(bench.pool.files.export, "a", "state").value
        files.errno = errno
        error = bench.do(partial(bench.import_, "b", data)).error
        assert isinstance(error, Unavailable) and os.strerror(errno) in error
        files.errno = 0
        bench.settle()
        assert bench.pool.find("b") is None
        assert len([*bench.pool.store.images_folder.iterdir()]) == 1
        assert bench.do(partial(bench.import_, "b", data)).error is None
        assert bench.look("b") == bench.look("a")


class FailingIndex:
    """While `fails`, no index of images can be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails, connect = False, sqlite3.connect

        def connected(*arguments: Any, **named: Any) -> sqlite3.Connection:
            database = connect(*arguments, **named)
            database.set_authorizer(self._asked)
            return database

        monkeypatch.setattr(sqlite3, "connect", connected)

    def _asked(self, action: int, *_: object) -> int:
        writes = action in (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_DELETE)
        return sqlite3.SQLITE_DENY if self.fails and writes else sqlite3.SQLITE_OK


def test_no_file_of_a_state_stays_where_the_index_of_images_cannot_be_written(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, name = FailingIndex(monkeypatch), new_name()
    with closing(Bench(store=PostgresStore(postgres.url, tmp_path, name=name))) as bench:
        folder = bench.pool.store.images_folder
        for key in "ab":
            bench.begin_in(key, b"past", 5)
        expected = bench.look("a")
        index.fails = True
        assert bench.delete("b") == 1
        bench.settle()
        assert len([*folder.iterdir()]) == 1
        assert len(bench.pool.store.image_turns()) == 2, "its row is still there"
        index.fails = False
        bench.begin_in("c", b"past", 5)
        assert bench.delete("c") == 1
        bench.settle()
        assert len([*folder.iterdir()]) == len(bench.pool.store.image_turns()) == 1
    with closing(Bench(store=PostgresStore(postgres.url, tmp_path / "other", name=name))) as bench:
        index.fails = True
        with pytest.raises(LookupError, match="index of states cannot be written"):
            bench.look("a")
        assert not [*bench.pool.store.images_folder.iterdir()]
        index.fails = False
        assert bench.look("a") == expected


# Reads for all that has arrived


class _Failing:
    """A database in which one session cannot be read, by a fault that nobody has thought of."""

    def refresh(self, wanted: Wanted) -> None:
        if "bad" in wanted.keys:
            raise ValueError("a fault")


def test_one_that_cannot_be_read_keeps_nobody_waiting() -> None:
    begin, end, errors = threading.Event(), threading.Event(), dict[str, str | None]()
    thread = JobThread("finds", lambda callback: callback())
    refresher = Refresher(_Failing(), thread)  # type: ignore[arg-type]
    thread.put(begin.wait)
    for key in ("good", "bad", "other"):
        refresher.put(Wanted([key]), lambda error, key=key: errors.update({key: error}))
    begin.set()
    thread.put(end.set)
    assert end.wait(60)
    refresher.close()
    assert errors["good"] is None and errors["other"] is None and errors["bad"]

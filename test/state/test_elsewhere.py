"""States that other servers have made: in a store that servers share, and at the servers themselves."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psycopg
import pytest
from databases import new_name
from faulty_objects import PROTOCOL, FaultyObjects
from pools import BEGINNING, Bench, after
from postgres_server import PostgresServer
from serving import until

from rwkv_batch.state.elsewhere import fetching, keeping
from rwkv_batch.state.elsewhere.fetching import Sources
from rwkv_batch.state.elsewhere.objects import Bounded, Objects
from rwkv_batch.state.elsewhere.peers import PATH, Peers
from rwkv_batch.state.entries import StoreError
from rwkv_batch.state.postgres.store import PostgresStore

URL = f"{PROTOCOL}://bucket/prefix"
SECRET = "s" * 32
FIRST, SECOND = list(range(1, 9)), list(range(20, 30))
END = after(BEGINNING, FIRST + SECOND)
PATIENCE = 60.0  # seconds until something that does not come is a failure


@pytest.fixture(autouse=True)
def objects() -> Iterator[type[FaultyObjects]]:
    FaultyObjects.renew()
    yield FaultyObjects
    FaultyObjects.renew()


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for some seconds has not missed a state, and asks nobody again."""
    monkeypatch.setattr(fetching, "MOST", PATIENCE)
    monkeypatch.setattr(fetching, "REST", 3600.0)


@pytest.fixture
def name() -> str:
    return new_name()


@pytest.fixture
def opened(postgres: PostgresServer, tmp_path: Path, name: str) -> Callable[..., PostgresStore]:
    """The database as a server sees it, with a disk of its own."""

    def store(server: str, objects: str | None = URL, peers: Peers | None = None) -> PostgresStore:
        return PostgresStore(postgres.url, tmp_path / server, name=name, sources=Sources(objects, peers))

    return store


@pytest.fixture
def database(postgres: PostgresServer, name: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres.url, autocommit=True, options=f"-c search_path={name}") as connection:
        yield connection


def talk(store: PostgresStore, key: str = "a") -> None:
    """A server has two turns of a session, stores the state at the end, and ends."""
    bench = Bench(store=store)
    bench.turn(key, FIRST)
    bench.turn(key, SECOND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rwkv_batch.state.postgres.store.SHARE_SECONDS", PATIENCE)
        bench.close()


def resume(bench: Bench, key: str = "a") -> list[int]:
    """Begin a turn of the session; what was fed for that. The state is that of all its tokens."""
    session = bench.pool.find(key)
    assert session
    slot = bench.slot()
    result = bench.do(bench.pool.load, session, slot)
    assert result.error is None
    replay: list[int] = result.value.replay
    bench.feed(slot, replay)
    assert bench.state(slot) == END
    bench.release(slot)
    return replay


def settled(store: PostgresStore) -> None:
    assert store.keeper.settle(PATIENCE)


# A store that servers share


def test_the_state_of_a_server_that_has_gone_is_taken_from_the_store(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects]
) -> None:
    talk(opened("one"))
    assert len(objects.kept) == 1
    with closing(Bench(store=opened("two"))) as two:
        assert resume(two) == []


def test_a_url_of_files_is_a_store(
    opened: Callable[..., PostgresStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "SWEEP_ROWS", -1.0)
    url = f"file://{tmp_path}/share/d"
    talk(opened("one", url))
    (kept,) = (tmp_path / "share").rglob("*.state")
    kept.with_name("5.state").touch()
    store = opened("two", url)
    with closing(Bench(store=store)) as two:
        store.keeper.sweep()
        settled(store)
        assert [*(tmp_path / "share").rglob("*.*")] == [kept]
        assert resume(two) == []


def test_without_a_store_the_tokens_are_fed(opened: Callable[..., PostgresStore]) -> None:
    talk(opened("one", None))
    with closing(Bench(store=opened("two", None))) as two:
        assert resume(two) == FIRST + SECOND


def test_a_state_whose_tokens_are_fed_sooner_is_not_fetched(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects]
) -> None:
    talk(opened("one"))
    with closing(Bench(store=opened("two"), replay_rate=1e9)) as two:
        assert resume(two) == FIRST + SECOND
    assert not objects.reads


@pytest.mark.parametrize("bad", ["damaged", "cut short", "too long", "empty", "missing"])
def test_what_is_not_the_state_is_passed_over_and_removed(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects], bad: str
) -> None:
    talk(opened("one"))
    ((path, data),) = objects.kept.items()
    changed = {
        "damaged": data[:-1] + bytes([data[-1] ^ 1]),
        "cut short": data[:-1],
        "too long": data * 3,
        "empty": b"",
    }
    objects.kept = {path: changed[bad]} if bad in changed else {}
    store = opened("two")
    with closing(Bench(store=store)) as two:
        assert resume(two) == FIRST + SECOND
        store.keeper.sweep()
        settled(store)
        assert objects.kept == {}


def test_a_store_that_fails_is_not_asked_again_at_once(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects]
) -> None:
    talk(opened("one"))
    talk(opened("three"), "b")
    objects.fails_to_read = OSError("it is down")
    with closing(Bench(store=opened("two"))) as two:
        assert resume(two) == resume(two, "b") == FIRST + SECOND
    assert objects.reads == 1


def test_a_store_that_does_not_answer_delays_a_turn_once_and_never_the_end(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(opened("one"))
    talk(opened("three"), "b")
    monkeypatch.setattr(fetching, "MOST", 2.0)  # of which the database may need some
    monkeypatch.setattr(fetching, "REST", 0.0)
    objects.holds = threading.Event()
    with closing(Bench(store=opened("two"))) as two:
        assert resume(two) == FIRST + SECOND
        assert resume(two, "b") == FIRST + SECOND
    assert objects.reads == 1  # the second call has not been begun behind the one that hangs


def test_a_full_store_costs_no_turn_and_gets_the_states_when_there_is_room(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "REST", 0.01)
    failed = threading.Event()

    class Full(OSError):
        def __str__(self) -> str:
            failed.set()
            return "no room"

    objects.fails_to_write = Full()
    store = opened("one")
    with closing(Bench(store=store, replay_tokens=4)) as one:
        one.turn("a", FIRST)
        one.settle()
        assert failed.wait(PATIENCE) and objects.kept == {}
        one.turn("a", SECOND)
        objects.fails_to_write = None
        one.settle()
        while len(objects.kept) < 2:  # both images
            settled(store)


def test_more_states_than_may_wait_are_not_kept_for_a_store_that_is_away(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "MOST_WAITING", 2)
    objects.holds = threading.Event()
    store = opened("one")
    with closing(Bench(store=store, replay_tokens=4)) as one:
        for key in "abcdef":
            one.turn(key, FIRST)
            one.settle()
        objects.holds.set()
        settled(store)
        assert 2 <= len(objects.kept) <= 3  # one was on its way


def test_what_a_server_deletes_goes_from_the_store_and_from_the_disk_of_the_others(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects]
) -> None:
    store = opened("one")
    with closing(Bench(store=store, replay_tokens=4)) as one, closing(Bench(store=opened("two"))) as two:
        one.turn("a", FIRST)
        one.turn("b", FIRST)
        one.settle()
        settled(store)
        assert len(objects.kept) == len([*store.images_folder.iterdir()]) == 2
        assert two.delete("a") == 1
        settled(two.pool.store)
        assert len(objects.kept) == 1
        store.keeper.sweep()
        settled(store)
        assert len([*store.images_folder.iterdir()]) == len(store.image_turns()) == 1
        assert store.find_session("b")


def test_an_object_whose_deletion_fails_is_removed_later(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects]
) -> None:
    talk(opened("one"))
    store = opened("two")
    with closing(Bench(store=store)) as two:
        objects.fails_to_write = OSError("it is down")
        two.delete("a")
        settled(store)
        assert len(objects.kept) == 1
        objects.fails_to_write = None
        store.keeper.sweep()
        settled(store)
        assert objects.kept == {}


def test_an_object_that_was_never_finished_is_removed(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects], database: psycopg.Connection
) -> None:
    talk(opened("one"))
    database.execute("UPDATE objects SET stored = false, changed = now() - interval '2 hours'")
    store = opened("two")
    with closing(store):
        settled(store)
        assert objects.kept == {}
        assert database.execute("SELECT count(*) FROM objects").fetchone() == (0,)


@pytest.mark.parametrize("looked_at", [keeping.LOOKED_AT, 0.11])
def test_objects_that_no_server_knows_are_removed(
    opened: Callable[..., PostgresStore],
    objects: type[FaultyObjects],
    monkeypatch: pytest.MonkeyPatch,
    looked_at: float,
) -> None:
    """As those of a server that was killed while it wrote, and its turn removed. Of many some at a time."""
    talk(opened("one"))
    (known,) = objects.kept
    folder, objects.kept["elsewhere/5.state"] = known.rpartition("/")[0], b""
    others = {f"{folder}/{name}": b"" for name in ("5.state.part", "05.state", "x.state")}
    stays = {known, "elsewhere/5.state", *others}
    objects.kept |= others | {f"{folder}/{turn}.state": b"" for turn in range(10, 100)}
    monkeypatch.setattr(keeping, "SWEEP_ROWS", -1.0)
    monkeypatch.setattr(keeping, "LOOKED_AT", looked_at)
    store = opened("two")
    with closing(Bench(store=store)) as two:
        for _ in range(500):
            store.keeper.sweep()
            settled(store)
            if objects.kept.keys() == stays:
                break
        assert objects.kept.keys() == stays and resume(two) == []


def test_an_object_that_is_written_now_is_known(
    opened: Callable[..., PostgresStore],
    objects: type[FaultyObjects],
    monkeypatch: pytest.MonkeyPatch,
    held: "HeldWrites",
) -> None:
    store = opened("one")
    with closing(Bench(store=store, replay_tokens=4)) as one, closing(Bench(store=opened("two"))) as two:
        one.turn("a", FIRST)
        one.settle()
        assert held.begun.wait(PATIENCE)
        session = one.pool.find("a")
        assert session
        path = f"bucket/prefix/{store.images_folder.parent.name}/{session.head.turn}.state"
        objects.kept[path] = b"its beginning"
        monkeypatch.setattr(keeping, "SWEEP_ROWS", -1.0)
        two.pool.store.keeper.sweep()
        settled(two.pool.store)
        assert path in objects.kept
        held.go_on.set()
        settled(store)


@pytest.fixture
def held(objects: type[FaultyObjects], monkeypatch: pytest.MonkeyPatch) -> "HeldWrites":
    return HeldWrites(objects, monkeypatch)


class HeldWrites:
    """What is written to the store waits: `begun` is set when a write comes; `go_on` lets all be done."""

    def __init__(self, objects: type[FaultyObjects], monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.calls = threading.Event(), threading.Event(), list[str]()
        write, remove = objects.pipe_file, objects.rm_file

        def pipe_file(store: FaultyObjects, path: str, value: bytes) -> None:
            self.calls.append("write")
            self.begun.set()
            assert self.go_on.wait(PATIENCE)
            write(store, path, value)

        def rm_file(store: FaultyObjects, path: str) -> None:
            self.calls.append("remove")
            remove(store, path)

        monkeypatch.setattr(objects, "pipe_file", pipe_file)
        monkeypatch.setattr(objects, "rm_file", rm_file)


def test_a_state_on_its_way_to_the_store_goes_with_its_session(
    opened: Callable[..., PostgresStore], objects: type[FaultyObjects], held: HeldWrites
) -> None:
    store = opened("one")
    with closing(Bench(store=store, replay_tokens=4)) as one, closing(Bench(store=opened("two"))) as two:
        one.turn("a", FIRST)
        one.settle()
        assert held.begun.wait(PATIENCE)
        assert two.delete("a") == 1
        settled(two.pool.store)
        held.go_on.set()
        settled(store)
        assert objects.kept == {}


def test_what_is_deleted_goes_before_more_states_come(
    opened: Callable[..., PostgresStore], held: HeldWrites
) -> None:
    store = opened("one")
    with closing(Bench(store=store, replay_tokens=4)) as one:
        for key in "abc":
            one.turn(key, FIRST)
            one.settle()
        assert held.begun.wait(PATIENCE)
        assert one.delete("a") == 1
        held.go_on.set()
        settled(store)
    assert held.calls[:2] == ["write", "remove"] and held.calls.count("write") == 3


def test_a_state_is_found_while_the_keeper_waits_for_the_database(
    opened: Callable[..., PostgresStore], database: psycopg.Connection
) -> None:
    talk(opened("one"))
    store = opened("two")
    with closing(Bench(store=store)) as two:
        settled(store)
        database.execute("INSERT INTO objects VALUES (77, %s, 1, true, true, now())", (URL,))
        with database.transaction():
            database.execute("SELECT 1 FROM objects WHERE turn = 77 FOR UPDATE")
            store.keeper.sweep()
            until(lambda: waits_for_a_lock(database))
            assert resume(two) == []


def waits_for_a_lock(database: psycopg.Connection) -> bool:
    return database.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None


@pytest.mark.parametrize("url", ["nothing://bucket", "reference://x"])
def test_a_url_that_is_none_is_refused_at_the_start(opened: Callable[..., PostgresStore], url: str) -> None:
    with pytest.raises(StoreError, match=r"--image-store"):
        opened("one", url).close()


def test_a_password_in_the_url_is_in_no_message(objects: type[FaultyObjects]) -> None:
    store = Objects(f"{PROTOCOL}://user:secret@bucket/prefix", "1")
    objects.fails_to_read = OSError("user:secret@bucket is away")
    with pytest.raises(StoreError, match=r"faulty://bucket/prefix cannot be used \(bucket is away\)"):
        store.read(1, 10, PATIENCE)
    with pytest.raises(StoreError, match="nothing://host") as refused:
        Objects("nothing://user:secret@host", "1")
    assert "secret" not in store.url + str(refused.value)


def test_a_call_that_is_cancelled_does_not_end_those_behind_it(objects: type[FaultyObjects]) -> None:
    store = Objects(URL, "1")
    objects.fails_to_read = asyncio.CancelledError()  # type: ignore[assignment]
    with pytest.raises(StoreError, match="CancelledError"):
        store.read(1, 10, PATIENCE)
    objects.fails_to_read = None
    assert store.read(1, 10, PATIENCE) is None


# Other servers


class _Peer:
    """A server that gives the states that a pool has. `gives`: in place of them; `says`: which status."""

    def __init__(self) -> None:
        self.gives: bytes | None = None
        self.says, self.asked, self.secrets = 200, 0, set[str]()
        self.goes_on = threading.Event()
        self.goes_on.set()
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                peer.asked += 1
                peer.secrets.add(self.headers["Authorization"])
                assert self.path.startswith(f"{PATH}?turn=")
                self.send_response(peer.says)
                data = peer.gives or b""
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[:100])
                self.wfile.flush()
                assert peer.goes_on.wait(PATIENCE)
                self.wfile.write(data[100:])

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def peer() -> Iterator[_Peer]:
    with closing(_Peer()) as one:
        yield one


@contextmanager
def moved(
    opened: Callable[..., PostgresStore], peer: _Peer, key: str = "a", secret: str = SECRET
) -> Iterator[Bench]:
    """A session whose server goes on, and the pool of another server to which it has moved."""
    one = Bench(store=opened("one", None, Peers(peer.address, secret)))
    two = Bench(store=opened("two", None, Peers("127.0.0.1:1", secret)))
    with closing(one), closing(two):
        one.turn(key, FIRST)
        one.turn(key, SECOND)
        session = one.pool.find(key)
        assert session
        if peer.gives is None:
            peer.gives = one.do(one.pool.files.state, session.head.turn).value
        yield two


def test_a_session_that_moves_takes_its_state_along(
    opened: Callable[..., PostgresStore], peer: _Peer
) -> None:
    with moved(opened, peer) as two:
        assert resume(two) == []
    assert peer.asked == 1 and peer.secrets == {f"Bearer {SECRET}"}


def test_a_state_on_the_disk_of_the_other_server_is_given_too(
    opened: Callable[..., PostgresStore],
) -> None:
    with closing(Bench(store=opened("one", None), l1=1, l2=0)) as one:
        for key in "abc":
            one.turn(key, FIRST)
        one.settle()
        session = one.pool.find("a")
        assert session and one.tier("a") == "L3"
        data = one.do(one.pool.files.state, session.head.turn).value
        assert len(data) == one.pool.parts.transfer.layout.size
        assert one.do(one.pool.files.state, 12345).value == b""


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_server_that_refuses_costs_the_feeding_of_tokens(
    opened: Callable[..., PostgresStore], peer: _Peer, status: int
) -> None:
    peer.says = status
    with moved(opened, peer) as two:
        assert resume(two) == FIRST + SECOND


def test_a_damaged_or_endless_answer_is_passed_over(
    opened: Callable[..., PostgresStore], peer: _Peer
) -> None:
    peer.gives = bytes(10 << 20)
    with moved(opened, peer) as two:
        assert resume(two) == FIRST + SECOND


def test_a_server_that_stops_in_the_middle_is_left_and_not_asked_again(
    opened: Callable[..., PostgresStore], peer: _Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "MOST", 2.0)  # of which the database may need some
    peer.goes_on.clear()
    with moved(opened, peer) as two:
        assert resume(two) == FIRST + SECOND
        assert resume(two) == FIRST + SECOND
    assert peer.asked == 1


def test_a_name_that_the_system_looks_up_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found, over = threading.Event(), threading.Event()

    def look_up(*_: object, **__: object) -> list[object]:
        assert found.wait(PATIENCE)
        over.set()
        raise socket.gaierror("there is no such host")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(StoreError, match="host:1 gives no states"):
        Peers("127.0.0.1:1", SECRET).read("host:1", 1, 10, 0.05)
    found.set()
    assert over.wait(PATIENCE)


def test_a_server_that_sends_its_head_byte_by_byte_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, given_up = f"127.0.0.1:{listener.getsockname()[1]}", threading.Event()

        def dribble() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # it is closed at the other end, once nobody waits any more
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Endless: ")
                while not given_up.wait(0.001):
                    connection.sendall(b"x")

        server = threading.Thread(target=dribble)
        server.start()
        with pytest.raises(StoreError, match=f"{address} gives no states"):
            Peers("127.0.0.1:1", SECRET).read(address, 1, 10, 0.1)
        is_sending = server.is_alive()
        given_up.set()
        server.join()
    assert is_sending


def test_a_server_that_is_gone_costs_the_feeding_of_tokens(
    opened: Callable[..., PostgresStore], peer: _Peer
) -> None:
    with moved(opened, peer) as two:
        peer.close()
        assert resume(two) == FIRST + SECOND


def test_a_secret_is_in_no_text_about_the_parts_that_have_it(
    opened: Callable[..., PostgresStore], peer: _Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.says = 401
    with moved(opened, peer) as two:
        resume(two)
    assert caplog.text and SECRET not in caplog.text
    assert SECRET not in repr(Sources(None, Peers(peer.address, SECRET)))


def test_a_thread_that_could_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Bounded("calls")

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError):
            calls.run(lambda: 1, 10)
    assert calls.run(lambda: 2, 10) == 2

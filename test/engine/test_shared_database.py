"""Engines of several servers over one database in PostgreSQL."""

import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from databases import new_name
from engine_driver import PROMPTS, Driver
from postgres_proxy import PostgresProxy
from postgres_server import PostgresServer

from rwkv_batch.state.entries import Done
from rwkv_batch.state.postgres.store import PostgresStore
from rwkv_batch.wire.commands import (
    DeleteSession,
    ExportSession,
    ForkSession,
    ImportSession,
    ListRequests,
    PauseRequest,
    SessionHistory,
    StopRequest,
)
from rwkv_batch.wire.protocol import (
    Accepted,
    CommandReply,
    Event,
    Progress,
    Rejected,
    RequestInfo,
    SessionTurn,
)

AWAY = "The database of sessions cannot be reached"


class Cluster:
    """Servers, each with a disk of its own, and what is between them and their database."""

    def __init__(self, server: PostgresServer, folder: Path, patience: float) -> None:
        self.proxy, self._folder, self._patience = PostgresProxy(server.folder), folder, patience
        self._name, self._numbers = new_name(), count()
        self.drivers: list[Driver] = []

    def start(self, **options) -> Driver:
        folder = self._folder / str(next(self._numbers))
        store = PostgresStore(self.proxy.url, folder, name=self._name, patience=self._patience)
        driver = Driver(store, l1=4, **options)
        self.drivers.append(driver)
        return driver

    def close(self) -> None:
        for driver in self.drivers:
            driver.engine.close()
        self.proxy.close()


@pytest.fixture
def cluster(postgres: PostgresServer, tmp_path: Path) -> Iterator[Cluster]:
    with closing(Cluster(postgres, tmp_path, patience=60)) as running:
        yield running


@pytest.fixture
def impatient(postgres: PostgresServer, tmp_path: Path) -> Iterator[Cluster]:
    """Requests that need the database fail as soon as it is away."""
    with closing(Cluster(postgres, tmp_path, patience=0)) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, int]]:
    """The conversation of PROMPTS by one server without a database."""
    return Driver().conversation("a")


def refusal(driver: Driver, name: str) -> Rejected:
    *_, last = driver.until(name, (Progress, Rejected))
    assert isinstance(last, Rejected), last
    return last


def test_a_session_goes_on_by_any_server(cluster: Cluster, expected: list[tuple[str, int]]) -> None:
    servers = [cluster.start(), cluster.start()]
    said = [servers[number % 2].say(prompt, "a") for number, prompt in enumerate(PROMPTS)]
    assert said == expected
    histories = [server.ask(SessionHistory("history", "a")).turns for server in servers]
    assert histories[0] == histories[1] and len(histories[0]) == len(PROMPTS)


def test_a_session_goes_on_by_a_server_that_starts_later(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    said = [cluster.start().say(prompt, "a") for prompt in PROMPTS]
    assert said == expected


def test_of_two_turns_at_once_one_is_refused_and_the_session_goes_on(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    one, two = cluster.start(), cluster.start()
    assert one.say(PROMPTS[0], "a") == expected[0]
    late = two.add([7, 8], "a", max_tokens=30, flush_tokens=1)
    while not two.text(late):
        two.step()
    assert one.say(PROMPTS[1], "a") == expected[1]
    refused = refusal(two, late)
    assert refused.reason == "conflict" and "send the request again" in refused.message
    assert two.say(PROMPTS[2], "a") == expected[2], "from where the other server has left it"
    assert one.say(PROMPTS[3], "a") == expected[3]


def test_a_turn_that_another_server_has_overtaken_is_refused_though_its_session_is_deleted_meanwhile(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    one, two = cluster.start(), cluster.start()
    one.say(PROMPTS[0], "a")
    # That of the second is still under way when its server has looked the session up for the deletion.
    lengths = {one: 30, two: 2000}
    turns = {
        driver: driver.add([7, 8], "a", max_tokens=most, flush_tokens=1) for driver, most in lengths.items()
    }
    for driver, name in turns.items():
        while not driver.text(name):
            driver.step()
    one.said(turns[one])
    assert two.ask(DeleteSession("delete", "a")).found == 1
    assert refusal(two, turns[two]).reason == "conflict"


def test_deleted_forked_and_moved_sessions_are_so_on_every_server(cluster: Cluster) -> None:
    one, two = cluster.start(), cluster.start()
    one.say(PROMPTS[0], "a")
    two.ask(ForkSession("fork", "a", "b"))
    assert one.say(PROMPTS[1], "b") == two.say(PROMPTS[1], "a")
    state = one.ask(ExportSession("export", "b", "state")).data
    two.ask(ImportSession("import", "c", state))
    assert one.say(PROMPTS[2], "c") == two.say(PROMPTS[2], "b"), "a state without tokens moves too"
    assert two.ask(DeleteSession("delete", "a")).found == 1
    one.engine.command((b"test", "late"), SessionHistory("late", "a"))
    assert refusal(one, "late").reason == "not_found"


def test_branches_of_a_tree_get_numbers_of_their_own_on_each_server(cluster: Cluster) -> None:
    servers = [cluster.start(), cluster.start()]
    servers[0].say(PROMPTS[0], "tree")
    taken = []
    for number in range(4):
        server = servers[number % 2]
        name = server.add([9], turn=SessionTurn(source="tree", branch="tree"))
        accepted, *_ = server.until(name, (Progress, Rejected))
        assert isinstance(accepted, Accepted)
        taken.append(accepted.target)
    assert taken == ["tree:1", "tree:2", "tree:3", "tree:4"]


# A database that is away


def test_a_turn_waits_for_a_database_that_comes_back(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    driver = cluster.start()
    assert driver.say(PROMPTS[0], "a") == expected[0]
    cluster.proxy.go_away()
    waiting = driver.add(PROMPTS[1], "a")
    other = driver.say([5], None)
    assert other[1] == 6, "what needs no session is answered"
    assert not driver.text(waiting)
    cluster.proxy.come_back()
    assert driver.said(waiting) == expected[1]
    assert driver.say(PROMPTS[2], "a") == expected[2]


def test_a_turn_whose_commit_finds_no_database_is_committed_when_it_is_back(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    driver = cluster.start()
    running = driver.add(PROMPTS[0], "a", flush_tokens=1)
    while not driver.text(running):
        driver.step()
    cluster.proxy.go_away()
    events: list[Event] = driver.events[running]
    while driver.engine.busy:  # until nothing is left but the commit
        driver.step()
    assert not any(row.finish_reason for event in events if isinstance(event, Progress) for row in event.rows)
    cluster.proxy.come_back()
    assert driver.said(running) == expected[0]
    assert cluster.start().say(PROMPTS[1], "a") == expected[1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_turn_whose_commit_is_cut_off_is_stored_once(
    cluster: Cluster, expected: list[tuple[str, int]], when
) -> None:
    driver = cluster.start()
    assert driver.say(PROMPTS[0], "a") == expected[0]
    cluster.proxy.cut_next_commit(when)
    assert driver.say(PROMPTS[1], "a") == expected[1]
    assert cluster.proxy.was_cut.is_set()
    assert len(driver.ask(SessionHistory("history", "a")).turns) == 2


def test_turns_are_refused_while_the_database_is_away_for_too_long(
    impatient: Cluster, expected: list[tuple[str, int]]
) -> None:
    driver = impatient.start()
    assert driver.say(PROMPTS[0], "a") == expected[0]
    running = driver.add(PROMPTS[1], "a", flush_tokens=1)
    while not driver.text(running):
        driver.step()
    impatient.proxy.go_away()
    for name in (running, driver.add(PROMPTS[1], "a")):
        refused = refusal(driver, name)
        assert refused.reason == "unavailable" and refused.message.startswith(AWAY)
    driver.engine.command((b"test", "history"), SessionHistory("history", "a"))
    assert refusal(driver, "history").reason == "unavailable"
    impatient.proxy.come_back()
    assert driver.say(PROMPTS[1], "a") == expected[1], "what was refused is not stored"


def test_a_request_that_is_cancelled_while_the_database_is_away_is_not_run(cluster: Cluster) -> None:
    driver = cluster.start()
    cluster.proxy.go_away()
    name = driver.add(PROMPTS[0], "a")
    driver.engine.cancel((b"test", name))
    assert driver.engine.drained
    cluster.proxy.come_back()
    assert driver.say(PROMPTS[0], "b")[1] == 6
    assert name not in driver.events


@pytest.fixture
def looked_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> tuple[Driver, list[Done], str]:
    """A server with a turn that waits for what the database says, and what ends this wait."""
    driver, held = cluster.start(), list[Done]()
    monkeypatch.setattr(driver.engine.pool, "refresh", lambda wanted, done: held.append(done))
    return driver, held, driver.add(PROMPTS[0], "a", name="waits")


def test_what_is_looked_up_is_a_request_of_the_server(looked_up: tuple[Driver, list[Done], str]) -> None:
    driver, _, _ = looked_up
    assert driver.ask(ListRequests("list")).requests == [RequestInfo("waits", 1, 0, 6)]


@pytest.mark.parametrize(
    ("command", "reason"), [(StopRequest("it", "waits"), "stop"), (PauseRequest("it", "waits"), "paused")]
)
def test_what_is_looked_up_is_stopped_and_paused(
    looked_up: tuple[Driver, list[Done], str], command: StopRequest | PauseRequest, reason: str
) -> None:
    driver, held, name = looked_up
    driver.engine.command((b"test", "it"), command)
    assert len(held) == 1 and not driver.engine.drained
    held.pop()(None)
    (reply,) = driver.until("it", (CommandReply,))
    assert isinstance(reply, CommandReply) and [info.name for info in reply.requests] == ["waits"]
    *_, last = driver.until(name, (Progress,))
    assert isinstance(last, Progress) and [row.finish_reason for row in last.rows] == [reason]
    assert driver.text(name) == ""


def test_a_stop_of_what_is_cancelled_or_fails_meanwhile_finds_nothing(
    looked_up: tuple[Driver, list[Done], str],
) -> None:
    driver, held, name = looked_up
    driver.engine.command((b"test", "it"), StopRequest("it", "waits"))
    driver.engine.cancel((b"test", name))
    assert driver.until("it", (CommandReply,)) == [CommandReply("it")]
    driver.add(PROMPTS[0], "b", name="fails")
    driver.engine.command((b"test", "other"), StopRequest("other", "fails"))
    held.pop()("It cannot be read.")
    assert driver.until("other", (CommandReply,)) == [CommandReply("other")]
    assert driver.engine.drained


def test_the_database_may_be_started_again(
    cluster: Cluster, postgres: PostgresServer, expected: list[tuple[str, int]]
) -> None:
    one, two = cluster.start(), cluster.start()
    assert one.say(PROMPTS[0], "a") == expected[0]
    postgres.stop()
    starting = threading.Thread(target=postgres.start)
    waiting = one.add(PROMPTS[1], "a")
    starting.start()
    assert one.said(waiting) == expected[1]
    starting.join()
    assert two.say(PROMPTS[2], "a") == expected[2]


def test_turns_are_refused_after_kill_9_of_the_database_and_none_is_lost(
    impatient: Cluster, postgres: PostgresServer, expected: list[tuple[str, int]]
) -> None:
    one, two = impatient.start(), impatient.start()
    assert one.say(PROMPTS[0], "a") == expected[0]
    running = one.add(PROMPTS[1], "a", flush_tokens=1)
    while not one.text(running):
        one.step()
    postgres.kill()
    try:
        for driver, name in (
            (one, running),
            (one, one.add(PROMPTS[1], "a")),
            (two, two.add(PROMPTS[1], "a")),
        ):
            refused = refusal(driver, name)
            assert refused.reason == "unavailable" and refused.message.startswith(AWAY)
    finally:
        postgres.start()
    assert two.say(PROMPTS[1], "a") == expected[1], "what was refused is not stored, and nothing else is lost"
    assert one.say(PROMPTS[2], "a") == expected[2]
    assert [len(each.ask(SessionHistory("history", "a")).turns) for each in (one, two)] == [3, 3]

"""Two engines of one database: a conversation goes on with either; a turn that comes too late is refused."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from engine_driver import PROMPTS, Driver
from hosts import ThreadHost
from stores import PATIENCE

from rwkv_batch.state.entries import Operation
from rwkv_batch.state.log.protocol import Outcome
from rwkv_batch.wire.commands import DeleteSession, ForkSession, RewindSession
from rwkv_batch.wire.protocol import CommandReply, Event, Failed, Progress, Rejected, SessionTurn

ENDS = (Progress, Rejected, Failed)


class Engines:
    """Several engines, closed at the end."""

    def __init__(self, host: ThreadHost) -> None:
        self.host, self._drivers = host, list[Driver]()

    def open(self, **options) -> Driver:
        driver = Driver(self.host.open(), **{"l1": 4} | options)
        self._drivers.append(driver)
        return driver

    def close(self) -> None:
        for driver in self._drivers:
            driver.engine.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with ThreadHost(tmp_path / "sessions.db") as host:
        engines = Engines(host)
        yield engines
        engines.close()


def last(driver: Driver, request: str) -> Event:
    return driver.until(request, ENDS)[-1]


@pytest.mark.parametrize("options", [{}, {"l1": 0, "l2": 0, "replay_tokens": 1}, {"token_log": False}])
def test_a_conversation_is_the_same_with_two_engines_in_turns(engines: Engines, options: dict) -> None:
    expected = Driver(l1=4).conversation("a", PROMPTS * 2)
    one, two = engines.open(**options), engines.open(**options)
    said = []
    for number, prompt in enumerate(PROMPTS * 2):
        said.append((one, two, two, one)[number % 4].say(prompt, "a"))
    assert said == expected


def test_of_two_turns_at_once_the_later_is_a_conflict(engines: Engines) -> None:
    one, two = engines.open(), engines.open()
    alone = Driver(l1=4)
    assert one.say(PROMPTS[0], "a") == alone.say(PROMPTS[0], "a")
    late = one.add(PROMPTS[1], "a", max_tokens=40, flush_tokens=1)
    while not one.text(late):
        one.step()
    assert two.say(PROMPTS[2], "a") == alone.say(PROMPTS[2], "a")
    refused = last(one, late)
    assert isinstance(refused, Rejected) and refused.reason == "conflict"
    assert refused.message == (
        "The session a has been changed meanwhile; send the request again to go on from what it is now."
    )
    assert one.say(PROMPTS[3], "a") == alone.say(PROMPTS[3], "a")
    alone.engine.close()


def test_a_turn_of_a_session_that_another_engine_has_deleted_is_a_conflict(engines: Engines) -> None:
    one, two = engines.open(), engines.open()
    one.say(PROMPTS[0], "a")
    late = one.add(PROMPTS[1], "a", max_tokens=40, flush_tokens=1)
    while not one.text(late):
        one.step()
    assert two.ask(DeleteSession("delete", "a")).found == 1
    refused = last(one, late)
    assert isinstance(refused, Rejected) and refused.reason == "conflict"
    again = last(one, one.add(PROMPTS[1], "a"))
    assert isinstance(again, Progress)


@pytest.mark.parametrize("change", [DeleteSession("c", "a"), ForkSession("c", "b", "a", replace=True)])
def test_a_turn_into_another_session_does_not_begin_with_a_change_that_is_refused(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, change: DeleteSession | ForkSession
) -> None:
    """Its commit would go through: it names the session that it is stored in, and that alone."""
    one, two = engines.open(), engines.open()
    for driver, session in ((one, "a"), (one, "b"), (alone := Driver(l1=4), "a")):
        driver.say(PROMPTS[0], session)
    begun, gate, commit = threading.Event(), threading.Event(), engines.host.store.commit

    def held(groups: Sequence[Sequence[Operation]]) -> list[Outcome]:
        begun.set()
        gate.wait(PATIENCE)
        return commit(groups)

    monkeypatch.setattr(engines.host.store, "commit", held)
    faster = two.add(PROMPTS[1], "a")
    while not begun.is_set():
        two.step()
    one.engine.command((b"test", change.id), change)
    turn = SessionTurn(source="a", target="d")
    late = one.add(PROMPTS[2], turn=turn)
    for _ in range(20):
        one.step()
    gate.set()
    assert two.said(faster) == alone.say(PROMPTS[1], "a")
    for name in (change.id, late):
        refused = last(one, name)
        assert isinstance(refused, Rejected) and refused.reason == "conflict"
    assert one.say(PROMPTS[2], turn=turn) == alone.say(PROMPTS[2], "a")


def test_commands_of_another_engine_hold_here(engines: Engines) -> None:
    one, two = engines.open(), engines.open()
    first = one.say(PROMPTS[0], "a")
    second = one.say(PROMPTS[1], "a")
    assert isinstance(two.ask(ForkSession("fork", "a", "b", turn=1)), CommandReply)
    assert isinstance(two.ask(RewindSession("rewind", "a", 1)), CommandReply)
    assert one.say(PROMPTS[1], "a") == second == one.say(PROMPTS[1], "b")
    assert two.ask(DeleteSession("delete", "a")).found == 1
    assert one.say(PROMPTS[0], "a") == first

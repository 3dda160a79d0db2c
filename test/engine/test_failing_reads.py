"""The database cannot be read once, at any place of the engine that reads it, and the engine goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_driver import PROMPTS, Driver

from rwkv_batch.state.entries import DiskFailed, RowDamaged
from rwkv_batch.state.log.reads import StoreReads
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import (
    Command,
    DeleteSession,
    ExportSession,
    ForkSession,
    ImportSession,
    RewindSession,
    SessionHistory,
)
from rwkv_batch.wire.protocol import CommandReply, Failed, Progress, Rejected

EIO = "The database cannot be used (disk I/O error)."


class Reads:
    """The sessions that are looked for: the one of that number fails, once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fails, self.count = 0, 0
        find = StoreReads.find_session

        def found(store: StoreReads, key: str):
            self.count += 1
            if self.count == self.fails:
                raise DiskFailed(EIO)
            return find(store, key)

        patch.setattr(StoreReads, "find_session", found)

    def fail(self, number: int) -> None:
        self.fails, self.count = number, 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def answer(driver: Driver, command: Command) -> CommandReply | Failed | Rejected:
    driver.events.pop(command.id, None)
    driver.engine.command((b"test", command.id), command)
    reply = driver.until(command.id, (CommandReply, Failed, Rejected))[-1]
    assert isinstance(reply, CommandReply | Failed | Rejected)
    return reply


COMMANDS: dict[str, Callable[[bytes], Command]] = {
    "fork": lambda data: ForkSession("c", "a", target="b"),
    "replacing fork": lambda data: ForkSession("c", "a", target="b", replace=True),
    "fork of a turn": lambda data: ForkSession("c", "a", target="b", turn=1),
    "fork of no turn": lambda data: ForkSession("c", "a", target="b", turn=0, replace=True),
    "import": lambda data: ImportSession("c", "b", data=data),
    "rewind": lambda data: RewindSession("c", "b", 1),
    "rewind to the beginning": lambda data: RewindSession("c", "b", 0),
    "deletion": lambda data: DeleteSession("c", "b", prefix=True),
    "history": lambda data: SessionHistory("c", "b"),
    "export": lambda data: ExportSession("c", "b"),
}


@pytest.mark.parametrize("asked", COMMANDS)
def test_a_command_whose_read_fails_is_refused_and_leaves_its_session_free(
    tmp_path: Path, reads: Reads, asked: str
) -> None:
    """Whichever of its reads it is: the same command succeeds then, and a turn after it."""
    driver = Driver(Store(tmp_path / "sessions.db"))
    for key in "ab":
        driver.say(PROMPTS[0], key)
    data = driver.ask(ExportSession("export", "a")).data
    number = failed = 0
    while number == failed:
        number += 1
        if asked in ("fork", "fork of a turn"):
            driver.ask(DeleteSession("delete", "b"))
        reads.fail(number)
        reply = answer(driver, COMMANDS[asked](data))
        reads.fail(0)
        if isinstance(reply, Rejected):
            failed += 1
            assert (reply.reason, reply.message) == ("unavailable", EIO)
            assert isinstance(answer(driver, COMMANDS[asked](data)), CommandReply)
        driver.say(PROMPTS[1], "b")
    assert failed
    driver.engine.close()


def test_a_turn_ends_whose_session_is_deleted_where_that_cannot_be_read(tmp_path: Path, reads: Reads) -> None:
    """A row beside it goes on, and the session can be used again."""
    driver = Driver(Store(tmp_path / "sessions.db"))
    expected = driver.say(PROMPTS[1])
    number, refused = 0, list[str]()
    while number <= reads.count:
        number += 1
        driver.say(PROMPTS[0], "a")
        turn = driver.add(PROMPTS[0], "a")
        while not driver.engine.scheduler.running:  # not at once where its state is on its way
            driver.step()
        other = driver.add(PROMPTS[1])
        reads.fail(number)
        reply = answer(driver, DeleteSession("delete", "a"))
        last = driver.until(turn, (Progress, Failed, Rejected))[-1]
        refused += [each.message for each in (reply, last) if isinstance(each, Failed | Rejected)]
        assert driver.said(other) == expected
        reads.fails = 0
    assert len(refused) >= 3 and EIO in refused, "of the turn, of the command"
    driver.say(PROMPTS[0], "a")
    assert driver.engine.drained
    driver.engine.close()


def test_a_turn_ends_whose_session_is_damaged_where_that_cannot_be_read(
    tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a session without a state in memory: each of its turns ends with an error."""
    Driver(Store(tmp_path / "sessions.db")).conversation("a", PROMPTS[:1])
    driver = Driver(Store(tmp_path / "sessions.db"))

    def damaged(store: StoreReads, turn: int) -> None:
        raise RowDamaged("A part of the session is stored damaged.")

    with monkeypatch.context() as patch:
        patch.setattr(StoreReads, "read_turn", damaged)
        patch.setattr(StoreReads, "image_model", lambda store, turn: None)
        for number in (3, 2, 1):
            reads.fail(number)
            failed = driver.add(PROMPTS[1], "a")
            assert isinstance(driver.until(failed, (Progress, Failed, Rejected))[-1], Failed | Rejected)
            assert reads.count == number
    reads.fail(0)
    driver.say(PROMPTS[1], "a")
    assert driver.engine.drained
    driver.engine.close()

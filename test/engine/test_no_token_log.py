"""Sessions of which a state is stored and no tokens: what needs turns is refused, and 0 turns is nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import PROMPTS, Driver

from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import (
    Command,
    ExportSession,
    ForkSession,
    ImportSession,
    ListSessions,
    PutStartState,
    RewindSession,
    SessionHistory,
)
from rwkv_batch.wire.protocol import CommandReply, Rejected


def state_only(folder: Path) -> Driver:
    return Driver(Store(folder / "sessions.db"), token_log=False)


def imported_state(folder: Path) -> Driver:
    """A server that stores tokens, with a session from a file of its state."""
    source, driver = Driver(l1=4), Driver(Store(folder / "sessions.db"))
    source.say(PROMPTS[0], "a")
    data = source.ask(ExportSession("export", "a", "state")).data
    driver.ask(ImportSession("import", "a", data))
    return driver


@pytest.mark.parametrize("make", [state_only, imported_state])
def test_nothing_is_left_of_a_session_that_is_a_state_when_all_its_turns_are_taken_back(
    tmp_path: Path, make: Callable[[Path], Driver]
) -> None:
    driver, undisturbed = make(tmp_path), Driver()
    driver.say(PROMPTS[1], "a")
    driver.say(PROMPTS[2], "a")
    assert driver.ask(RewindSession("rewind", "a", 0)).position == 0
    assert driver.ask(ListSessions("list")).total == 0
    assert driver.say(PROMPTS[2], "a") == undisturbed.say(PROMPTS[2], "a")
    driver.engine.close()


def test_a_session_with_a_start_state_goes_back_to_that(tmp_path: Path) -> None:
    driver = Driver()
    draw = torch.Generator().manual_seed(3)
    tuned = {f"blocks.{i}.att.time_state": torch.randn(2, 64, 64, generator=draw) for i in range(2)}
    torch.save(tuned, tmp_path / "tuned.pth")
    driver.ask(PutStartState("put", "tuned", str(tmp_path / "tuned.pth"), "vk", b""))
    first = driver.say(PROMPTS[0], "a", start_state="tuned")
    driver.ask(RewindSession("rewind", "a", 0))
    assert driver.say(PROMPTS[0], "a") == first


@pytest.mark.parametrize(
    "command",
    [
        RewindSession("it", "a", 1),
        ForkSession("it", "a", "b", 1),
        SessionHistory("it", "a"),
        ExportSession("it", "a", "tokens"),
    ],
)
def test_what_needs_turns_is_refused_where_states_are_stored(tmp_path: Path, command: Command) -> None:
    driver = state_only(tmp_path)
    said = [driver.say(PROMPTS[0], "a")]
    driver.engine.command((b"test", command.id), command)
    (refused,) = driver.until(command.id, (Rejected, CommandReply))
    assert isinstance(refused, Rejected) and refused.reason == "conflict"
    assert "--no-token-log" in refused.message and " a" in refused.message
    whole = driver.ask(ForkSession("fork", "a", "whole"))
    assert isinstance(whole, CommandReply)
    data = driver.ask(ExportSession("export", "a", "both")).data
    driver.ask(ImportSession("import", "c", data))
    undisturbed = Driver(l1=4)
    said += [driver.say(PROMPTS[1], key) for key in ("a", "whole", "c")]
    expected = [undisturbed.say(prompt, "a") for prompt in PROMPTS[:2]]
    assert said == [*expected, expected[1], expected[1]]
    driver.engine.close()


def test_a_turn_that_an_imported_state_does_not_know_is_refused_in_other_words(tmp_path: Path) -> None:
    driver = imported_state(tmp_path)
    command = RewindSession("it", "a", 1)
    driver.engine.command((b"test", "it"), command)
    (refused,) = driver.until("it", (Rejected,))
    assert refused.reason == "conflict" and "--" not in refused.message
    assert driver.ask(SessionHistory("history", "a")).turns == []
    driver.say(PROMPTS[1], "a")
    assert driver.ask(RewindSession("again", "a", 1)).position > 0
    driver.engine.close()

"""Start states: what begins in one reads on as under a model that has it merged, wherever its state is."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoints import tiny
from engine_driver import PROMPTS, WEIGHTS, Driver

from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.state.entries import StoreError
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import (
    Command,
    DeleteSession,
    DescribeStartState,
    ListSessions,
    ListStartStates,
    PutStartState,
    RemoveStartStates,
)
from rwkv_batch.wire.protocol import CommandReply, Failed, PausedRow, Rejected, Sampling

LONG = [(7 * i) % 390 + 1 for i in range(300)]  # long enough for the prefix cache


def numbers(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {f"blocks.{i}.att.time_state": torch.randn(2, 64, 64, generator=draw) for i in range(2)}


def merged(seed: int) -> Checkpoint:
    return from_tensors("merged", WEIGHTS.tensors | numbers(seed))


def file(folder: Path, seed: int) -> Path:
    path = folder / f"state-{seed}.pth"
    torch.save(numbers(seed), path)
    return path


def put(driver: Driver, path: Path, name: str = "pirate", layout: str = "vk") -> CommandReply | Rejected:
    command = PutStartState(f"put {path}", key=name, path=str(path), layout=layout, description=b"mine")
    driver.engine.command((b"test", command.id), command)
    return driver.until(command.id, (CommandReply, Rejected))[-1]


def names(driver: Driver) -> list[str]:
    return [info.name for info in driver.ask(ListStartStates("list")).start_states]


def test_texts_are_those_of_a_model_that_has_the_state_merged(tmp_path: Path) -> None:
    driver, plain, tuned = Driver(), Driver(), Driver(weights=merged(1))
    reply = put(driver, file(tmp_path, 1))
    (info,) = reply.start_states
    assert (info.name, info.description, info.layers, info.heads) == ("pirate", b"mine", 2, 2)
    for prompt in (*PROMPTS, LONG):
        assert driver.say(prompt, start_state="pirate") == tuned.say(prompt)
        assert driver.say(prompt) == plain.say(prompt)
    assert tuned.say(LONG) != plain.say(LONG)


def test_cached_prefixes_of_different_start_states_are_different(tmp_path: Path) -> None:
    driver = Driver(prefix_cache_mb=8)
    for seed in (1, 2):
        put(driver, file(tmp_path, seed), f"state {seed}")
    expected = [Driver().say(LONG), *(Driver(weights=merged(seed)).say(LONG) for seed in (1, 2))]
    states = ["", "state 1", "state 2"]
    for _ in range(3):  # the first feeds all, the second leaves a state near the end, the third begins there
        assert [driver.say(LONG, start_state=name) for name in states] == expected
    put(driver, file(tmp_path, 3), "state 1")
    assert driver.say(LONG, start_state="state 1") == Driver(weights=merged(3)).say(LONG)


def test_the_rows_of_one_step_begin_in_different_states(tmp_path: Path) -> None:
    driver = Driver()
    for seed in (1, 2):
        put(driver, file(tmp_path, seed), f"state {seed}")
    ids = [driver.add(PROMPTS[2], start_state=name, flush_tokens=1) for name in ("state 1", "", "state 2")]
    together = [driver.said(id_) for id_ in ids]
    alone = [Driver(weights=merged(1)), Driver(), Driver(weights=merged(2))]
    assert together == [one.say(PROMPTS[2]) for one in alone]


def test_a_conversation_begins_in_it_wherever_its_state_comes_from(tmp_path: Path) -> None:
    expected = Driver(weights=merged(1), l1=4).conversation("a")
    drivers = {
        "slots": Driver(l1=4, l2=4),
        "tokens": Driver(l1=0, l2=0),
        "images": Driver(Store(tmp_path / "images.db"), l1=0, l2=0, replay_tokens=1),
        "states only": Driver(Store(tmp_path / "states.db"), l1=0, l2=0, token_log=False),
    }
    for driver in drivers.values():
        put(driver, file(tmp_path, 1))
    said = {name: driver.conversation("a", start_state="pirate") for name, driver in drivers.items()}
    assert said == dict.fromkeys(drivers, expected)


def test_it_is_there_after_a_restart_and_sessions_go_on(tmp_path: Path) -> None:
    expected = Driver(weights=merged(1), l1=4).conversation("a")
    driver = Driver(Store(tmp_path / "sessions.db"), l1=0)
    put(driver, file(tmp_path, 1))
    said = [driver.say(PROMPTS[0], "a", start_state="pirate")]
    driver.engine.close()
    for number, prompt in enumerate(PROMPTS[1:]):
        driver = Driver(Store(tmp_path / "sessions.db"), l1=0, l2=0)
        assert names(driver) == ["pirate"]
        said.append(driver.say(prompt, "a", start_state="pirate" if number else ""))
        assert driver.say(PROMPTS[2], start_state="pirate") == Driver(weights=merged(1)).say(PROMPTS[2])
        driver.engine.close()
    assert said == expected


def test_a_session_goes_on_after_its_start_state_is_removed(tmp_path: Path) -> None:
    expected = Driver(weights=merged(1), l1=4).conversation("a")
    driver = Driver(Store(tmp_path / "sessions.db"), l1=0)
    put(driver, file(tmp_path, 1))
    said = [driver.say(PROMPTS[0], "a", start_state="pirate")]
    assert driver.ask(RemoveStartStates("1", name="pirate")).found == 1
    said.append(driver.say(PROMPTS[1], "a"))
    driver.engine.close()
    image = tmp_path / "sessions.db.images" / "1.state"  # of the first turn there is, which stands for it
    assert image.exists(), "the session has it as its past"
    driver = Driver(Store(tmp_path / "sessions.db"), l1=0, l2=0)
    assert names(driver) == []
    said += [driver.say(prompt, "a") for prompt in PROMPTS[2:]]
    assert said == expected
    assert driver.ask(DeleteSession("2", key="a")).found == 1
    driver.engine.close()
    assert not image.exists(), "nothing uses the state any longer"


def test_those_of_another_model_are_not_offered(tmp_path: Path) -> None:
    driver = Driver(Store(tmp_path / "sessions.db"))
    put(driver, file(tmp_path, 1))
    driver.engine.close()
    other = Driver(Store(tmp_path / "sessions.db"), tiny(vocab=400, seed=5))
    assert names(other) == []
    other.engine.close()
    again = Driver(Store(tmp_path / "sessions.db"))
    assert names(again) == ["pirate"]
    again.engine.close()


def test_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    driver = Driver()
    for session in (None, "a"):
        name = driver.add(PROMPTS[0], session, start_state="nobody")
        (refused,) = driver.until(name, (Rejected,))
        assert (refused.reason, refused.message) == ("not_found", "There is no start state nobody.")
    assert driver.ask(RemoveStartStates("1", name="nobody")).found == 0


@pytest.mark.parametrize("session", [None, "a"])
def test_one_that_is_removed_while_a_request_waits_is_refused(tmp_path: Path, session: str | None) -> None:
    driver = Driver()
    put(driver, file(tmp_path, 1))
    running = [driver.add(PROMPTS[0], max_tokens=40) for _ in range(2)]  # in both slots
    driver.engine.step()
    waiting = driver.add(PROMPTS[0], session, start_state="pirate")
    driver.ask(RemoveStartStates("1"))
    events = driver.until(waiting, (Rejected,))
    assert events[-1].reason == "not_found"
    assert [driver.said(id_) for id_ in running] == [Driver().say(PROMPTS[0], max_tokens=40)] * 2


def test_a_file_that_is_no_state_changes_nothing(tmp_path: Path) -> None:
    driver = Driver()
    put(driver, file(tmp_path, 1))
    expected = driver.say(LONG, start_state="pirate")
    (tmp_path / "bad.pth").write_text("no state")
    refused = put(driver, tmp_path / "bad.pth")
    assert isinstance(refused, Rejected) and refused.reason == "invalid"
    assert str(tmp_path / "bad.pth") in refused.message
    assert driver.say(LONG, start_state="pirate") == expected


@pytest.mark.parametrize("command", [RemoveStartStates("it"), DescribeStartState("it", "pirate", b"other")])
def test_what_could_not_be_stored_of_it_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    driver = Driver(Store(tmp_path / "sessions.db"))
    put(driver, file(tmp_path, 1))
    expected = driver.say(LONG, start_state="pirate")
    with monkeypatch.context() as broken:
        broken.setattr(Store, "commit", Mock(side_effect=StoreError("The disk is full.")))
        driver.engine.command((b"test", "it"), command)
        assert driver.until("it", (Failed, CommandReply)) == [Failed("it", "The disk is full.")]
    (info,) = driver.ask(ListStartStates("list")).start_states
    assert info.description == b"mine" and driver.say(LONG, start_state="pirate") == expected
    driver.engine.close()
    again = Driver(Store(tmp_path / "sessions.db"))
    assert names(again) == ["pirate"] and again.say(LONG, start_state="pirate") == expected
    again.engine.close()


def test_start_states_are_no_sessions(tmp_path: Path) -> None:
    driver = Driver(Store(tmp_path / "sessions.db"))
    put(driver, file(tmp_path, 1))
    driver.say(PROMPTS[0], "a", start_state="pirate")
    for listing in (ListSessions("1"), ListSessions("2", limit=10)):
        reply = driver.ask(listing)
        assert ([session.key for session in reply.sessions], reply.total) == (["a"], 1)
    driver.engine.close()


def test_a_paused_request_does_not_go_on_in_another_state(tmp_path: Path) -> None:
    driver = Driver()
    digest = put(driver, file(tmp_path, 1)).start_states[0].digest
    whole = driver.say(PROMPTS[2], start_state="pirate", sampling=Sampling(temperature=0))
    resumed = {"rows": [PausedRow(0, [])], "start_state": "pirate", "start_digest": digest}
    assert driver.say(PROMPTS[2], sampling=Sampling(temperature=0), **resumed) == whole
    put(driver, file(tmp_path, 2))
    (refused,) = driver.until(driver.add(PROMPTS[2], **resumed), (Rejected,))
    assert "is not what it was" in refused.message

"""A turn that is sent again under its Idempotency-Key: it is stored once, and its reply is the same."""

from pathlib import Path

import pytest
from engine_driver import PROMPTS, Driver

from rwkv_batch.engine.rows import stored_turns
from rwkv_batch.state.entries import REQUEST_ID
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import DeleteSession, ForkSession, RewindSession, SessionHistory
from rwkv_batch.wire.protocol import Accepted, Progress, Rejected, RowDelta, Sampling, SessionTurn

ASCII = Sampling(temperature=1.5, seed=3, logit_bias=dict.fromkeys([0, *range(129, 400)], -100.0))


def key(name: str) -> bytes:
    return name.encode().ljust(REQUEST_ID, b".")


def turn(name: str, **fields) -> dict:
    """The fields of a turn of session a."""
    return {"turn": SessionTurn(**{"source": "a", "target": "a", "request": key(name)} | fields)}


def reply(driver: Driver, name: str) -> tuple[Accepted, RowDelta]:
    """Of a request that has ended: how it began, and all that it has said."""
    accepted, *rest = driver.until(name, (Progress, Rejected))
    rows = [row for event in rest if isinstance(event, Progress) for row in event.rows]
    assert isinstance(accepted, Accepted) and rows
    last = rows[-1]
    text, tokens = "".join(row.text for row in rows), sum(row.tokens for row in rows)
    return accepted, RowDelta(0, text, tokens, last.finish_reason, stop=last.stop)


def turns_of(driver: Driver, session: str) -> int:
    return len(driver.ask(SessionHistory("history", session)).turns)


@pytest.mark.parametrize("how", ["the same server", "another server"])
def test_a_turn_that_is_sent_again_has_the_same_reply(tmp_path: Path, how: str) -> None:
    stops = {"stop_strings": ["a", "e", "1"], "max_tokens": 60, "flush_tokens": 1, "sampling": ASCII}
    driver = Driver(Store(tmp_path / "sessions.db"), l1=4)
    first = [
        reply(driver, driver.add(prompt, **turn(f"k{number}"), **fields))
        for number, (prompt, fields) in enumerate(zip(PROMPTS, [{}, stops, {}, stops], strict=True))
    ]
    assert {said.finish_reason for _, said in first} == {"length", "stop"}
    if how == "another server":
        driver.engine.close()
        driver = Driver(Store(tmp_path / "sessions.db"), l1=4)
    for number, (prompt, fields) in enumerate(zip(PROMPTS, [{}, stops, {}, stops], strict=True)):
        began, said = reply(driver, driver.add(prompt, **turn(f"k{number}"), **fields))
        was, before = first[number]
        assert (began.target, began.prompt_tokens) == (was.target, was.prompt_tokens)
        assert said == before
    assert turns_of(driver, "a") == len(PROMPTS)
    assert driver.say(PROMPTS[0], **turn("new"))[1] == 6, "the session goes on"
    assert turns_of(driver, "a") == len(PROMPTS) + 1
    driver.engine.close()


@pytest.mark.parametrize("durable", [True, False])
def test_a_turn_that_is_sent_again_while_it_runs_waits_for_it(durable: bool) -> None:
    driver = Driver(l1=4, durable=durable)
    names = [driver.add(PROMPTS[0], **turn("k"), max_tokens=30) for _ in range(3)]
    said = {driver.said(name) for name in names}
    assert len(said) == 1 and turns_of(driver, "a") == 1
    driver.engine.close()


def test_a_node_of_a_tree_is_made_once() -> None:
    driver = Driver(l1=4)
    node = turn("k", source="t:0", target=None, branch="t")
    first, said = reply(driver, driver.add(PROMPTS[0], **node))
    other = reply(driver, driver.add(PROMPTS[0], **turn("other", source="t:0", target=None, branch="t")))
    again = reply(driver, driver.add(PROMPTS[0], **node))
    assert (first.target, other[0].target, again[0].target) == ("t:1", "t:2", "t:1")
    assert again[1] == said
    driver.engine.close()


def test_numbers_of_nodes_go_on_though_there_are_many_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_turns, "MOST_NUMBERED", 1)
    driver, targets = Driver(l1=4), list[str | None]()
    for tree in "tututt":
        began = driver.until(driver.add([1], turn=SessionTurn(f"{tree}:0", branch=tree)), (Progress,))[0]
        assert isinstance(began, Accepted)
        targets.append(began.target)
    assert targets == ["t:1", "u:1", "t:2", "u:2", "t:3", "t:4"]
    driver.engine.close()


def test_the_node_of_a_turn_is_not_a_fork_of_it() -> None:
    driver = Driver(l1=4)
    node = turn("k", source="t:0", target=None, branch="t")
    first, said = reply(driver, driver.add(PROMPTS[0], **node))
    for fork in ("a", "z"):
        driver.ask(ForkSession("fork", "t:1", fork))
    again = reply(driver, driver.add(PROMPTS[0], **node))
    assert (first.target, again[0].target) == ("t:1", "t:1") and again[1] == said
    driver.engine.close()


def test_the_reply_of_a_deleted_turn_that_a_fork_has_is_that_of_then() -> None:
    driver = Driver(l1=4)
    said = driver.say(PROMPTS[0], **turn("k"))
    driver.ask(ForkSession("fork", "a", "b"))
    driver.ask(DeleteSession("delete", "a"))
    assert driver.say(PROMPTS[0], **turn("k")) == said
    assert turns_of(driver, "b") == 1
    refused = driver.until(driver.add([1], turn=SessionTurn("a", "a", required=True)), (Rejected,))[-1]
    assert isinstance(refused, Rejected) and refused.reason == "not_found"
    driver.engine.close()


def test_of_a_node_that_is_sent_again_while_it_runs_one_is_stored() -> None:
    driver = Driver(l1=4)
    node = turn("k", source="t:0", target=None, branch="t")
    names = [driver.add(PROMPTS[0], **node) for _ in range(2)]
    ends = [driver.until(name, (Progress, Rejected))[-1] for name in names]
    refused = [end for end in ends if isinstance(end, Rejected)]
    assert len(refused) == 1 and refused[0].reason == "conflict"
    assert "send the request again" in refused[0].message
    assert reply(driver, driver.add(PROMPTS[0], **node))[0].target in ("t:1", "t:2")
    driver.engine.close()


@pytest.mark.parametrize(
    "other", [{"prompts": [[8]]}, {"max_tokens": 7}, turn("k", source=None)], ids=["prompt", "length", "past"]
)
def test_a_key_stands_for_one_turn(other: dict) -> None:
    driver = Driver(l1=4)
    driver.say(PROMPTS[0], **turn("k"))
    (refused,) = driver.until(driver.add(**{"prompt": PROMPTS[0]} | turn("k") | other), (Rejected,))
    assert isinstance(refused, Rejected) and refused.reason == "invalid"
    assert refused.message.startswith("The Idempotency-Key was sent before with another")
    assert turns_of(driver, "a") == 1
    driver.engine.close()


def test_a_key_that_another_turn_has_meanwhile_is_refused_too() -> None:
    driver = Driver(l1=4)
    first = driver.add(PROMPTS[0], **turn("k"), max_tokens=20)
    second = driver.add(PROMPTS[1], **turn("k"), max_tokens=20)
    assert driver.said(first)[1] == 20
    refused = driver.until(second, (Rejected,))[-1]
    assert isinstance(refused, Rejected) and refused.reason == "invalid"
    assert turns_of(driver, "a") == 1
    driver.engine.close()


def test_a_turn_that_was_taken_back_is_made_again() -> None:
    driver = Driver(l1=4)
    greedy = {"sampling": Sampling(temperature=0)}
    driver.say(PROMPTS[0], "a", **greedy)
    said = driver.say(PROMPTS[1], **turn("k"), **greedy)
    driver.ask(RewindSession("back", "a", 1))
    assert turns_of(driver, "a") == 1
    assert driver.say(PROMPTS[1], **turn("k"), **greedy) == said
    assert turns_of(driver, "a") == 2
    driver.engine.close()

"""Requests that are paused and resumed say what they would have said; those that are stopped end there."""

from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import pytest
from ahead import LateRunner, SeveralRunner, without_time
from checkpoints import tiny
from engine_driver import PROMPTS, SAMPLED, Driver
from msgspec.structs import replace

from rwkv_batch.engine import Engine
from rwkv_batch.engine.scheduling.row import LOADING
from rwkv_batch.runner import backends
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.state.entries import StoreError
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.codec import decode_paused
from rwkv_batch.wire.commands import (
    PAUSED,
    GetDocument,
    ListRequests,
    PauseRequest,
    SessionHistory,
    StopRequest,
)
from rwkv_batch.wire.protocol import (
    CommandReply,
    Event,
    Failed,
    GenerateRequest,
    MixturePart,
    Progress,
    Rejected,
    RequestInfo,
    Sampling,
)

GREEDY = Sampling(temperature=0, alpha_presence=0.7, alpha_frequency=0.3, alpha_decay=0.9)
NUCLEUS = Sampling(method="nucleus", seed=5, top_k=50, top_p=0.8, alpha_presence=0.5, alpha_frequency=0.2)
LONG = 60  # tokens


@pytest.fixture(params=[TorchRunner, LateRunner, SeveralRunner], autouse=True)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is awaited, or one is queued ahead, or several are launched together."""
    monkeypatch.setattr(backends, "TorchRunner", request.param)
    without_time(monkeypatch)


def texts(events: list[Event]) -> dict[int, tuple[str, int, str | None]]:
    """Of each row: the text, its tokens, and why it ended."""
    said: defaultdict[int, tuple[str, int, str | None]] = defaultdict(lambda: ("", 0, None))
    for event in events:
        for row in event.rows if isinstance(event, Progress) else []:
            text, tokens, _ = said[row.row]
            said[row.row] = text + row.text, tokens + row.tokens, row.finish_reason
    return dict(said)


def run_until(driver: Driver, name: str, tokens: int) -> list[Event]:
    """The events of a request until some row has said so many tokens."""
    events: list[Event] = []
    while not any(count >= tokens for _, count, _ in texts(events).values()):
        events += [event for (_, id_), event in driver.engine.step() if id_ == name]
    return events


def interrupt(
    driver: Driver, command: PauseRequest | StopRequest, name: str
) -> tuple[CommandReply, list[Event]]:
    """The answer, and the events of the request `name` from then on."""
    driver.engine.command((b"other", command.id), command)
    replies: list[Event] = []
    events: list[Event] = []
    while not replies or not texts(events) or not all(end for _, _, end in texts(events).values()):
        if not driver.engine.busy:
            assert driver.woken.wait(30), "the engine waits for nothing"
        driver.woken.clear()
        for (_, id_), event in driver.engine.step():
            if id_ in (command.id, name):
                (replies if id_ == command.id else events).append(event)
    (reply,) = replies
    assert isinstance(reply, CommandReply)
    return reply, events


def paused(driver: Driver, name: str) -> GenerateRequest:
    return decode_paused(driver.ask(GetDocument("document", PAUSED + name)).data)


def resume(driver: Driver, name: str, id_: str = "resumed") -> list[Event]:
    """The events of a paused request from its resumption to its end."""
    request = replace(paused(driver, name), id=id_, name=name)
    driver.engine.add((b"test", id_), request)
    events: list[Event] = []
    left = {row.number for row in request.rows}
    while left:
        if not driver.engine.busy:
            assert driver.woken.wait(30), "the engine waits for nothing"
        driver.woken.clear()
        new = [event for (_, key), event in driver.engine.step() if key == id_]
        assert not any(isinstance(event, Failed | Rejected) for event in new), new
        left -= {row for row, (_, _, end) in texts(new).items() if end}
        events += new
    return events


def joined(*parts: list[Event]) -> dict[int, tuple[str, int]]:
    """Of each row: all its text and tokens."""
    whole: defaultdict[int, tuple[str, int]] = defaultdict(lambda: ("", 0))
    for part in parts:
        for row, (text, tokens, _) in texts(part).items():
            whole[row] = whole[row][0] + text, whole[row][1] + tokens
    return dict(whole)


@pytest.mark.parametrize(
    "sampling, stops, tokens",
    [
        (SAMPLED, [], 0),
        (SAMPLED, ["ab", "\x10\x11", "zz"], 17),
        (GREEDY, [], 17),
        (NUCLEUS, ["ab", "\x10\x11", "zz"], 1),
    ],
    ids=["rapid, at once", "rapid, stop strings", "greedy", "nucleus"],
)
def test_a_paused_request_says_what_it_would_have_said(
    tmp_path: Path, sampling: Sampling, stops: list[str], tokens: int
) -> None:
    fields = {"sampling": sampling, "stop_strings": stops, "max_tokens": LONG, "flush_tokens": 1}
    driver = Driver(Store(tmp_path / "sessions.db"))
    expected = joined(driver.until(driver.add(PROMPTS[2], **fields), (Progress,)))
    name = driver.add(PROMPTS[2], **fields, name="it")
    before = run_until(driver, name, tokens)
    reply, last = interrupt(driver, PauseRequest("pause", "it"), name)
    assert [info.name for info in reply.requests] == ["it"]
    assert texts(last)[0][2] == "paused"
    assert not driver.engine.busy
    driver.engine.close()

    driver = Driver(Store(tmp_path / "sessions.db"))  # a restart
    assert driver.ask(ListRequests("list")).paused == ["it"]
    assert joined(before, last, resume(driver, "it")) == expected
    driver.engine.close()


def test_a_request_may_be_paused_again_and_again() -> None:
    fields = {"max_tokens": LONG, "flush_tokens": 1, "name": "it"}
    driver = Driver()
    expected = joined(driver.until(driver.add(PROMPTS[0], **fields), (Progress,)))
    name = driver.add(PROMPTS[0], **fields)
    parts = [run_until(driver, name, 5), interrupt(driver, PauseRequest("pause 1", "it"), name)[1]]
    driver.engine.add((b"test", "again"), replace(paused(driver, "it"), id="again", name="it"))
    parts += [run_until(driver, "again", 9), interrupt(driver, PauseRequest("pause 2", "it"), "again")[1]]
    assert joined(*parts, resume(driver, "it")) == expected
    driver.engine.close()


def test_of_many_rows_those_go_on_that_had_not_ended() -> None:
    """Five rows of an engine with two, some over, some running and some waiting."""
    fields = {"prompts": [[40 + i] for i in range(5)], "max_tokens": LONG, "flush_tokens": 1, "name": "it"}
    fields |= {"stop_ids": list(range(30)), "n": 2}
    driver = Driver()

    def all_rows(id_: str, rows: int) -> list[Event]:
        events: list[Event] = []
        while sum(end is not None for _, _, end in texts(events).values()) < rows:
            events += [event for (_, key), event in driver.engine.step() if key == id_]
        return events

    expected = joined(all_rows(driver.add([], **fields), 10))
    name = driver.add([], **fields)
    before = all_rows(name, 3)
    ended = [row for row, (_, _, end) in texts(before).items() if end]
    _, last = interrupt(driver, PauseRequest("pause", "it"), name)
    assert sorted([*ended, *texts(last)]) == list(range(10))
    assert [row.number for row in paused(driver, "it").rows] == sorted(texts(last))
    assert joined(before, last, resume(driver, "it")) == expected
    driver.engine.close()


@pytest.mark.parametrize("tokens", [0, 4])
def test_a_paused_turn_is_stored_when_it_has_ended(tmp_path: Path, tokens: int) -> None:
    expected = Driver(l1=4).conversation("a", max_tokens=20)
    driver = Driver(Store(tmp_path / "sessions.db"), l1=0, l2=0)
    said = [driver.say(PROMPTS[0], "a", max_tokens=20)]
    name = driver.add(PROMPTS[1], "a", max_tokens=20, flush_tokens=1, name="it")
    before = run_until(driver, name, tokens)
    _, last = interrupt(driver, PauseRequest("pause", "it"), name)
    assert len(driver.ask(SessionHistory("between", "a")).turns) == 1
    said.append(joined(before, last, resume(driver, "it"))[0])
    (_, turn) = driver.ask(SessionHistory("after", "a")).turns
    assert (turn.prompt_tokens, turn.completion, len(turn.completion_tokens)) == (PROMPTS[1], *said[1])
    assert said + driver.conversation("a", PROMPTS[2:], max_tokens=20) == expected


@pytest.mark.parametrize("drawn", range(5))
def test_a_turn_that_ends_while_it_is_to_be_paused_lets_the_next_one_begin(drawn: int) -> None:
    """Its last draw may be in flight when the command comes."""
    driver = Driver()
    name = driver.add([5, 6], "s", name="turn", max_tokens=4)
    driver.step()
    while any(len(row.drawn) < drawn for row in driver.engine.scheduler.rows()):
        driver.step()
    driver.engine.command((b"test", "pause"), PauseRequest("pause", "turn"))
    following = driver.add([7, 8], "s", max_tokens=2)
    (said,) = texts(driver.until(name, (Progress,))).values()
    assert said[2] in ("length", "paused")
    assert driver.said(following)[1] == 2


def test_a_paused_turn_is_refused_when_its_session_has_gone_on() -> None:
    driver = Driver()
    driver.say(PROMPTS[0], "a")
    name = driver.add(PROMPTS[1], "a", max_tokens=20, flush_tokens=1, name="it")
    run_until(driver, name, 2)
    interrupt(driver, PauseRequest("pause", "it"), name)
    driver.say(PROMPTS[3], "a")
    driver.engine.add((b"test", "resumed"), replace(paused(driver, "it"), id="resumed"))
    (*_, refusal) = driver.until("resumed", (Rejected,))
    assert isinstance(refusal, Rejected) and refusal.reason == "conflict"
    assert len(driver.ask(SessionHistory("history", "a")).turns) == 2
    driver.engine.close()


def test_that_holds_when_it_is_paused_again_behind_a_turn_of_another() -> None:
    driver = Driver()
    driver.say(PROMPTS[0], "a")
    name = driver.add(PROMPTS[1], "a", max_tokens=20, flush_tokens=1, name="it")
    run_until(driver, name, 2)
    interrupt(driver, PauseRequest("pause", "it"), name)
    other = driver.add(PROMPTS[3], "a", max_tokens=200)
    driver.engine.add((b"test", "again"), replace(paused(driver, "it"), id="again"))
    interrupt(driver, PauseRequest("pause again", "it"), "again")
    driver.until(other, (Progress,))
    driver.engine.add((b"test", "resumed"), replace(paused(driver, "it"), id="resumed"))
    (*_, refusal) = driver.until("resumed", (Rejected,))
    assert isinstance(refusal, Rejected) and refusal.reason == "conflict"
    driver.engine.close()


def test_what_cannot_be_continued_is_not_paused() -> None:
    driver = Driver()
    name = driver.add(PROMPTS[0], max_tokens=LONG, flush_tokens=1, name="it", pausable=False)
    run_until(driver, name, 2)
    driver.engine.command((b"other", "pause"), PauseRequest("pause", "it"))
    (refusal,) = driver.until("pause", (Rejected,))
    assert isinstance(refusal, Rejected) and refusal.reason == "conflict"
    assert texts(driver.until(name, (Progress,)))[0][2] == "length"
    driver.engine.close()


def test_what_is_stopped_before_it_has_gone_on_stays_paused() -> None:
    driver = Driver()
    fields = {"max_tokens": LONG, "flush_tokens": 1, "name": "it"}
    expected = joined(driver.until(driver.add(PROMPTS[0], **fields), (Progress,)))
    name = driver.add(PROMPTS[0], **fields)
    before = run_until(driver, name, 5)
    _, last = interrupt(driver, PauseRequest("pause", "it"), name)
    driver.engine.add((b"test", "again"), replace(paused(driver, "it"), id="again"))
    _, stopped = interrupt(driver, StopRequest("stop", "it"), "again")
    assert texts(stopped) == {0: ("", 0, "paused")}
    assert joined(before, last, resume(driver, "it")) == expected
    driver.engine.close()


def driver_with_a_paused_request() -> Driver:
    """A driver with a paused request of the name "it"."""
    driver = Driver()
    name = driver.add(PROMPTS[0], max_tokens=LONG, flush_tokens=1, name="it")
    run_until(driver, name, 2)
    interrupt(driver, PauseRequest("pause", "it"), name)
    return driver


def test_a_paused_request_is_forgotten_when_it_is_stopped() -> None:
    driver = driver_with_a_paused_request()
    assert driver.ask(StopRequest("stop", "it")).found == 1
    assert driver.ask(ListRequests("list")).paused == []
    driver.engine.close()


def test_a_request_is_not_paused_where_texts_are_not_stored(tmp_path: Path) -> None:
    driver = Driver(Store(tmp_path / "sessions.db"), token_log=False)
    name = driver.add(PROMPTS[0], max_tokens=LONG, flush_tokens=1, name="it")
    run_until(driver, name, 2)
    driver.engine.command((b"test", "pause"), PauseRequest("pause", "it"))
    (refusal,) = driver.until("pause", (Rejected,))
    assert isinstance(refusal, Rejected) and "--no-token-log" in refusal.message
    assert driver.ask(ListRequests("list")).requests, "it goes on"
    driver.engine.close()


def test_what_another_model_began_is_refused() -> None:
    driver = driver_with_a_paused_request()
    other = Engine(tiny(vocab=400, seed=9), device="cpu", max_rows=1)
    other.add((b"test", "resumed"), replace(paused(driver, "it"), id="resumed"))
    ((_, refusal),) = other.step()
    assert isinstance(refusal, Rejected) and "another model" in refusal.message
    for engine in (driver.engine, other):
        engine.close()


@pytest.mark.parametrize("session", [None, "a"])
def test_a_request_whose_pause_cannot_be_stored_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: str | None
) -> None:
    fields = {"session": session, "max_tokens": LONG, "flush_tokens": 1, "name": "it"}
    undisturbed = Driver()
    expected = joined(undisturbed.until(undisturbed.add(PROMPTS[0], **fields), (Progress,)))
    driver = Driver(Store(tmp_path / "sessions.db"))
    name = driver.add(PROMPTS[0], **fields)
    before = run_until(driver, name, 2)

    def full(*arguments: object) -> None:
        raise StoreError("The disk is full.")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "commit", full)
        for attempt in ("pause", "pause again"):
            driver.engine.command((b"test", attempt), PauseRequest(attempt, "it"))
            (refused,) = driver.until(attempt, (Failed,))
            sentence = "The disk is full. The request is not paused and goes on."
            assert refused == Failed(attempt, sentence)
            (listed,) = driver.ask(ListRequests(f"list after {attempt}")).requests
            assert listed.name == "it"
    assert joined(before, driver.until(name, (Progress,))) == expected
    assert driver.ask(ListRequests("list")).paused == []
    driver.engine.close()
    undisturbed.engine.close()


def test_rows_of_a_mixture_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(Store(tmp_path / "sessions.db"), max_rows=4)
    fields = {"max_tokens": LONG, "flush_tokens": 1, "n": 2, "sampling": GREEDY}
    mixture = [MixturePart("", 0.5), MixturePart("", 0.5)]
    expected = joined(driver.until(driver.add(PROMPTS[0], mixture=mixture, **fields), (Progress,)))
    name = driver.add(PROMPTS[0], name="it", mixture=mixture, **fields)
    before = run_until(driver, name, 2)
    with monkeypatch.context() as broken:
        broken.setattr(Store, "commit", Mock(side_effect=StoreError("The disk is full.")))
        driver.engine.command((b"test", "pause"), PauseRequest("pause", "it"))
        driver.until("pause", (Failed,))
    while driver.ask(ListRequests("list")).requests:
        driver.step()
    assert joined(before, driver.until(name, (Progress,))) == expected
    driver.engine.close()


def test_a_turn_that_was_dropped_while_its_state_was_loaded_is_no_request_any_longer() -> None:
    driver = Driver(l1=0, l2=2)
    driver.say(PROMPTS[0], "a")
    while driver.engine.scheduler.queues:  # its state may be kept later than its text is answered
        driver.step()
    name = driver.add(PROMPTS[1], "a", max_tokens=LONG, name="it")
    driver.engine.launch()
    assert [row.state for row in driver.engine.scheduler.running.values()] == [LOADING]
    driver.engine.cancel((b"test", name))
    assert driver.ask(PauseRequest("pause", "it")).requests == []
    assert driver.say(PROMPTS[1], "a")[1] == 6
    driver.engine.close()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("states", [0, 2])
def test_a_stopped_turn_is_stored_as_far_as_it_went(tokens: int, states: int) -> None:
    driver = Driver(l1=states, l2=states)
    name = driver.add(PROMPTS[0], "a", max_tokens=LONG, flush_tokens=1, name="it")
    before = run_until(driver, name, tokens)
    reply, last = interrupt(driver, StopRequest("stop", "it"), name)
    assert len(reply.requests) == 1 and texts(last)[0][2] == "stop"
    text, count = joined(before, last)[0]
    (turn,) = driver.ask(SessionHistory("history", "a")).turns
    assert (turn.completion, len(turn.completion_tokens)) == (text, count)
    again = driver.say(PROMPTS[1], "a")

    plain = Driver()
    assert plain.say(PROMPTS[0], "a", max_tokens=count) == (text, count)
    assert plain.say(PROMPTS[1], "a") == again
    for each in (driver, plain):
        each.engine.close()


def test_what_waits_is_stopped_too() -> None:
    driver = Driver()
    running = [driver.add([50 + i], max_tokens=LONG, flush_tokens=1, name=f"runs {i}") for i in range(2)]
    waiting = driver.add([60], "a", max_tokens=LONG, flush_tokens=1, name="waits")
    run_until(driver, running[0], 1)
    _, last = interrupt(driver, StopRequest("stop", "waits"), waiting)
    assert texts(last) == {0: ("", 0, "stop")}
    assert [info.name for info in driver.ask(ListRequests("list")).requests] == ["runs 0", "runs 1"]
    driver.engine.close()


def test_a_list_names_what_waits_runs_and_is_paused() -> None:
    driver = Driver()
    assert driver.ask(ListRequests("empty")) == CommandReply("empty")
    for i in range(3):
        driver.add([50 + i], max_tokens=LONG, flush_tokens=1, name=f"request {i}")
    events: list[Event] = []
    while not texts(events):
        events += [event for _, event in driver.engine.step()]
    reply, _ = interrupt(driver, PauseRequest("pause", "request 1"), "2")
    assert reply.requests == [RequestInfo("request 1", 1, reply.requests[0].drawn, LONG)]
    listed = driver.ask(ListRequests("list"))
    assert [info.name for info in listed.requests] == ["request 0", "request 2"]
    assert listed.paused == ["request 1"]
    assert driver.ask(PauseRequest("nobody", "request 9")) == CommandReply("nobody")
    assert driver.ask(StopRequest("nobody", "request 9")) == CommandReply("nobody")
    driver.engine.close()

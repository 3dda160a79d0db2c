"""Sessions in mixtures of start states: every turn is as if the whole conversation were one prompt."""

from pathlib import Path

import pytest
from engine_driver import PROMPTS, Driver
from mixtures import add_start_states, greedy, parts

from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import ForkSession, PauseRequest
from rwkv_batch.wire.protocol import Failed, Progress, Rejected, Sampling

GREEDY = Sampling(temperature=0)
LONG = [(7 * i) % 390 + 1 for i in range(90)]
TURNS = [LONG, [300], PROMPTS[2], LONG[::-1]]


def new_driver(folder: Path, **options) -> Driver:
    driver = Driver(**{"max_rows": 8, "prefill_tokens": 64, "prefix_cache_mb": 16} | options)
    add_start_states(driver, folder)
    return driver


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return new_driver(tmp_path)


def text(driver: Driver, tokens: list[int]) -> str:
    return driver.engine.tokenizer.decode(tokens)


def say(driver: Driver, prompt: list[int], session: str, weights: dict, **fields) -> str:
    return driver.say(prompt, session, mixture=parts(weights), **{"sampling": GREEDY} | fields)[0]


def running(driver: Driver) -> int:
    """How many sequences hold a slot once nothing is left to do."""
    while driver.engine.busy:
        driver.step()
    return len(driver.engine.scheduler.running)


def conversation(driver: Driver, session: str, weights: list[dict[int | None, float]]) -> None:
    """Turns with these weights, each compared with one prompt."""
    past: list[int] = []
    for prompt, mixture in zip(TURNS, weights, strict=True):
        expected, _ = greedy(mixture, past + prompt, 6)
        assert say(driver, prompt, session, mixture) == text(driver, expected)
        past += prompt + expected


@pytest.mark.parametrize("megabytes", [0, 16])
@pytest.mark.parametrize("first", [1, None])
def test_a_conversation_is_that_of_one_long_prompt(tmp_path: Path, megabytes: int, first) -> None:
    driver = new_driver(tmp_path, prefix_cache_mb=megabytes)
    conversation(driver, "s", [{first: 1.0, 2: 2.0}] * 4)
    assert not running(driver)


def test_weights_may_change_from_turn_to_turn(driver: Driver) -> None:
    """A weight of 0 leaves the session in that state all the same."""
    conversation(
        driver, "s", [{1: 1.0, 2: 1.0}, {1: 0.0, 2: 1.0}, {1: 1.0, 2: 0.0}, {1: 2.0, 2: 1.0, 3: -0.5}]
    )


def test_a_turn_feeds_what_is_new(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    run = driver.engine.runner.run
    monkeypatch.setattr(driver.engine.runner, "run", lambda b: (fed.append(len(b.tokens)), run(b))[1])
    say(driver, LONG, "s", {1: 1.0, 2: 1.0}, max_tokens=20)
    fed.clear()
    say(driver, [300], "s", {1: 1.0, 2: 1.0}, max_tokens=2)
    assert sum(fed) <= 2 * (2 + 1) + 1 + 2  # for each the token drawn last, the new one and a draw


def test_turns_of_one_session_wait_for_each_other(driver: Driver) -> None:
    mixture = parts({1: 1.0, 2: 1.0})
    names = [driver.add(prompt, "s", mixture=mixture, sampling=GREEDY) for prompt in TURNS]
    others = [driver.add(prompt, mixture=mixture, sampling=GREEDY) for prompt in TURNS]
    said = [driver.said(name) for name in names]
    past: list[int] = []
    for prompt, (found, _) in zip(TURNS, said, strict=True):
        expected, _ = greedy({1: 1.0, 2: 1.0}, past + prompt, 6)
        assert found == text(driver, expected)
        past += prompt + expected
    assert driver.said(others[0]) == said[0]


def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    past: list[int] = []
    for prompt in TURNS:
        driver = Driver(Store(tmp_path / "sessions.db"), max_rows=8)
        if not driver.engine.pool.starts.names():
            add_start_states(driver, tmp_path)
        expected, _ = greedy({1: 1.0, 2: 1.0}, past + prompt, 6)
        assert say(driver, prompt, "s", {1: 1.0, 2: 1.0}) == text(driver, expected)
        past += prompt + expected
        driver.engine.close()


def test_a_fork_goes_on_in_the_mixture(driver: Driver) -> None:
    weights: dict[int | None, float] = {1: 1.0, 2: 1.0}
    say(driver, LONG, "s", weights)
    driver.ask(ForkSession("fork", key="s", target="t"))
    assert say(driver, [300], "t", weights) == say(driver, [300], "s", weights)


def test_only_reading_a_prompt_counts(driver: Driver) -> None:
    say(driver, LONG, "s", {1: 1.0, 2: 1.0}, max_tokens=0)
    expected, _ = greedy({1: 1.0, 2: 1.0}, [*LONG, 300], 6)
    assert say(driver, [300], "s", {1: 1.0, 2: 1.0}) == text(driver, expected)


@pytest.mark.parametrize(
    ("before", "weights"), [({}, {1: 1.0, 2: 1.0}), ({"start_state": "s2"}, {1: 1.0, 2: 1.0})]
)
def test_a_session_that_began_elsewhere_is_refused(driver: Driver, before: dict, weights: dict) -> None:
    said = driver.say(LONG, "s", sampling=GREEDY, **before)
    events = driver.until(driver.add([300], "s", mixture=parts(weights)), (Rejected,))
    assert "The session s did not begin in the first state" in events[-1].message
    assert not running(driver)
    driver.say(LONG, "t", sampling=GREEDY, **before)
    assert driver.say([9], "s", sampling=GREEDY) == driver.say([9], "t", sampling=GREEDY)
    assert said


def test_a_client_that_leaves_ends_all_of_it(driver: Driver) -> None:
    say(driver, LONG, "s", {1: 1.0, 2: 1.0})
    for steps in range(4):
        driver.add(LONG, "s", mixture=parts({1: 1.0, 2: 1.0}), max_tokens=1000)
        for _ in range(steps):
            driver.step()
        driver.engine.cancel_frontend(b"test")
    expected = say(driver, [300], "s", {1: 1.0, 2: 1.0})
    assert not running(driver)
    say(driver, LONG, "t", {1: 1.0, 2: 1.0})
    assert say(driver, [300], "t", {1: 1.0, 2: 1.0}) == expected


def test_a_paused_turn_leaves_its_session_as_it_was(driver: Driver) -> None:
    weights: dict[int | None, float] = {1: 1.0, 2: 1.0}
    say(driver, LONG, "s", weights)
    say(driver, LONG, "t", weights)
    driver.add([300], "s", mixture=parts(weights), max_tokens=50, name="x", flush_tokens=1)
    while not any(row.drawn for row in driver.engine.scheduler.running.values()):
        driver.step()
    assert driver.ask(PauseRequest("pause", name="x")).requests[0].rows == 1
    assert not running(driver)
    assert say(driver, [9], "s", weights) == say(driver, [9], "t", weights)


def test_a_session_whose_tokens_are_not_stored_is_refused(tmp_path: Path) -> None:
    driver = new_driver(tmp_path, token_log=False)
    say(driver, LONG, "s", {1: 1.0, 2: 1.0})
    events = driver.until(
        driver.add([300], "s", mixture=parts({1: 1.0, 2: 1.0})), (Rejected, Failed, Progress)
    )
    assert isinstance(events[-1], Rejected)

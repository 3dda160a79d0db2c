"""Logits that are not finite end a row with an error, and leave sessions and other rows as they were."""

import math
from pathlib import Path

import pytest
import torch
from ahead import LateRunner, SeveralRunner, without_time
from engine_driver import Driver
from mixtures import add_start_states, parts

from rwkv_batch.engine.landing import NOT_FINITE
from rwkv_batch.engine.serving.report import of_engine
from rwkv_batch.evaluate.asks import Ask, EvaluationError
from rwkv_batch.evaluate.local import LocalModel
from rwkv_batch.model.stages import StagedModel
from rwkv_batch.model.torch_model import TorchModel
from rwkv_batch.runner import backends
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.protocol import (
    Event,
    Failed,
    Grammar,
    MixturePart,
    Progress,
    Rejected,
    RowDelta,
    Sampling,
)

POISON = 66  # the token that makes them so
GREEDY = Sampling(temperature=0)
DRAWS_IT = Sampling(temperature=0, logit_bias={POISON: 1e4})
ENDS = (Failed, Progress, Rejected)
PROMPTS = [[5, 6], [7, POISON, 8], [5, 9], [POISON]]
SOUND = [0, 1, 4, 5]  # rows of these prompts, two of each


def poisoned(driver: Driver, number: float = math.nan) -> Driver:
    with torch.inference_mode():
        stages_of(driver)[0].embedding.table[POISON] = number
    return driver


def stages_of(driver: Driver) -> list[TorchModel]:
    model = driver.engine.runner.model
    return [*model.stages] if isinstance(model, StagedModel) else [model]


@pytest.fixture(params=["at once", "ahead", "several steps"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "at once":
        runner = LateRunner if request.param == "ahead" else SeveralRunner
        monkeypatch.setattr(backends, "TorchRunner", runner)
        without_time(monkeypatch)
    return request.param


@pytest.fixture
def driver(runner: str) -> Driver:
    return poisoned(Driver(max_rows=8))


def ends_of(events: list[Event]) -> list[RowDelta]:
    """The last delta of each row."""
    rows = [row for event in events if isinstance(event, Progress) for row in event.rows]
    return [row for row in rows if row.finish_reason]


def assert_failed(driver: Driver, name: str, rows: int = 1) -> None:
    """All rows of a request, with the one sentence, once."""
    while len(ends_of(events := driver.until(name, ENDS))) < rows:
        driver.events[name].append(driver.events[name][0])  # so that `until` looks for more
    ended = ends_of(events)
    assert [row.finish_reason for row in ended] == ["error"] * rows
    assert {row.error for row in ended} == {NOT_FINITE} and not any(row.prompt for row in ended)
    assert not any(isinstance(event, Failed | Rejected) for event in events)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": GREEDY},
        {"sampling": Sampling(seed=1)},
        {"sampling": Sampling(top_p=0.5, presence_penalty=1.0)},
        {"sampling": Sampling(min_p=0.1, repetition_penalty=1.2)},
        {"sampling": Sampling(method="noise", noise=2.0)},
        {"sampling": Sampling(logit_bias={5: 10.0})},
        {"sampling": GREEDY, "top_logprobs": 2},
        {"sampling": GREEDY, "n": 3},
        {"sampling": GREEDY, "grammar": Grammar("regex", "[A-Z]{2}")},
        {"sampling": GREEDY, "flush_tokens": 1, "max_tokens": 1},
    ],
)
def test_a_prompt_that_breaks_them_is_an_error_and_other_rows_go_on(driver: Driver, fields, number) -> None:
    poisoned(driver, number)
    alone = driver.say([5, 6], max_tokens=12)
    beside = driver.add([5, 6], max_tokens=12)
    rows = fields.get("n", 1)
    assert_failed(driver, driver.add([7, POISON, 8], **fields), rows)
    assert driver.said(beside) == alone == driver.say([5, 6], max_tokens=12)
    counts = driver.engine.counts
    assert counts.corrupted == counts.finished["error"] == rows
    figures = {series.family: series.values for series in of_engine("m", driver.engine).series}
    assert figures["corrupted_requests"] == [rows]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"flush_tokens": 1},
        {"prompt_logprobs": 1},
        {"grammar": Grammar("regex", "[A-Z]{3}")},
        {"mixture": [MixturePart("", 0.5), MixturePart("", 0.5)]},
    ],
)
@pytest.mark.parametrize("slots", [2, 8])
def test_the_other_rows_of_its_request_go_on(runner: str, fields, slots: int) -> None:
    driver = Driver(max_rows=slots)
    never = Sampling(seed=1, logit_bias={POISON: -1e4})  # the token is drawn by none
    found = []
    for number in (0.1, math.nan):
        poisoned(driver, number)
        name = driver.add([], prompts=PROMPTS, n=2, sampling=never, **fields)
        while not driver.engine.drained or driver.engine.masks.wait():
            driver.step()
        rows: dict[int, list[RowDelta]] = {}
        for event in driver.events[name]:
            for row in event.rows if isinstance(event, Progress) else ():
                rows.setdefault(row.row, []).append(row)
        found.append(rows)
    broken = found[1]
    for row in range(8):
        if row in SOUND:
            texts = ["".join(each.text for each in rows[row]) for rows in found]
            assert texts[0] == texts[1] and broken[row][-1].finish_reason == found[0][row][-1].finish_reason
        else:
            assert [(each.finish_reason, each.error) for each in broken[row]] == [("error", NOT_FINITE)]
    assert driver.engine.counts.corrupted == 4


def test_generate_says_which_of_its_rows_has_failed(driver: Driver) -> None:
    rows = driver.engine.generate([[5, 6], [7, POISON]], max_tokens=3, sampling=GREEDY)
    assert [row.finish_reason for row in rows] == ["length", "error"]
    assert [row.error for row in rows] == ["", NOT_FINITE]
    with pytest.raises(RuntimeError, match="not finite"):
        driver.engine.generate([[7, POISON], [POISON]], max_tokens=3, sampling=GREEDY)


@pytest.mark.parametrize(
    "fields", [{}, {"session": "a"}, {"mixture": [MixturePart("", 1), MixturePart("", 2)]}]
)
def test_states_that_have_broken_a_row_are_no_beginnings_of_others(fields) -> None:
    """What was broken for a moment, and stays in the cache of prompts, breaks one more row at most."""
    driver = Driver(max_rows=8, prefix_cache_mb=8)
    prompt = [*range(100, 300), POISON, *range(100, 300)]
    poisoned(driver, 0.1)
    fine = driver.say([*prompt, 5], prefix_cache=False)
    poisoned(driver, math.nan)
    assert_failed(driver, driver.add([*prompt, 6], **fields))
    poisoned(driver, 0.1)
    assert driver.say([*prompt, 5]) == fine


def test_an_evaluation_says_why_it_has_no_answer(driver: Driver) -> None:
    with pytest.raises(EvaluationError, match="not finite"):
        list(LocalModel(driver.engine).answers([Ask([5], 1), Ask([POISON], 1)]))


def test_a_token_that_breaks_them_is_the_last_that_is_drawn(driver: Driver, runner: str) -> None:
    """What was drawn before it may have been sent."""
    driver.say([5], sampling=GREEDY, max_tokens=30)
    before = driver.engine.counts.generation_tokens
    name = driver.add([5], sampling=DRAWS_IT, max_tokens=20, flush_tokens=1)
    assert_failed(driver, name)
    assert len(driver.text(name).encode()) <= 1
    assert driver.engine.counts.generation_tokens - before == 1
    assert runner != "several steps" or driver.engine.runner.steps[-1] > 1


@pytest.mark.parametrize("token_log", [True, False])
@pytest.mark.parametrize(
    "turn",
    [
        {"prompt": [POISON]},
        {"prompt": [9, POISON, 9], "stop_strings": ["zzz"]},
        {"prompt": [9], "sampling": DRAWS_IT},
        {"prompt": [9, POISON], "max_tokens": 0},
    ],
    ids=["prompt", "with savepoints", "drawn", "only read"],
)
def test_the_turn_is_refused_and_the_session_goes_on_from_its_last(
    runner: str, turn, token_log, tmp_path
) -> None:
    said = []
    for broken in (False, True):
        store = Store(tmp_path / f"{broken}.db")
        driver = poisoned(Driver(store, token_log=token_log))
        first = driver.say([20, 21], "a")
        if broken:
            assert_failed(driver, driver.add(session="a", **turn))
            assert_failed(driver, driver.add(session="new", **turn))
            assert driver.engine.pool.find("new") is None
        said.append((first, driver.say([22], "a"), driver.say([23], "a")))
        driver.engine.close()
    assert said[0] == said[1]


def test_a_session_whose_turn_only_reads_goes_on_behind_it(driver: Driver) -> None:
    """Its prompt is looked at as all prompts are."""
    driver.say([20, 21], "a")
    driver.say([20, 21], "b")
    assert driver.say([22, 23], "a", max_tokens=0) == ("", 0)
    assert driver.say([24], "a") == driver.say([22, 23, 24], "b")


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 1, "top_logprobs": 1}]
)
@pytest.mark.parametrize("place", [0, 2, 3])
def test_logprobs_of_a_prompt_are_an_error_too(runner: str, fields, place: int) -> None:
    driver = poisoned(Driver(max_rows=2, prefill_tokens=2))
    prompt = [5, 6, 7, 8]
    prompt[place] = POISON
    assert_failed(driver, driver.add(prompt, prompt_logprobs=1, **fields))
    assert driver.engine.counts.corrupted == 1


def test_logits_that_only_a_prompt_shows_are_an_error(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind its first token, while the state is sound."""
    model = stages_of(driver)[-1]
    head, calls = model.head, []

    def broken_at_first(x):
        found = head(x)
        if not calls:
            found[0, 3] = math.inf
        calls.append(len(x))
        return found

    monkeypatch.setattr(model, "head", broken_at_first)
    assert_failed(driver, driver.add([5, 6, 7, 8], prompt_logprobs=0, max_tokens=2))


def test_a_mixture_of_which_one_state_breaks_them(driver: Driver, tmp_path: Path) -> None:
    add_start_states(driver, tmp_path)
    fine = driver.add([5], mixture=parts({1: 1.0, 2: 1.0}))
    assert_failed(driver, driver.add([POISON], mixture=parts({1: 1.0, 2: 1.0})))
    assert_failed(driver, driver.add([5, POISON], "a", mixture=parts({1: 1.0, 2: 1.0})))
    assert driver.said(fine)[1] == 6 and driver.engine.pool.find("a") is None
    assert driver.engine.counts.corrupted == 2

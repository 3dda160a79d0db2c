"""Mixtures of start states: one distribution, which is the weighted geometric mean of those of its states."""

from pathlib import Path

import pytest
import torch
from engine_driver import PROMPTS, Driver
from mixtures import add_start_states, greedy, parts

from rwkv_batch.sampling.mixtures import MixedRows, mix_logits
from rwkv_batch.wire.codec import decode_paused
from rwkv_batch.wire.commands import ListRequests, PauseRequest, StopRequest
from rwkv_batch.wire.protocol import CommandReply, MixturePart, Progress, Rejected, Sampling

GREEDY = Sampling(temperature=0)
LONG = [(11 * i) % 390 + 1 for i in range(150)]


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    driver = Driver(max_rows=8, prefill_tokens=64)
    add_start_states(driver, tmp_path)
    return driver


@pytest.mark.parametrize(
    "weights",
    [
        {1: 0.5, 2: 0.5},
        {1: 2.0, 2: 1.0, 3: 1.0},
        {1: 1.0, None: 3.0},
        {1: 1.5, 2: -0.5},  # what the second says is subtracted
    ],
)
@pytest.mark.parametrize("prompt", [[5], PROMPTS[2], LONG])
def test_tokens_and_logprobs_are_those_of_the_geometric_mean(driver: Driver, weights, prompt) -> None:
    expected, logprobs = greedy(weights, prompt, 10)
    name = driver.add(prompt, max_tokens=10, sampling=GREEDY, mixture=parts(weights), top_logprobs=0)
    events = driver.until(name, (Progress,))
    found = [e for event in events if isinstance(event, Progress) for row in event.rows for e in row.logprobs]
    assert [entry.token for entry in found] == [driver.engine.tokenizer.token_bytes(t) for t in expected]
    assert torch.allclose(torch.tensor([entry.logprob for entry in found]), torch.tensor(logprobs), atol=1e-4)


@pytest.mark.parametrize("prompt", [PROMPTS[2], LONG])
def test_all_weight_on_one_state_is_that_state_alone(driver: Driver, prompt: list[int]) -> None:
    for seed in (1, 2):
        weights = {each: float(each == seed) for each in (1, 2, 3)}
        name = driver.add(prompt, mixture=parts(weights))
        assert driver.said(name) == driver.say(prompt, start_state=f"s{seed}")
    assert driver.say(prompt, mixture=parts({1: 0.0, None: 5.0})) == driver.say(prompt)


def test_mixtures_and_plain_rows_run_in_one_batch(driver: Driver) -> None:
    """With penalties and seeds, streamed, several texts of one request; each is what it is alone."""
    requests = [
        {"mixture": parts({1: 1.0, 2: 1.0}), "n": 2},
        {},
        {"mixture": parts({1: 1.0, 2: 1.0, 3: -0.5})},
        {"start_state": "s3"},
    ]
    fields = {"max_tokens": 14, "flush_tokens": 1}
    prompts = [PROMPTS[2], LONG, PROMPTS[0], PROMPTS[2]]
    alone = [driver.said(driver.add(p, **r, **fields)) for p, r in zip(prompts, requests, strict=True)]
    names = [driver.add(p, **r, **fields) for p, r in zip(prompts, requests, strict=True)]
    assert [driver.said(name) for name in names] == alone


def test_more_mixtures_than_fit_wait_for_whole_room(driver: Driver) -> None:
    mixture = parts({1: 1.0, 2: 1.0, 3: 1.0})
    expected = driver.say(LONG, mixture=mixture)
    names = [driver.add(LONG, mixture=mixture) for _ in range(7)]
    assert [driver.said(name) for name in names] == [expected] * 7
    assert not driver.engine.scheduler.running


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({1: 0.0, 2: 0.0}, "sum to 0"),
        ({1: 1.0, 2: -1.0}, "sum to 0"),
        ({9: 1.0, 1: 1.0}, "no start state s9"),
    ],
)
def test_what_cannot_be_mixed(driver: Driver, weights, named: str) -> None:
    (refused,) = driver.until(driver.add(PROMPTS[0], mixture=parts(weights)), (Rejected,))
    assert named in refused.message


def test_more_states_than_rows_are_refused(driver: Driver) -> None:
    mixture = [MixturePart("s1", 1.0) for _ in range(9)]
    (refused,) = driver.until(driver.add(PROMPTS[0], mixture=mixture), (Rejected,))
    assert "9 states" in refused.message


def test_a_mixture_is_one_request_to_those_who_stop_or_pause_it(driver: Driver) -> None:
    mixture, sampling = parts({1: 1.0, 2: 1.0}), Sampling(temperature=1.0, seed=3)
    whole = driver.say(LONG, mixture=mixture, sampling=sampling, max_tokens=30)
    name = driver.add(LONG, mixture=mixture, sampling=sampling, max_tokens=30, flush_tokens=1, name="x")
    while sum(len(row.drawn) for row in driver.engine.scheduler.running.values()) < 10:
        driver.step()
    driver.woken.clear()
    driver.engine.command((b"test", "list"), ListRequests("list"))
    assert driver.woken.wait(30), "what is paused is not read"  # before the next steps end the rows
    (info,) = driver.until("list", (CommandReply,))[-1].requests
    assert (info.rows, info.max_tokens) == (1, 30)
    assert driver.ask(PauseRequest("pause", name="x")).requests[0].rows == 1
    assert not driver.engine.scheduler.running
    paused = decode_paused(driver.engine.pool.store.read_document("paused:x"))
    assert len(paused.rows) == 1 and paused.mixture == mixture
    resumed = driver.add(
        [],
        prompts=paused.prompts,
        rows=paused.rows,
        mixture=mixture,
        sampling=paused.sampling,
        start_digest=paused.start_digest,
        max_tokens=30,
    )
    assert driver.text(name) + driver.said(resumed)[0] == whole[0]
    stopped = driver.add(LONG, mixture=mixture, max_tokens=1000, name="y", flush_tokens=1)
    driver.step()
    reply = driver.ask(StopRequest("stop", name="y"))
    assert isinstance(reply, CommandReply) and not driver.engine.scheduler.running
    assert driver.until(stopped, (object,))


def test_rows_get_the_same_mixed_logits() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    mix_logits(logits, [MixedRows([1, 4], [0.25, 0.75]), MixedRows([0, 5, 6], [0.5, 0.7, -0.2])])
    for places, weights in (([1, 4], [0.25, 0.75]), ([0, 5, 6], [0.5, 0.7, -0.2])):
        expected = sum(w * before[p].double() for p, w in zip(places, weights, strict=True))
        assert torch.allclose(logits[places[0]].double(), expected, atol=1e-5)
        assert all(torch.equal(logits[place], logits[places[0]]) for place in places)
    assert torch.equal(logits[[2, 3]], before[[2, 3]])

"""Speculative decoding: rows draw what they draw without drafts, in fewer steps."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import tiny, write_pth
from engine_driver import Driver
from msgspec import structs
from reference import Reference

from bench.make_checkpoint import random_checkpoint, random_rwkv6
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.speculation import drafting
from rwkv_batch.engine.speculation.cost import DraftCost
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner.backends import create_runner
from rwkv_batch.runner.protocol import Batch, NewRow
from rwkv_batch.runner.speculation.verifiers import verifier_of
from rwkv_batch.wire.protocol import Grammar, MixturePart, RowDelta, Sampling

GREEDY = Sampling(temperature=0)
TALE = "User: Tell me a story about a dog.\n\nAssistant:"
MOST = 56  # tokens of it
OPTIONS = {"device": "cpu", "max_rows": 4, "l1": 0, "prefix_cache_mb": 0}
SAMPLED = Sampling(seed=3, temperature=0.9, top_p=0.9)
ADJUSTED = Sampling(
    seed=4,
    temperature=0.7,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    repetition_penalty=1.05,
    min_p=0.02,
    logit_bias={33: 1.0},
)
NOISY = Sampling(seed=5, method="noise", noise=2.0)


pytestmark = pytest.mark.usefixtures("free_drafts")


@pytest.fixture(scope="module")
def drivers(free_drafts: None, weights: Checkpoint) -> Iterator[list[Driver]]:
    """The bundled model without drafts, and with them."""
    made = [Driver(weights=weights, max_rows=4, l1=4, prefill_tokens=32, speculate=most) for most in (0, 7)]
    yield made
    for driver in made:
        driver.engine.close()


@pytest.fixture(scope="module")
def plain(drivers: list[Driver]) -> Engine:
    return drivers[0].engine


@pytest.fixture(scope="module")
def drafted(drivers: list[Driver]) -> Engine:
    return drivers[1].engine


@pytest.fixture(scope="module")
def told(plain: Engine) -> RowDelta:
    """The beginning of the story."""
    return plain.generate([TALE], sampling=GREEDY, max_tokens=MOST)[0]


def same(rows: list[RowDelta], others: list[RowDelta]) -> bool:
    """Whether rows are the same, but for their drafts."""
    return [structs.replace(row, accepted=0, rejected=0) for row in rows] == others


def drafts(engine: Engine) -> int:
    return engine.counts.steps.drafted


def accepted(rows: list[RowDelta]) -> int:
    return sum(row.accepted for row in rows)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, ADJUSTED, NOISY])
def test_texts_are_those_without_drafts(plain: Engine, drafted: Engine, told: RowDelta, sampling: Sampling):
    given = {"sampling": sampling, "max_tokens": 40, "n": 2}
    want, before = plain.generate([TALE, "1, 2, 3,"], **given), drafted.counts.generation_tokens
    known = drafts(drafted), drafted.counts.steps.accepted
    expected = want[0].text.replace("dog", "cat")
    found = drafted.generate([TALE, "1, 2, 3,"], **given, prediction=expected)
    assert same(found, want) and accepted(found) > 20
    assert drafted.counts.steps.accepted - known[1] == accepted(found)
    assert drafts(drafted) - known[0] == accepted(found) + sum(row.rejected for row in found)
    assert drafted.counts.generation_tokens - before == sum(row.tokens for row in found)


def test_a_text_that_comes_back_takes_few_steps(plain: Engine, drafted: Engine, told: RowDelta):
    before = sum(drafted.counts.steps.rows.values[:-1])
    found = drafted.generate([TALE], sampling=GREEDY, max_tokens=MOST, prediction=told.text)
    assert same(found, [told]) and accepted(found) > 0.8 * told.tokens
    assert sum(drafted.counts.steps.rows.values[:-1]) - before < told.tokens / 3
    edited = f"{TALE}{told.text}\n\n{TALE.replace('dog', 'cat')}"
    want, found = (engine.generate([edited], sampling=GREEDY, max_tokens=MOST) for engine in (plain, drafted))
    assert same(found, want) and accepted(found) > found[0].tokens / 2, "its draft is the story in the prompt"


@pytest.mark.parametrize(
    "ends",
    [
        {"stop_strings": ["explore"]},
        {"max_tokens": 21},
        {"stop_strings": ["."]},
        {"stop_ids": [20]},
    ],
)
def test_a_text_ends_inside_of_a_draft(plain: Engine, drafted: Engine, told: RowDelta, ends: dict):
    if ends.get("stop_ids"):  # the token there
        ends = {"stop_ids": plain.tokenizer.encode(told.text)[20:21]}
    given = {"sampling": GREEDY, "prediction": told.text, "max_tokens": MOST} | ends
    want, found = plain.generate([TALE], **given), drafted.generate([TALE], **given)
    assert same(found, want) and accepted(found) > 5 and found[0].tokens < told.tokens


def test_counts_of_a_text_that_ends_inside_of_a_draft(plain: Engine, drafted: Engine, told: RowDelta):
    """No count goes down, which Prometheus would take for a restart, and none has what is not in the text."""
    tokens, waits = plain.tokenizer.encode(told.text), drafted.counts.waits.between_tokens
    given = {"sampling": GREEDY, "prediction": told.text, "max_tokens": MOST}
    for ends, count in (({"stop_ids": tokens[4:5]}, 4), ({"stop_ids": [], "stop_strings": ["upon"]}, 2)):
        before, known = list(waits.counts), drafts(drafted)
        (found,) = drafted.generate([TALE], **given, **ends)
        assert found.tokens == count and 0 < found.accepted < count
        assert found.accepted + found.rejected == drafts(drafted) - known
        came = [now - past for now, past in zip(waits.counts, before, strict=True)]
        assert min(came) == 0 and sum(came) == count - 1, "of all tokens but the first"


def test_a_prediction_without_end_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, drafted: Engine):
    """It is read as far as it may help: what is behind that costs no time and no memory."""
    read, lookup = [], drafting.Lookup
    monkeypatch.setattr(drafting, "Lookup", lambda *of: read.append(len(of[1])) or lookup(*of))
    drafted.generate([TALE], sampling=GREEDY, max_tokens=3, prediction="a b " * (1 << 20))
    assert len(read) == 1 and 0 < read[0] < drafting.MOST_EXPECTED


def test_logprobs_and_ids_of_drafts(drivers: list[Driver], told: RowDelta):
    deltas, given = [], {"sampling": GREEDY, "top_logprobs": 2, "return_ids": True, "flush_tokens": 1}
    for driver in drivers:
        name = driver.add(TALE, max_tokens=30, **given, stop_ids=[0], prediction=told.text)
        driver.said(name)
        rows = [row for event in driver.events[name][1:] for row in event.rows]
        deltas.append(([e for row in rows for e in row.logprobs], [i for row in rows for i in row.ids]))
    assert deltas[0] == deltas[1] and len(deltas[0][0]) == len(deltas[0][1]) == 30
    assert accepted(rows) > 15 and len(rows) < 15, "a stream gets several tokens at once"


def test_rows_without_drafts_run_beside_those_with_them(plain: Engine, drivers: list[Driver], told: RowDelta):
    driver, long = drivers[1], TALE * 4
    before, want = drafts(driver.engine), plain.generate([long], sampling=GREEDY, max_tokens=30)[0]
    given = {"sampling": GREEDY, "stop_ids": [0]}
    mixture = [MixturePart("", 0.5), MixturePart("", 0.5)]
    mixed = driver.add(TALE, **given, max_tokens=20, mixture=mixture, prediction=told.text)
    assert told.text.startswith(driver.said(mixed)[0])
    assert drafts(driver.engine) == before, "rows of mixtures have none"
    first = driver.add(TALE, **given, max_tokens=MOST, prediction=told.text)
    bound = driver.add("x", **given, max_tokens=30, grammar=Grammar(kind="regex", source="(ab){10}"))
    for _ in range(6):
        driver.step()
    later = driver.add(long, **given, max_tokens=30)
    assert [driver.said(name)[0] for name in (first, bound, later)] == [told.text, "ab" * 10, want.text]
    assert drafts(driver.engine) > before + 30


def test_sessions_are_those_without_drafts(drivers: list[Driver], told: RowDelta):
    stored, before = [], drivers[1].engine.counts.steps.accepted
    for driver in drivers:
        turns: list[dict] = [
            {"prompt": TALE, "max_tokens": 25},
            {"prompt": "\n\n" + TALE, "max_tokens": 40, "stop_strings": ["loved to"]},
            {"prompt": "\n\n" + TALE, "max_tokens": 25, "stop_ids": [0]},
            {"prompt": "\n\n1, 2, 3,", "max_tokens": 9, "stop_strings": [" 9"]},
        ]
        given = {"sampling": GREEDY, "prediction": told.text}
        said = [driver.say(session="s", **given | turn) for turn in turns]
        stored.append((said, driver.engine.pool.find("s").head.digest))
    assert stored[0] == stored[1]
    assert drivers[1].engine.counts.steps.accepted > before + 20
    after = [driver.say("\n\nUser: And then?", "s", sampling=NOISY, max_tokens=20) for driver in drivers]
    assert after[0] == after[1], "the states are the same"


def test_greedy_text_is_that_of_the_package(tmp_path: Path):
    path = write_pth(tmp_path / "random.pth", random_checkpoint(layers=2, width=128, vocab=65536, seed=1))
    engine, reference = Engine(path, **OPTIONS, speculate=7), Reference(path)
    want = reference.text("hello", 40)
    expected = want[:30] + "!" + want[31:]
    found = engine.generate(["hello"], max_tokens=40, stop_ids=[], sampling=GREEDY, prediction=expected)
    assert found[0].text == want and found[0].accepted > 10


def test_a_draft_changes_no_probability():
    """Total variation from the distribution of the logits, of tokens in place of a draft's and behind it."""
    rows, calls, vocab = 100, 30, 24
    runner = Engine(tiny(vocab=vocab), **OPTIONS | {"max_rows": rows + 1}).runner
    verifier = verifier_of(runner)
    assert verifier
    given, logits = runner.states.read(rows), []
    for token in (7, 3):
        logits.append(runner.model.forward(torch.tensor([token]), [1], [rows], runner.states)[0])
    first, second = (each.softmax(0) for each in logits)
    drawn, behind = torch.zeros(vocab), torch.zeros(vocab)
    step = Batch([7, 3] * rows, [2] * rows, list(range(rows)), list(range(rows)))
    for call in range(calls):
        for slot in range(rows):
            runner.begin(slot, NewRow(Sampling(), call, slot, ()))
        runner.states.replace(dict.fromkeys(range(rows), given))
        verified = verifier.feed(step, dict.fromkeys(range(rows), 1))(None, {})
        for token in verified.wait():
            drawn[token] += 1
        for more in verified.more().values():
            for token, _ in more:
                behind[token] += 1
    assert drawn.sum() == rows * calls and behind.sum() == drawn[3]
    for counts, exact in ((drawn, first), (behind, second)):
        # Of so many draws from the distribution itself it is half of this on average.
        bound = (exact * (1 - exact) / counts.sum()).sqrt().sum()
        assert (counts / counts.sum() - exact).abs().sum() / 2 < bound


def test_operations_of_torch_verify_too(weights: Checkpoint, told: RowDelta):
    engine = Engine(weights, **OPTIONS, backend="torch", speculate=3)
    rows = engine.generate([TALE], max_tokens=24, sampling=GREEDY, prediction=told.text)
    assert told.text.startswith(rows[0].text) and accepted(rows) > 10


@pytest.mark.parametrize(
    ("model", "places", "fields", "why"),
    [
        (tiny, ["cpu", "cpu"], {}, "--speculate is not for a model in stages"),
        (lambda: from_tensors("6", random_rwkv6(2, 64, 64)), ["cuda"], {}, "--speculate is not for RWKV-6"),
        (tiny, ["cuda"], {"sampler": "flashinfer"}, "--speculate is not for --sampler flashinfer"),
    ],
)
def test_what_does_not_verify_drafts_refuses_them(
    model: Callable[[], Checkpoint], places: list[str], fields: dict, why: str
):
    with pytest.raises(DeviceError, match=why):
        create_runner(model(), [torch.device(place) for place in places], EngineConfig(speculate=3, **fields))


@pytest.mark.parametrize(("each", "drafted"), [(0.1, True), (1.0, False)])
def test_drafts_end_where_a_token_costs_as_much_as_a_step(
    monkeypatch: pytest.MonkeyPatch, each: float, drafted: bool
):
    monkeypatch.setattr(drafting, "draft_cost", lambda *of: DraftCost(0.0, each))
    engine = Engine(tiny(vocab=65536), **OPTIONS, speculate=7)
    engine.generate([[5]], max_tokens=8, stop_ids=[], sampling=GREEDY, prediction="What comes back is this.")
    assert (drafts(engine) > 0) is drafted

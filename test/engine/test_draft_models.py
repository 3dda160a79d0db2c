"""A second model guesses what rows draw: they draw what they draw without it, in fewer steps."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import refusal, tiny, write_pth
from engine_driver import Driver
from msgspec import structs

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.bundled.unpack import DRAFT
from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.speculation import drafting
from rwkv_batch.engine.speculation.cost import DraftCost
from rwkv_batch.engine.speculation.guessing import Draft, Guessing, WantedGuesses
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner.loading import LoadedModel
from rwkv_batch.runner.speculation.draft_loading import load_draft
from rwkv_batch.wire.protocol import RowDelta, Sampling

GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(seed=3, temperature=0.9, top_p=0.9)
ADJUSTED = Sampling(seed=4, temperature=0.7, presence_penalty=0.2, repetition_penalty=1.05, min_p=0.02)
TALE = "User: Tell me a story about a dog.\n\nAssistant:"
LONG = "User: My name is Ben.\n\nAssistant: Hello Ben!\n\n" * 8 + TALE
PROMPTS = [TALE, LONG, "User: What is the capital of France?\n\nAssistant:"]
OPTIONS = {"device": "cpu", "max_rows": 4, "prefix_cache_mb": 0, "prefill_tokens": 64}


pytestmark = pytest.mark.usefixtures("free_drafts")


@pytest.fixture(scope="module")
def drivers(free_drafts: None, weights: Checkpoint) -> Iterator[list[Driver]]:
    """The bundled model alone, and with its draft model."""
    with_it = {"speculate": 5, "draft_model": str(DRAFT)}
    made = [Driver(weights=weights, **OPTIONS, l1=4, **given) for given in ({}, with_it)]
    yield made
    for driver in made:
        driver.engine.close()


def drafts(engine: Engine) -> int:
    return engine.counts.steps.drafted


def same(rows: list[RowDelta], others: list[RowDelta]) -> bool:
    """Whether rows are the same, but for their drafts."""
    return [structs.replace(row, accepted=0, rejected=0) for row in rows] == others


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, ADJUSTED])
def test_texts_are_those_without_a_draft_model(drivers: list[Driver], sampling: Sampling):
    given = {"sampling": sampling, "max_tokens": 30, "n": 2}
    before, steps = drafts(drivers[1].engine), drivers[1].engine.counts.steps.accepted
    want, found = (driver.engine.generate(PROMPTS, **given) for driver in drivers)
    assert same(found, want) and found[0].accepted > found[0].tokens / 2
    assert drafts(drivers[1].engine) - before == sum(row.accepted + row.rejected for row in found)
    assert drivers[1].engine.counts.steps.accepted - steps == sum(row.accepted for row in found)


@pytest.mark.parametrize("ends", [{"stop_strings": ["named"]}, {"max_tokens": 9}, {"stop_ids": [47, 11]}])
def test_a_text_ends_among_guesses(drivers: list[Driver], ends: dict):
    given = {"sampling": GREEDY, "max_tokens": 40} | ends
    want, found = (driver.engine.generate([TALE], **given) for driver in drivers)
    assert same(found, want) and found[0].accepted > 0


def test_streams_logprobs_and_ids_are_those_without_a_draft_model(drivers: list[Driver]):
    found, given = [], {"sampling": GREEDY, "top_logprobs": 2, "return_ids": True, "flush_tokens": 1}
    for driver in drivers:
        name = driver.add(TALE, max_tokens=30, **given, stop_ids=[0])
        driver.said(name)
        rows = [row for event in driver.events[name][1:] for row in event.rows]
        found.append(([e for row in rows for e in row.logprobs], [i for row in rows for i in row.ids]))
    assert found[0] == found[1] and len(rows) < len(found[0][1]), "a stream gets several tokens at once"


def test_sessions_are_those_without_a_draft_model(drivers: list[Driver]):
    stored, before = [], drivers[1].engine.counts.steps.accepted
    for driver in drivers:
        given = {"sampling": GREEDY, "session": "s", "stop_ids": [0], "max_tokens": 30}
        said = [driver.say(prompt, **given) for prompt in (TALE, f"\n\n{PROMPTS[2]}", "\n\n1, 2, 3,")]
        stored.append((said, driver.engine.pool.find("s").head.digest))
    assert stored[0] == stored[1]
    assert drivers[1].engine.counts.steps.accepted > before


def test_a_row_that_guesses_badly_has_no_guesses(
    monkeypatch: pytest.MonkeyPatch, weights: Checkpoint, tmp_path: Path
):
    """Nor does one whose guesses cost more than they give."""
    path = write_pth(tmp_path / "other.pth", random_checkpoint(layers=1, width=64, vocab=65536, seed=1))
    rejected = []
    for draft, guess in ((None, 0.0), (DRAFT, 2.0), (path, 0.3)):
        cost = DraftCost(0.0, 0.02, guess, 0.02)
        monkeypatch.setattr(drafting, "draft_cost", lambda *of, cost=cost: cost)
        engine = Engine(weights, **OPTIONS, l1=0, speculate=5, draft_model=draft and str(draft))
        rows = engine.generate([TALE], max_tokens=50, sampling=SAMPLED)
        rejected.append(rows[0].rejected)
        engine.close()
    assert rejected[1] == rejected[0], "only those of its own text"
    assert rejected[0] < rejected[2] < rejected[0] + 15


def test_guesses_that_are_expected_to_gain_less_do_not_replace_what_stands_in_the_text(
    monkeypatch: pytest.MonkeyPatch, weights: Checkpoint
):
    def unlikely(self: Guessing, wanted: Mapping[int, WantedGuesses], *_: object) -> dict[int, Draft]:
        return {place: Draft([7], 1e-6) for place in wanted}

    monkeypatch.setattr(Guessing, "drafts", unlikely)
    accepted, rejected = [], []
    for draft in (None, str(DRAFT)):
        engine = Engine(weights, **OPTIONS, l1=0, speculate=5, draft_model=draft)
        (told,) = engine.generate([TALE], max_tokens=50, sampling=GREEDY)
        again = f"{TALE}{told.text}\n\n{TALE.replace('dog', 'cat')}"
        (row,) = engine.generate([again], max_tokens=50, sampling=GREEDY)
        accepted.append(row.accepted)
        rejected.append(row.rejected)
        engine.close()
    assert accepted[0] == accepted[1] > 0 and rejected[0] < rejected[1], "some have nothing in the text"


def test_the_states_of_a_draft_model_count(weights: Checkpoint):
    needed = []
    for given in ({}, {"speculate": 3, "draft_model": str(DRAFT)}):
        engine = Engine(weights, **OPTIONS, l1=0, **given)
        needed.append(engine.runner.bytes_needed(100, 0, 16))
        engine.close()
    assert needed[1] > needed[0] + 100 * 2 * 2 * 64 * 64


def test_a_draft_model_on_a_gpu_needs_the_kernels():
    elsewhere = LoadedModel(tiny(), SimpleNamespace(device=torch.device("cuda")), "x", 0)
    with pytest.raises(DeviceError, match=r"^--draft-model .* --backend torch "):
        load_draft(elsewhere, EngineConfig(speculate=3, draft_model=str(DRAFT)))


def test_a_draft_model_of_another_vocabulary_is_refused():
    message = refusal(lambda: Engine(tiny(vocab=512), **OPTIONS, speculate=3, draft_model=str(DRAFT)))
    assert message.startswith("--draft-model") and "65,536" in message and "512" in message

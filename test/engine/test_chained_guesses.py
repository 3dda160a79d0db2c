"""A draft model whose passes are queued together, of an engine that queues steps, as on a GPU."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ahead import LateRunner
from checkpoints import write_pth
from engine_driver import Driver
from late_drafts import MOST_ROWS, ChainedDraftModel, verifier_of

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.bundled.unpack import DRAFT
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.speculation import drafting
from rwkv_batch.engine.speculation.cost import DraftCost
from rwkv_batch.engine.speculation.guessing import Guessing, WantedGuesses, hope_of
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.runner import backends
from rwkv_batch.runner.speculation import draft_loading
from rwkv_batch.runner.speculation.draft_model import Guess
from rwkv_batch.wire.protocol import Grammar, RowDelta, Sampling

TALE = "User: Tell me a story about a dog.\n\nAssistant:"
ASKED = "User: What is the capital of France?\n\nAssistant:"
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(seed=3, temperature=0.9, top_p=0.9)
FIELDS = {"device": "cpu", "max_rows": 4, "prefix_cache_mb": 0, "prefill_tokens": 64, "l1": 2}
FREE = DraftCost(0.0, 0.0)

pytestmark = pytest.mark.thorough


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch, weights: Checkpoint) -> Iterator[Callable[..., list[Driver]]]:
    """Makes engines of the bundled model, alone and with a draft model: (cost, its file)."""
    made = list[Driver]()

    def make(cost: DraftCost = FREE, draft: Path = DRAFT) -> list[Driver]:
        monkeypatch.setattr(backends, "TorchRunner", LateRunner)
        monkeypatch.setattr(draft_loading, "TorchDraftModel", ChainedDraftModel)
        monkeypatch.setattr(drafting, "verifier_of", verifier_of)
        monkeypatch.setattr(drafting, "draft_cost", lambda *of: cost)
        for given in ({}, {"speculate": 7, "draft_model": str(draft)}):
            made.append(Driver(weights=weights, **FIELDS, **given))
        return made

    yield make
    for driver in made:
        driver.engine.close()


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[ChainedDraftModel]:
    """The draft models that are made."""
    made, begin = list[ChainedDraftModel](), ChainedDraftModel.allocate

    def allocate(model: ChainedDraftModel, slots: int) -> None:
        made.append(model)
        begin(model, slots)

    monkeypatch.setattr(ChainedDraftModel, "allocate", allocate)
    return made


def ahead(engine: Engine) -> int:
    assert isinstance(engine.runner, LateRunner)
    return engine.runner.fed_last


def texts(rows: list[RowDelta]) -> list[str]:
    return [row.text for row in rows]


def accepted(rows: list[RowDelta]) -> int:
    return sum(row.accepted for row in rows)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_those_without_a_draft_model(
    drivers: Callable[..., list[Driver]], chained: list[ChainedDraftModel], sampling: Sampling
):
    plain, drafted = (driver.engine for driver in drivers())
    given = {"sampling": sampling, "max_tokens": 40}
    for prompts in ([TALE], [ASKED, TALE]):
        want, found = (engine.generate(prompts, **given) for engine in (plain, drafted))
        assert texts(found) == texts(want) and accepted(found) > found[0].tokens / 2
    assert max(chained[0].passes) > 1, "several passes are queued together"
    assert ahead(drafted) < ahead(plain) / 4, "guesses begin behind what has been drawn"
    number = Grammar("regex", "[0-9]{3}-abc-[0-9]{3}")
    want, found = (engine.generate([TALE], **given, grammar=number) for engine in (plain, drafted))
    assert texts(found) == texts(want)


def test_sessions_are_those_without_a_draft_model(drivers: Callable[..., list[Driver]]):
    stored = []
    for driver in drivers():
        given = {"sampling": GREEDY, "session": "s", "stop_ids": [0], "max_tokens": 30}
        said = [driver.say(prompt, **given) for prompt in (TALE, f"\n\n{ASKED}")]
        stored.append((said, driver.engine.pool.find("s").head.digest))
    assert stored[0] == stored[1]
    assert driver.engine.counts.steps.accepted > 0


def test_more_rows_than_can_be_verified_together_have_no_guesses(drivers: Callable[..., list[Driver]]):
    plain, drafted = (driver.engine for driver in drivers())
    given = {"sampling": SAMPLED, "max_tokens": 20, "stop_ids": []}
    want, found = (engine.generate([TALE] * (MOST_ROWS + 1), **given) for engine in (plain, drafted))
    assert texts(found) == texts(want) and accepted(found) == 0
    assert ahead(drafted) == ahead(plain), "nor does anything wait"


def test_one_that_cannot_pay_is_off_and_the_log_says_so(
    drivers: Callable[..., list[Driver]], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        plain, drafted = (driver.engine for driver in drivers(DraftCost(0.2, 0.1, 0.9, 0.01, 0.8)))
    assert [record.message for record in caplog.records if "draft model is off" in record.message]
    want, found = (engine.generate([TALE], sampling=GREEDY, max_tokens=30) for engine in (plain, drafted))
    assert texts(found) == texts(want) and accepted(found) == 0 and ahead(drafted) == ahead(plain)


def test_rows_that_are_guessed_badly_are_queued_ahead_again(
    drivers: Callable[..., list[Driver]], tmp_path: Path
):
    path = write_pth(tmp_path / "other.pth", random_checkpoint(layers=1, width=64, vocab=65536, seed=1))
    plain, drafted = (driver.engine for driver in drivers(DraftCost(0.05, 0.02, 0.2, 0.001, 0.1), path))
    want, found = (
        engine.generate([TALE], sampling=SAMPLED, max_tokens=60, stop_ids=[]) for engine in (plain, drafted)
    )
    assert texts(found) == texts(want) and 0 < found[0].rejected < 60
    assert ahead(drafted) > ahead(plain) / 2


@pytest.mark.parametrize(
    ("rate", "chained", "passes"),
    [(0.9, 0.02, 7), (0.75, 0.05, 7), (0.75, 0.2, 4), (0.5, 0.1, 2), (0.5, 0.7, 1)],
)
def test_as_many_passes_are_queued_as_gain_most(rate: float, chained: float, passes: int):
    cost = DraftCost(0.1, 0.03, 0.1, 0.001, chained)
    hope = hope_of({0: (rate, 7)}, cost, 1.0, 7)
    assert hope.passes == passes and hope.expected == pytest.approx(
        sum(rate**number for number in range(1, passes + 1))
    )
    one = hope_of({0: (rate, 7)}, cost, 1.0, 1)
    assert one.passes == 1 and one.gain <= hope.gain
    assert hope_of({0: (rate, 7)}, cost, 8.0, 7).passes <= passes, "of more rows fewer"


class Forgetful:
    """A draft model that keeps the states of no row when it is told to lose them."""

    most_chained, slots = 3, frozenset[int]()

    def __init__(self) -> None:
        self.fed: list[list[int]] = []

    def allocate(self, slots: int) -> None: ...

    def holds(self, slot: int) -> bool:
        return slot in self.slots

    def begin(self, slot: int) -> None:
        self.slots = frozenset([slot])

    def first(self, tokens: dict[int, list[int]], masks: Any, passes: int) -> dict[int, list[Guess]]:
        self.fed += tokens.values()
        return {slot: [Guess(9, 0.99)] * passes for slot in tokens}

    def further(self, *_: Any, **__: Any) -> dict[int, list[Guess]]:
        return {}


def test_a_row_that_has_lost_its_states_is_read_again():
    model, drawn = Forgetful(), [4]
    row = SimpleNamespace(
        slot=3, arrival=1, prompt=[1, 2, 3], drawn=drawn, draws=SimpleNamespace(constraint=None)
    )
    row.request, row.text = SimpleNamespace(max_tokens=100), SimpleNamespace(stop_ids=())
    guessing = Guessing(model, 8)
    guess = lambda: guessing.drafts({0: WantedGuesses(row, 5)}, FREE, 1.0)[0].tokens  # noqa: E731
    assert guess() == [9, 9, 9] and model.fed == [[1, 2, 3, 4]]
    drawn += [9, 5]
    assert guess() and model.fed[1:] == [[9, 5]]
    model.slots = frozenset()
    drawn += [6]
    assert guess() and model.fed[2:] == [[1, 2, 3, 4, 9, 5, 6]]
    drawn += [7, 8]
    assert guess() and model.fed[3:] == [[7, 8]]

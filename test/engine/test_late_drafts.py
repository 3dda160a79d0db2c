"""Drafts over a runner whose steps are queued before it is known what the one before has drawn."""

from collections.abc import Iterator

import pytest
from ahead import LateRunner
from late_drafts import verifier_of

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.speculation import drafting
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.runner import backends
from rwkv_batch.wire.protocol import RowDelta, Sampling

TALE = "User: Tell me a story about a dog.\n\nAssistant:"
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def pair(free_drafts: None, weights: Checkpoint) -> Iterator[tuple[Engine, Engine]]:
    """Both queue steps; the second has drafts, which cost nothing, while waiting does."""
    fields = {"device": "cpu", "max_rows": 4, "l1": 2, "prefix_cache_mb": 0, "prefill_tokens": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "TorchRunner", LateRunner)
        patch.setattr(drafting, "verifier_of", verifier_of)
        made = Engine(weights, **fields), Engine(weights, **fields, speculate=7)
    yield made
    for engine in made:
        engine.close()


def fed_ahead(engine: Engine) -> int:
    assert isinstance(engine.runner, LateRunner)
    return engine.runner.fed_last


def accepted(rows: list[RowDelta]) -> int:
    return sum(row.accepted for row in rows)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3, temperature=0.9, top_p=0.9)], ids=str)
@pytest.mark.parametrize("ends", [{}, {"stop_strings": ["explore", "."]}], ids=str)
def test_texts_are_those_without_drafts(pair: tuple[Engine, Engine], sampling: Sampling, ends: dict):
    plain, drafted = pair
    given = {"sampling": sampling, "max_tokens": 40} | ends
    want = plain.generate([TALE, "1, 2, 3,"], **given)
    found = drafted.generate([TALE, "1, 2, 3,"], **given, prediction=want[0].text.replace("dog", "cat"))
    assert [row.text for row in found] == [row.text for row in want]
    assert accepted(found) > (0 if ends else 15)


def test_it_waits_for_what_was_drawn_where_a_text_comes_back_and_else_does_not(
    pair: tuple[Engine, Engine],
):
    plain, drafted = pair
    given = {"sampling": GREEDY, "max_tokens": 40}
    before = fed_ahead(plain), fed_ahead(drafted)
    told = plain.generate([TALE], **given)[0]
    assert drafted.generate([TALE], **given)[0].text == told.text
    ahead = fed_ahead(plain) - before[0], fed_ahead(drafted) - before[1]
    assert ahead[1] > ahead[0] / 2, "most steps are queued ahead"
    before = fed_ahead(plain), fed_ahead(drafted)
    found = drafted.generate([TALE], **given, prediction=told.text)[0]
    assert found.text == told.text and found.accepted > 25
    assert fed_ahead(drafted) - before[1] < ahead[0] / 4


def test_more_rows_than_can_be_verified_together_have_no_drafts(pair: tuple[Engine, Engine]):
    plain, drafted = pair
    given = {"sampling": GREEDY, "max_tokens": 24}
    told = plain.generate([TALE] * 3, **given)
    found = drafted.generate([TALE] * 3, **given, prediction=told[0].text)
    assert [row.text for row in found] == [row.text for row in told] and accepted(found) == 0

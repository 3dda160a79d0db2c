"""Drafts of rows that a grammar binds: they draw what they draw without them, in fewer steps."""

import json
import math
from collections.abc import Iterator

import pytest
from engine_driver import Driver
from msgspec import structs

from rwkv_batch.bundled.unpack import DRAFT
from rwkv_batch.engine.constraints import masks
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.wire.protocol import Grammar, RowDelta, Sampling

GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(seed=3, temperature=1.2, top_p=0.95)
PENALIZED = Sampling(seed=4, temperature=0.9, presence_penalty=0.4, repetition_penalty=1.1)
SCHEMA = {
    "type": "object",
    "properties": {
        "the_name_of_the_person": {"type": "string", "maxLength": 12},
        "the_age_of_the_person": {"type": "integer", "minimum": 0, "maximum": 99},
        "the_city_of_the_person": {"enum": ["Paris", "London"]},
    },
    "required": ["the_name_of_the_person", "the_age_of_the_person", "the_city_of_the_person"],
    "additionalProperties": False,
}
PERSON = Grammar(kind="json_schema", source=json.dumps(SCHEMA))
FREE = Grammar(kind="regex", source=r"[A-Za-z ,.']{1,200}")
WORDS = Grammar(kind="regex", source="(cat|dog|bird)( (cat|dog|bird)){8}")
TALE = "User: Tell me a story about a dog.\n\nAssistant:"
OPTIONS = {"device": "cpu", "max_rows": 4, "prefix_cache_mb": 0, "l1": 4}


@pytest.fixture(scope="module", autouse=True)
def patience_with_masks(free_drafts: None) -> Iterator[None]:
    """No mask takes long, on any machine: drafts behind each are verified."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "PATIENCE", math.inf)
        patch.setattr(masks, "QUICK", math.inf)
        yield


@pytest.fixture(scope="module")
def drivers(patience_with_masks: None, weights: Checkpoint) -> Iterator[list[Driver]]:
    """The bundled model without drafts, with those of its text, and with those of a draft model."""
    kinds: list[dict] = [{}, {"speculate": 7}, {"speculate": 5, "draft_model": str(DRAFT)}]
    made = [Driver(weights=weights, **OPTIONS, **kind) for kind in kinds]
    yield made
    for driver in made:
        driver.engine.close()


def plain(row: RowDelta) -> RowDelta:
    """A row but for its drafts."""
    return structs.replace(row, accepted=0, rejected=0)


@pytest.mark.parametrize(
    ("grammar", "prompt", "sampling"),
    [
        (PERSON, "{", GREEDY),
        (PERSON, "{", PENALIZED),
        (WORDS, "x", SAMPLED),
        (FREE, TALE, GREEDY),
        (FREE, TALE, SAMPLED),
    ],
)
def test_bound_texts_are_those_without_drafts(
    drivers: list[Driver], grammar: Grammar, prompt: str, sampling: Sampling
):
    given = {"sampling": sampling, "grammar": grammar, "max_tokens": 30, "n": 2}
    want, *others = ([*driver.engine.generate([prompt], **given)] for driver in drivers)
    for found in others:
        assert [plain(row) for row in found] == want
    if grammar is PERSON:
        assert others[0][0].accepted > 8, "the names of fields leave no choice"
    if grammar is FREE:
        assert others[1][0].accepted > 8, "the draft model"


def test_a_bound_text_that_comes_back_takes_few_steps(drivers: list[Driver]):
    given = {"sampling": GREEDY, "grammar": FREE, "max_tokens": 40}
    (want,) = drivers[0].engine.generate([TALE], **given)
    (found,) = drivers[1].engine.generate([TALE], **given, prediction=want.text)
    assert plain(found) == want and found.accepted > 25
    # What the grammar does not take of a prediction is no draft.
    (found,) = drivers[1].engine.generate([TALE], **given, prediction=want.text.replace(" ", "_"))
    assert plain(found) == want


def test_bound_rows_have_drafts_beside_others_and_in_sessions(drivers: list[Driver]):
    said = []
    for driver in drivers:
        given = {"sampling": GREEDY, "stop_ids": [0]}
        bound = driver.add("{", session="s", **given, max_tokens=120, grammar=PERSON)
        free = driver.add(TALE, **given, max_tokens=30)
        texts = [driver.said(bound), driver.said(free)]
        texts.append(driver.say("\n\n1, 2, 3,", session="s", **given, max_tokens=9))
        said.append((texts, driver.engine.pool.find("s").head.digest))
        json.loads(texts[0][0])
    assert said[0] == said[1] == said[2]


def test_logprobs_of_bound_drafts(drivers: list[Driver]):
    deltas, given = [], {"sampling": GREEDY, "top_logprobs": 2, "return_ids": True, "flush_tokens": 1}
    for driver in drivers:
        name = driver.add("{", max_tokens=60, **given, stop_ids=[0], grammar=PERSON)
        driver.said(name)
        rows = [row for event in driver.events[name][1:] for row in event.rows]
        deltas.append(([e for row in rows for e in row.logprobs], [i for row in rows for i in row.ids]))
    assert deltas[0] == deltas[1] == deltas[2] and len(rows) < len(deltas[0][1])

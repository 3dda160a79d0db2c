"""Random JSON schemas and the bundled model at temperature 1: an answer that finishes is valid by its schema.

`python -m pytest test/engine/test_json_schemas.py --schemas 1000` takes some minutes.
"""

import json
import threading

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from json_schemas import schemas

from rwkv_batch.engine import Engine
from rwkv_batch.wire.protocol import GenerateRequest, Grammar, Progress, Rejected, RowDelta, Sampling

pytestmark = pytest.mark.thorough

KEY = b"test"
ROWS = 32
PROMPT = "User: Write some JSON.\n\nAssistant:"


def random_schemas(count: int) -> list[dict]:
    found: list[dict] = []

    @seed(20260726)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(schemas())
    def collect(schema: dict) -> None:
        found.append(schema)

    collect()
    return found


def written(
    engine: Engine, wanted: list[dict], woken: threading.Event
) -> tuple[dict[int, RowDelta], dict[int, str]]:
    """The answer to each schema, and why some were refused, by their places."""
    answers: dict[int, RowDelta] = {}
    refused: dict[int, str] = {}
    for place, schema in enumerate(wanted):
        request = GenerateRequest(
            id=str(place),
            prompts=[PROMPT],
            max_tokens=300,
            sampling=Sampling(seed=place),
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        engine.add((KEY, request.id), request)
    while len(answers) + len(refused) < len(wanted):
        if not engine.busy:
            assert woken.wait(60)
        woken.clear()
        for (_, name), event in engine.step():
            if isinstance(event, Progress):
                answers[int(name)] = event.rows[0]
            elif isinstance(event, Rejected):
                refused[int(name)] = event.message
    return answers, refused


def test_every_answer_that_finishes_is_valid(request: pytest.FixtureRequest):
    wanted = random_schemas(request.config.getoption("--schemas"))
    woken = threading.Event()
    engine = Engine(device="cpu", max_rows=ROWS, wake=woken.set)
    answers, refused = written(engine, wanted, woken)
    engine.close()
    ended = {place: answer for place, answer in answers.items() if answer.finish_reason == "stop"}
    for place, answer in ended.items():
        validator = jsonschema.Draft202012Validator
        validator(wanted[place], format_checker=validator.FORMAT_CHECKER).validate(json.loads(answer.text))
    assert all("more digits than can be told apart" in why for why in refused.values())
    assert len(ended) > 0.9 * len(wanted)

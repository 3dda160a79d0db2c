"""Requests that are generated from the OpenAPI document, and what must hold for every reply."""

import random
from collections.abc import Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SILENT = 60  # seconds without a byte, after which a request hangs
FEW = 8  # tokens of a text, texts of a prompt, items of a list
LONGEST = 500  # letters of a parameter in a URL
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")
# What clients name that is seldom there.
NAMES = ("model", "adapter", "adapter_id", "state_id", "mrss_gatingweight", "previous_response_id")
MESSAGES = [{"role": "user", "content": "Hi"}]
# What the routes need to answer anything: fields of bodies that have none of them.
TEXTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"messages": MESSAGES}, {"contents": ["Hi"]}],
    "/openai/v1/chat/completions": [{"messages": MESSAGES}],
    "/v3/chat/completions": [{"messages": MESSAGES}, {"contents": ["Hi", "Yes"]}],
    "/state/chat/completions": [{"contents": ["Hi"]}],
    "/multi_state/chat/completions": [{"contents": ["Hi"], "dialogue_idx": 0}],
    "/FIM/v1/batch-FIM": [{"prefix": ["a"], "suffix": ["b"]}],
    "/v1/responses": [{"input": "Hi"}],
    "/openai/v1/responses": [{"input": "Hi"}],
    "/v1/responses/input_tokens": [{"input": "Hi"}],
    "/openai/v1/responses/input_tokens": [{"input": "Hi"}],
    "/v1/fim/completions": [{"prompt": "a", "suffix": "b"}],
    "/v1/messages": [{"messages": MESSAGES}],
    "/v1/messages/count_tokens": [{"messages": MESSAGES}],
    "/api/chat": [{"messages": MESSAGES}],
} | {f"{kind}/completions": [{"contents": ["Hi"]}] for kind in ("/v1/batch", "/v2/chat", "/big_batch")}


def operations(document: dict) -> list[APIOperation]:
    schema = schemathesis.openapi.from_dict(document)
    return [found.ok() for found in schema.get_all_operations()]


def cases(operation: APIOperation, number: int, count: int, valid: bool = True) -> list[Case]:
    """`count` generated requests, the same for the same number. Invalid ones break the document somewhere."""
    found: list[Case] = []
    mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Case) -> None:
        found.append(case)

    try:
        collect()
    except Unsatisfiable:  # nothing can be wrong where nothing is taken
        assert not valid
    return found


def plain(value: Any) -> Any:
    """JSON as programs write it: whole numbers have no point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def short(case: Case) -> Case:
    """The request without what makes its texts long, or its URL, which the HTTP library answers then."""
    for name, value in case.query.items() if isinstance(case.query, dict) else ():
        if isinstance(value, list):
            case.query[name] = [each[:LONGEST] if isinstance(each, str) else each for each in value[:FEW]]
        elif isinstance(value, str):
            case.query[name] = value[:LONGEST]
    body = case.body
    for place in (body, body.get("options")) if isinstance(body, dict) else ():
        for name in (*LIMITS, "n") if isinstance(place, dict) else ():
            if isinstance(place.get(name), int | float):
                place[name] = min(place[name], FEW)
    if isinstance(body, dict) and all(body.get(name) is None for name in LIMITS):
        body["max_output_tokens" if "/responses" in case.path else "max_tokens"] = FEW
    return case


def usual(case: Case, dice: random.Random) -> Case:
    """The request with less in it. Most ask for some text, and name nothing strange."""
    if case.media_type == "multipart/form-data":  # broken forms are answered by the HTTP library
        case.body = {"state_id": "s", "file": b"state"}
    body = case.body
    if not isinstance(body, dict):
        return case
    for name in list(body):
        if dice.random() < (0.9 if name in NAMES else 0.3):
            del body[name]
        elif isinstance(body[name], list):
            body[name] = body[name][:FEW]
    if case.path in TEXTS and dice.random() < 0.7:
        body.update(dice.choice(TEXTS[case.path]))
    return case


def send(case: Case, url: str) -> requests.Response:
    """The checked reply. Raises FailureGroup for a wrong one, and requests' exceptions if it hangs."""
    response = case.call(base_url=url, timeout=SILENT)
    case.validate_response(response, checks=CHECKS)
    return response


def calls(operation: APIOperation, number: int, count: int) -> Iterator[Case]:
    """Requests for short texts: twice as many valid ones as broken ones."""
    dice = random.Random(number)
    for valid, wanted in ((True, count), (False, (count + 1) // 2)):
        for case in cases(operation, number, wanted, valid):
            is_form = case.media_type == "multipart/form-data"
            yield short(usual(case, dice) if valid or is_form else case)

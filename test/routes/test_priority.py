"""How urgent a request is, by its fields, on the routes of every family."""

import time

import pytest
from frontend_process import FrontendProcess
from native_calls import V1

from routes.http.priority import PriorityFields
from rwkv_batch.wire.protocol import GenerateRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES = {
    V1: {"contents": ["Hi"]},
    "/openai/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": CHAT | {"max_tokens": 4},
    "/api/chat": CHAT | {"stream": False},
    "/v2/translate": {"text": ["Hi"], "target_lang": "DE"},
}


@pytest.mark.parametrize("path", BODIES)
def test_priority_and_deadline_reach_the_engine(server: FrontendProcess, path: str):
    before = len(server.engine.requests)
    assert server.http.post(path, json=BODIES[path]).status_code == 200
    first = server.engine.requests[before]
    assert (first.batch, first.deadline) == (False, 0.0)
    began, before = time.time(), len(server.engine.requests)
    late = {"priority": "batch", "deadline": 60}
    assert server.http.post(path, json=BODIES[path] | late).status_code == 200
    second = server.engine.requests[before]
    assert second.batch and began + 59.5 <= second.deadline <= time.time() + 60.5


def test_rows_of_a_batch_have_one_deadline_and_run_in_their_order(monkeypatch: pytest.MonkeyPatch):
    """Each says how long is left when it is sent, and is read a little later."""
    request = GenerateRequest(id="a", prompts=[[1]], max_tokens=1)
    deadlines = []
    for sent, read in ((1000.15, 1000.2), (1000.7, 1000.9), (1001.0, 1001.0001)):
        monkeypatch.setattr("routes.http.priority.time.time", lambda read=read: read)
        fields = PriorityFields(priority="batch", deadline=2000 - sent)
        deadlines.append(fields.ranked(request).deadline)
    assert deadlines == [2000.0] * 3


@pytest.mark.parametrize(
    ("fields", "batch"),
    [
        ({"service_tier": "flex"}, True),
        ({"service_tier": "default"}, False),
        ({"service_tier": "priority"}, False),
        ({"priority": 1}, True),
        ({"priority": 0}, False),
        ({"priority": -5}, False),
        ({"priority": "interactive"}, False),
    ],
)
def test_the_class_is_known_by_the_fields_of_openai_and_vllm(server: FrontendProcess, fields, batch):
    before = len(server.engine.requests)
    reply = server.http.post("/v1/responses", json=BODIES["/v1/responses"] | fields)
    assert reply.json()["service_tier"] == ("flex" if batch else "default")
    assert server.engine.requests[before].batch == batch


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("wrong", [{"priority": "soon"}, {"deadline": -1}, {"service_tier": "gold"}])
def test_what_is_no_priority_is_refused(server: FrontendProcess, path: str, wrong: dict):
    reply = server.http.post(path, json=BODIES[path] | wrong)
    assert reply.status_code == 400 and next(iter(wrong)) in reply.text

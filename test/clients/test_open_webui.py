"""The requests that open-webui makes of OpenAI's and Ollama's routes, in their shapes."""

import json

import httpx
import pytest
from asked import (
    ALICE,
    CAPITAL,
    CITY,
    FUNCTION,
    MODEL,
    PARIS,
    SUNNY,
    TOOL,
    UNKNOWN,
    WEATHER,
    conversation,
    said,
)


@pytest.fixture(scope="module")
def http(url: str):
    headers = {"Authorization": "Bearer unused", "Content-Type": "application/json"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        yield client


def deltas(reply: httpx.Response) -> list[dict]:
    """Those of a stream of chat completions."""
    assert reply.status_code == 200, reply.text
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [choice["delta"] for event in events for choice in json.loads(event)["choices"]]


# What stands in each of its chats beside the messages.
HABITS = {
    "model": MODEL,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "max_tokens": 200,
    "logit_bias": {},
    "custom_params": {},
}


def test_it_finds_models(http: httpx.Client):
    assert http.get("/v1/models").json()["data"][0]["object"] == "model"
    tags = http.get("/api/tags").json()["models"]
    assert MODEL in [each["model"] for each in tags]
    assert all({"name", "model", "modified_at", "size", "digest", "details"} <= set(each) for each in tags)
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    assert all("expires_at" in each for each in http.get("/api/ps").json()["models"])


def test_a_stream(http: httpx.Client):
    found = deltas(http.post("/v1/chat/completions", json=HABITS | {"messages": [said(CAPITAL)]}))
    assert PARIS in "".join(delta.get("content") or "" for delta in found)


def test_a_chat_that_names_itself(http: httpx.Client):
    """Its titles and tags are answers that are not streamed."""
    body = HABITS | {"stream": False, "messages": [said(CAPITAL)], "max_completion_tokens": 200}
    del body["stream_options"], body["max_tokens"]
    assert PARIS in http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def test_a_tool_and_its_result(http: httpx.Client):
    body = HABITS | {"messages": [said(WEATHER)], "tools": [TOOL]}
    (call,) = [
        c
        for delta in deltas(http.post("/v1/chat/completions", json=body))
        for c in delta.get("tool_calls", [])
    ]
    assert call["function"] == {"name": FUNCTION["name"], "arguments": '{"city": "Paris"}'}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": SUNNY}
    body["messages"] += [asked, result]
    assert any(delta.get("content") for delta in deltas(http.post("/v1/chat/completions", json=body)))


def test_a_structured_answer(http: httpx.Client):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    body = HABITS | {"messages": [said(CAPITAL)], "response_format": form}
    found = deltas(http.post("/v1/chat/completions", json=body))
    assert list(json.loads("".join(delta.get("content") or "" for delta in found))) == ["city"]


def test_a_second_turn(http: httpx.Client):
    found = deltas(http.post("/v1/chat/completions", json=HABITS | {"messages": conversation()}))
    assert ALICE in "".join(delta.get("content") or "" for delta in found)


def test_a_chat_of_ollama(http: httpx.Client):
    body = {
        "model": f"{MODEL}:latest",
        "messages": [said(CAPITAL)],
        "options": {"temperature": 0, "num_predict": 200, "num_ctx": 2048},
        "stream": True,
        "keep_alive": "5m",
    }
    lines = [json.loads(line) for line in http.post("/api/chat", json=body).text.splitlines()]
    assert PARIS in "".join(line["message"]["content"] for line in lines) and lines[-1]["done"]


def test_an_error(http: httpx.Client):
    """It shows `error.message` of the one protocol, and `error` of the other."""
    body = {"model": UNKNOWN, "messages": [said(CAPITAL)]}
    assert UNKNOWN in http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    assert UNKNOWN in http.post("/api/chat", json=body).json()["error"]
    assert "embeddings" in http.post("/api/embed", json={"model": MODEL, "input": "Hi"}).json()["error"]

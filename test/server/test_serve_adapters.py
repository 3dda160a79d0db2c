"""Adapters of requests through the real server: loaded, chosen, and dropped, beside plain requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from adapter_files import FACTOR
from row_adapters import merged_by_hand, write
from serving import Server

from rwkv_batch.bundled import unpack
from rwkv_batch.engine import Engine
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors
from rwkv_batch.wire.protocol import Sampling

PROMPT = "User: What is the capital of France?\n\nAssistant:"
ONLY = {"targets": ("att.value", "ffn.key")}
MODEL = "rwkv7-demo"


@pytest.fixture(scope="module")
def weights() -> Checkpoint:
    return from_tensors(MODEL, unpack.tensors())


@pytest.fixture(scope="module")
def http(weights: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        write(folder, weights, "lora", seed, **ONLY)
    server = Server("--device", "cpu", "--models", str(folder), "--max-adapters", "1")
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for seed in (1, 2):
            body = {"lora_name": f"a{seed}", "lora_path": f"lora-{seed}.pth", "adapter_scaling": FACTOR}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 200, server.log()
        yield client
    assert server.stop() == 0, server.log()


def said(weights: Checkpoint) -> str:
    engine = Engine(weights, device="cpu", max_rows=1, l1=0)
    (row,) = engine.generate([PROMPT], max_tokens=24, sampling=Sampling(temperature=0), stop_ids=[])
    engine.close()
    return row.text


def completion(http: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def test_requests_at_the_same_time_each_with_its_weights(http: httpx.Client, weights: Checkpoint) -> None:
    expected = {MODEL: said(weights)}
    for seed in (1, 2):
        expected[f"{MODEL}:a{seed}"] = said(merged_by_hand(weights, "lora", seed, **ONLY))
    assert "Paris" in expected[MODEL] and len(set(expected.values())) == 3
    models = [*expected] * 3
    with ThreadPoolExecutor(len(models)) as pool:
        texts = list(pool.map(lambda model: completion(http, model), models))
    assert texts == [expected[model] for model in models]


def test_a_session_is_refused_another_adapter(http: httpx.Client) -> None:
    body = {"session_id": "s", "contents": [PROMPT], "temperature": 0, "max_tokens": 4}
    assert http.post("/state/chat/completions", json=body | {"adapter": "a1"}).status_code == 200
    for fields in ({}, {"adapter": "a2"}):
        reply = http.post("/state/chat/completions", json=body | fields)
        assert reply.status_code == 409
    assert http.post("/state/chat/completions", json=body | {"adapter": "a1"}).status_code == 200


def test_an_adapter_without_its_scaling_is_refused_and_changes_nothing(http: httpx.Client) -> None:
    body = {"lora_name": "b", "lora_path": "lora-1.pth"}
    reply = http.post("/v1/load_lora_adapter", json=body)
    assert reply.status_code == 400 and "adapter_alpha" in reply.json()["error"]["message"]
    ids = [each["id"] for each in http.get("/v1/models").json()["data"]]
    assert ids == [MODEL, f"{MODEL}:a1", f"{MODEL}:a2"]

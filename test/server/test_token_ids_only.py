"""A real server with a model of bytes: requests with ids are answered, and every text is refused."""

from pathlib import Path

import httpx
import pytest
import torch
from checkpoints import write_pth
from serving import Server

from bench.make_checkpoint import random_checkpoint
from rwkv_batch.model.checkpoint import load
from rwkv_batch.model.rwkv7 import RWKV7

ROWS = 256
PROMPT = [34, 105, 110]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pth(tmp_path_factory.mktemp("models") / "bytes.pth", random_checkpoint(2, 64, ROWS))


@pytest.fixture(scope="module")
def server(file: Path):
    server = Server("--device", "cpu", "--frontends", "1", "--model-path", str(file), "--wkv", "fp32")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def http(server: Server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def test_it_is_said_at_load_and_in_health(server, http):
    assert "only token ids work" in server.log()
    health = http.get("/health")
    assert health.status_code == 200 and health.json()["token_ids_only"] == ["bytes"]


def drawn(file: Path, count: int) -> list[int]:
    model, ids = RWKV7(load(file)), list(PROMPT)
    for _ in range(count):
        states = model.new_states(1)
        logits = model.forward(torch.tensor(ids), [len(ids)], [0], states)
        ids.append(int(logits[-1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize("stream", [False, True])
def test_ids_are_answered_with_ids(http, file, stream):
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True, "stream": stream}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        (choice,) = reply.json()["choices"]
        assert (choice["token_ids"], choice["text"]) == (drawn(file, 6), "")
    else:
        assert reply.text.rstrip().endswith("data: [DONE]") and str(drawn(file, 6)[-1]) in reply.text


def test_logprobs_name_ids(http, file):
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "logprobs": 3}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in drawn(file, 2)]
    assert all(len(top) == 3 for top in choice["logprobs"]["top_logprobs"])


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
TEXTS = [
    ("/openai/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"contents": ["hello"], "max_tokens": 4}),
    ("/v2/chat/completions", {"contents": ["hello"], "max_tokens": 4}),
    ("/big_batch/completions", {"contents": ["hello"], "max_tokens": 4}),
    ("/FIM/v1/batch-FIM", {"prefix": ["a"], "suffix": ["b"], "max_tokens": 4}),
    ("/state/chat/completions", {"contents": ["hello"], "session_id": "s", "max_tokens": 4}),
    ("/multi_state/chat/completions", {"contents": ["hello"], "session_id": "t", "dialogue_idx": 0}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
    ("/v1/completions", {"prompt": PROMPT, "stop": ["a"], "max_tokens": 4}),
    ("/v1/completions", {"prompt": PROMPT, "guided_regex": "a+", "max_tokens": 4}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    ("/v1/messages", CHAT | {"model": "bytes"}),
    ("/api/chat", CHAT | {"model": "bytes", "stream": False}),
    ("/api/generate", {"model": "bytes", "prompt": "hello", "stream": False}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 4}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": PROMPT}),
    ("/v1/tokens/count", {"text": "hello"}),
]


@pytest.mark.parametrize(("path", "body"), TEXTS)
def test_texts_are_refused_on_every_route(http, path, body):
    reply = http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert "World vocabulary" in reply.text and f"{ROWS} tokens" in reply.text
    assert reply.headers["content-type"].startswith("application/json")


def test_a_stream_of_a_text_is_refused_before_it_begins(http):
    reply = http.post("/openai/v1/chat/completions", json=CHAT | {"stream": True})
    assert reply.status_code == 400 and "World vocabulary" in reply.json()["error"]["message"]


def test_nothing_is_said_of_a_tokenizer(http):
    reply = http.get("/tokenizer_info")
    assert reply.status_code == 400 and "World" in reply.json()["error"]["message"]

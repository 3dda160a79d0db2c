"""A server whose weights are in fewer bits, as a user starts it and as /loadmodel asks for one."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from checkpoints import write_pth
from serving import Server

from rwkv_batch.bundled import unpack
from rwkv_batch.quantize import main

CAPITAL = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_pth(made / "rwkv7-demo.pth", unpack.tensors())
    assert main([str(made / "rwkv7-demo.pth"), str(made / "int4.safetensors"), "--weights", "int4"]) == 0
    return made


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Server]:
    flags = ["--device", "cpu", "--frontends", "1", "--weights", "int8", "--models", str(folder)]
    server = Server(*flags, "--model-path", str(folder / "rwkv7-demo.pth"))
    yield server
    assert server.stop() == 0, server.log()


def ask(server: Server, model: str = "") -> httpx.Response:
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=CAPITAL | {"model": model}, timeout=60)
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]
    return reply


def test_a_server_in_int8_answers_and_says_so(small: Server, server: Server):
    prints = [ask(each).headers["x-model-fingerprint"] for each in (small, server)]
    assert prints[0] != prints[1]
    listed = httpx.get(f"{small.url}/api/tags", timeout=60).json()["models"][0]
    assert listed["details"]["quantization_level"] == "INT8"
    assert (
        listed["size"] < 100e6 < httpx.get(f"{server.url}/api/tags", timeout=60).json()["models"][0]["size"]
    )


@pytest.mark.parametrize(
    ("file", "strategy", "level", "said"),
    [("rwkv7-demo.pth", "nf4", "NF4", "RWKV-Infer"), ("int4.safetensors", "", "INT4", "")],
)
def test_a_model_is_loaded_in_another_format(small: Server, file: str, strategy: str, level: str, said: str):
    body = {"model_filename": file, "model_viewname": level, "model_strategy": strategy}
    reply = httpx.post(f"{small.url}/loadmodel", json=body, timeout=60).json()
    assert reply["status"] == "success" and said in reply.get("message", "")
    ask(small, level)
    levels = [
        each["details"]["quantization_level"]
        for each in httpx.get(f"{small.url}/api/tags", timeout=60).json()["models"]
    ]
    assert level in levels
    httpx.post(f"{small.url}/removemodel", json={"model_viewname": level}, timeout=60)


def test_a_session_of_other_weights_is_a_conflict(small: Server):
    def turn(strategy: str, stream: bool = False) -> httpx.Response:
        body = {"model_filename": "rwkv7-demo.pth", "model_viewname": "it", "model_strategy": strategy}
        assert httpx.post(f"{small.url}/loadmodel", json=body, timeout=60).json()["status"] == "success"
        asked = CAPITAL | {"model": "it", "session_id": "of the weights", "max_tokens": 8, "stream": stream}
        return httpx.post(f"{small.url}/v1/chat/completions", json=asked, timeout=60)

    assert turn("fp6").status_code == 200
    for stream in (False, True):
        refused = turn("fp5", stream)
        assert refused.status_code == 409 and "made by another model" in refused.json()["error"]["message"]
    httpx.post(f"{small.url}/removemodel", json={"model_viewname": "it"}, timeout=60)


def test_a_strategy_that_is_not_there_is_refused_with_those_that_are(small: Server):
    reply = httpx.post(
        f"{small.url}/loadmodel",
        json={"model_filename": "rwkv7-demo.pth", "model_strategy": "fp5c"},
        timeout=60,
    )
    assert reply.status_code == 400 and "model_strategy" in reply.json()["error"]
    assert "int4-128" in reply.json()["error"]

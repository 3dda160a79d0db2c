"""Greedy text through HTTP is that of the PyPI package `rwkv` for the same tokens, by every route."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from checkpoints import write_pth
from reference import Reference
from serving import Server, native_stream

from bench.make_checkpoint import random_checkpoint

TOKENS = 24
GREEDY = {
    "temperature": 0,
    "alpha_presence": 0,
    "alpha_frequency": 0,
    "stop_tokens": [],
    "max_tokens": TOKENS,
}
PROMPTS = [
    "User: hi\n\nAssistant:",
    "Один, два, три: " * 9,
    "x",
    "English: The quick brown fox jumps over the lazy dog.\n\nChinese:",
    "床前明月光，疑是地上霜。" * 20,
    "🦄🧬🫠 hello 𠮷",
    "def add(a, b):\n    return a + b\n" * 12,
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pth(
        tmp_path_factory.mktemp("checkpoint") / "random.pth",
        random_checkpoint(layers=3, width=192, vocab=65536, seed=1),
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[str]:
    reference = Reference(checkpoint)
    texts = [reference.text(prompt, TOKENS) for prompt in PROMPTS]
    assert len(set(texts)) == len(PROMPTS), "a model that says the same to everything shows nothing"
    return texts


@pytest.fixture(
    scope="module",
    params=[(), ("--prefill-tokens", "16", "--max-rows", "3")],
    ids=["default", "small pieces, few slots"],
)
def random_server(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    running = Server(
        "--device", "cpu", "--model-path", str(checkpoint.with_suffix("")), "--frontends", "1", *request.param
    )
    yield running
    assert running.stop() == 0, running.log()


def test_a_batch_of_mixed_lengths(random_server: Server, expected: list[str]):
    reply = httpx.post(
        random_server.url + "/v1/chat/completions", json=GREEDY | {"contents": PROMPTS}, timeout=120
    ).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == expected
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 8, 128])
def test_the_same_streamed(random_server: Server, expected: list[str], chunk_size: int):
    texts, reasons, _ = native_stream(
        random_server.url + "/v1/chat/completions", GREEDY | {"contents": PROMPTS, "chunk_size": chunk_size}
    )
    assert texts == expected
    assert set(reasons) == {"length"}


def test_each_prompt_alone_and_as_a_completion(random_server: Server, expected: list[str]):
    for prompt, text in zip(PROMPTS, expected, strict=True):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "n": 2}
        choices = httpx.post(random_server.url + "/v1/completions", json=body, timeout=120).json()["choices"]
        assert [choice["text"] for choice in choices] == [text, text]

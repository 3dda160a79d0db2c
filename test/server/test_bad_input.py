"""The real server refuses bad requests as its front end alone does, and keeps answering."""

import json

import httpx
import pytest
from native_calls import BAD, COMPLETIONS, V1
from serving import Server

GOOD = {
    "contents": ["User: What is the capital of France?\n\nAssistant:"],
    "temperature": 0,
    "max_tokens": 20,
}
SENT = [
    case for case in BAD if case[2] != 413 and "invalid" not in str(case[1])
]  # the rest needs the fake engine's limits
ENGINE = [  # what only the engine can know
    (V1, {"contents": ["a"] * 4096, "max_tokens": 1}, 200, "choices"),
    (V1, {"contents": ["a" * (17 << 20)]}, 413, "16777216"),
    (COMPLETIONS, {"prompt": [65530], "max_tokens": 1}, 400, "65529"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"prompt": "\x00" * 1000, "max_tokens": 1}, 200, "choices"),
]


@pytest.fixture(scope="module", autouse=True)
def before(server: Server) -> tuple[int, int]:
    """The engine and the length of the log, which other files have used too."""
    return server.children()["engine"], len(server.log())


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    SENT + ENGINE,
    ids=[f"{i}-{c[0]}" for i, c in enumerate(SENT + ENGINE)],
)
def test_bad_input(server: Server, path: str, body: bytes | dict, status: int, words: str):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = httpx.post(server.url + path, content=content, timeout=60)
    assert reply.status_code == status and words in reply.text


def test_the_engine_has_lived_through_it_all(server: Server, before: tuple[int, int]):
    engine, logged = before
    reply = httpx.post(server.url + V1, json=GOOD, timeout=60)
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]
    assert engine == server.children()["engine"] and "ERROR" not in server.log()[logged:]

"""Limits and usage of keys over two front ends, the access log as JSON, and the audit log of both."""

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from fake_engine import FakeEngine
from frontend_process import FrontendProcess
from native_calls import CHAT, COMPLETIONS, V1

from rwkv_batch.audit.lines import verify
from rwkv_batch.keys import records
from rwkv_batch.keys.records import Key

SEEN_WITHIN = 60.0  # seconds: when a test gives up


class Host(NamedTuple):
    """Two front ends of one engine."""

    fronts: list[FrontendProcess]
    file: Path
    audit: Path

    def key(self, name: str, **limits: object) -> list[httpx.Client]:
        """A client at each front end, with a new key that both know."""
        secret = records.add(self.file, Key(name, "", 0, 0.0, **limits))
        clients = [front.client() for front in self.fronts]
        for front, client in zip(self.fronts, clients, strict=True):
            client.headers["authorization"] = f"Bearer {secret}"
            front.until(lambda _, client=client: client.get("/v1/models").status_code == 200)
        return clients


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder, counts = tmp_path_factory.mktemp("host"), tmp_path_factory.mktemp("counts")
    file, audit = folder / "keys.json", folder / "audit.jsonl"
    records.add(file, Key("first", "", 0, 0.0))
    options = {"keys": str(file), "audit_log": str(audit), "log_format": "json"}
    with (
        FakeEngine(f"ipc://{counts}/engine") as engine,
        FrontendProcess(engine, name="one", **options) as one,
        FrontendProcess(engine, name="two", **options) as two,
    ):
        yield Host([one, two], file, audit)


def until(condition) -> None:
    deadline = time.monotonic() + SEEN_WITHIN
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)  # another process writes; there is nothing to wait on


def ask(client: httpx.Client, prompt: str = "a", **fields: object) -> httpx.Response:
    return client.post(COMPLETIONS, json={"model": "rwkv7", "prompt": prompt, "max_tokens": 100} | fields)


def test_requests_a_minute_over_both_front_ends(host):
    clients = host.key("five", requests_per_minute=5)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: ask(clients[number % 2]), range(12)))
    assert Counter(answer.status_code for answer in answers) == {200: 5, 429: 7}
    left = sorted(int(a.headers["x-ratelimit-remaining-requests"]) for a in answers if a.status_code == 200)
    assert left == [0, 1, 2, 3, 4]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-limit-requests"] == "5"
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert ask(host.key("other")[0]).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}, "error"),
        ("/api/generate", {"prompt": "a", "stream": False}, "error"),
        (V1, {"contents": ["a"]}, "error"),
    ],
)
def test_429_in_the_shape_of_each_family(host, path, body, kind):
    client, _ = host.key(f"none-{path.strip('/').replace('/', '-')}", requests_per_minute=0)
    answer = client.post(path, json=body)
    assert answer.status_code == 429 and "0 requests a minute" in str(answer.json()[kind])


def test_tokens_a_minute_count_what_streams_have_had(host):
    one, two = host.key("tokens", tokens_per_minute=60)
    answer = ask(one, "x" * 20)  # which is echoed: 20 and 20 tokens
    assert answer.headers["x-ratelimit-remaining-tokens"] == "60"
    again = ask(two, "y" * 20)
    assert again.headers["x-ratelimit-remaining-tokens"] == "20"
    assert ask(one).status_code == 429


def test_rows_at_once_and_their_end(host):
    one, two = host.key("rows", rows=2)
    with one.stream("POST", V1, json={"contents": ["hang"] * 2, "stream": True}) as running:
        assert running.status_code == 200
        refused = ask(two)
        assert refused.status_code == 429 and "2 rows running of 2" in refused.text
        assert refused.headers["retry-after"] == "1"
    until(lambda: ask(two).status_code == 200)
    assert ask(one, n=3).status_code == 403


def test_a_revoked_key_stops_on_both_front_ends_with_what_it_has_running(host):
    one, two = host.key("gone")
    with one.stream("POST", V1, json={"contents": ["hang"], "stream": True}) as running:
        lines = running.iter_lines()
        assert ask(two).status_code == 200
        records.revoke(host.file, "gone")
        rest = "".join(lines)
        assert "This key has been revoked" in rest and "[DONE]" in rest
    until(lambda: ask(one).status_code == ask(two).status_code == 401)


def logged(host: Host, key: str) -> list[dict]:
    """The lines of the access logs for requests of a key that the engine has got."""
    lines = [line for front in host.fronts for line in lines_of(front.log)]
    return [line for line in lines if line.get("key") == key and "model" in line]


def lines_of(file: Path) -> list[dict]:
    """Without one that is being written."""
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]


def usage_of(client: httpx.Client) -> dict[str, int]:
    return client.get("/v1/usage").json()["total"]


def test_usage_is_what_clients_have_counted_also_of_streams_that_they_have_left(host):
    """A few hundred requests of all kinds. Who leaves a stream does so while it is silent."""
    clients = host.key("counted")
    dice = random.Random(3)
    jobs = [(clients[n % 2], dice.choice((whole, streamed, chat, left, failed)), n) for n in range(240)]
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda job: job[1](job[0], f"{job[2]:03d}"), jobs))
    requests, prompt, completion = map(sum, zip(*counts, strict=True))
    expected = {"requests": requests, "prompt_tokens": prompt, "completion_tokens": completion}
    until(lambda: expected.items() <= usage_of(clients[0]).items())
    (entry,) = clients[1].get("/v1/usage").json()["data"]
    assert (entry["key"], entry["model"], entry["requests"]) == ("counted", "fake-rwkv", requests)
    until(lambda: sum(line["completion_tokens"] for line in logged(host, "counted")) == completion)


def whole(client: httpx.Client, number: str) -> tuple[int, int, int]:
    used = ask(client, f"whole {number}", n=2).json()["usage"]
    return 1, used["prompt_tokens"], used["completion_tokens"]


def chat(client: httpx.Client, number: str) -> tuple[int, int, int]:
    body = {"messages": [{"role": "user", "content": number}], "max_tokens": 5}
    used = client.post(CHAT, json=body).json()["usage"]
    return 1, used["prompt_tokens"], used["completion_tokens"]


def streamed(client: httpx.Client, number: str) -> tuple[int, int, int]:
    prompt = f"streamed {number}"
    answer = client.post(V1, json={"contents": [prompt], "stream": True, "chunk_size": 3})
    text = "".join(
        choice["delta"].get("content", "")
        for line in answer.text.splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
    )
    assert text == prompt
    return 1, len(prompt), len(text)  # a character is a token


def left(client: httpx.Client, number: str) -> tuple[int, int, int]:
    """Four tokens come, then nothing; the client leaves."""
    prompt, text = f"trickle {number}", ""
    body = {"contents": [prompt], "stream": True, "chunk_size": 1}
    with client.stream("POST", V1, json=body) as answer:
        lines = answer.iter_lines()
        while len(text) < 4:
            line = next(lines)
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    return 1, len(prompt), 4


def failed(client: httpx.Client, number: str) -> tuple[int, int, int]:
    """Two requests that the engine refuses, or gives up; what they count."""
    assert ask(client, f"overloaded {number}").status_code == 429
    assert ask(client, f"fail {number}").status_code == 500
    return 1, len(f"fail {number}"), 0


def test_what_counts_tokens_only_uses_none(host):
    client, _ = host.key("counts")
    body = {"messages": [{"role": "user", "content": "How many?"}]}
    assert client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 0
    assert client.post("/v1/responses/input_tokens", json={"input": "How many?"}).status_code == 200
    assert usage_of(client)["total_tokens"] == 0


def test_all_rows_of_a_translation_are_counted(host):
    """What the engine has got for it, in how many requests ever: the echo says as much as it is asked."""
    client, _ = host.key("translator")
    engine = host.fronts[0].engine
    before = len(engine.requests)
    body = {"text": ["Hello", "Good morning to all"], "target_lang": "DE"}
    assert client.post("/v2/translate", json=body).status_code == 200
    asked = [request for request in engine.requests[before:] if request.to_model]
    prompt = sum(len(prompt) for request in asked for prompt in request.prompts)
    until(lambda: usage_of(client)["requests"] == 1)
    assert usage_of(client)["prompt_tokens"] == prompt > 0


def test_usage_of_others_is_the_operators(host):
    client, _ = host.key("curious")
    admin, _ = host.key("chief", admin=True)
    assert client.get("/v1/usage", params={"key": "counted"}).status_code == 403
    assert client.get("/v1/usage", params={"start": "soon"}).status_code == 400
    ask(client, "hello")
    until(lambda: usage_of(client)["requests"] == 1)
    everyone = {entry["key"] for entry in admin.get("/v1/usage").json()["data"]}
    assert "curious" in everyone
    assert admin.get("/v1/usage", params={"key": "curious"}).json()["total"]["completion_tokens"] == 5
    assert not admin.get("/v1/usage", params={"end": "2020-01-01"}).json()["data"]


def test_metrics_by_key_name(host):
    client, _ = host.key("measured")
    admin, _ = host.key("meter", admin=True)
    ask(client, "12345")
    wanted = [
        'key_requests_total{key="measured"} 1.0',
        'key_tokens_total{key="measured",kind="completion"} 5.0',
    ]
    until(lambda: all(line in admin.get("/metrics").text for line in wanted))


def test_the_audit_log_is_one_chain_of_what_the_engine_has_got(host):
    one, two = host.key("audited")
    for number in range(20):
        ask((one, two)[number % 2], f"prompt {number}")
    one.get("/v1/models")

    def entries() -> list[dict]:
        return [entry for entry in lines_of(host.audit) if entry["key"] == "audited"]

    until(lambda: len(entries()) == 20)
    with host.audit.open("rb") as file:
        verify(file)
    hashes = {entry["prompt_sha256"] for entry in entries()}
    assert hashes == {hashlib.sha256(f"prompt {number}".encode()).hexdigest() for number in range(20)}
    assert all(entry["answer_sha256"] == entry["prompt_sha256"] for entry in entries())  # it echoes
    (entry,) = [e for e in entries() if e["prompt_sha256"] == hashlib.sha256(b"prompt 7").hexdigest()]
    assert entry["fingerprint"] == "0123456789abcdef" and entry["completion_tokens"] == 8
    assert "prompt 7" not in host.audit.read_text()


def test_the_access_log_is_json(host):
    client, _ = host.key("logged")
    ask(client, "hello")
    until(lambda: logged(host, "logged"))
    (entry,) = logged(host, "logged")
    assert {"time", "level", "message"} <= entry.keys()
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", COMPLETIONS, 200)
    assert 0 <= entry["first_token_ms"] <= entry["ms"]

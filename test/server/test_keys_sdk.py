"""Keys on a server with two engines and two front ends, as OpenAI's SDK and many clients meet them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
from serving import ROOT, Server, until

from bench.key_usage import UsageDriver, settled
from rwkv_batch.audit.lines import verify
from rwkv_batch.keys import records
from rwkv_batch.keys.records import Key

pytestmark = pytest.mark.thorough
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
MIXED = 150  # requests; bench/key_usage.py sends 10,000


class KeyedServer(Server):
    """A server with its file of keys."""

    def __init__(self, folder: Path) -> None:
        self.keys, self.audit = folder / "keys.json", folder / "audit.jsonl"
        self.add("first")
        more = ["--keys", str(self.keys), "--audit-log", str(self.audit), "--max-rows", "8"]
        super().__init__("--device", "cpu,cpu", "--frontends", "2", *more)

    def add(self, name: str, **limits: object) -> str:
        return records.add(self.keys, Key(name, "", 0, 0.0, **limits))

    def statuses(self, secret: str) -> set[int]:
        """What a request gets on new connections, of which some come to each front end."""
        once = {"headers": {"authorization": f"Bearer {secret}"}, "verify": False, "timeout": 60}
        return {httpx.get(f"{self.url}/v1/usage", **once).status_code for _ in range(12)}

    def key(self, name: str, **limits: object) -> str:
        """A key that both front ends know."""
        secret = self.add(name, **limits)
        until(lambda: self.statuses(secret) == {200})
        return secret

    def client(self, secret: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=secret, max_retries=0)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    running = KeyedServer(tmp_path_factory.mktemp("keys"))
    yield running
    assert running.stop() == 0, running.log()


def ask(client: openai.OpenAI, model: str = "rwkv7-demo") -> str:
    made = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=10)
    return made.choices[0].message.content or ""


def test_the_sdk_knows_the_errors(keyed):
    with pytest.raises(openai.AuthenticationError):
        ask(keyed.client("sk-rwkv-wrong"))
    with pytest.raises(openai.PermissionDeniedError, match="may not use"):
        ask(keyed.client(keyed.key("elsewhere", models=["other"])), "rwkv7-demo")
    limited = keyed.client(keyed.key("twice", requests_per_minute=2))
    answer = limited.chat.completions.with_raw_response.create(
        model="rwkv7-demo", messages=MESSAGES, max_tokens=10
    )
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert "Paris" in ask(limited)
    with pytest.raises(openai.RateLimitError) as raised:
        ask(limited)
    assert int(raised.value.response.headers["retry-after"]) > 0


def test_two_keys_under_load_have_exactly_what_their_limits_say(keyed):
    limits = {"few": 7, "more": 19}
    clients = [keyed.client(keyed.key(name, requests_per_minute=n)) for name, n in limits.items()]

    def send(number: int) -> tuple[int, bool]:
        try:
            ask(clients[number % 2].copy(http_client=httpx.Client(timeout=60)))
        except openai.RateLimitError:
            return number % 2, False
        return number % 2, True

    with ThreadPoolExecutor(8) as pool:
        taken = Counter(which for which, answered in pool.map(send, range(60)) if answered)
    assert taken == {0: 7, 1: 19}


def test_a_revoked_key_stops_on_every_front_end_and_its_stream_ends(keyed):
    secret = keyed.key("leaver")
    endless = keyed.client(secret).chat.completions.create(
        model="rwkv7-demo", messages=MESSAGES, max_tokens=100_000, stream=True, logit_bias={"0": -100}
    )
    next(iter(endless))
    command = [sys.executable, "-m", "rwkv_batch.keys", "revoke", str(keyed.keys), "leaver"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with pytest.raises(openai.APIError, match="has been revoked"):
        list(endless)
    until(lambda: keyed.statuses(secret) == {401})


def test_a_front_end_that_begins_with_a_damaged_file_takes_the_keys_from_before(keyed):
    old, good = keyed.key("old"), keyed.keys.read_bytes()
    said, first = len(keyed.log()), keyed.children()["frontend-1"]
    os.kill(first, signal.SIGSTOP)  # it does not look at the file before it ends
    damaged = keyed.keys.with_name("damaged")
    damaged.write_bytes(good[:-20])
    damaged.replace(keyed.keys)  # at once: what is half written is another damage, which is said too
    os.kill(first, signal.SIGKILL)
    sentence = "the keys from before are still taken"
    until(lambda: keyed.log()[said:].count(sentence) == 2)  # of the other one, and of the one that begins

    def takes_both() -> bool:
        with suppress(httpx.TransportError):  # connections of the dead one
            return keyed.statuses(old) == {200}
        return False

    until(takes_both)
    assert "Traceback" not in keyed.log()[said:] and keyed.log()[said:].count(sentence) == 2
    keyed.keys.write_bytes(good)
    new = keyed.key("new")
    assert keyed.statuses(new) == {200}


def test_responses_of_another_key_are_not_found(keyed):
    alice, bob = (keyed.client(keyed.key(name)) for name in ("alice", "bob"))
    made = alice.responses.create(model="rwkv7-demo", input="I am Alice.", max_output_tokens=16)
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.create(model="rwkv7-demo", input="Who am I?", previous_response_id=made.id)
    going_on = alice.responses.create(
        model="rwkv7-demo", input="Who am I?", previous_response_id=made.id, max_output_tokens=16
    )
    assert "Alice" in going_on.output_text
    with pytest.raises(openai.NotFoundError):
        bob.responses.delete(made.id)


def test_a_paused_request_is_resumed_by_its_key_only(keyed):
    secrets = [keyed.key(name) for name in ("pauser", "thief")]
    owner, thief = ({"authorization": f"Bearer {secret}"} for secret in secrets)
    body = {"contents": ["User: Count.\n\nAssistant:"], "stop_tokens": [], "stream": True}
    body["max_tokens"] = 10_000_000  # it does not end by itself
    named = {"x-request-id": "mine"}

    def post(path: str, headers: dict[str, str]) -> httpx.Response:
        body = {"request_id": "mine"}
        return httpx.post(f"{keyed.url}/v1/server/{path}", json=body, headers=headers, timeout=60)

    url = f"{keyed.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=owner | named, timeout=60) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data"))
        assert not post("pause", thief).json()["paused"] and not post("stop", thief).json()["stopped"]
        assert post("pause", owner).json()["paused"]
        list(lines)
    assert post("resume", thief).status_code == 404
    assert (
        httpx.get(f"{keyed.url}/v1/server/status", headers=thief, timeout=60).json()["paused_requests"] == []
    )
    url = f"{keyed.url}/v1/server/resume"
    with httpx.stream("POST", url, json={"request_id": "mine"}, headers=owner, timeout=60) as stream:
        lines = stream.iter_lines()
        assert '"content":"' in next(line for line in lines if line.startswith("data"))
        assert post("stop", owner).json()["stopped"]
        assert '"finish_reason":"stop"' in [line for line in lines if line.startswith("data")][-2]


def test_usage_is_what_clients_have_counted_and_lies_in_its_file(keyed):
    secret = keyed.key("bench")
    driver = UsageDriver(keyed.url, secret)
    with ThreadPoolExecutor(8) as pool:
        counts = [count for sent in pool.map(driver.send, range(MIXED)) for count in sent]
    assert 0.04 < sum(count.left or count.kind == "stopped" for count in counts) / MIXED < 0.2
    assert settled({"bench": driver}, keyed.audit, counts) == []
    with keyed.audit.open("rb") as file:
        verify(file)
    before = sum(entry["completion_tokens"] for entry in driver.entries())
    command = [sys.executable, "-m", "rwkv_batch.keys", "usage", str(keyed.keys), "--key", "bench", "--json"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    used = [json.loads(line) for line in shown.splitlines()]  # as another process finds it in the file
    assert sum(each["completion_tokens"] for each in used) == before > 0


def test_an_asynchronous_client_that_has_its_rows_at_once(keyed):
    secret = keyed.key("eight", rows=4)

    async def ask_all() -> list[object]:
        async with openai.AsyncOpenAI(base_url=f"{keyed.url}/v1", api_key=secret, max_retries=0) as client:
            made = [
                client.completions.create(
                    model="rwkv7-demo", prompt="Count:", max_tokens=1000, n=2, logit_bias={"0": -100}
                )
                for _ in range(8)
            ]
            return await asyncio.gather(*made, return_exceptions=True)

    answers = asyncio.run(ask_all())
    refused = [each for each in answers if isinstance(each, openai.RateLimitError)]
    assert 0 < len(refused) < 8, answers
    assert all("of 4 that it may have at once" in str(each) for each in refused)
    assert len(refused) + sum(1 for each in answers if not isinstance(each, BaseException)) == 8

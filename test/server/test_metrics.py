"""/metrics of a whole server says what its clients have counted."""

import json
import os
import random
import signal
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import httpx
import pytest
from scrapes import Scrape
from serving import Server, until

from rwkv_batch.wire.metrics import FAMILIES

QUIET = 210  # requests of clients that read to the end
UNSTEADY = 100  # those after them, of which some leave, while a front end is killed
CLIENTS = 12
CHATS, TEXTS, BATCH = "/openai/v1/chat/completions", "/v1/completions", "/v1/batch/completions"
TREE = "/multi_state/chat/completions"
ENDLESS = {"stop_tokens": [], "max_tokens": 100_000, "temperature": 1.0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("--device", "cpu", "--frontends", "2", "--max-rows", "24")
    yield running
    assert running.stop() == 0, running.log()


class Tally:
    """What the clients have seen, all together."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        self.http: Counter[tuple[str, str, str]] = Counter()  # by route, method and status
        self.reasons: Counter[str] = Counter()
        self.requests = self.rows = self.prompt = self.cached = self.generated = 0
        self.turns = 0  # of sessions
        self.sessions: set[str] = set()
        self.left = 0  # requests whose reader has left
        self._lock = threading.Lock()

    def send(self, number: int, leaves: bool = False) -> None:
        """One request, of a kind that its number says."""
        chance = random.Random(number)
        sends = [self.texts, self.chat, self.stream, self.session, self.batch, self.wrong, self.missing]
        (self.leave if leaves else sends[number % len(sends)])(chance)

    def texts(self, chance: random.Random) -> None:
        prompts = [f"User: {word}\n\nAssistant:" * chance.randint(1, 30) for word in chance.sample(WORDS, 2)]
        body = {"prompt": prompts, "n": 2, "max_tokens": chance.randint(1, 5), "temperature": 1.0}
        self.whole(TEXTS, body, 4)

    def chat(self, chance: random.Random) -> None:
        self.whole(CHATS, {"messages": said(chance), "max_tokens": chance.randint(1, 8)}, 1)

    def session(self, chance: random.Random) -> None:
        name = f"s{chance.randrange(40)}"
        body = {"messages": said(chance), "max_tokens": 6, "session_id": name}
        if self.whole(CHATS, body, 1):
            with self._lock:
                self.turns += 1
                self.sessions.add(name)

    def stream(self, chance: random.Random) -> None:
        body = {"messages": said(chance), "max_tokens": chance.randint(1, 8), "stream": True}
        body |= {"stream_options": {"include_usage": True}, "stop": ["."], "stop_tokens": [0]}
        with httpx.stream("POST", self.url + CHATS, json=body, timeout=60) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line[:5] == "data:"]
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        self.count(CHATS, answer.status_code)
        self.add(chunks[-1]["usage"], [c["finish_reason"] for c in choices if c["finish_reason"]], 1)

    def batch(self, chance: random.Random) -> None:
        """A route without usage; its rows draw exactly as many tokens as they were asked for."""
        tokens, rows = chance.randint(1, 4), chance.randint(1, 6)
        body = {
            "contents": ["a"] * rows,
            "stop_tokens": [],
            "max_tokens": tokens,
            "stream": chance.random() < 0.5,
        }
        answer = httpx.post(self.url + BATCH, json=body, timeout=60)
        self.count(BATCH, answer.status_code)
        usage = {"prompt_tokens": rows, "completion_tokens": rows * tokens}
        self.add(usage, ["length"] * rows, rows)

    def wrong(self, chance: random.Random) -> None:
        """What is refused: by the engine, or by the front end."""
        if chance.random() < 0.5:
            body = {"contents": ["a"], "session_id": "nobody", "dialogue_idx": 7}
            answer = httpx.post(self.url + TREE, json=body, timeout=60)
            self.count(TREE, answer.status_code, refused=True)
        else:
            answer = httpx.post(self.url + TEXTS, json={"prompt": "a", "max_tokens": -1}, timeout=60)
            self.count(TEXTS, answer.status_code)
        assert answer.status_code in (400, 404)

    def missing(self, chance: random.Random) -> None:
        answer = httpx.get(f"{self.url}/{chance.random()}", timeout=60)
        self.count("other", answer.status_code, "GET")

    def leave(self, chance: random.Random) -> None:
        """A reader who has had enough of two rows after some events."""
        body = ENDLESS | {"contents": ["a", "b"], "stream": True, "chunk_size": 1}
        with httpx.stream("POST", self.url + BATCH, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            for _ in range(chance.randint(1, 9)):
                next(lines)
        self.count(BATCH, answer.status_code)
        with self._lock:
            self.left += 1
            self.requests += 1
            self.rows += 2
            self.reasons["abort"] += 2

    def whole(self, path: str, body: dict, rows: int) -> bool:
        answer = httpx.post(self.url + path, json=body, timeout=60)
        self.count(path, answer.status_code, refused=answer.status_code == 429)
        if answer.status_code == 429:
            return False
        reply = answer.json()
        self.add(reply["usage"], [choice["finish_reason"] for choice in reply["choices"]], rows)
        return True

    def count(self, route: str, status: int, method: str = "POST", refused: bool = False) -> None:
        with self._lock:
            self.http[route, method, str(status)] += 1
            self.reasons["refused"] += refused

    def add(self, usage: dict, reasons: list[str], rows: int) -> None:
        assert len(reasons) == rows
        with self._lock:
            self.requests += 1
            self.rows += rows
            self.reasons.update(reasons)
            self.prompt += usage["prompt_tokens"]
            self.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            self.generated += usage["completion_tokens"]


WORDS = ["cat", "Paris", "bread", "a story", "7 + 5", "music", "rain", "the sea"]


def said(chance: random.Random) -> list[dict]:
    return [{"role": "user", "content": f"Tell me about {chance.choice(WORDS)} {chance.randrange(100)}"}]


def answered(scrape: Scrape) -> dict[tuple[str, str, str], float]:
    found = {
        tuple(dict(of)[label] for label in FAMILIES["http_requests"].labels): n
        for (name, of), n in scrape.samples.items()
        if name == "rwkv:http_requests_total"
    }
    return {key: n for key, n in found.items() if key[0] not in ("/health", "/metrics")}


def idle(scrape: Scrape) -> bool:
    """Without an engine that has answered soon enough there are no numbers."""
    up = scrape("engine_up")
    return bool(up) and not scrape("num_requests_running") and not scrape("num_requests_waiting")


@pytest.fixture(scope="module")
def tally(server: Server) -> Tally:
    """After the quiet load."""
    seen = Tally(server)
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(seen.send, range(QUIET)))
    return seen


def test_metrics_agree_with_what_clients_counted(server: Server, tally: Tally):
    # A front end counts a stream when it has sent the last event.
    scrape = Scrape.when(server.url, lambda s: idle(s) and sum(answered(s).values()) >= QUIET)
    assert answered(scrape) == tally.http and sum(tally.http.values()) == QUIET
    outcomes = scrape.by("requests_total", "outcome")
    assert outcomes.pop("accepted") == tally.requests
    assert sum(outcomes.values()) == tally.reasons["refused"] > 0
    assert scrape("request_rows_total") == tally.rows
    ended = {reason: tally.reasons[reason] for reason in ("stop", "length")}
    assert scrape.by("request_success_total", "finished_reason") == ended and all(ended.values())
    assert scrape("prompt_tokens_total") == tally.prompt
    assert scrape("prompt_tokens_cached_total") == tally.cached > 0
    assert scrape("generation_tokens_total") == tally.generated
    assert scrape("session_commits_total") == tally.turns
    assert scrape("sessions") == len(tally.sessions)
    assert scrape("e2e_request_latency_seconds_count") == tally.rows
    assert scrape("request_queue_time_seconds_count") == tally.rows
    begun = scrape("time_to_first_token_seconds_count")
    assert scrape("inter_token_latency_seconds_count") == tally.generated - begun and 0 < begun <= tally.rows
    assert (
        scrape("batch_size_count")
        == scrape("step_time_seconds_count")
        == scrape("iteration_tokens_total_count")
    )
    # what was fed: prompts and sessions, and every token that was drawn, but the last of a row
    fed = scrape("iteration_tokens_total_sum")
    assert fed >= scrape("prefill_tokens_total") + tally.generated - tally.rows
    assert scrape("models_loaded") == 1 and scrape("restarts_total") == 0


def test_stats_agree_with_the_metrics(server: Server, tally: Tally):
    scrape = Scrape.when(server.url, idle)
    body = httpx.get(server.url + "/stats", timeout=30).json()
    batching = body["dynamic_batching"]
    assert batching["stats"]["total_requests"] == tally.rows
    assert batching["stats"]["total_batches"] == scrape("batch_size_count")
    assert batching["stats"]["avg_batch_size"] == pytest.approx(
        scrape("batch_size_sum") / scrape("batch_size_count"), abs=0.01
    )
    assert batching["pending_requests"] == 0
    (model,) = body["models"]
    assert model["generation_tokens"] == tally.generated
    assert sum(model["sessions"].values()) == len(tally.sessions)


def test_a_front_end_that_is_killed_under_load_takes_no_counts_with_it(server: Server, tally: Tally):
    before = Scrape.when(server.url, idle)
    broken, halfway = Counter[str](), threading.Event()

    def send(number: int) -> None:
        if number == UNSTEADY // 2:
            halfway.set()
        try:
            tally.send(number, leaves=number % 3 == 0)
        except httpx.TransportError:
            broken["requests"] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        load = pool.map(send, range(UNSTEADY))
        assert halfway.wait(60)
        victim = next(name for name in server.children() if name.startswith("frontend"))
        os.kill(server.children()[victim], signal.SIGKILL)
        list(load)
    until(lambda: "frontend-3" in server.children())
    # A row whose reader has left ends when the front end notices.
    scrape = Scrape.when(server.url, lambda s: idle(s) and answered(s) == answered(Scrape.of(server.url)))
    ended = scrape.by("request_success_total", "finished_reason")
    assert sum(ended.values()) == scrape("request_rows_total")
    assert not set(ended) - {"stop", "length", "abort"}
    counters = [key for key in before.samples if key[0].endswith(("_total", "_count", "_sum", "_bucket"))]
    lost = {key for key in counters if scrape.samples.get(key, 0) < before.samples[key]}
    assert not lost, "what was counted stays"
    assert scrape("restarts_total", process="frontend") == 1
    # Of requests that broke off the client does not know what had become of them; and the front end may have
    # died before it noticed that a reader had left.
    unknown = broken["requests"]
    assert -tally.left <= sum(answered(scrape).values()) - sum(tally.http.values()) <= unknown
    assert 0 <= scrape("requests_total", outcome="accepted") - tally.requests <= unknown
    for reason in ("stop", "length", "abort"):
        assert 0 <= ended[reason] - tally.reasons[reason] <= 6 * unknown
    assert 0 <= scrape("session_commits_total") - tally.turns <= unknown


def test_times_are_those_of_a_client_to_one_bucket(server: Server):
    """What the engine measures lies inside of what a client does; texts are long beside what is between."""
    prompt = "User: Tell me a story about a cat.\n\nAssistant: " * 60
    body = {"prompt": prompt, "max_tokens": 100, "stop_tokens": [], "stream": True, "use_prefix_cache": False}
    first, whole = "time_to_first_token_seconds", "e2e_request_latency_seconds"
    differences: dict[str, list[int]] = {first: [], whole: []}
    for _ in range(5):
        before, began, seen = Scrape.when(server.url, idle), time.monotonic(), {}
        with httpx.stream("POST", server.url + TEXTS, json=body | {"chunk_size": 1}, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    seen.setdefault(first, time.monotonic() - began)
        seen[whole] = time.monotonic() - began
        after = Scrape.when(server.url, idle)
        for name, seconds in seen.items():
            bounds = [*before.buckets(name)]
            (engine,) = [
                place
                for place, bound in enumerate(bounds)
                if after.buckets(name)[bound] != before.buckets(name)[bound]
            ]
            differences[name].append(bisect_left(bounds, seconds) - engine)
    assert all(difference >= 0 for found in differences.values() for difference in found)
    assert all(median(found) <= 1 for found in differences.values()), differences


def test_an_engine_that_dies_is_counted_and_begins_anew(server: Server):
    before = Scrape.when(server.url, idle)
    os.kill(server.children()["engine"], signal.SIGKILL)
    after = Scrape.when(server.url, lambda s: s("restarts_total", process="engine") and s("engine_up"))
    assert after("restarts_total", process="engine") == 1
    assert after("generation_tokens_total") == 0 < before("generation_tokens_total")
    assert after("sessions") == before("sessions") > 0
    for key, count in answered(before).items():
        assert answered(after)[key] == count

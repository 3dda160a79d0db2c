"""Sends the requests of a plan, at random moments or a fixed number at a time, and records every answer.

One process reads some ten thousand events a second; bench/processes.py shares a load among several. Every
request has a connection of its own, so that they spread over the front ends.
"""

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from bench.http_post import HttpFailure, post
from bench.report import Answer, Record, error_text, tokenizer

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "batch": "/v1/chat/completions",
    "big_batch": "/big_batch/completions",
}
NATIVE = ("batch", "big_batch")  # many prompts in one request
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # one for each request


def base_url(url: str) -> str:
    """A server's address without a final /v1. Raises ValueError with a sentence."""
    url = url if "://" in url else f"http://{url}"
    with contextlib.suppress(httpx.InvalidURL):
        parts = httpx.URL(url)
        if parts.scheme in ("http", "https") and parts.host:
            return url.rstrip("/").removesuffix("/v1").rstrip("/")
    raise ValueError(f"--url {url} is not an http or https address, such as http://127.0.0.1:8000.")


@dataclass(frozen=True)
class Prompts:
    """Prompt number i, the same for the same seed.

    With `length` 0 `parts` are whole prompts; otherwise they are words to draw from.
    """

    parts: list[str]
    length: int = 0
    seed: int = 0

    def __getitem__(self, index: int) -> str:
        if not self.length:
            return self.parts[index % len(self.parts)]
        return "".join(random.Random(f"{self.seed}/{index}").choices(self.parts, k=self.length))


def prompts_from_file(path: str) -> Prompts:
    """One prompt a line; in a .jsonl file the "prompt" of the object on each line.

    Raises ValueError with a sentence for the user.
    """
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path} cannot be read: {error}.") from None
    if path.endswith(".jsonl"):
        lines = [_read_prompt(line, path) for line in lines]
    if not lines:
        raise ValueError(f"--prompts {path} holds no prompts; put one on each line.")
    return Prompts(lines)


def _read_prompt(line: str, path: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError(
            f'--prompts {path}: every line must be a JSON object with a string "prompt", not {line[:60]}.'
        )
    return prompt


def random_prompts(tokens: int, seed: int) -> Prompts:
    """Random prompts of exactly `tokens` tokens of the World vocabulary, all different.

    The words are single tokens that begin with a space. The tokenizer takes the longest match, so a word that
    is the beginning of a token with a second space is left out: no two words then merge, and the count is
    exact.
    """
    vocabulary = tokenizer().get_vocab()
    merging = {f" {head}" for token in vocabulary for head in re.findall(r"^ ([a-z]+) ", token)}
    words = sorted(
        token for token in vocabulary if re.fullmatch(r" [a-z]{3,12}", token) and token not in merging
    )
    return Prompts(words, tokens, seed)


@dataclass(frozen=True)
class LoadPlan:
    """What is sent: everything a generator process needs to know.

    Clients of a closed loop take the next request that nobody has taken. With `own_requests` each has its
    own: client c sends c, c + concurrency, ..., one after the other, with `think` seconds between two.
    """

    url: str  # as `base_url` returns it
    api: str  # a key of PATHS
    prompts: Prompts
    requests: int
    rate: float | None  # requests a second; None: closed loop
    concurrency: int  # requests at a time in the closed loop
    output_tokens: int  # max_tokens
    model: str = "rwkv7"
    stream: bool = True
    fixed_length: bool = True  # ask the server not to stop before max_tokens
    rows: int = 1  # prompts in one batch request
    password: str | None = None
    api_key: str | None = None
    extra: dict = field(default_factory=dict)
    seed: int = 0
    timeout: float = 600.0  # seconds per request
    own_requests: bool = False
    think: float = 0.0

    def headers(self) -> dict[str, str]:
        key = self.api_key or self.password
        return {"Authorization": f"Bearer {key}"} if key else {}

    def request_prompts(self, index: int) -> list[str]:
        """The prompts of request `index`; negative indexes (warm-up) have their own."""
        return [self.prompts[index * self.rows + row] for row in range(self.rows)]

    def request(self, index: int) -> tuple[str, dict]:
        """Path and body of request `index`."""
        prompts = self.request_prompts(index)
        body: dict = {"model": self.model, "max_tokens": self.output_tokens, "stream": self.stream}
        if self.api in NATIVE:
            body["contents"] = prompts
        elif self.api == "chat":
            body["messages"] = [{"role": "user", "content": prompts[0]}]
        else:
            body["prompt"] = prompts[0]
        if self.fixed_length:
            body |= {"stop_tokens": []} if self.api in NATIVE else {"stop_tokens": [], "ignore_eos": True}
        if self.stream and self.api not in NATIVE:
            body["stream_options"] = {"include_usage": True}
        if self.password:
            body["password"] = self.password
        return PATHS[self.api], body | self.extra

    def arrivals(self) -> Iterator[tuple[int, float]]:
        """(index, seconds after the start) of every request of a Poisson process with `rate`.

        The first is at 0.
        """
        assert self.rate is not None
        gaps, due = random.Random(f"arrivals/{self.seed}"), 0.0
        for index in range(self.requests):
            yield index, due
            due += gaps.expovariate(self.rate)


class Moment:
    """The time at which something was read. All that one read brings came at one moment."""

    def __init__(self) -> None:
        self._loop, self._now = asyncio.get_running_loop(), 0.0

    def __call__(self) -> float:
        if not self._now:
            self._now = time.monotonic()
            self._loop.call_soon(self._pass)  # before anything else is read
        return self._now

    def _pass(self) -> None:
        self._now = 0.0


class Load:
    """The running requests of one process. `records` holds the answers that have ended, well or not."""

    def __init__(
        self, plan: LoadPlan, next_index: Callable[[], int], start: float, share: int = 0, shares: int = 1
    ) -> None:
        """A share of the plan.

        `next_index` gives out request numbers to all processes. `start` is their common moment 0 on
        `time.monotonic`.
        """
        self.plan, self._next_index, self._start = plan, next_index, start
        self._share, self._shares = share, shares
        self.records: list[Record] = []
        self.sent = 0
        self.events = 0
        self._running: asyncio.Future | None = None

    @property
    def unfinished(self) -> int:
        return self.sent - len(self.records)

    async def run(self) -> None:
        """Until every request has ended or `stop` is called."""
        self._running = asyncio.ensure_future(self._run())
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    def stop(self) -> None:
        """Cancel the requests in flight."""
        if self._running:
            self._running.cancel()

    async def _run(self) -> None:
        await (self._open_loop() if self.plan.rate is not None else self._closed_loop())

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index, due in self.plan.arrivals():
                if index % self._shares != self._share:
                    continue
                due += self._start
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._one(index, due))

    async def _closed_loop(self) -> None:
        await asyncio.sleep(max(0.0, self._start - time.monotonic()))
        async with asyncio.TaskGroup() as group:
            for number in range(self._share, self.plan.concurrency, self._shares):
                group.create_task(self._one_after_another(number))

    async def _one_after_another(self, number: int) -> None:
        own, first = itertools.count(number, self.plan.concurrency), True
        following = own.__next__ if self.plan.own_requests else self._next_index
        while (index := following()) < self.plan.requests:
            if not first:
                await asyncio.sleep(self.plan.think)
            first = False
            await self._one(index, time.monotonic())

    async def _one(self, index: int, due: float) -> None:
        path, body = self.plan.request(index)
        start = time.monotonic()
        record = Record(index, start, late=start - due)
        self.sent += 1
        try:
            async with asyncio.timeout(self.plan.timeout):
                await self._exchange(path, body, record)
        except HttpFailure as error:
            record.failure = record.failure or str(error)
        except TimeoutError:
            record.failure = f"no complete answer within {self.plan.timeout:g} s"
        record.end = time.monotonic()
        self.records.append(record)

    async def _exchange(self, path: str, body: dict, record: Record) -> None:
        answer, moment = Answer(record), Moment()
        data = msgspec.json.encode(body)
        async with post(self.plan.url, path, data, self.plan.headers()) as reply:
            if reply.status != 200:
                record.failure = f"HTTP {reply.status}: {error_text(await reply.read())}"
            elif "event-stream" not in reply.headers.get("content-type", ""):
                answer.take_whole(await reply.read(), time.monotonic())
            else:
                async for data in reply.pieces():
                    self.events += answer.feed_events(data, moment())
                if not answer.done:
                    record.failure = record.failure or "the stream ended without [DONE]"

"""Sends the requests of a plan, at random moments or a fixed number at a time, and records every answer."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from answer import Answer, Record, error_text
from prompts import Prompts
from wire import Exchange, ExchangeError, Target

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "batch": "/v1/chat/completions",
    "big_batch": "/big_batch/completions",
}
NATIVE = ("batch", "big_batch")  # many prompts in one request


@dataclass(frozen=True)
class LoadPlan:
    """What is sent: everything a generator process needs to know."""

    target: Target
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

    def headers(self) -> dict[str, str]:
        key = self.api_key or self.password
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def request_prompts(self, index: int) -> list[str]:
        """The prompts of request `index`; negative indexes (warm-up) have their own."""
        return [self.prompts[index * self.rows + row] for row in range(self.rows)]

    def message(self, index: int) -> bytes:
        """Request `index` as it goes over the wire."""
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
        return self.target.message(
            "POST", PATHS[self.api], self.headers(), msgspec.json.encode(body | self.extra)
        )

    def arrivals(self) -> Iterator[tuple[int, float]]:
        """(index, seconds after the start) of every request of a Poisson process with `rate`.

        The first is at 0.
        """
        assert self.rate is not None
        gaps, due = random.Random(f"arrivals/{self.seed}"), 0.0
        for index in range(self.requests):
            yield index, due
            due += gaps.expovariate(self.rate)


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
        work = self._open_loop() if self.plan.rate is not None else self._closed_loop()
        self._running = asyncio.ensure_future(work)
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    def stop(self) -> None:
        """Cancel the requests in flight."""
        if self._running:
            self._running.cancel()

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
        width = len(range(self._share, self.plan.concurrency, self._shares))
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(self._one_after_another())

    async def _one_after_another(self) -> None:
        while (index := self._next_index()) < self.plan.requests:
            await self._one(index, time.monotonic())

    async def _one(self, index: int, due: float) -> None:
        message = self.plan.message(index)
        start = time.monotonic()
        record = Record(index, start, late=start - due)
        self.sent += 1
        try:
            async with asyncio.timeout(self.plan.timeout):
                await self._exchange(message, record)
        except ExchangeError as error:
            record.failure = record.failure or str(error)
        except TimeoutError:
            record.failure = f"no complete answer within {self.plan.timeout:g} s"
        record.end = time.monotonic()
        self.records.append(record)

    async def _exchange(self, message: bytes, record: Record) -> None:
        answer, whole = Answer(record), bytearray()

        def streamed() -> bool:
            return exchange.status == 200 and "event-stream" in exchange.headers.get("content-type", "")

        def receive(data: bytes, now: float) -> None:
            if streamed():
                self.events += answer.feed_events(data, now)
            else:
                whole.extend(data)

        exchange = Exchange(message, receive)
        await exchange.run(self.plan.target)
        if exchange.status != 200:
            record.failure = f"HTTP {exchange.status}: {error_text(bytes(whole))}"
        elif not streamed():
            answer.take_whole(bytes(whole), time.monotonic())
        elif not answer.done:
            record.failure = record.failure or "the stream ended without [DONE]"

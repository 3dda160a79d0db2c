"""Clients that send one request after the other: turns of sessions, or stateless ones; stored sessions."""

import asyncio
import contextlib
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from tqdm import tqdm

from bench.load import CONNECTIONS, PATHS, LoadPlan, random_prompts
from bench.processes import Generators
from bench.report import Record, error_text, spread, stream_latencies

USER_TOKENS = 16  # of a user's text
ENDLESS = sys.maxsize  # `requests` of a plan that runs until another has ended
SEPARATOR = "\n\n"  # what the server puts before a later turn of a session that does not begin with it


class LoadFailed(Exception):
    """A request failed or was answered with fewer tokens, so there is nothing to compare."""


@dataclass(frozen=True)
class TurnPlan(LoadPlan):
    """`concurrency` clients; request number i is client i % concurrency's.

    `sessions`: request i continues the session i % len(sessions). Without any, all requests are stateless.
    """

    own_requests: bool = True
    sessions: tuple[str, ...] = ()

    def request_prompts(self, index: int) -> list[str]:
        """The user's text, with the separator from the second turn on: both kinds read the same tokens."""
        separator = SEPARATOR if index >= self.concurrency else ""
        return [f"{separator}User:{self.prompts[index]}\n\nAssistant:"]

    def request(self, index: int) -> tuple[str, dict]:
        body: dict = {
            "contents": self.request_prompts(index),
            "max_tokens": self.output_tokens,
            "stop_tokens": [],
            "stream": True,
            "chunk_size": 1,
        }
        path = PATHS["batch"]
        if self.sessions:
            path, body["session_id"] = "/state/chat/completions", self.sessions[index % len(self.sessions)]
        return path, body | self.extra


def plan_for(
    url: str, clients: int, requests: int, tokens: int, input_tokens: int = USER_TOKENS, **more
) -> TurnPlan:
    """Random texts, different in every request and the same in every run. `tokens`: of an answer."""
    texts = random_prompts(input_tokens, 0)
    return TurnPlan(url, "batch", texts, requests, None, clients, tokens, **more)


def answers(generators: Generators, plan: TurnPlan, *beside: TurnPlan) -> list[Record]:
    """All answers to `plan`; the plans beside it run until it has ended. Raises LoadFailed."""
    run = generators.run(plan, *beside)
    if run.interrupted:
        raise KeyboardInterrupt
    check([*run.records, *run.beside])
    return run.records


def run_one_by_one(plan: TurnPlan) -> list[Record]:
    """The answers to the requests of a plan with one client, sent from this process. Raises LoadFailed."""
    with Generators(1) as here:
        return answers(here, plan)


def check(records: list[Record]) -> None:
    """Raises LoadFailed unless every answer is whole and has max_tokens tokens."""
    wrong = Counter(
        record.failure or "an answer ended before max_tokens"
        for record in records
        if record.failure or record.finish != {0: "length"}
    )
    if wrong:
        raise LoadFailed("; ".join(f"{count} x {failure}" for failure, count in wrong.most_common(3)))


class TurnFigures:
    """What the runs of one kind of load brought."""

    def __init__(self) -> None:
        self.turns = self.tokens = 0
        self.seconds = 0.0  # of each run, from the first request sent to the last answer ended
        self.rates: list[float] = []  # tokens/s of each run
        self._samples: dict[str, list[np.ndarray]] = defaultdict(list)

    def add(self, records: list[Record], tokens: int) -> None:
        """The answers of a run, each of so many tokens."""
        seconds = max(r.end for r in records) - min(r.start for r in records)
        self.turns, self.tokens = self.turns + len(records), self.tokens + len(records) * tokens
        self.seconds += seconds
        self.rates.append(len(records) * tokens / seconds)
        for record in records:
            for name, values in stream_latencies(record, {0: tokens}).items():
                self._samples[name].append(values * 1e3)
            self._samples["end_ms"].append(end_of_turn(record) * 1e3)

    @property
    def rate(self) -> float:
        """Tokens/s of all runs."""
        return self.tokens / self.seconds

    def cells(self, name: str) -> str:
        """Median and P99 of a latency in ms ("ttft_ms", "itl_ms", "event_gap_ms", "end_ms"), for a table."""
        found = spread(self._samples[name])
        return f"{found['median']:.1f} | {found['p99']:.1f}" if found else " | "

    def p99(self, name: str) -> float:
        found = spread(self._samples[name])
        return found["p99"] if found else math.nan


def end_of_turn(record: Record) -> np.ndarray:
    """Seconds from the last event but one to the end of the stream; empty if all text came at once.

    The last token of a session's turn leaves with the end of the stream, when the turn is committed. So the
    time after the last token would leave the commit out.
    """
    moments = np.unique(record.times)
    return record.end - moments[-2:-1]


async def ask(client: httpx.AsyncClient, path: str, body: dict) -> None:
    """Send a request and read its reply. Raises LoadFailed unless the status is 200."""
    reply = await client.post(path, json=body)
    if reply.status_code != 200:
        raise LoadFailed(f"{path}: HTTP {reply.status_code}: {error_text(reply.content)}")


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=None, limits=CONNECTIONS, trust_env=False)


def seconds_to_fork(url: str, source: str, names: Iterable[str], connections: int) -> float:
    """Fork the session under every name, `connections` at a time. Raises LoadFailed."""
    left = iter(tqdm(names, unit="fork", disable=None, leave=False))

    async def work() -> None:
        async with client_of(url) as client:

            async def connection() -> None:
                for name in left:
                    await ask(client, "/v1/state/fork", {"session_id": source, "new_session_id": name})

            await asyncio.gather(*(connection() for _ in range(connections)))

    began = time.monotonic()
    asyncio.run(work())
    return time.monotonic() - began


def begin_session(url: str, name: str, tokens: int) -> None:
    """Store a session of about so many tokens."""
    run_one_by_one(plan_for(url, 1, 1, 1, tokens, sessions=(name,)))


def stored_bytes(database: Path | None) -> dict[str, int]:
    """Bytes of a database, its log and the images in the folder beside it; 0 for what does not exist."""
    if database is None:
        return {}
    images = database.with_name(f"{database.name}.images")
    parts = {
        "file": [database],
        "log": [database.with_name(f"{database.name}-wal")],
        "images": list(images.iterdir()) if images.is_dir() else [],
    }
    return {part: sum(map(file_size, files)) for part, files in parts.items()}


def file_size(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # the server may remove it meanwhile
        return file.stat().st_size
    return 0


def resumption(url: str, ids: tuple[str, ...]) -> TurnPlan:
    """A turn of each session, one by one. Two tokens, as the last one waits for the commit."""
    return plan_for(url, 1, len(ids), 2, sessions=ids)


def seconds_to_list(url: str, limit: int) -> float:
    """Ask for the first sessions, at most `limit`. Raises LoadFailed."""

    async def work() -> None:
        async with client_of(url) as client:
            await ask(client, "/state/status", {"limit": limit})

    began = time.monotonic()
    asyncio.run(work())
    return time.monotonic() - began

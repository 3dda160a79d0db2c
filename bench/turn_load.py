"""Clients that send one request after the other, all clients at once: turns of sessions, or stateless ones.

The clients are spread over processes that stay from one run to the next, since one process reads no more than
some ten thousand events a second.
"""

import asyncio
import itertools
import math
import multiprocessing
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

import msgspec
import numpy as np
from answer import Record
from load import PATHS, Load, LoadPlan
from processes import raise_file_limit
from prompts import random_prompts
from report import spread, stream_latencies
from wire import Target

USER_TOKENS = 16  # of a user's text
ENDLESS = sys.maxsize  # `requests` of a plan that runs until another has ended
SEPARATOR = "\n\n"  # what the server puts before a later turn of a session that does not begin with it


class LoadFailed(Exception):
    """A request failed or was answered with fewer tokens, so there is nothing to compare."""


@dataclass(frozen=True)
class TurnPlan(LoadPlan):
    """`concurrency` clients; request number i is client i % concurrency's.

    `sessions`: request i continues the session i % len(sessions). Without any, all requests are stateless.
    `think`: seconds that a client waits between two requests.
    """

    sessions: tuple[str, ...] = ()
    think: float = 0.0

    def request_prompts(self, index: int) -> list[str]:
        """The user's text, with the separator from the second turn on: both kinds read the same tokens."""
        separator = SEPARATOR if index >= self.concurrency else ""
        return [f"{separator}User:{self.prompts[index]}\n\nAssistant:"]

    def message(self, index: int) -> bytes:
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
        return self.target.message("POST", path, self.headers(), msgspec.json.encode(body | self.extra))


def plan_for(
    target: Target, clients: int, requests: int, tokens: int, input_tokens: int = USER_TOKENS, **more
) -> TurnPlan:
    """Random texts, different in every request and the same in every run. `tokens`: of an answer."""
    texts = random_prompts(input_tokens, 0)
    return TurnPlan(target, "batch", texts, requests, None, clients, tokens, **more)


class ChatClient(Load):
    """One client of a plan."""

    def __init__(self, plan: TurnPlan, number: int) -> None:
        turns = itertools.count(number, plan.concurrency).__next__
        super().__init__(plan, turns, time.monotonic(), number, plan.concurrency)
        self._number, self._think = number, plan.think

    async def _one(self, index: int, due: float) -> None:
        if index != self._number:
            await asyncio.sleep(self._think)
        await super()._one(index, time.monotonic())


class ClientProcesses:
    """Processes that share the clients of each run. To be used in a `with` statement."""

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._shares = processes
        self._pool = ProcessPoolExecutor(
            processes, context, initializer=_join, initargs=(context.Barrier(processes),)
        )
        self.cpu = 0.0  # of one core, the busiest process in any run

    def __enter__(self) -> "ClientProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def run(self, plan: TurnPlan, *beside: TurnPlan) -> list[Record]:
        """All answers to `plan`, which has at least as many clients as there are processes.

        The plans beside it run until it has ended. Raises LoadFailed.
        """
        shares = [
            self._pool.submit(_run_share, [plan, *beside], share, self._shares)
            for share in range(self._shares)
        ]
        records: list[Record] = []
        for answers, others, cpu in (share.result() for share in shares):
            check([*answers, *others])
            records += answers
            self.cpu = max(self.cpu, cpu)
        return records


_together: Barrier  # of a process of the clients: all processes begin a run at once


def _join(barrier: Barrier) -> None:
    global _together
    _together = barrier
    raise_file_limit()


def _run_share(plans: list[TurnPlan], share: int, shares: int) -> tuple[list[Record], list[Record], float]:
    """Answers to this share of the first plan and of all others, and the processor time used, of one core."""

    async def work() -> tuple[list[Record], list[Record], float]:
        clients, *groups = [
            [ChatClient(plan, number) for number in range(share, plan.concurrency, shares)] for plan in plans
        ]
        beside = list(itertools.chain(*groups))
        _together.wait()
        cpu, wall = time.process_time(), time.monotonic()
        running = [asyncio.ensure_future(client.run()) for client in beside]
        await asyncio.gather(*(client.run() for client in clients))
        for client in beside:
            client.stop()
        await asyncio.gather(*running)
        used = (time.process_time() - cpu) / (time.monotonic() - wall)
        return _records(clients), _records(beside), used

    return asyncio.run(work())


def run_one_by_one(plan: TurnPlan) -> list[Record]:
    """The answers to the requests of a plan with one client, sent from this process. Raises LoadFailed."""
    client = ChatClient(plan, 0)
    asyncio.run(client.run())
    check(client.records)
    return client.records


def _records(clients: list[ChatClient]) -> list[Record]:
    return [record for client in clients for record in client.records]


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

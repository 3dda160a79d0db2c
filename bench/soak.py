#!/usr/bin/env python3
"""Many requests of all kinds to the real front ends, while engines are killed; what comes is checked.

The engines only answer (bench/frontends.py), so that there are many requests. What each must get follows from
its number: its kind, its prompt and so its text. Every minute an engine is killed (kill -9). A stream that
had sent text by then may end with the error event, behind text that is the beginning of what it must be;
nothing else may fail. Linux only: it reads /proc. When the time is over, or at SIGINT or SIGTERM, no further
request is sent, and the table has what there was until then.

    python -m bench.soak [--requests 1000000] [--engines 3] [--frontends 2] [--clients 64] [--kill-every 60]
                         [--processes 1] [--minutes 1440]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.frontends import PATH, Host, word_of

KINDS = {"short": 40, "rows": 10, "chat": 10, "stream": 25, "long stream": 5, "cancelled": 5, "refused": 5}
TOKENS = {"short": 4, "rows": 4, "chat": 8, "stream": 32, "long stream": 256, "cancelled": 256, "refused": 4}
STREAMED = ("stream", "long stream", "cancelled")
ROWS = 6  # prompts of a request of several
CHAT = "/v1/chat/completions"
AFTER_KILL = 10.0  # seconds for which a stream may end with an error
PATIENCE = 300.0  # seconds for a reply; a machine that others keep busy may stand still for long
PARTS = 10  # of the run, after each of which the memory is read
GROWTH = 1.1  # of the memory of all front ends, from the third part on, that is still flat,
WARM = 100_000  # requests, from which on it is looked at


class SoakReply(NamedTuple):
    status: int
    body: bytes  # all of it, or of a stream that was left what had come


class SoakConnection:
    """One to the server, which is kept while replies end properly. A request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, object], *, leave: bool = False) -> SoakReply:
        """leave: after the first piece of the reply. Raises OSError and EOFError where that is no HTTP."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
        if not self._streams:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._streams
        try:
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            reply = await self._reply(reader, leave)
        except BaseException:  # what comes next on it is not known
            self.close()
            raise
        if leave:
            self.close()
        return reply

    async def _reply(self, reader: asyncio.StreamReader, leave: bool) -> SoakReply:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        status = int(first.split()[1])
        if "content-length" in headers:
            found = await reader.readexactly(int(headers["content-length"]))
        else:
            found = b"".join([piece async for piece in self._pieces(reader, 1 if leave else None)])
        return SoakReply(status, found)

    async def _pieces(self, reader: asyncio.StreamReader, most: int | None):
        while most is None or most:
            size = int(await reader.readline(), 16)
            piece = await reader.readexactly(size + 2)
            if not size:
                return
            yield piece[:-2]
            most = most and most - 1

    def close(self) -> None:
        if self._streams:
            self._streams[1].close()
        self._streams = None


class SoakRequest:
    """Number `index`: what is sent, and what must come."""

    def __init__(self, index: int) -> None:
        draw = random.Random(index)
        self.kind = draw.choices([*KINDS], [*KINDS.values()])[0]
        self.tokens = -1 if self.kind == "refused" else TOKENS[self.kind]
        prompt = f"{index} {draw.randbytes(draw.randrange(1, 60)).hex()}"
        self.prompts = [f"{prompt} {row}" for row in range(ROWS)] if self.kind == "rows" else [prompt]
        self.path = CHAT if self.kind == "chat" else PATH
        self.body: dict[str, object] = {"model": "fake", "max_tokens": self.tokens}
        if self.kind == "chat":
            self.body |= {"contents": self.prompts, "stop_tokens": []}
        else:
            self.body |= {"prompt": self.prompts, "stream": self.kind in STREAMED}

    def judge(self, reply: SoakReply) -> str:
        """What has become of it: "whole", "cut off" or what is wrong."""
        if self.kind == "refused":
            return (
                "whole" if reply.status == 400 and b"max_tokens" in reply.body else f"status {reply.status}"
            )
        if reply.status != 200:
            return f"status {reply.status}: {reply.body[:200]!r}"
        wanted = {row: word_of(prompt) * self.tokens for row, prompt in enumerate(self.prompts)}
        if self.kind not in STREAMED:
            found = {c["index"]: text_of(c) for c in json.loads(reply.body)["choices"]}
            return "whole" if found == wanted else "another text"
        text, error = "", False
        for event in events(reply.body):
            error = error or "error" in event
            text += "".join(map(text_of, event.get("choices", ())))
        if self.kind == "cancelled" or error:
            if not wanted[0].startswith(text):
                return "another text"
            return "cut off" if error else "whole"
        return "whole" if text == wanted[0] and reply.body.endswith(b"[DONE]\n\n") else "another text"


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def events(body: bytes) -> Iterator[dict]:
    for line in body.decode().splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@dataclass
class SoakTally:
    """What has become of requests."""

    found: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and outcome
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds

    def add(self, other: "SoakTally") -> None:
        self.found += other.found
        self.wrong += other.wrong
        self.slowest = max(self.slowest, other.slowest)


class SoakClients:
    """Some of the clients, in a process that says every second what has become of its requests."""

    def __init__(self, port: int, numbers: range, until: Any, killed: Any) -> None:
        """until: when no further request is sent. killed: when an engine was. Both are shared numbers."""
        self._port, self._numbers, self._until, self._killed = port, iter(numbers), until, killed
        self._tally = SoakTally()

    async def run(self, clients: int, said: Connection) -> None:
        saying = asyncio.create_task(self._say(said))
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client())
        saying.cancel()
        said.send(self._tally)

    async def _say(self, said: Connection) -> None:
        while True:
            await asyncio.sleep(1)
            said.send(self._tally)
            self._tally = SoakTally()

    async def _client(self) -> None:
        connection = SoakConnection(self._port)
        for index in self._numbers:
            if time.monotonic() > self._until.value:
                break
            request, began = SoakRequest(index), time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE):
                    reply = await connection.post(
                        request.path, request.body, leave=request.kind == "cancelled"
                    )
                outcome = request.judge(reply)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                outcome = f"{type(error).__name__}: {error}"
            tally = self._tally
            tally.slowest = max(tally.slowest, time.monotonic() - began)
            if outcome == "cut off" and time.monotonic() - self._killed.value > AFTER_KILL:
                outcome = "cut off though no engine was killed"
            if outcome not in ("whole", "cut off"):
                tally.wrong.append(f"request {index} ({request.kind}): {outcome}")
                outcome = "wrong"
            tally.found[request.kind, outcome] += 1
        connection.close()


def run_clients(port: int, numbers: range, clients: int, until: Any, killed: Any, said: Connection) -> None:
    """The process. Signals to the program, and to its group, are not for its clients."""
    os.setsid()
    asyncio.run(SoakClients(port, numbers, until, killed).run(clients, said))


class Soak:
    """The requests, and what has become of them."""

    def __init__(self, host: Host, options: argparse.Namespace) -> None:
        self._host, self._options, self.tally = host, options, SoakTally()
        context = multiprocessing.get_context("spawn")
        self._until = context.Value("d", time.monotonic() + 60 * options.minutes)
        self._killed = context.Value("d", -AFTER_KILL)
        self.kills = 0
        self.held = list[dict[str, float]]()  # after each part; see `memory`
        self._draw = random.Random(0)
        self._running: dict[Connection, SpawnProcess] = {}
        port, processes = int(host.url.rpartition(":")[2]), options.processes
        for number in range(processes):
            clients = options.clients // processes + (number < options.clients % processes)
            numbers = range(number, options.requests, processes)
            ours, theirs = context.Pipe(duplex=False)
            arguments = port, numbers, clients, self._until, self._killed, theirs
            process = context.Process(target=run_clients, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._running[ours] = process

    def stop(self, *_: object) -> None:
        """No further request is sent."""
        self._until.value = 0.0

    def run(self) -> None:
        options, killing = self._options, time.monotonic() + self._options.kill_every
        with tqdm(total=options.requests, unit="request", disable=None) as bar:
            while self._running:
                for said in wait([*self._running], max(0.0, min(1.0, killing - time.monotonic()))):
                    assert isinstance(said, Connection)
                    try:
                        self.tally.add(said.recv())
                    except EOFError:
                        self._running.pop(said).join()
                bar.update(self.sent - bar.n)
                if self.sent >= options.requests * len(self.held) / PARTS:
                    self.held.append(memory(self._host))
                if time.monotonic() > killing and self._host.ready() == options.engines:
                    self._kill()
                    killing = time.monotonic() + options.kill_every
        self.held.append(memory(self._host))

    @property
    def sent(self) -> int:
        return self.tally.found.total()

    def _kill(self) -> None:
        engines = [pid for name, pid in self._host.processes().items() if name.startswith("engine")]
        self._killed.value = time.monotonic()
        self.kills += 1
        os.kill(self._draw.choice(engines), signal.SIGKILL)


def memory(host: Host) -> dict[str, float]:
    """Resident memory of each front end, in MB."""
    page = os.sysconf("SC_PAGE_SIZE") / 1e6
    return {
        name: int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * page
        for name, pid in host.processes().items()
        if name.startswith("frontend")
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--frontends", type=int, default=2)
    parser.add_argument("--clients", type=int, default=64, help="at a time")
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="after which it ends")
    parser.add_argument("--processes", type=int, default=1, help="that have the clients")
    options = parser.parse_args(arguments)
    with Host(options.frontends, options.engines) as host:
        began = time.monotonic()
        soak = Soak(host, options)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, soak.stop)
        soak.run()
        seconds = time.monotonic() - began
    sent, tally, held = soak.sent, soak.tally, soak.held
    print(f"{sent:,} requests in {seconds:,.0f} s, {sent / seconds:,.0f} a second")
    print(f"slowest {tally.slowest:.2f} s; {soak.kills} engines killed")
    print("| kind | whole | cut off | wrong |\n|---|---:|---:|---:|")
    for kind in KINDS:
        counts = [tally.found[kind, each] for each in ("whole", "cut off", "wrong")]
        print(f"| {kind} | {' | '.join(map(str, counts))} |")
    sums = [sum(each.values()) for each in held]
    print("memory of the front ends together, MB:", " ".join(f"{each:.0f}" for each in sums))
    if tally.wrong:
        sys.exit("\n".join(tally.wrong[:20]))
    return 1 if sent >= WARM and sums[-1] > GROWTH * sums[min(3, len(sums) - 1)] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

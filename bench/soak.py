#!/usr/bin/env python3
"""Many requests of all kinds to the real front ends, while engines are killed; what comes is checked.

The engines only answer (bench/frontends.py), so that there are many requests. What each must get follows from
its number: its kind, its prompt and so its text. Every minute an engine is killed (kill -9). A stream that
had sent text by then may end with the error event, behind text that is the beginning of what it must be;
nothing else may fail. Linux only: it reads /proc.

    python -m bench.soak [--requests 1000000] [--engines 3] [--frontends 2] [--clients 64] [--kill-every 60]
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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
        reader, writer = self._streams or await asyncio.open_connection(
            "127.0.0.1", self._port, limit=1 << 20
        )
        self._streams = None
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        status = int(first.split()[1])
        if "content-length" in headers:
            found = await reader.readexactly(int(headers["content-length"]))
        else:
            found = b"".join([piece async for piece in self._pieces(reader, 1 if leave else None)])
        if leave:
            writer.close()
        else:
            self._streams = reader, writer
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


class Soak:
    """The requests, and what has become of them."""

    def __init__(self, host: Host, requests: int, seconds: float) -> None:
        """seconds: after which no further request is sent."""
        self._until = time.monotonic() + seconds
        self._host, self._port = host, int(host.url.rpartition(":")[2])
        self._numbers = iter(range(requests))
        self._killed = -AFTER_KILL  # when an engine was last
        self.kills = 0
        self.found: Counter[tuple[str, str]] = Counter()  # by kind and outcome
        self.wrong: list[str] = []
        self.slowest = 0.0  # seconds

    async def run(self, clients: int, kill_every: float, bar: tqdm) -> None:
        killer = asyncio.create_task(self._kill(kill_every))
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(bar))
        killer.cancel()

    async def _client(self, bar: tqdm) -> None:
        connection = SoakConnection(self._port)
        for index in self._numbers:
            if time.monotonic() > self._until:
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
            self.slowest = max(self.slowest, time.monotonic() - began)
            if outcome == "cut off" and time.monotonic() - self._killed > AFTER_KILL:
                outcome = "cut off though no engine was killed"
            if outcome not in ("whole", "cut off"):
                self.wrong.append(f"request {index} ({request.kind}): {outcome}")
                outcome = "wrong"
            self.found[request.kind, outcome] += 1
            bar.update()
        connection.close()

    async def _kill(self, every: float) -> None:
        draw = random.Random(0)
        while True:
            await asyncio.sleep(every)
            engines = [pid for name, pid in self._host.processes().items() if name.startswith("engine")]
            self._killed = time.monotonic()
            self.kills += 1
            os.kill(draw.choice(engines), signal.SIGKILL)


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
    options = parser.parse_args(arguments)
    with Host(options.frontends, options.engines) as host:
        soak, held = Soak(host, options.requests, 60 * options.minutes), list[dict[str, float]]()
        began = time.monotonic()

        async def run() -> None:
            with tqdm(total=options.requests, unit="request", disable=None) as bar:
                running = asyncio.create_task(soak.run(options.clients, options.kill_every, bar))
                while not running.done():
                    if sum(soak.found.values()) >= options.requests * len(held) / PARTS:
                        held.append(memory(host))
                    await asyncio.wait([running], timeout=1)
                await running

        asyncio.run(run())
        seconds = time.monotonic() - began
        held.append(memory(host))
    sent = sum(soak.found.values())
    print(f"{sent:,} requests in {seconds:,.0f} s, {sent / seconds:,.0f} a second")
    print(f"slowest {soak.slowest:.2f} s; {soak.kills} engines killed")
    print("| kind | whole | cut off | wrong |\n|---|---:|---:|---:|")
    for kind in KINDS:
        counts = [soak.found[kind, each] for each in ("whole", "cut off", "wrong")]
        print(f"| {kind} | {' | '.join(map(str, counts))} |")
    sums = [sum(each.values()) for each in held]
    print("memory of the front ends together, MB:", " ".join(f"{each:.0f}" for each in sums))
    if soak.wrong:
        sys.exit("\n".join(soak.wrong[:20]))
    return 1 if sent >= WARM and sums[-1] > GROWTH * sums[min(3, len(sums) - 1)] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Seconds from the start of app.py until /health answers, of one or more checkouts in turns.

The first start in a checkout may build kernels, so each starts once before the rounds. --streams: also the
seconds until the first text of a request, and the longest gap in so many streams that begin as soon as the
server answers, while it captures graphs. --first: each is a first start with kernels built, whose GEMMs have
never been timed.

    python bench/startup.py . -- --model-path rwkv7-g1-7.2b.pth
    python bench/startup.py . --streams 8 -- --model-path rwkv7-g1-7.2b.pth
    python bench/startup.py . --streams 8 --first -- --model-path rwkv7-g1-7.2b.pth
    python bench/startup.py ../old . --rounds 3 -- --model-path rwkv7-g1-7.2b.pth
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.load import CONNECTIONS
from rwkv_batch.ops.compiled import kernel_cache

PATIENCE = 600  # seconds
STREAMED = 15  # seconds of each stream


@dataclass(frozen=True)
class StartTimes:
    """Of one start, in seconds."""

    ready: float
    first_text: float = 0.0
    longest_gap: float = 0.0  # in any stream


@contextlib.contextmanager
def launched(
    checkout: str | Path, flags: list[str], folder: str, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The server of `checkout` and its port; what it stores is in `folder`. It is stopped at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--port", str(port), "--state-db", f"{folder}/sessions.db", "--log-level", "WARNING"]
    command = [sys.executable, "app.py", *place, *flags]
    server = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield server, port
    finally:
        server.terminate()
        server.wait()


def own_and_servers(arguments: list[str]) -> tuple[list[str], list[str]]:
    """A program's own arguments, and those after "--", which are for the server."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def start(checkout: str, flags: list[str]) -> None:
    """Start the server of `checkout` with an empty database, and stop it when it is ready."""
    measure(checkout, flags, 0, first=False)


def measure(checkout: str, flags: list[str], streams: int, first: bool) -> StartTimes:
    """Time a start, with so many streams over STREAMED seconds from then on.

    `first`: with a copy of the user's cache that says nothing of GEMMs.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if first:
            environment["RWKV_BATCH_CACHE"] = untuned_cache(f"{folder}/cache")
        client = httpx.Client(timeout=5, trust_env=False)
        begin = time.monotonic()
        with client, launched(checkout, flags, folder, environment) as (server, port):
            while not answers(client, port):
                if server.poll() is not None or time.monotonic() - begin > PATIENCE:
                    sys.exit(f"The server of {checkout} ended, or was not ready within {PATIENCE} s.")
                time.sleep(0.05)
            ready = time.monotonic() - begin
            return StartTimes(ready, *(asyncio.run(stream(port, begin, streams)) if streams else ()))


def answers(client: httpx.Client, port: int) -> bool:
    """Whether the server there is ready."""
    with contextlib.suppress(httpx.TransportError):
        return client.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False


def untuned_cache(to: str) -> str:
    """Copy the user's cache, but for what has been found out about GEMMs, and return where the copy is."""
    cache = kernel_cache.folder().parent
    shutil.copytree(cache, to, ignore=shutil.ignore_patterns("tuning-*"))
    return to


async def stream(port: int, begin: float, streams: int) -> tuple[float, float]:
    """Seconds from `begin` until the first text, and the longest gap in any of so many streams.

    One thread reads all of them, as threads that wait for each other's turns would add gaps of their own.
    Raises RuntimeError for a stream that ends, TimeoutError for no text.
    """
    body = {"prompt": "The Eiffel tower is in", "max_tokens": 1 << 20, "stream": True, "ignore_eos": True}
    texts: list[list[float]] = [[] for _ in range(streams)]  # when each stream's came
    begun = asyncio.Event()
    client = httpx.AsyncClient(timeout=None, limits=CONNECTIONS, trust_env=False)

    async def one(times: list[float]) -> None:
        async with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as reply:
            async for data in reply.aiter_raw():
                if b"data:" in data:
                    times.append(time.monotonic())
                    begun.set()
        raise RuntimeError(f"a stream has ended, HTTP {reply.status_code}")

    running: asyncio.Future[Any] = asyncio.gather(*map(one, texts))  # ends by an error alone
    first_text: asyncio.Future[Any] = asyncio.ensure_future(begun.wait())
    await asyncio.wait([running, first_text], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait([running], timeout=STREAMED)
    if running.done():
        running.result()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await client.aclose()
    if not all(texts):
        raise TimeoutError(f"{texts.count([])} of {streams} streams had no text")
    end = time.monotonic()
    gaps = (after - before for times in texts for before, after in pairwise([*times, end]))
    return min(times[0] for times in texts) - begin, max(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--first", action="store_true")
    own, flags = own_and_servers(sys.argv[1:])
    args = parser.parse_args(own)
    checkouts = [str(c) for c in args.checkouts]
    for checkout in checkouts:
        start(checkout, flags)
    found: dict[str, list[StartTimes]] = {c: [] for c in checkouts}
    for turn in range(args.rounds):
        for checkout in checkouts if turn % 2 == 0 else reversed(checkouts):
            found[checkout].append(measure(checkout, flags, args.streams, args.first))
    for checkout, times in found.items():
        for field in fields(StartTimes)[: 3 if args.streams else 1]:
            seconds = [getattr(each, field.name) for each in times]
            each = ", ".join(f"{s:.3f}" for s in seconds)
            print(f"{checkout}: {field.name.replace('_', ' ')} {median(seconds):.3f} s ({each})")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What 64 greedy streams cost a server's processes on a CPU, in multiples of one alone.

In CPU time, which other work on the machine hardly changes, from a server of any checkout. Linux only: it
reads /proc.

    python bench/stream_cpu.py [CHECKOUT] [--rounds 3] [--output-tokens 128] [-- APP_FLAGS ...]

"waited": the time for which the engine's main thread was ready to run and had no core. What is left of the
wall time, it waited for others.
"""

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.recovery import PATIENCE, answering, children  # noqa: E402

ALONE_TIMES = 4  # as one stream is short
NANO = 1e-9


class Cost(NamedTuple):
    """Of the streams of one run, in seconds."""

    wall: float
    engine: float
    waited: float  # by the engine's main thread for a core
    frontends: float


def streams(port: int, count: int, tokens: int) -> None:
    """Return when so many streams at once have ended."""
    waiting = selectors.DefaultSelector()
    for number in range(count):
        fields = {"max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        body = json.dumps(fields | {"prompt": f"The number {number} is known for"}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        waiting.register(connection, selectors.EVENT_READ, bytearray())
    while waiting.get_map():
        for key, _ in waiting.select(PATIENCE):
            connection, seen = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 16)
            seen += data
            if b"[DONE]" in seen or not data:
                if b"[DONE]" not in seen:
                    sys.exit(f"a stream ended early: {bytes(seen[-500:])!r}")
                waiting.unregister(connection)
                connection.close()
            del seen[:-16]


def thread_times(pid: int) -> dict[int, tuple[int, int]]:
    """Nanoseconds for which each thread of a process has run, and waited for a core."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        run, waited, _ = (task / "schedstat").read_text(encoding="ascii").split()
        found[int(task.name)] = int(run), int(waited)
    return found


def measure(port: int, pids: dict[str, int], count: int, tokens: int, times: int) -> Cost:
    def spent() -> tuple[float, float, float]:
        engine = thread_times(pids["engine"])
        others = [thread_times(pid) for name, pid in pids.items() if name.startswith("frontend")]
        used = sum(run for threads in others for run, _ in threads.values())
        whole = sum(run for run, _ in engine.values())
        return whole * NANO, engine[pids["engine"]][1] * NANO, used * NANO

    before, began = spent(), time.perf_counter()
    for _ in range(times):
        streams(port, count, tokens)
    wall, after = time.perf_counter() - began, spent()
    return Cost(wall / times, *((b - a) / times for a, b in zip(before, after, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", nargs="?", default=ROOT, type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        log = Path(scratch) / "log"
        own = ["--device", "cpu", "--port", str(port), "--state-db", str(Path(scratch) / "sessions.db")]
        flags = [flag for flag in flags if flag != "--"]
        with log.open("wb") as out:
            command = [sys.executable, "app.py", *own, *flags]
            server = subprocess.Popen(
                command,
                cwd=options.checkout,
                stdout=out,
                stderr=out,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        try:
            answering(port)
            pids = children(log)
            costs: dict[int, list[Cost]] = {1: [], options.streams: []}
            streams(port, options.streams, 4)  # until here threads begin
            for _ in range(options.rounds):
                for count, found in costs.items():
                    times = ALONE_TIMES if count == 1 else 1
                    found.append(measure(port, pids, count, options.output_tokens, times))
        finally:
            server.terminate()
            server.wait(PATIENCE)
    middle = {count: Cost(*map(median, zip(*found, strict=True))) for count, found in costs.items()}
    print("| streams | engine, s | front ends, s | wall, s | of it waited |\n|---|---|---|---|---|")
    for count, cost in middle.items():
        print(f"| {count} | {cost.engine:.2f} | {cost.frontends:.2f} | {cost.wall:.2f} | {cost.waited:.2f} |")
    one, many = middle.values()
    ratios = many.engine / one.engine, (many.engine + many.frontends) / (one.engine + one.frontends)
    print("times one alone: engine {:.1f}, all processes {:.1f}".format(*ratios))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What HAProxy costs: streams of one server through it and directly, by turns.

    python bench/proxy_cost.py [--streams 64] [--tokens 200] [--rounds 5]

A server of the bundled model on the CPU sends a chunk for each token. Printed are, for each way, tokens a
second, the time to the first chunk, and the CPU that all processes of the server, and those of HAProxy, take
for a chunk. Then single short requests, one after the other: what a request waits longer.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "helpers")]

from serving import free_port  # noqa: E402

from deploy import check  # noqa: E402
from deploy.cluster.haproxy import configuration  # noqa: E402

TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Round:
    """What a number of streams took together."""

    seconds: float
    chunks: int
    first: float  # seconds to the first chunk, the median
    server: float  # seconds of CPU
    haproxy: float


def cpu(root: int) -> float:
    """Seconds of CPU of a process and of all below it."""
    below: defaultdict[int, list[int]] = defaultdict(list)
    used: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:
                continue
            below[int(words[1])].append(int(folder.name))
            used[int(folder.name)] = (int(words[11]) + int(words[12])) / TICK
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        total += used.get(pid, 0.0)
        waiting += below[pid]
    return total


async def stream(port: int, number: int, tokens: int) -> tuple[int, float]:
    """Chunks with text, and seconds to the first."""
    body = json.dumps(
        {
            "contents": [f"User: Tell me story {number}.\n\nAssistant:"],
            "stream": True,
            "chunk_size": 1,
            "max_tokens": tokens,
            "stop_tokens": [],
            "use_prefix_cache": False,
        }
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    chunks, first = 0, 0.0
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            break
        if b'"content"' in line:
            first = first or time.perf_counter() - began
            chunks += 1
    writer.close()
    return chunks, first


async def all_streams(port: int, streams: int, tokens: int) -> tuple[int, float]:
    found = await asyncio.gather(*(stream(port, number, tokens) for number in range(streams)))
    return sum(chunks for chunks, _ in found), statistics.median(first for _, first in found)


def request(port: int) -> float:
    """Seconds of one short request on a new connection."""
    began = time.perf_counter()
    data, headers = json.dumps({"prompt": "a b c"}).encode(), {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/tokenize", data, headers)
    with urllib.request.urlopen(asked) as reply:
        reply.read()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="of each way")
    given = parser.parse_args()
    direct, outside, program = free_port(), free_port(), check.tool("haproxy")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        file = Path(folder) / "haproxy.cfg"
        text = configuration([f"127.0.0.1:{direct}"], f"127.0.0.1:{outside}", f"{folder}/socket", user="")
        file.write_text(text, encoding="utf-8")
        flags = [
            "--port",
            direct,
            "--device",
            "cpu",
            "--frontends",
            "1",
            "--state-db",
            ":memory:",
            "--log-level",
            "WARNING",
        ]
        server = subprocess.Popen(
            [sys.executable, ROOT / "app.py", *map(str, flags)], stdout=subprocess.DEVNULL
        )
        haproxy = subprocess.Popen([program, "-f", file], stderr=subprocess.DEVNULL)
        try:
            # HAProxy takes a server for there until it has looked for the first time.
            while not (answers(direct, "/health/ready") and answers(outside, "/haproxy/health")):
                for name, process in (("The server", server), ("HAProxy", haproxy)):
                    if process.poll() is not None:
                        sys.exit(f"{name} has ended with the exit code {process.returncode}; run it alone.")
                time.sleep(0.2)
            measure(given, {"direct": direct, "HAProxy": outside}, server.pid, haproxy.pid)
        finally:
            for each in (haproxy, server):
                each.terminate()
                each.wait()


def answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def measure(given: argparse.Namespace, ports: dict[str, int], server: int, haproxy: int) -> None:
    rounds: dict[str, list[Round]] = {way: [] for way in ports}
    single: dict[str, list[float]] = {way: [] for way in ports}
    for number in range(given.rounds + 1):
        for way, port in ports.items():
            before, began = (cpu(server), cpu(haproxy)), time.perf_counter()
            chunks, first = asyncio.run(all_streams(port, given.streams, given.tokens))
            took = time.perf_counter() - began
            if number:  # the first is a warm-up
                rounds[way].append(
                    Round(took, chunks, first, cpu(server) - before[0], cpu(haproxy) - before[1])
                )
    for _ in range(200):
        for way, port in ports.items():
            single[way].append(request(port))
    print("| | tokens/s | first chunk, ms | server's CPU a chunk, us | HAProxy's | short request, ms |")
    print("|---|---|---|---|---|---|")
    for way, found in rounds.items():
        chunks = sum(each.chunks for each in found)
        print(
            f"| {way} | {chunks / sum(each.seconds for each in found):,.0f} "
            f"| {1e3 * statistics.median(each.first for each in found):.0f} "
            f"| {1e6 * sum(each.server for each in found) / chunks:.0f} "
            f"| {1e6 * sum(each.haproxy for each in found) / chunks:.1f} "
            f"| {1e3 * statistics.median(single[way]):.2f} |"
        )


if __name__ == "__main__":
    main()

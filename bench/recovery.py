#!/usr/bin/env python3
"""How soon a server recovers: after clients leave, after a process dies, after SIGTERM.

Starts its own server (one row, one front end) on a free port, so nothing else hides the time. Linux only: it
reads /proc. --hung: only after its engine hangs, while a row runs: stopped by a signal, and on a GPU by a
kernel that never ends. Then also how soon /health/ready is not 200, and the engine is ended.

    python bench/recovery.py [--rounds 5] [-- APP_FLAGS ...]
    python bench/recovery.py --hung --rounds 1 -- --device cuda
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import app  # noqa: E402
from rwkv_batch import supervisor  # noqa: E402
from rwkv_batch.config import EngineConfig  # noqa: E402

PATH = "/v1/chat/completions"
ENDLESS = {
    "contents": ["User: hi\n\nAssistant:"],
    "stop_tokens": [],
    "max_tokens": 10_000_000,
    "temperature": 0,
    "chunk_size": 1,
}
ONE_TOKEN = ENDLESS | {"max_tokens": 1}
START, PATIENCE = 600, 60  # seconds: a first start may build kernels
FOR_YEARS = 1 << 60  # cycles of a GPU
run_engine = supervisor.run_engine


def post(port: int, body: dict) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", PATH, json.dumps(body))
    return connection.getresponse()


def answering(port: int, seconds: float = PATIENCE) -> None:
    """Return when the server has answered a request."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            reply = post(port, ONE_TOKEN)
            reply.read()
            if reply.status == 200:
                return
        time.sleep(0.01)
    sys.exit(f"the server did not answer within {seconds} s")


def leave_stream(port: int, pids: dict[str, int]) -> None:
    reply = post(port, ENDLESS | {"stream": True})
    reply.readline()
    reply.close()


def leave_reply(port: int, pids: dict[str, int]) -> None:
    reply = post(port, ENDLESS)  # the head comes when the reply takes longer than a moment
    reply.close()


def kill_frontend(port: int, pids: dict[str, int]) -> None:
    os.kill(next(pid for name, pid in pids.items() if name.startswith("frontend")), signal.SIGKILL)


def kill_engine(port: int, pids: dict[str, int]) -> None:
    os.kill(pids["engine"], signal.SIGKILL)


EVENTS: dict[str, Callable[[int, dict[str, int]], None]] = {
    "client leaves a stream -> its slot serves the next request": leave_stream,
    "client leaves while it waits for a whole reply -> the same": leave_reply,
    "front end killed -> answering": kill_frontend,
    "engine killed -> model loaded again, answering": kill_engine,
}


def children(log: Path) -> dict[str, int]:
    """The running processes by name, from the supervisor's log."""
    found = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if "started as process" in line and Path(f"/proc/{words[-1]}").exists():
            found[words[words.index("started") - 1]] = int(words[-1])
    return found


def engine_that_can_hang(
    configs: tuple[EngineConfig, ...], address: str, changes: Sequence[bytes], control: Connection
) -> None:
    """The engine, which at SIGUSR1 has its GPU run a kernel that never ends."""

    def hang(*_: object) -> None:
        import torch

        torch.cuda._sleep(FOR_YEARS)

    signal.signal(signal.SIGUSR1, hang)
    run_engine(configs, address, changes, control)


def serve(arguments: list[str]) -> int:
    """The server of app.py with that engine."""
    supervisor.run_engine = engine_that_can_hang
    return app.main(arguments)


def ready(port: int) -> bool:
    """Whether /health/ready is 200."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200


def hang(port: int, log: Path, number: signal.Signals) -> list[float]:
    """Seconds until /health/ready is not 200, until the engine is ended, and until a new one answers."""
    stream = post(port, ENDLESS | {"stream": True})
    stream.readline()
    engine = children(log)["engine"]
    os.kill(engine, number)
    began, times = time.monotonic(), list[float]()
    for over in (lambda: not ready(port), lambda: children(log).get("engine") != engine):
        while not over():
            if time.monotonic() - began > 2 * PATIENCE:
                sys.exit(f"the engine has hung for {2 * PATIENCE} s and is there still")
            time.sleep(0.05)
        times.append(time.monotonic() - began)
    answering(port)
    stream.close()
    return [*times, time.monotonic() - began]


def print_hung(port: int, log: Path, rounds: int, gpu: bool) -> None:
    kinds = {"engine stopped by SIGSTOP": signal.SIGSTOP}
    if gpu:
        kinds["a kernel that never ends"] = signal.SIGUSR1
    for name, number in kinds.items():
        for _ in range(rounds):
            silent, ended, again = hang(port, log, number)
            print(
                f"{name}: /health/ready is 503 after {silent:.1f} s, the engine is ended after {ended:.1f}, "
                f"another one answers after {again:.1f}",
                flush=True,
            )


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--serve"]:
        return serve(arguments[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hung", action="store_true", help="only after its engine hangs")
    parser.add_argument("flags", nargs="*", help="flags for app.py")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        log = Path(scratch) / "log"
        with log.open("wb") as out:
            narrow = [
                "--port",
                str(port),
                "--max-rows",
                "1",
                "--frontends",
                "1",
                "--state-db",
                str(Path(scratch) / "sessions.db"),
            ]
            server = subprocess.Popen(
                [sys.executable, "-m", "bench.recovery", "--serve", *narrow, *options.flags],
                cwd=ROOT,
                stdout=out,
                stderr=out,
            )
        try:
            began = time.monotonic()
            answering(port, START)
            print(f"{'start -> answering':62} {time.monotonic() - began:6.2f} s")
            if options.hung:
                from torch.cuda import is_available

                print_hung(port, log, options.rounds, is_available() and "cpu" not in options.flags)
            for name, happen in [] if options.hung else EVENTS.items():
                times = []
                for _ in range(options.rounds):
                    happen(port, children(log))
                    began = time.monotonic()
                    answering(port)
                    times.append(time.monotonic() - began)
                print(f"{name:62} {statistics.median(times):6.2f} s  (most {max(times):.2f})", flush=True)
            began = time.monotonic()
            server.terminate()
            code = server.wait(PATIENCE)
            print(f"{'SIGTERM, idle -> exit code ' + str(code):62} {time.monotonic() - began:6.2f} s")
        finally:
            server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

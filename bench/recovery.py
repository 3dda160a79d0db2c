#!/usr/bin/env python3
"""How soon a server recovers: after clients leave, after a process dies, after SIGTERM.

Starts its own server (one row, one front end) on a free port, so nothing else hides the time. Linux only: it
reads /proc.

    python bench/recovery.py [--rounds 5] [-- APP_FLAGS ...]
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
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATH = "/v1/chat/completions"
ENDLESS = {
    "contents": ["User: hi\n\nAssistant:"],
    "stop_tokens": [],
    "max_tokens": 10_000_000,
    "temperature": 0,
    "chunk_size": 1,
}
ONE_TOKEN = ENDLESS | {"max_tokens": 1}
PATIENCE = 60  # seconds


def post(port: int, body: dict) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", PATH, json.dumps(body))
    return connection.getresponse()


def answering(port: int) -> None:
    """Return when the server has answered a request."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            reply = post(port, ONE_TOKEN)
            reply.read()
            if reply.status == 200:
                return
        time.sleep(0.01)
    sys.exit(f"the server did not answer within {PATIENCE} s")


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="flags for app.py")
    options = parser.parse_args()
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
                [sys.executable, "app.py", *narrow, *options.flags], cwd=ROOT, stdout=out, stderr=out
            )
        try:
            began = time.monotonic()
            answering(port)
            print(f"{'start -> answering':62} {time.monotonic() - began:6.2f} s")
            for name, happen in EVENTS.items():
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


if __name__ == "__main__":
    main()

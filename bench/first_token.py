#!/usr/bin/env python3
"""Where the time from a request to its first token goes: moments in the client, a front end and the engine.

    python -m bench.first_token --requests 30                                  # the bundled model
    python -m bench.first_token --input-tokens 1024 -- --model-path m7.2b.pth --max-rows 1024

One request at a time, over a connection of its own, to a server of this program whose processes write down
when they come to some calls. Unknown flags behind -- go to app.py. Prints the median and the largest time of
each part in milliseconds, and its share of the median of the whole; also what a step of a prompt has taken of
the device by the engine's metrics. Linux only: all processes have one clock.
"""

import argparse
import ctypes
import json
import os
import re
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
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import app
from bench.frontends import PARENT_DEATH_SIGNAL
from bench.load import random_prompts
from bench.startup import own_and_servers
from rwkv_batch import supervisor
from rwkv_batch.config import EngineConfig, FrontendConfig

FILE = "RWKV_FIRST_TOKEN"  # names the file of moments to the processes
READ = 65536
PATH = "/v1/chat/completions"
# Moments on the way to the first token, each with what ends there.
WAY = {
    "sent": "client: connect and send",
    "called": "HTTP is read, a handler is called",
    "submitted": "handler: fields, template",
    "transmitted": "the wire's thread sends",
    "received": "the engine's loop wakes",
    "added": "engine: read, encode, queue",
    "launching": "engine: admit, plan",
    "launched": "engine: a step is queued",
    "drawn": "the device runs it",
    "answered": "engine: text, send",
    "delivered": "the wire's thread receives",
    "framed": "a thread makes the event",
    "text": "HTTP is written, the client reads",
}
BESIDE = {
    "accepted": "submitted",
    "opened": "accepted",
}  # the way of the head of the reply, and what is before

engine_process, frontend_process = supervisor.run_engine, supervisor.run_frontend
LAST = ("answered", "framed")  # after which a process writes: each write takes time that would be counted
_file, _notes = -1, list[tuple[str, float]]()


def note(name: str) -> None:
    global _notes
    _notes.append((name, time.monotonic()))
    if name in LAST:
        written, _notes = _notes, []
        os.write(_file, "".join(f"{what} {at:.7f}\n" for what, at in written).encode())


def marked(owner: type, name: str, before: str = "", after: str = "") -> None:
    """Have calls of a method noted."""
    real = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        if before:
            note(before)
        found = real(*given, **named)
        if after:
            note(after)
        return found

    setattr(owner, name, call)


def _open() -> None:
    global _file
    _file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def traced_engine(
    configs: tuple[EngineConfig, ...], address: str, changes: Sequence[bytes], control: Connection
) -> None:
    """In place of supervisor.run_engine."""
    _open()
    from rwkv_batch.engine.engine import Engine
    from rwkv_batch.engine.landing import Landing
    from rwkv_batch.engine.loop import StepLoop
    from rwkv_batch.engine.serving.process import Service

    marked(Service, "_receive", before="received")
    marked(Engine, "add", after="added")
    marked(StepLoop, "_launch", before="launching", after="launched")
    marked(Landing, "take", before="drawn")
    marked(Service, "_send", after="answered")
    engine_process(configs, address, changes, control)


def traced_frontend(
    config: FrontendConfig, name: str, addresses: Sequence[str], counts: str, control: Connection
) -> None:
    """In place of supervisor.run_frontend."""
    _open()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts
    import robyn  # noqa: F401

    from routes.http import stream
    from routes.http.exchange import HttpRequest
    from rwkv_batch.wire import client
    from rwkv_batch.wire.protocol import Accepted, Progress

    real: Callable[..., Any] = HttpRequest.from_robyn

    def from_robyn(*given: Any) -> HttpRequest:
        note("called")
        return real(*given)

    HttpRequest.from_robyn = staticmethod(from_robyn)  # type: ignore[assignment,method-assign]
    marked(client.Client, "submit", before="submitted")
    marked(client.Client, "_transmit", after="transmitted")
    put = client.Job.put

    def put_noted(self: client.Job, event: Any) -> None:
        if isinstance(event, Accepted | Progress):
            note("accepted" if isinstance(event, Accepted) else "delivered")
        put(self, event)

    client.Job.put = put_noted  # type: ignore[method-assign]
    following = stream.EventStream._next

    def following_noted(self: stream.EventStream) -> bytes:
        if not self._begun:
            note("opened")
        found = following(self)
        note("framed")
        return found

    stream.EventStream._next = following_noted  # type: ignore[method-assign]
    frontend_process(config, name, addresses, counts, control)


def serve(arguments: list[str]) -> int:
    """The server of app.py, whose processes note their moments. It ends when what has started it does."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    supervisor.run_engine, supervisor.run_frontend = traced_engine, traced_frontend
    return app.main(arguments)


def ask(port: int, body: bytes) -> dict[str, float]:
    """Send a request; the client's moments."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    message = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    found, data = {"began": time.monotonic()}, b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(message)
        found["sent"] = time.monotonic()
        while b"data: [DONE]" not in data:
            piece = connection.recv(READ)
            if not piece:
                sys.exit(f"the reply ended early: {data[-300:]!r}")
            now, data = time.monotonic(), data + piece
            found.setdefault("head", now)
            if "text" not in found and re.search(rb'"(content|reasoning_content)":"[^"]', data):
                found["text"] = now
    found.setdefault("text", now)
    return found


def parts(client: dict[str, float], moments: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds of each part of the way of one request, and of what is beside it."""
    found, now, at = dict[str, float](), client["began"], dict(client)
    for name in WAY:
        before = now
        if name in client:
            now = client[name]
        else:
            now = min((t for t in moments.get(name, []) if t >= before), default=before)
        at[name], found[name] = now, 1e3 * (now - before)
    for name, before_it in BESIDE.items():
        since = at[before_it]
        at[name] = min((t for t in moments.get(name, []) if t >= since), default=since)
        found[name] = 1e3 * (at[name] - since)
    found["head"] = 1e3 * (client["head"] - at["opened"])
    found["whole"] = 1e3 * (client["text"] - client["began"])
    return found


def read(file: Path) -> dict[str, list[float]]:
    moments: dict[str, list[float]] = {}
    for line in file.read_text(encoding="ascii").splitlines():
        name, at = line.split()
        moments.setdefault(name, []).append(float(at))
    return {name: sorted(times) for name, times in moments.items()}


def prefills(url: str) -> tuple[float, float]:
    """Seconds that steps of prompts have taken of the device, and how many there were."""
    text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    found = [
        sum(
            map(
                float, re.findall(rf'(?m)^rwkv:step_time_seconds_{what}{{[^}}]*"prefill"[^}}]*}} (\S+)', text)
            )
        )
        for what in ("sum", "count")
    ]
    return found[0], found[1]


def report(found: list[dict[str, float]]) -> None:
    def line(name: str, what: str) -> None:
        times = [each[name] for each in found]
        middle = statistics.median(times)
        print(f"{what:40s} {middle:8.3f} {max(times):8.3f} {middle / whole:7.1%}")

    whole = statistics.median(each["whole"] for each in found)
    print(f"{len(found)} requests: ms              {'median':>15s} {'largest':>8s}   share")
    for name, what in WAY.items():
        line(name, what)
    line("whole", "client: until the first text")
    print("beside that, until the client has the head of the reply:")
    line("accepted", "submitted until accepted")
    line("opened", "a thread asks for the first event")
    line("head", "HTTP is written, the client reads")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--serve"]:
        return serve(arguments[1:])
    arguments, flags = own_and_servers(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--input-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=2)
    parser.add_argument("--settle", type=float, default=60, help="seconds for what a start leaves for later")
    options = parser.parse_args(arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "moments", Path(folder) / "log"
        flags += ["--port", str(port), "--state-db", ":memory:", "--log-level", "WARNING"]
        with output.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.first_token", "--serve", *flags],
                stdout=log,
                stderr=log,
                env=os.environ | {FILE: str(file)},
            )
        try:
            wait_for(f"http://127.0.0.1:{port}", options.settle, process)
            run(options, f"http://127.0.0.1:{port}", port, file)
        except httpx.HTTPError:
            print(output.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()
    return 0


def wait_for(url: str, settle: float, process: subprocess.Popen[bytes]) -> None:
    """Until the server is ready, and has nothing pending any more. Raises httpx.HTTPError if it ends."""
    until = time.monotonic() + 600
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).json().get("status") == "ready":
                break
        except httpx.HTTPError:
            if time.monotonic() > until or process.poll() is not None:
                raise
        time.sleep(0.1)
    until = time.monotonic() + settle
    while time.monotonic() < until:
        text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
        if not re.search(r"(?m)^rwkv:background_work_pending\S* 1", text):
            return
        time.sleep(0.2)


def run(options: argparse.Namespace, url: str, port: int, file: Path) -> None:
    prompts, clients = random_prompts(options.input_tokens, 0), list[dict[str, float]]()
    before = 0.0, 0.0
    for number in range(-3, options.requests):
        if not number:
            before = prefills(url)
        body = {
            "model": "rwkv7",
            "messages": [{"role": "user", "content": prompts[number]}],
            "max_tokens": options.output_tokens,
            "stream": True,
            "stop_tokens": [],
            "ignore_eos": True,
            "use_prefix_cache": False,
        }
        found = ask(port, json.dumps(body).encode())
        if number >= 0:
            clients.append(found)
    after = prefills(url)
    moments = read(file)
    windows = []
    for client in clients:
        mine = {
            name: [t for t in times if client["began"] <= t <= client["text"]]
            for name, times in moments.items()
        }
        windows.append(parts(client, mine))
    report(windows)
    seconds, steps = after[0] - before[0], after[1] - before[1]
    if steps:
        print(f"{steps:.0f} steps of prompts, {1e3 * seconds / steps:.3f} ms of the device each")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

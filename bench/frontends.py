#!/usr/bin/env python3
"""Requests and tokens a second of the real front ends, against engines that only answer.

The engines have no model: they answer each request at once, or with a token a step to each row that runs, as
fast as they can. So what is measured is the front ends, the wire and HTTP. The load comes from `wrk`
(https://github.com/wg/wrk), whose CPU time is small beside theirs. Linux only: it reads /proc.

    python -m bench.frontends [--frontends 11] [--engines 1 4] [--streams 320 1000 4000] [--seconds 10]

What flags of app.py cost a front end: with them and without, in turns; steps that take as long as a model's.

    python -m rwkv_batch.keys add keys.json bench
    python -m bench.frontends --frontends 1 --engines 1 --streams 80 --step-ms 2.3
    python -m bench.frontends --frontends 1 --engines 1 --streams 80 --step-ms 2.3 --key KEY -- \\
        --keys keys.json --audit-log audit.jsonl --log-format json
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import httpx
import zmq

import app
from bench.startup import own_and_servers
from rwkv_batch import supervisor
from rwkv_batch.config import EngineConfig
from rwkv_batch.wire.codec import decode_to_engine, encode
from rwkv_batch.wire.commands import GetMetrics
from rwkv_batch.wire.metrics import Series
from rwkv_batch.wire.protocol import (
    Accepted,
    Cancel,
    CommandReply,
    Event,
    GenerateRequest,
    Progress,
    RowDelta,
)
from rwkv_batch.wire.supervision import EngineInfo, Ping, Serving, Stop

ROWS = 4096
PARENT_DEATH_SIGNAL = 1  # an option of prctl
FEW, MANY = 4, 256  # tokens of a request of the first measurement, and of a stream
PATH = "/v1/completions"
LUA = """wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer %s"
wrk.body = %s
"""


def word_of(prompt: str | list[int]) -> str:
    """Each token of an answer to it. Answers to other prompts have other words."""
    return f" {zlib.crc32(str(prompt).encode()):08x}"


class Answers:
    """Requests under way of one front end: a token for each row a step, until all are there."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, Progress, Progress]] = {}  # steps left, a step, the last

    def add(self, request: GenerateRequest) -> list[Event]:
        words = [word_of(prompt) for prompt in request.prompts for _ in range(request.n)]
        rows = dict(zip(request.row_numbers or range(len(words)), words, strict=True))
        accepted = Accepted(request.id, [1] * len(request.prompts), [0] * len(request.prompts))
        if not request.flush_tokens:
            count = request.max_tokens
            done = [RowDelta(row, word * count, count, "length") for row, word in rows.items()]
            return [accepted, Progress(request.id, done)]
        step = Progress(request.id, [RowDelta(row, word, 1) for row, word in rows.items()])
        last = Progress(request.id, [RowDelta(row, "", 0, "length") for row in rows])
        self._running[request.id] = request.max_tokens, step, last
        return [accepted]

    def cancel(self, request: str) -> None:
        self._running.pop(request, None)

    def step(self) -> list[Event]:
        events: list[Event] = []
        for request, (left, step, last) in [*self._running.items()]:
            events.append(step if left else last)
            if left:
                self._running[request] = left - 1, step, last
            else:
                del self._running[request]
        return events

    def __bool__(self) -> bool:
        return bool(self._running)


def answer(
    configs: tuple[EngineConfig, ...],
    address: str,
    changes: Sequence[bytes],
    control: Connection,
    step_seconds: float = 0.0,
) -> None:
    """In place of supervisor.run_engine: a process that serves at `address` until `Stop`.

    step_seconds: what a step takes, however many rows it has.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(address)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(control.fileno(), zmq.POLLIN)
    info = EngineInfo("fake", 1, 64, 1, "float32", "cpu", ROWS, 65536, "0" * 16, "fake")
    control.send(Serving([info], engine=configs[0].place))
    answers: defaultdict[bytes, Answers] = defaultdict(Answers)
    due = 0.0  # when the next step ends
    while True:
        wait = max(0.0, due - time.monotonic()) if any(answers.values()) else None
        ready = dict(poller.poll(wait if wait is None else wait * 1000))
        if control.fileno() in ready:
            message = control.recv()
            if isinstance(message, Stop):
                return
            if isinstance(message, Ping):
                control.send(message)
        events: defaultdict[bytes, list[Event]] = defaultdict(list)
        with contextlib.suppress(zmq.Again):
            while True:
                frontend, data = router.recv_multipart(zmq.NOBLOCK)
                match decode_to_engine(data):
                    case GenerateRequest() as request:
                        events[frontend] += answers[frontend].add(request)
                    case Cancel(id=request_id):
                        answers[frontend].cancel(request_id)
                    case GetMetrics(id=asked):
                        series = [Series("models_loaded", [], [1.0])]
                        events[frontend].append(CommandReply(asked, metrics=series))
        if (now := time.monotonic()) >= due:
            due = max(due + step_seconds, now)
            for frontend, running in answers.items():
                events[frontend] += running.step()
        for frontend, its_events in events.items():
            if its_events:
                router.send_multipart([frontend, encode(its_events)])


def serve(arguments: list[str]) -> int:
    """The server of app.py with these engines in place of its own, behind the milliseconds of a step.

    It ends when what has started it does.
    """
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    supervisor.run_engine = partial(answer, step_seconds=float(arguments[0]) / 1000)
    return app.main(arguments[1:])


class Host:
    """The server in a process of its own, which signals to this one's group do not reach."""

    def __init__(self, frontends: int, engines: int, *more: str, step_ms: float = 0.0) -> None:
        """more: further flags of app.py."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.port, self.url, self._frontends = port, f"http://127.0.0.1:{port}", frontends
        self._scratch = tempfile.TemporaryDirectory(prefix="rwkv-frontends-")
        self._log = Path(self._scratch.name) / "log"
        flags = ["--device", ",".join(["cpu"] * engines), "--frontends", str(frontends), "--port", str(port)]
        flags += ["--state-db", ":memory:", "--max-waiting", str(1 << 20), *more]
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "bench.frontends", "--serve", str(step_ms), *flags]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> "Host":
        while True:
            if self._process.poll() is not None:
                sys.exit(f"the server ended:\n{self._log.read_text(encoding='utf-8', errors='replace')}")
            with contextlib.suppress(httpx.TransportError):
                # Connections stay with the front ends that were there when they came.
                ready = httpx.get(self.url + "/health", timeout=5).json().get("status") == "ready"
                if ready and self._listening() == self._frontends:
                    return self
            time.sleep(0.05)

    def _listening(self) -> int:
        """How many front ends take connections."""
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        places = [(fields[1], fields[3]) for fields in map(str.split, lines)]
        return places.count((f"0100007F:{self.port:04X}", "0A"))

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._scratch.cleanup()

    @property
    def supervisor(self) -> int:
        """Its process id."""
        return self._process.pid

    def ready(self) -> int:
        """How many of several engines serve."""
        text = httpx.get(self.url + "/metrics", timeout=60).text
        return len(re.findall(r'rwkv:engine_up\{engine="engine-\d+"\} 1\.0', text))

    def processes(self) -> dict[str, int]:
        """Of engines and front ends by their names, those that were started last."""
        started = r"((?:engine|frontend)\S*) started as process (\d+)"
        return {name: int(pid) for name, pid in re.findall(started, self._log.read_text(encoding="utf-8"))}

    def cpu_seconds(self) -> dict[str, float]:
        """Of the busiest engine and of the busiest front end, so far."""
        tick, found = os.sysconf("SC_CLK_TCK"), {"engine": 0.0, "frontend": 0.0}
        for name, pid in self.processes().items():
            kind = name.partition("-")[0]
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            found[kind] = max(found[kind], (int(fields[11]) + int(fields[12])) / tick)
        return found


class FrontendFigures(NamedTuple):
    requests: float  # a second
    p99: str  # of a request, as wrk writes it
    failed: int
    cpu: dict[str, float]  # of one core: the busiest engine, the busiest front end


def measure(
    host: Host, body: dict[str, object], connections: int, seconds: int, threads: int, key: str = ""
) -> FrontendFigures:
    """Measure so many clients at a time, each of which sends the next request when it has its answer."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua", encoding="utf-8") as script:
        script.write(LUA % (key, json.dumps(json.dumps(body))))
        script.flush()
        wrk = ["wrk", f"-t{threads}", f"-c{connections}", f"-d{seconds}s", "--timeout", "60s", "--latency"]
        before = host.cpu_seconds()
        done = subprocess.run(
            [*wrk, "-s", script.name, host.url + PATH], capture_output=True, text=True, check=True
        )
        after = host.cpu_seconds()
    text = done.stdout
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    slow, bad = re.search(r"99%\s+(\S+)", text), re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    sockets = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    if rate is None or slow is None:
        sys.exit(f"wrk said what is not understood:\n{text}{done.stderr}")
    failed = int(bad[1]) if bad else 0
    failed += sum(map(int, sockets.groups())) if sockets else 0
    return FrontendFigures(
        float(rate[1]), slow[1], failed, {k: (after[k] - before[k]) / seconds for k in after}
    )


def check(host: Host, key: str = "") -> None:
    """That an answer is what the engine has said, whole and streamed."""
    body = {"model": "fake", "prompt": "Hi", "max_tokens": FEW}
    headers = {"authorization": f"Bearer {key}"} if key else {}  # httpx sends none that is empty
    reply = httpx.post(host.url + PATH, json=body, headers=headers).raise_for_status().json()
    assert reply["choices"][0]["text"] == word_of("Hi") * FEW, reply
    with httpx.stream("POST", host.url + PATH, json=body | {"stream": True}, headers=headers) as streamed:
        events = [line.removeprefix("data: ") for line in streamed.iter_lines() if line.startswith("data: {")]
    assert "".join(c["text"] for e in events for c in json.loads(e)["choices"]) == word_of("Hi") * FEW, events


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--serve"]:
        return serve(arguments[1:])
    arguments, flags = own_and_servers(arguments)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    cores = os.cpu_count() or 1
    parser.add_argument("--frontends", type=int, default=max(1, cores - 5))
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--clients", type=int, default=64, help="at a time, of short requests")
    parser.add_argument("--streams", type=int, nargs="+", default=[320, 1000, 4000], help="at a time")
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=max(1, cores // 8), help="of wrk")
    parser.add_argument("--step-ms", type=float, default=0.0, help="what a step of the engines takes")
    parser.add_argument("--key", default="", help="that clients send, of --keys among the flags behind --")
    options = parser.parse_args(arguments)
    if shutil.which("wrk") is None:
        parser.error("wrk is missing; install it, as with apt install wrk")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("It was ended early."))  # and its server with it
    print(f"{cores} cores, {options.frontends} front ends; CPU of the busiest engine and front end, of 1")
    print(
        "| engines | at a time | tokens each | requests/s | tokens/s | P99 | failed | engine | front end ",
        end="",
    )
    print("| us a request |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for engines in options.engines:
        with Host(options.frontends, engines, *flags, step_ms=options.step_ms) as host:
            check(host, options.key)
            loads = [(options.clients, FEW, False), *((each, MANY, True) for each in options.streams)]
            for clients, tokens, stream in loads:
                body = {"model": "fake", "prompt": "Hi", "max_tokens": tokens, "stream": stream}
                found = measure(host, body, clients, options.seconds, options.threads, options.key)
                each = found.cpu["frontend"] / max(found.requests, 1.0) * options.frontends * 1e6
                print(
                    f"| {engines} | {clients} | {tokens} | {found.requests:,.0f} | "
                    f"{found.requests * tokens:,.0f} | {found.p99} | {found.failed} | "
                    f"{found.cpu['engine']:.2f} | {found.cpu['frontend']:.2f} | {each:,.0f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

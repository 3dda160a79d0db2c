#!/usr/bin/env python3
"""The loads of bench/results/h200-serve.md, one after the other, against a server of its own on this machine.

    python bench/serve_all.py --model-path m7.2b.pth --json serve.jsonl
    python bench/serve_all.py --divide 32      # the bundled model, everything 32 times smaller: a trial run

Unknown flags go to app.py. Prints a line for each load, and at the end what /health/ready has said all the
time, the model's load included, and how often a process was started again: each that nobody has stopped is a
false alarm. --json keeps all figures in the form of bench/serve.py. --beside FILE: a model that is loaded
while the loads run. Exit code 1 if the server does not come up, a request fails or there was a false alarm.
"""

import argparse
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

BENCH = Path(__file__).resolve().parent
START = 600  # seconds for a server to be ready: a first start builds kernels and tunes GEMMs
LOOK = 0.5  # seconds between two looks at /health/ready
FRESH = '{"use_prefix_cache": false}'


@dataclass(frozen=True)
class LoadCase:
    """A load. `beside`: rows that decode meanwhile."""

    name: str
    requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int = 1
    processes: int = 1
    batch: int = 1
    beside: int = 0
    api: str = "chat"

    def divided(self, by: int) -> "LoadCase":
        smaller = {
            name: max(1, getattr(self, name) // by)
            for name in ("requests", "input_tokens", "concurrency", "batch", "processes")
        }
        return replace(
            self, output_tokens=max(2, self.output_tokens // by), beside=self.beside // by, **smaller
        )

    def flags(self) -> list[str]:
        """The flags of bench/serve.py for this load.

        As many requests as run at a time are sent before, not counted. Long prompts use no prefix cache.
        """
        flags = {
            "api": self.api,
            "requests": self.requests,
            "input-tokens": self.input_tokens,
            "output-tokens": self.output_tokens,
            "concurrency": self.concurrency,
            "processes": self.processes,
            "warmup": self.concurrency,
            "batch": self.batch,
        }
        return [
            *(f"--{name}={value}" for name, value in flags.items()),
            *([f"--extra-body={FRESH}"] if self.input_tokens >= 1024 else []),
        ]


CASES = [
    LoadCase("one stream", 3, 32, 512),
    LoadCase("32 streams", 64, 32, 512, concurrency=32, processes=4),
    LoadCase("320 streams", 640, 32, 512, concurrency=320, processes=8),
    LoadCase("320 prompts in one request", 2, 32, 512, batch=320, api="batch"),
    LoadCase("960 prompts in one request", 1, 32, 256, batch=960, api="batch"),
    LoadCase("960 prompts, big_batch", 1, 32, 256, batch=960, api="big_batch"),
    LoadCase("960 prompts, big_batch, longer texts", 1, 32, 512, batch=960, api="big_batch"),
    LoadCase("first token, idle", 12, 1024, 2),
    LoadCase("first token beside 256 rows", 24, 1024, 2, beside=256),
]


class Server:
    """app.py on a free port, with sessions in a folder of its own."""

    def __init__(self, arguments: list[str], folder: Path, key: str = "") -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self._output = f"http://127.0.0.1:{port}", folder / "server.log"
        with self._output.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(BENCH.parent / "app.py"),
                    "--port",
                    str(port),
                    "--log-level",
                    "WARNING",
                    "--state-db",
                    str(folder / "sessions.db"),
                    *arguments,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Until it is ready and as fast as it gets. Ends this process with its last words if it never is."""
        end = time.monotonic() + START
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError, httpx.TimeoutException):
                if self.get("/health").status_code == 200 and not self._improving():
                    return
            time.sleep(0.5)
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        sys.exit("\n".join(["The server did not come up; it said last:", *lines]))

    def _improving(self) -> bool:
        """Whether it captures graphs or times GEMMs still, or cannot say so now."""
        pending = re.findall(r"(?m)^rwkv:background_work_pending\{.*\} (\d)", self.get("/metrics").text)
        return not pending or "1" in pending

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self._headers, timeout=30, trust_env=False)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


class HealthWatch:
    """Looks at /health/ready all the time, from before the server answers until `stop`."""

    def __init__(self, server: Server) -> None:
        self._server, self._said = server, Counter[str]()
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look)
        self._looking.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK):
            try:
                self._said[self._server.get("/health/ready").json()["status"]] += 1
            except httpx.TransportError:
                if self._said:
                    self._said["no answer"] += 1

    def stop(self) -> bool:
        """Print what it has seen, before the server stops; whether there was no false alarm."""
        self._over.set()
        self._looking.join()
        restarts: dict[str, int] = {}
        with contextlib.suppress(httpx.TransportError):  # it has never answered, or not any more
            metrics = self._server.get("/metrics").text
            found = re.findall(r'(?m)^rwkv:restarts_total\{process="(\w+)"\} (\d+)', metrics)
            restarts = {process: int(count) for process, count in found}
        print(f"/health/ready, every {LOOK} s: {dict(self._said)}; started again (/metrics): {restarts}")
        return self._said.keys() <= {"ready", "loading"} and bool(restarts) and not any(restarts.values())


class ModelBeside:
    """Loads a model while others serve. The server has its folder as --models."""

    def __init__(self, server: Server, file: Path) -> None:
        self._server, self._file = server, file
        self._loading = threading.Thread(target=self._load)
        self._loading.start()

    def _load(self) -> None:
        began = time.monotonic()
        body = {"model_filename": self._file.name, "model_viewname": "beside"}
        reply = httpx.post(f"{self._server.url}/loadmodel", json=body, timeout=3600, trust_env=False)
        said = reply.text if reply.status_code != 200 else "loaded"
        print(f"{self._file.name} beside: {said} after {time.monotonic() - began:.1f} s", flush=True)

    def wait(self) -> None:
        self._loading.join()


class BackgroundRows:
    """Rows that decode until `stop`, once they have begun. Raises RuntimeError if they are refused."""

    def __init__(self, url: str, count: int) -> None:
        self._url, self._body = (
            url,
            {
                "contents": [f"Number {i}:" for i in range(count)],
                "stream": True,
                "chunk_size": 32,
                "stop_tokens": [],
                "max_tokens": 100_000,
            },
        )
        self._begun, self._over, self._refusal = threading.Event(), threading.Event(), ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._begun.wait()
        if self._refusal:
            raise RuntimeError(f"the {count} rows beside were refused: {self._refusal}")

    def _read(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._url, timeout=600, trust_env=False) as client,
                client.stream("POST", "/v1/chat/completions", json=self._body) as reply,
            ):
                if reply.status_code != 200:
                    self._refusal = reply.read().decode(errors="replace")
                    return
                for _ in reply.iter_raw():
                    self._begun.set()
                    if self._over.is_set():
                        return
        except httpx.TransportError as error:
            self._refusal = str(error)
        finally:
            self._begun.set()

    def stop(self) -> None:
        self._over.set()
        self._reader.join()


def measure(url: str, case: LoadCase, folder: Path) -> dict:
    """The figures of one load. Raises RuntimeError with what bench/serve.py says if it fails."""
    file = folder / "figures.jsonl"
    file.unlink(missing_ok=True)
    rows = BackgroundRows(url, case.beside) if case.beside else None
    try:
        flags = [f"--url={url}", f"--json={file}", f"--note={case.name}", *case.flags()]
        done = subprocess.run(
            [sys.executable, str(BENCH / "serve.py"), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        if rows:
            rows.stop()
    if done.returncode:
        raise RuntimeError(f"{case.name}: {done.stderr.strip() or 'requests failed'}")
    return json.loads(file.read_text(encoding="utf-8"))


def line(case: LoadCase, figures: dict) -> str:
    first = figures.get("ttft_ms") or {}
    return (
        f"{case.name:36s} {figures['output_tokens_per_s']:9.0f} tokens/s   first token "
        f"{first.get('median', 0):7.1f} ms, "
        f"P99 {first.get('p99', 0):7.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="all sizes N times smaller")
    parser.add_argument("--json", metavar="FILE", help="append the figures, a line for each load")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="load this model while the loads run")
    options, rest = parser.parse_known_args()
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            [*rest, *(["--models", str(options.beside.parent)] if options.beside else [])], Path(folder)
        )
        watch = HealthWatch(server)
        try:
            server.wait()
            beside = ModelBeside(server, options.beside) if options.beside else None
            for case in (case.divided(options.divide) for case in CASES):
                try:
                    figures = measure(server.url, case, Path(folder))
                except RuntimeError as error:
                    wrong = True
                    print(error, flush=True)
                    continue
                print(line(case, figures), flush=True)
                if options.json:
                    with open(options.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(figures, ensure_ascii=False) + "\n")
            if beside:
                beside.wait()
        finally:
            try:
                wrong |= not watch.stop()
            finally:
                server.stop()
    sys.exit(wrong)


if __name__ == "__main__":
    main()

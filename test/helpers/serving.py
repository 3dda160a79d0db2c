"""Runs the real server for tests: `python app.py` on a free port, as a user would."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
CPU = ["--device", "cpu"]
TWO_CPUS = ["--device", "cpu,cpu"]
# What a server is given in place of these: another topology, where the tests are run over one.
on_cpu, on_two = CPU, TWO_CPUS
FIRST_OF_ANY = 32_768  # of the ports that Linux gives to connections, and to whoever asks for any
DRAW = random.SystemRandom()  # the other one may have the same seed in each process of the tests
_reserved: list[socket.socket] = []  # a name for each port that this process has asked for
START_SECONDS = 120  # a deadline, not a wait: cold caches and shared cores


def on_gpu() -> bool:
    """Whether servers run on one in place of a CPU."""
    return "cpu" not in on_cpu[1]


def free_port() -> int:
    """One that stays free until a server has it, as nobody gets it who has not asked for it.

    Nor do other processes of tests, while this one lives: front ends would share it without a word.
    """
    while True:
        port = DRAW.randrange(10_000, FIRST_OF_ANY)
        name = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            if sys.platform == "linux":  # elsewhere a name is a file
                name.bind(f"\0rwkv-test-port-{port}")
            probe.bind(("127.0.0.1", port))
            _reserved.append(name)
            return port
        name.close()


class Server:
    """A running server. `args` are those of app.py, and `root` is the folder that it lies in.

    `through`: a script of the shell that runs it, as `"$@"`.
    """

    def __init__(self, *args: str, wait: bool = True, root: Path = ROOT, through: str = 'exec "$@"') -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.scratch = tempfile.mkdtemp(prefix="rwkv-test-")
        weakref.finalize(
            self, shutil.rmtree, self.scratch, ignore_errors=True
        )  # the log is still wanted after `stop`
        self._log = open(Path(self.scratch) / "log", "w+b")  # noqa: SIM115  lives as long as the server
        env = os.environ | {"TMPDIR": self.scratch}
        if "--state-db" not in args:
            args = (*args, "--state-db", str(Path(self.scratch) / "sessions.db"))
        for usual, given in ((CPU, on_cpu), (TWO_CPUS, on_two)):
            if args[:2] == tuple(usual):
                args = (*given, *args[2:])
                break
        command = ["sh", "-c", through, "sh", sys.executable, "app.py", "--port", str(self.port), *args]
        # Which stay ignored where these tests run in the background, or under nohup.
        ignored = [
            each for each in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_IGN
        ]
        if ignored:
            names = ",".join(each.name.removeprefix("SIG") for each in ignored)
            command = ["env", f"--default-signal={names}", *command]
        self.process = subprocess.Popen(
            command,
            cwd=root,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        if wait:
            self.wait_ready()

    def log(self) -> str:
        return (Path(self.scratch) / "log").read_text(errors="replace")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        with httpx.Client(verify=False, timeout=5) as http:  # no certificates to load
            while time.monotonic() < deadline:
                assert self.process.poll() is None, (
                    f"the server ended with {self.process.returncode}:\n{self.log()}"
                )
                with contextlib.suppress(httpx.TransportError):
                    if http.get(self.url + "/health").json()["status"] == "ready":
                        return
                time.sleep(0.05)  # a poll: readiness has no event that reaches a client
        raise AssertionError(f"not ready after {START_SECONDS} s:\n{self.log()}")

    def children(self) -> dict[str, int]:
        """Process ids of the engine and the front ends, by name."""
        found = {}
        for line in self.log().rpartition("\n")[0].splitlines():  # the last one may be half written
            if "started as process" in line:
                words = line.split()
                found[words[words.index("started") - 1]] = int(words[-1])
        return {name: pid for name, pid in found.items() if alive(pid)}

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Signal the supervisor and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self._log.close()


def alive(pid: int) -> bool:
    """Whether a process runs (one that only waits to be reaped does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until(condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    """Wait for something that nothing announces; `seconds` is when a test gives up."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def events(response: httpx.Response) -> Iterator[dict | str]:
    """The server-sent events of a stream as they come; the last one is the string "[DONE]"."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def native_stream(url: str, body: dict) -> tuple[list[str], list[str], list[dict]]:
    """Post to a native route with `stream`; the text and the finish reason of each row, and all events but
    `[DONE]`.
    """
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    seen = []
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for event in events(response):
            if event == "[DONE]":
                break
            assert isinstance(event, dict)
            seen.append(event)
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
                if choice.get("finish_reason"):
                    assert choice["index"] not in reasons, "a row has one finish chunk"
                    reasons[choice["index"]] = choice["finish_reason"]
        else:
            raise AssertionError("the stream ended without [DONE]")
    rows = sorted(reasons)
    return [texts.get(i, "") for i in rows], [reasons[i] for i in rows], seen

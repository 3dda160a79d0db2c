#!/usr/bin/env python3
"""A cluster on this machine that is broken while clients use it: `make check-cluster`.

    python test/cluster/check.py --server-python .venv/bin/python [--sessions 100] [--turns 5] [--clients 6]
        [--seconds 60]

Three servers of the bundled model on CPUs, under Ray on three nodes (deploy/cluster/serve.yaml), behind
HAProxy with one PostgreSQL. Each client sends a turn with an Idempotency-Key, half of them as streams, and
sends it again until it is answered. Meanwhile a server is killed, a node is killed, a server is added, and
all are rolled. Then every session is read: each turn is there once, with the text that its client got, which
is also that of one long prompt.

It fails when a turn is lost or wrong, when more than 1% of the requests failed or one of which nothing had
been sent, or when for more than 5 seconds no turn was answered.
"""

import argparse
import itertools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "helpers")]
os.environ["PYTHONPATH"] = str(ROOT)  # of Ray's workers
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # all of it on the loopback device
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (which the servers would have, too)

import httpx  # noqa: E402
import postgres_server  # noqa: E402
import ray  # noqa: E402
import yaml  # noqa: E402
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402
from serving import free_port  # noqa: E402

from deploy import check as tools  # noqa: E402
from deploy.cluster.haproxy import configuration  # noqa: E402
from deploy.cluster.servers import DIRECTORY, NAMESPACE  # noqa: E402

MOST_FAILED = 0.01  # of the requests
LONGEST_GAP = 5.0  # seconds in which this process ran
TICK, STANDSTILL = 0.1, 0.5  # seconds between two looks at the clock, and what counts at most of them
GREEDY = {
    "temperature": 0,
    "alpha_presence": 0,
    "alpha_frequency": 0,
    "max_tokens": 24,
    "stop_tokens": [0, 24281],
}
NAMES = ["Anna", "Tom", "Lucy", "Jack", "Emma", "Max", "Nina", "Paul", "Mary", "Leo"]
SLOTS = 6
PATIENCE = 120.0  # seconds until something that does not come is a failure


class Lost(Exception):
    """A request that failed. `begun`: its reply had."""

    def __init__(self, why: str, begun: bool) -> None:
        super().__init__(why)
        self.begun = begun


class RunningClock:
    """Seconds in which this process ran. Where the machine stops for a while, nobody can be answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ran, self._looked = 0.0, time.monotonic()
        threading.Thread(target=self._tick, daemon=True).start()

    def now(self) -> float:
        with self._lock:
            before, self._looked = self._looked, time.monotonic()
            self._ran += min(self._looked - before, STANDSTILL)
            return self._ran

    def _tick(self) -> None:
        while True:
            time.sleep(TICK)
            self.now()


@dataclass
class Load:
    """What the clients have done. `said`: prompts and texts by session."""

    url: str
    clock: RunningClock = field(default_factory=RunningClock)
    said: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    answered: list[float] = field(default_factory=list)  # when
    failed: list[Lost] = field(default_factory=list)
    again: Counter[str] = field(default_factory=Counter)  # refusals that say to send the turn again
    longest: float = 0.0  # seconds of a turn with all its tries
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def turn(self, client: httpx.Client, session: str, number: int) -> None:
        """One turn of a session, until it is answered."""
        prompt = _prompt(session, number)
        body = GREEDY | {
            "session_id": session,
            "contents": [prompt],
            "stream": (number + len(session)) % 2 == 0,
        }
        headers, began = {"Idempotency-Key": f"{session}/{number}"}, time.monotonic()
        for pause in itertools.chain([0.05, 0.1, 0.2], itertools.repeat(0.4)):
            with self.lock:
                self.requests += 1
            try:
                text = _ask(client, body, headers)
                break
            except Lost as lost:
                with self.lock:
                    self.failed.append(lost)
            except Again as again:
                with self.lock:
                    self.again[str(again)] += 1
            assert time.monotonic() - began < PATIENCE, f"{session} has had no answer"
            time.sleep(pause)
        now = time.monotonic()
        with self.lock:
            self.answered.append(self.clock.now())
            self.longest = max(self.longest, now - began)
            self.said.setdefault(session, []).append((prompt, text))

    @property
    def gap(self) -> float:
        """The longest time without an answer."""
        return max((b - a for a, b in itertools.pairwise(sorted(self.answered))), default=0.0)


class Again(Exception):
    """409: the turn was running on another server."""


def _prompt(session: str, number: int) -> str:
    name = NAMES[int(session[1:]) % len(NAMES)]
    if number == 0:
        return f"User: My name is {name}.\n\nAssistant:"
    if number % 2:
        return f"User: What is {int(session[1:]) % 10} + {number}?\n\nAssistant:"
    return "User: What is my name?\n\nAssistant:"


def _ask(client: httpx.Client, body: dict[str, Any], headers: dict[str, str]) -> str:
    """The text of a turn. Raises Lost, Again."""
    begun = False
    try:
        with client.stream("POST", "/state/chat/completions", json=body, headers=headers) as reply:
            begun = reply.status_code == 200
            data = reply.read().decode()
            if reply.status_code == 409:
                raise Again(data[:200])
            if not begun:
                raise Lost(f"{reply.status_code} {data[:200]}", begun)
    except httpx.HTTPError as error:
        raise Lost(f"{type(error).__name__} {error}", begun) from None
    try:
        return _streamed(data) if body["stream"] else json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, LookupError):
        raise Lost(f"an error in the reply: {data[-200:]}", begun) from None


def _streamed(data: str) -> str:
    events = [line.removeprefix("data: ") for line in data.splitlines() if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        raise ValueError("the stream has no end")
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    if not chunks[-1].get("finish_reason"):
        raise ValueError("the text has no end")
    return "".join(chunk["delta"].get("content", "") for chunk in chunks)


def use(load: Load, sessions: int, turns: int, clients: int, pace: float) -> list[threading.Thread]:
    """Threads that send all turns, at most one in `pace` seconds; each session's in their order."""
    waiting: queue.Queue[tuple[str, int]] = queue.Queue()
    for number in range(turns):
        order = [f"s{i}" for i in range(sessions)]
        random.Random(number).shuffle(order)
        for session in order:
            waiting.put((session, number))
    began, sent = time.monotonic(), itertools.count()
    last: dict[str, threading.Lock] = {f"s{i}": threading.Lock() for i in range(sessions)}

    def run() -> None:
        with httpx.Client(base_url=load.url, timeout=PATIENCE) as client:
            while True:
                try:
                    session, number = waiting.get_nowait()
                except queue.Empty:
                    return
                time.sleep(max(0.0, began + pace * next(sent) - time.monotonic()))
                with last[session]:
                    load.turn(client, session, number)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    return threads


# The cluster


@dataclass
class Place:
    """What is started on this machine."""

    cluster: Cluster
    config: dict[str, Any]
    nodes: list[Any]
    directory: Any = None

    def deploy(self, servers: int, revision: int) -> None:
        """Have so many servers. Another revision replaces all of them."""
        (application,) = self.config["applications"]
        application["deployments"][0]["num_replicas"] = servers
        application["args"]["revision"] = revision
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", "serve")  # as `serve deploy` does by HTTP
        ray.get(controller.apply_config.remote(ServeDeploySchema.model_validate(self.config)))

    def servers(self) -> dict[int, str]:
        """By their slots; none while that is not known."""
        try:
            self.directory = self.directory or ray.get_actor(DIRECTORY, NAMESPACE)
            found: tuple[dict[int, str], bool] = ray.get(self.directory.servers.remote(), timeout=2)
        except (ray.exceptions.RayError, ValueError):
            return {}
        return found[0]

    def add_node(self) -> None:
        self.nodes.append(
            self.cluster.add_node(num_cpus=0, resources={"server": 2}, object_store_memory=80 << 20)
        )

    def kill_node(self) -> int:
        """Kill the node with the most servers at once, as a power cut does; how many it had."""
        servers = {pid: _ancestors(pid) for pid, _ in _servers()}

        def of(node: Any) -> list[int]:
            raylet = node.all_processes["raylet"][0].process.pid
            return [pid for pid, above in servers.items() if raylet in above]

        node = max(self.nodes, key=lambda node: len(of(node)))
        doomed = of(node)
        self.nodes.remove(node)
        for pid in doomed:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)
        return len(doomed)


def _servers() -> Iterator[tuple[int, list[str]]]:
    """The processes of app.py, each the first of its group."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            first = os.getpgid(int(folder.name)) == int(folder.name)
        except OSError:
            continue
        if first and str(ROOT / "app.py") in words[:3]:
            yield int(folder.name), words


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(pid)
    return found


def kill_server(address: str) -> None:
    """kill -9 of all processes of one server."""
    port = address.rpartition(":")[2]
    for pid, words in _servers():
        if port in words:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(pid, signal.SIGKILL)


def until(true: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what} did not come within {seconds:.0f} s"
        time.sleep(0.1)


@contextmanager
def process(*command: object, log: Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        running = subprocess.Popen([str(word) for word in command], stdout=out, stderr=out, **more)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(60)


@contextmanager
def kept_apart(file: Path) -> Iterator[TextIO]:
    """What Ray says goes to this file, which is shown when something fails. Our own output."""
    both = os.dup(1), os.dup(2)
    with file.open("wb") as log, os.fdopen(os.dup(1), "w") as out:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
        try:
            yield out
        except BaseException:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            print(*lines[-40:], sep="\n", file=out)
            raise
        finally:
            for number, own in enumerate(both, 1):
                os.dup2(own, number)
                os.close(own)


@contextmanager
def running(server_python: str, folder: Path) -> Iterator[tuple[str, Place]]:
    """Its address, and the parts of it."""
    programs = postgres_server.find()
    assert programs, "There is no PostgreSQL; install it."
    with ExitStack() as stack:
        database = postgres_server.PostgresServer(programs)
        stack.callback(database.close)
        port, control = free_port(), folder / "haproxy.sock"
        user = "haproxy" if os.geteuid() == 0 else ""
        text = configuration([], f"127.0.0.1:{port}", str(control), SLOTS, user)
        (folder / "haproxy.cfg").write_text(text)
        stack.enter_context(
            process(tools.tool("haproxy"), "-f", folder / "haproxy.cfg", log=folder / "haproxy.log")
        )
        os.environ["RAY_TMPDIR"] = str(folder)  # its logs go with it
        cluster = Cluster()
        stack.callback(cluster.shutdown)
        cluster.add_node(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
        ray.init(cluster.address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False)
        stack.callback(ray.shutdown)
        config = yaml.safe_load((ROOT / "deploy/cluster/serve.yaml").read_text(encoding="utf-8"))
        (application,) = config["applications"]
        options, deployment = application["args"], application["deployments"][0]
        options |= {"python": server_python, "host": "127.0.0.1", "slots": SLOTS}
        options["flags"] = {
            "--state-db": database.url,
            "--image-store": str(folder / "states"),
            "--cluster-secret-file": str(secret_file(folder)),
            "--device": "cpu",
            "--threads": "1",
            "--frontends": "1",
            "--log-level": "WARNING",
        }
        del deployment["autoscaling_config"]
        deployment["ray_actor_options"] = {"num_cpus": 0, "num_gpus": 0, "resources": {"server": 1}}
        place = Place(cluster, config, [])
        for _ in range(3):
            place.add_node()
        serve.start(proxy_location="Disabled")
        stack.callback(serve.shutdown)
        place.deploy(3, 1)
        command = [
            sys.executable,
            "-m",
            "deploy.cluster.sync_haproxy",
            "--socket",
            control,
            "--ray",
            cluster.address,
        ]
        stack.enter_context(process(*command, log=folder / "sync_haproxy.log", cwd=ROOT))
        until(lambda: len(answering(place)) == 3, "three servers", 300)
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/haproxy/health").status_code == 200, "HAProxy")
        yield f"http://127.0.0.1:{port}", place


def secret_file(folder: Path) -> Path:
    """With which servers give states to each other."""
    file = folder / "secret"
    file.write_text("s" * 32)
    return file


def answering(place: Place) -> set[str]:
    """The addresses of the servers that take requests."""
    found = set()
    for address in place.servers().values():
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://{address}/health/ready", timeout=2).status_code == 200:
                found.add(address)
    return found


# What comes of it


def compare(url: str, load: Load, turns: int) -> tuple[int, int]:
    """How many turns are lost or there twice, and how many have another text than one long prompt has."""
    lost = wrong = 0
    prompts: list[list[int]] = []
    texts: list[str] = []
    with httpx.Client(base_url=url, timeout=300) as client:
        for session, said in sorted(load.said.items()):
            reply = client.get("/v1/state/history", params={"session_id": session})
            found = reply.json()["turns"] if reply.status_code == 200 else []
            stored = [(turn["prompt"].removeprefix("\n\n"), turn["completion"]) for turn in found]
            lost += sum(a != b for a, b in itertools.zip_longest(said, stored)) + (len(said) != turns)
            past: list[int] = []
            for turn in found:
                prompts.append([*past, *turn["prompt_tokens"]])
                texts.append(turn["completion"])
                past = prompts[-1] + turn["completion_tokens"]
        for first in range(0, len(prompts), 100):
            body = GREEDY | {"prompt": prompts[first : first + 100], "use_prefix_cache": False}
            choices = client.post("/v1/completions", json=body).json()["choices"]
            wrong += sum(choice["text"] != text for choice, text in zip(choices, texts[first:], strict=False))
    return lost, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--server-python", default=str(ROOT / ".venv/bin/python"), help="which has the server's packages"
    )
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5, help="of each session")
    parser.add_argument("--clients", type=int, default=6, help="requests at once")
    parser.add_argument("--seconds", type=float, default=60.0, help="over which the turns are sent, at least")
    given = parser.parse_args()
    began = time.monotonic()

    total = given.sessions * given.turns
    with (
        tempfile.TemporaryDirectory(prefix="rwkv-cluster-", dir="/tmp") as folder,
        kept_apart(Path(folder) / "ray.log") as out,
        running(given.server_python, Path(folder)) as (url, place),
    ):

        def tell(what: str) -> None:
            print(f"{time.monotonic() - began:6.1f} s  {what}", file=out, flush=True)

        tell(f"three servers answer at {url}")
        load = Load(url)
        threads = use(load, given.sessions, given.turns, given.clients, given.seconds / total)

        until(lambda: len(load.answered) >= total / 20, "the first turns", 600)
        (slot, address), *_ = sorted(place.servers().items())
        kill_server(address)
        tell(f"kill -9 of the server in slot {slot}")
        until(lambda: len(answering(place)) == 3, "another server")
        tell("another is there")
        tell(f"the power of a node with {place.kill_node()} servers is cut")
        until(lambda: len(answering(place)) == 3, "a server on another node")
        tell("there are three again")
        place.add_node()
        place.deploy(4, 1)
        tell("a node and a server are added")
        until(lambda: len(answering(place)) == 4, "the fourth server")
        tell("it answers")
        before = answering(place)
        place.deploy(4, 2)
        tell("all are rolled")
        until(lambda: len(found := answering(place)) == 4 and not found & before, "new servers", 300)
        tell(f"all are new, after {len(load.answered)} turns")
        for thread in threads:
            thread.join()
        tell(f"{len(load.answered)} turns are answered")
        lost, wrong = compare(url, load, given.turns)
        tell("all texts are compared")
    silent = [why for why in load.failed if not why.begun]
    share = len(load.failed) / load.requests
    print(f"turns {len(load.answered)} of {total}, lost or twice {lost}, wrong texts {wrong}")
    print(f"requests {load.requests}, of which {len(load.failed)} failed ({share:.2%})")
    print(f"of these, such that nothing had come {len(silent)}; sent again at a 409 {load.again.total()}")
    print(
        f"longest time without an answer {load.gap:.2f} s, longest turn with its tries {load.longest:.2f} s"
    )
    for why in load.failed:
        print(f"  failed: {why}")
    bad = [
        f"{lost} turns are lost or stored twice" if lost or len(load.answered) != total else "",
        f"{wrong} texts are wrong" if wrong else "",
        f"{share:.2%} of the requests failed" if share > MOST_FAILED else "",
        f"{len(silent)} requests failed of which nothing had been sent" if silent else "",
        f"for {load.gap:.1f} s no turn was answered" if load.gap > LONGEST_GAP else "",
    ]
    sys.exit("\n".join(filter(None, bad)) or 0)


if __name__ == "__main__":
    main()

"""A front end in a process of its own, driven as the supervisor does it, for tests over HTTP."""

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
from fake_engine import INFO, FakeEngine
from serving import free_port

from rwkv_batch.config import FrontendConfig
from rwkv_batch.wire.supervision import AllServe, EngineInfo, Restarts, Serving

spawn = multiprocessing.get_context("spawn")
PASSWORD = "pass word &+%41"  # differs from itself in most encodings of a URL
UP_WITHIN = 120.0  # seconds; generous, for machines that are busy otherwise
LOGGED_WITHIN = 60.0  # seconds, likewise


def serve(
    config: FrontendConfig,
    name: str,
    addresses: Sequence[str],
    control: Connection,
    log: str,
    patches: dict[str, float],
) -> None:
    """Be a front end, in the new process, with constants changed ("routes.http.generate.ACCEPTED_WITHIN")."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["app.py"]  # importing the HTTP library reads it
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(Path(addresses[0].removeprefix("ipc://")).parent)
    for place, value in patches.items():
        module, _, constant = place.rpartition(".")
        assert hasattr(importlib.import_module(module), constant)
        setattr(importlib.import_module(module), constant, value)
    from routes.server import run

    run(config, name, addresses, control)


class FrontendProcess:
    """Started on entry, killed on exit if it is still there. `port` and `engine` may be those of
    another one. `missing`: so many more engines, of which nothing comes, behind it in `addresses`.
    `ready`: None: it has been sent nothing yet, and does not listen.
    """

    def __init__(
        self,
        engine: FakeEngine | None = None,
        port: int | None = None,
        ready: bool | None = True,
        patches: dict[str, float] | None = None,
        name: str = "frontend",
        infos: Sequence[EngineInfo] = (INFO,),
        missing: int = 0,
        **options,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._own_engine = None if engine else FakeEngine(f"ipc://{self._folder.name}/engine")
        self.engine = engine or self._own_engine
        self.port = port or free_port()
        self.log = Path(self._folder.name) / "log"
        self.log.touch()
        self.name, self.infos = name, list(infos)
        self._config = FrontendConfig(port=self.port, **{"log_level": "DEBUG"} | options)
        self._ready, self._patches = ready, patches or {}
        self.addresses = [self.engine.address]
        self.addresses += [f"ipc://{self._folder.name}/missing-{number}" for number in range(missing)]

    def __enter__(self) -> "FrontendProcess":
        self.control, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=serve,
            args=(self._config, self.name, self.addresses, theirs, str(self.log), self._patches),
        )
        self.process.start()
        theirs.close()
        self.http = self.client()
        if self._ready is None:
            return self
        self.control.send(Restarts())
        if self._ready:
            self.serve(Serving(self.infos))
            self.until(lambda health: health.status_code == 200)
        else:
            self.until(lambda health: True)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.control.close()
        if self._own_engine:
            self._own_engine.__exit__()
        self._folder.cleanup()

    def serve(self, serving: Serving) -> None:
        """Say, as the supervisor does, that an engine serves, and then that all front ends know of it."""
        self.control.send(serving)
        self.control.send(AllServe(serving.engine))

    def client(self) -> httpx.Client:
        """Connections of its own."""
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=60, verify=False
        )  # no certificates to load

    def logs(self, condition: Callable[[str], object]) -> bool:
        """Whether `condition` comes to hold for the log. A stream's line may follow its last event."""
        deadline = time.monotonic() + LOGGED_WITHIN
        while not (held := condition(self.log.read_text())) and time.monotonic() < deadline:
            time.sleep(0.02)  # another process writes the file; there is nothing to wait on
        return bool(held)

    def until(self, condition) -> httpx.Response:
        """Ask for /health until `condition` holds for an answer of this process."""
        deadline = time.monotonic() + UP_WITHIN
        while True:
            try:
                with self.client() as http:
                    answer = http.get("/health")
                if condition(answer) and answer.headers["x-request-id"] in self.log.read_text():
                    return answer
            except httpx.TransportError:
                pass
            assert self.process.is_alive() or self.process.exitcode is None, self.log.read_text()
            assert time.monotonic() < deadline, "the front end did not come up: " + self.log.read_text()
            time.sleep(0.02)  # it listens when it listens; there is nothing to wait on

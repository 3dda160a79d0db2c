"""Starts the engine and the front ends, restarts what dies, drains on a signal and leaves nothing behind."""

import contextlib
import errno
import gc
import http.client
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rwkv_batch.config import EngineConfig, FrontendConfig, ServerConfig
from rwkv_batch.ops.compiled.bytecode import keep_bytecode
from rwkv_batch.ops.cuda.context import prepare_context
from rwkv_batch.ops.torch_libraries import loading_libraries
from rwkv_batch.processes.folder import SOCKET, NoFolder, runtime_folder
from rwkv_batch.processes.limits import TooFewFiles, allow_open_files
from rwkv_batch.processes.streams import keep_streams
from rwkv_batch.wire.supervision import (
    Drain,
    EngineInfo,
    EngineLost,
    FrontendLost,
    LoadFailure,
    Restarts,
    Serving,
    Stop,
)

SAVE_SECONDS = 60.0  # the engine's time to commit what is not stored yet, once no request is running
CUT_OFF_SECONDS = 2.0  # the front ends' time, past the deadline, to end the requests that are still running
RESTART_PAUSE = 0.5  # seconds between restarts of something that dies at once
ANSWER_SECONDS = 20  # until it is said that no front end answers
PROBE_PAUSE = 0.05  # seconds until a front end that has not answered is asked again
ENGINE_RESTARTS = 3  # in a row, without having become ready

log = logging.getLogger(__name__)
spawn = multiprocessing.get_context("spawn")  # a fork would share sockets and threads


def run_engine(configs: tuple[EngineConfig, ...], address: str, control: Connection) -> None:
    keep_streams()
    # oneDNN keeps what it makes for every shape of a product; batches have hundreds of shapes, and making one
    # anew costs nothing. Torch reads both when it is imported.
    os.environ |= {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    keep_bytecode("torch")
    prepare_context(configs[0].device)  # while torch is imported
    gc.disable()  # collections would look through the modules again and again, which all stay
    from rwkv_batch.text.tokenizer import Tokenizer

    with loading_libraries():
        Tokenizer()  # reads the vocabulary, which is kept
    from rwkv_batch.engine.serving.process import run

    gc.freeze()
    gc.enable()
    run(configs, address, control)


def run_frontend(config: FrontendConfig, name: str, address: str, counts: str, control: Connection) -> None:
    keep_streams()
    # The folder in which all front ends count; what one has counted stays when it dies. prometheus_client
    # reads it when it is imported.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts
    from routes.server import run  # loads Robyn, which no other process needs

    run(config, name, address, control)


class Child:
    """A process and the supervisor's end of its pipe. `target` is called with `args` and the other end."""

    def __init__(self, name: str, target: Callable[..., None], *args: object) -> None:
        self.name, self.started = name, time.monotonic()
        self.control, theirs = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(*args, theirs), name=name)
        self.process.start()
        theirs.close()
        log.info("%s started as process %d", name, self.process.pid)

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has just died, which its sentinel reports
            self.control.send(message)

    def close(self) -> None:
        self.process.join()
        self.control.close()


class Supervisor:
    """Owns every process of the server."""

    _engine: Child
    _address: str  # where the engine listens
    _counts: str  # the folder in which front ends count

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._frontends: list[Child] = []
        self._frontends_started = 0
        self._serving: Serving | None = None  # None: the engine has never been ready
        self._ready = False  # whether the engine that runs now has been ready
        self._failures = 0  # of the engine since it was ready
        self._restarts = Restarts()
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What nohup ignores, or a shell for what it runs in the background, stays ignored.
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # the byte in the pipe is the message

    def run(self) -> int:
        """Serve until a signal. Returns the exit code: 2 if the configuration cannot be served."""
        try:
            allow_open_files()
            probe(self._config.frontend.host, self._config.frontend.port)
            with runtime_folder() as folder:
                return self._run_in(folder)
        except (TooFewFiles, CannotListen, NoFolder) as error:
            return refuse(str(error))

    def _run_in(self, folder: Path) -> int:
        self._address, self._counts = f"ipc://{folder / SOCKET}", str(folder / "counts")
        try:
            Path(self._counts).mkdir()
            self._start_engine()
            try:
                for _ in range(self._config.frontends or max(2, min(8, (os.cpu_count() or 1) // 4))):
                    self._start_frontend()
                return self._watch()
            finally:
                self._kill_all()
        except OSError as error:
            log.error("the server ends, as a process cannot be started (%s)", error.strerror or error)
            return 1

    def _watch(self) -> int:
        code = None
        while code is None:
            sentinels = [child.process.sentinel for child in (self._engine, *self._frontends)]
            ready = wait([self._signals, self._engine.control, *sentinels])
            if self._signals in ready:
                os.read(self._signals, 64)
                return self._drain()
            if self._engine.control in ready:
                code = self._receive()
            elif self._engine.process.sentinel in ready:
                code = self._restart_engine()
            for frontend in [f for f in self._frontends if f.process.sentinel in ready]:
                self._restart_frontend(frontend)
        return code

    def _receive(self) -> int | None:
        """Take a message from the engine. Returns an exit code if it is the end."""
        try:
            message: Serving | LoadFailure = self._engine.control.recv()
        except (EOFError, OSError):
            return self._restart_engine()
        if isinstance(message, LoadFailure):
            return refuse(message.message)
        began, self._serving, self._failures = not self._ready, message, 0
        self._ready = True
        self._broadcast(message)
        if began:  # later it is a change of the models
            served = message.models, self._config.frontend
            threading.Thread(target=announce, args=served, name="announce", daemon=True).start()
        return None

    def _broadcast(self, message: object) -> None:
        for frontend in self._frontends:
            frontend.send(message)

    def _start_engine(self) -> None:
        self._ready = False
        self._engine = Child("engine", run_engine, self._config.engines, self._address)

    def _restart_engine(self) -> int | None:
        """Returns an exit code if starting it once more is of no use."""
        self._engine.close()
        self._failures += 1
        code = self._engine.process.exitcode
        if self._serving is None:
            log.error("the engine died while loading (exit code %s)", code)
            return 1
        if self._failures > ENGINE_RESTARTS:
            log.error("the engine died %d times (exit code %s); the server ends", self._failures, code)
            return 1
        log.error("the engine died (exit code %s); it is started again", code)
        self._broadcast(EngineLost())
        self._count_restart(engine=1)
        self._start_engine()
        return None

    def _start_frontend(self) -> None:
        self._frontends_started += 1
        name = f"frontend-{self._frontends_started}"
        frontend = Child(name, run_frontend, self._config.frontend, name, self._address, self._counts)
        self._frontends.append(frontend)
        frontend.send(self._restarts)
        if self._serving:
            frontend.send(self._serving)

    def _restart_frontend(self, dead: Child) -> None:
        dead.close()
        self._frontends.remove(dead)
        log.warning("%s died (exit code %s); another is started", dead.name, dead.process.exitcode)
        self._engine.send(FrontendLost(dead.name))
        if time.monotonic() - dead.started < RESTART_PAUSE:
            time.sleep(RESTART_PAUSE)
        self._count_restart(frontend=1)
        self._start_frontend()

    def _count_restart(self, engine: int = 0, frontend: int = 0) -> None:
        before = self._restarts
        self._restarts = Restarts(before.engine + engine, before.frontend + frontend)
        self._broadcast(self._restarts)

    def _drain(self) -> int:
        """Let running requests end, then let the engine commit what is not stored yet. Returns the exit code.

        The deadline or a second signal cuts requests off.
        """
        seconds = self._config.drain_seconds
        log.info("draining: requests under way may finish within %d s", seconds)
        self._broadcast(Drain(seconds))
        deadline = time.monotonic() + seconds + CUT_OFF_SECONDS
        frontends = {frontend.process.sentinel for frontend in self._frontends}
        engine = {self._engine.process.sentinel}
        while frontends and (left := deadline - time.monotonic()) > 0:
            ready = set(wait([self._signals, *engine, *frontends], left))
            if self._signals in ready:
                log.warning("second signal: requests under way are cut off")
                os.read(self._signals, 64)
                break
            if engine & ready:
                log.error(
                    "the engine died (exit code %s) while requests were under way",
                    self._engine.process.exitcode,
                )
                self._broadcast(EngineLost())
            engine -= ready
            frontends -= ready
        self._engine.send(Stop())
        wait([self._signals, self._engine.process.sentinel], SAVE_SECONDS)
        return 0

    def _kill_all(self) -> None:
        for child in [*self._frontends, self._engine]:
            child.process.kill()
            child.close()


def describe(models: list[EngineInfo], frontend: FrontendConfig) -> str:
    """What is served, where, and a command that is answered at once; between blank lines."""
    access = "no password" if frontend.password is None else "password on every route"
    if frontend.password is not None and not frontend.protect_translate:
        access += " but /translate, which is open (--protect-translate closes it)"
    served = [
        f"{info.model}: {info.layers} layers, width {info.width}, {info.parameters:,} parameters, "
        f"{info.dtype} on {info.device}, {info.slots} slots, {access}"
        for info in models
    ]
    url = _url(frontend.host, frontend.port)
    here = _url(_here(frontend.host), frontend.port)
    key = "" if frontend.password is None else " -H 'Authorization: Bearer PASSWORD'"
    chat = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    page = [f"  page        {here}/"] if frontend.page else []
    lines = [
        "",
        *(f"  {line}" for line in served),
        "",
        f"  ready on    {url}",
        *page,
        f"  try         curl {here}/v1/chat/completions{key} -d '{chat}'",
        "",
    ]
    return "\n".join(lines)


def _here(host: str) -> str:
    """An address under which this machine reaches the server."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(models: list[EngineInfo], frontend: FrontendConfig) -> None:
    """Say what is served as soon as it is: when a front end has answered a request."""
    host, silent_since = _here(frontend.host), time.monotonic()
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(host, frontend.port, timeout=ANSWER_SECONDS)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    print(describe(models, frontend), file=sys.stderr, flush=True)
                    return
        if time.monotonic() - silent_since > ANSWER_SECONDS:
            log.error(
                "the front ends have not answered on %s:%d for %d s", host, frontend.port, ANSWER_SECONDS
            )
            silent_since = time.monotonic()
        time.sleep(PROBE_PAUSE)


def refuse(message: str) -> int:
    """Say why the server does not start; the exit code, for which nothing starts it again."""
    print(f"error: {message}", file=sys.stderr)
    return 2


class CannotListen(Exception):
    """The message says what to do."""


def probe(host: str, port: int) -> None:
    """Raise CannotListen if nobody could listen there.

    Robyn would wait for an answer on the terminal instead, or share the port silently.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # as the server does: connections that have ended do not count
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
    except OSError as error:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        match error.errno:
            case errno.EADDRINUSE:
                way = "choose another --port, or stop what uses it"
            case errno.EACCES | errno.EPERM:
                way = "ports below 1024 are for root as a rule, so choose another --port"
            case _:
                way = (
                    "let --host be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
                )
        raise CannotListen(f"cannot listen on {where} ({error.strerror}); {way}") from None

#!/usr/bin/env python3
"""Command line and supervisor: starts the engine and the front ends, restarts what dies, drains and leaves
nothing behind.
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from routes.settings import Drain, EngineLost, FrontendSettings
from rwkv_batch.config import EngineSettings, FrontendGone, LoadFailure
from rwkv_batch.wire.protocol import EngineInfo

log = logging.getLogger("rwkv")

DRAIN_SECONDS = 30.0  # how long running requests may go on after SIGTERM
SAVE_SECONDS = 60.0  # how long the engine may take to store what is not stored yet
RESTART_PAUSE = 0.5  # seconds between restarts of something that dies at once
ENGINE_RESTARTS = 3  # in a row, without having become ready
spawn = multiprocessing.get_context("spawn")  # a fork would share sockets and threads


def run_engine(settings: EngineSettings, control: Connection) -> None:
    # oneDNN keeps what it makes for every shape of a product; batches have hundreds of shapes, and making one
    # anew costs nothing
    os.environ |= {
        "LRU_CACHE_CAPACITY": "64",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }  # read when torch is imported
    from rwkv_batch.engine.process import run

    run(settings, control)


def run_frontend(settings: FrontendSettings, control: Connection) -> None:
    from routes.server import run

    run(settings, control)


@dataclass
class Child:
    """A process of ours and our end of its pipe."""

    name: str
    process: BaseProcess
    control: Connection
    started: float

    @classmethod
    def start(cls, name: str, target, settings) -> "Child":
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=target, args=(settings, theirs), name=name)
        process.start()
        theirs.close()
        log.info("%s started as process %d", name, process.pid)
        return cls(name, process, ours, time.monotonic())

    def tell(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has just died; its sentinel says so
            self.control.send(message)

    def close(self) -> None:
        self.process.join()
        self.control.close()


class Supervisor:
    """Owns every process of the server."""

    def __init__(self, engine: EngineSettings, frontend: FrontendSettings, frontends: int) -> None:
        self._engine_settings, self._frontend_settings = engine, frontend
        self._count = frontends
        self._engine: Child | None = None
        self._frontends: list[Child] = []
        self._number = 0
        self._info: EngineInfo | None = None
        self._failures = 0
        self._signals, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # the byte in the pipe is the message

    def run(self) -> int:
        """Serve until a signal. Returns the exit code."""
        self._engine = Child.start("engine", run_engine, self._engine_settings)
        for _ in range(self._count):
            self._start_frontend()
        try:
            return self._watch()
        finally:
            self._kill_all()

    def _watch(self) -> int:
        while True:
            assert self._engine
            sentinels = [child.process.sentinel for child in (self._engine, *self._frontends)]
            ready = wait([self._signals, self._engine.control, *sentinels])
            if self._signals in ready:
                os.read(self._signals, 64)
                return self._drain()
            if self._engine.control in ready:
                code = self._hear_engine()
                if code is not None:
                    return code
            elif self._engine.process.sentinel in ready:
                code = self._restart_engine()
                if code is not None:
                    return code
            for frontend in [f for f in self._frontends if f.process.sentinel in ready]:
                self._restart_frontend(frontend)

    def _hear_engine(self) -> int | None:
        assert self._engine
        try:
            message = self._engine.control.recv()
        except (EOFError, OSError):
            return self._restart_engine()
        if isinstance(message, LoadFailure):
            print(f"error: {message.message}", file=sys.stderr)
            return 2
        self._info, self._failures = message, 0
        for frontend in self._frontends:
            frontend.tell(message)
        print(describe(message, self._frontend_settings), file=sys.stderr, flush=True)
        return None

    def _restart_engine(self) -> int | None:
        assert self._engine
        self._engine.close()
        self._failures += 1
        code = self._engine.process.exitcode
        if self._failures > ENGINE_RESTARTS or (self._info is None and self._failures > 0):
            log.error("the engine died while loading (exit code %s)", code)
            return 1
        log.error("the engine died (exit code %s); it is started again", code)
        for frontend in self._frontends:
            frontend.tell(EngineLost())
        self._engine = Child.start("engine", run_engine, self._engine_settings)
        return None

    def _start_frontend(self) -> None:
        self._number += 1
        settings = replace(self._frontend_settings, name=f"frontend-{self._number}")
        child = Child.start(settings.name, run_frontend, settings)
        self._frontends.append(child)
        if self._info:
            child.tell(self._info)

    def _restart_frontend(self, dead: Child) -> None:
        dead.close()
        self._frontends.remove(dead)
        log.warning("%s died (exit code %s); another is started", dead.name, dead.process.exitcode)
        assert self._engine
        self._engine.tell(FrontendGone(dead.name))
        if time.monotonic() - dead.started < RESTART_PAUSE:
            time.sleep(RESTART_PAUSE)
        self._start_frontend()

    def _drain(self) -> int:
        """Let running requests end; the deadline or a second signal cuts them off. Then let the engine store
        what is not stored yet.
        """
        log.info("draining: requests under way may finish within %.0f s", DRAIN_SECONDS)
        for frontend in self._frontends:
            frontend.tell(Drain(DRAIN_SECONDS))
        deadline = time.monotonic() + DRAIN_SECONDS + 2
        assert self._engine
        left, engine = list(self._frontends), [self._engine.process.sentinel]
        while left and time.monotonic() < deadline:
            ready = wait(
                [self._signals, *engine, *(f.process.sentinel for f in left)],
                timeout=max(0, deadline - time.monotonic()),
            )
            if self._signals in ready:
                log.warning("second signal: requests under way are cut off")
                os.read(self._signals, 64)
                break
            if engine and engine[0] in ready:
                log.error(
                    "the engine died (exit code %s) while requests were under way",
                    self._engine.process.exitcode,
                )
                engine = []
                for frontend in left:
                    frontend.tell(EngineLost())
            left = [f for f in left if f.process.sentinel not in ready]
        self._engine.tell("stop")
        wait([self._signals, self._engine.process.sentinel], timeout=SAVE_SECONDS)
        return 0

    def _kill_all(self) -> None:
        for child in [*self._frontends, *([self._engine] if self._engine else [])]:
            if child.process.is_alive():
                child.process.kill()
            child.close()


def describe(info: EngineInfo, frontend: FrontendSettings) -> str:
    """The line that says what is served, and where."""
    doors = "no password" if frontend.password is None else "password on every route"
    if frontend.password is not None and not frontend.protect_translate:
        doors += " but /translate, which is open (--protect-translate closes it)"
    host = f"[{frontend.host}]" if ":" in frontend.host else frontend.host
    return (
        f"{info.model}: {info.layers} layers, width {info.width}, {info.parameters:,} parameters, "
        f"{info.dtype} on {info.device}, "
        f"{info.slots} slots, {doors}\nready on http://{host}:{frontend.port}"
    )


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="app.py", description="RWKV-7 inference server.", allow_abbrev=False
    )
    parser.add_argument(
        "--model-path",
        metavar="P",
        help="a .pth or .safetensors checkpoint, suffix optional (default: the bundled model)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="where to listen; 0.0.0.0 is every network (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=_port, default=8000)
    parser.add_argument(
        "--password", metavar="W", help="asked for on every route but /translate (default: none)"
    )
    parser.add_argument(
        "--protect-translate", action="store_true", help="ask for the password on /translate too"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default auto)")
    parser.add_argument(
        "--pp-devices", metavar="LIST", nargs="+", default=[], help="the GPU to use: 0 or [0]"
    )
    parser.add_argument(
        "--max-rows",
        type=_positive,
        metavar="N",
        help="rows that run at once (default: what the memory holds)",
    )
    parser.add_argument(
        "--max-waiting",
        type=_positive,
        default=4096,
        metavar="N",
        help="rows that may wait before 429 (default 4096)",
    )
    parser.add_argument(
        "--prefill-tokens",
        type=_positive,
        metavar="N",
        help="prompt tokens a step (default: what suits the device)",
    )
    parser.add_argument(
        "--wkv",
        choices=("fp16", "fp32"),
        help="how the recurrent state is stored (default fp32 on a CPU, fp16 on a GPU)",
    )
    parser.add_argument(
        "--state-db",
        default="rwkv_sessions.db",
        metavar="FILE",
        help="where sessions are stored (default %(default)s)",
    )
    parser.add_argument(
        "--l1", type=_count, default=16, metavar="N", help="sessions kept on the device (default 16)"
    )
    parser.add_argument(
        "--l2", type=_count, default=32, metavar="N", help="sessions kept in host memory (default 32)"
    )
    parser.add_argument(
        "--l3-gb",
        type=_positive,
        metavar="N",
        help="size of the database; the oldest sessions go first (default: any)",
    )
    parser.add_argument(
        "--durable",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="commit a session before its turn's last event; --no-durable writes behind (default on)",
    )
    parser.add_argument(
        "--prefix-cache-mb",
        type=_count,
        default=512,
        metavar="N",
        help="memory for beginnings of prompts (default 512)",
    )
    parser.add_argument(
        "--frontends",
        type=_positive,
        metavar="N",
        help="HTTP processes that share the port (default: by cores)",
    )
    parser.add_argument(
        "--max-body-mb",
        type=_positive,
        default=16,
        metavar="N",
        help="larger request bodies get 413 (default 16)",
    )
    parser.add_argument(
        "--max-state-mb",
        type=_positive,
        default=256,
        metavar="N",
        help="larger session files get 413 (default 256)",
    )
    parser.add_argument(
        "--log-level", type=str.upper, choices=("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO"
    )
    options = parser.parse_args(argv)
    if options.pp_devices:
        options.device = _pipeline_device(parser, options)
    try:
        options.host = socket.getaddrinfo(options.host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        parser.error(
            f"--host {options.host} is no address of this machine; use 127.0.0.1, or 0.0.0.0 for every "
            "network"
        )
    if options.password == "":
        parser.error("--password is empty; leave it out for a server without one")
    if not _travels(options.password or ""):
        parser.error(
            "--password must be ASCII without spaces around it; nothing else arrives in an Authorization "
            "header"
        )
    return options


def _travels(password: str) -> bool:
    """Whether an Authorization header can carry it."""
    return password == password.strip() and password.isascii() and password.isprintable()


def _pipeline_device(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """`--pp-devices` is written `[0,1]`, `0,1` or `0 1`."""
    text = " ".join(options.pp_devices)
    names = text.strip("[]").replace(",", " ").split()
    if not names or not all(name.isdecimal() for name in names):
        parser.error(f"--pp-devices {text} is no list of GPU numbers; write [0] or 0")
    if len(names) > 1:
        parser.error(
            f"--pp-devices {text}: splitting the layers over several GPUs is not supported; name one"
        )
    if options.device not in ("auto", "cuda"):
        parser.error(
            f"--pp-devices {text} and --device {options.device} both name a device; give one of them"
        )
    return f"cuda:{names[0]}"


def _port(text: str) -> int:
    number = _whole(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; use 1 to 65535")
    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _count(text: str) -> int:
    number = _whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is too small; use 0 or more")
    return number


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; use 1 or more")
    return number


def main(argv: list[str]) -> int:
    options = arguments(argv)
    logging.basicConfig(level=options.log_level, format="%(asctime)s %(levelname)s supervisor: %(message)s")
    try:
        probe(options.host, options.port)
    except OSError as error:
        print(
            f"error: cannot listen on {options.host}:{options.port} ({error.strerror}); choose another "
            "--port or stop what uses it",
            file=sys.stderr,
        )
        return 2
    folder = Path(tempfile.mkdtemp(prefix="rwkv-"))
    try:
        address = f"ipc://{folder}/engine"
        engine = EngineSettings(
            address=address,
            model_path=options.model_path,
            device=options.device,
            max_rows=options.max_rows,
            prefill_tokens=options.prefill_tokens,
            max_waiting=options.max_waiting,
            wkv=options.wkv,
            prefix_cache_mb=options.prefix_cache_mb,
            state_db=options.state_db,
            l1=options.l1,
            l2=options.l2,
            l3_bytes=options.l3_gb << 30 if options.l3_gb else None,
            durable=options.durable,
            log_level=options.log_level,
        )
        frontend = FrontendSettings(
            engine_address=address,
            host=options.host,
            port=options.port,
            password=options.password,
            protect_translate=options.protect_translate,
            max_body=options.max_body_mb << 20,
            max_state=options.max_state_mb << 20,
            log_level=options.log_level,
        )
        return Supervisor(
            engine, frontend, options.frontends or max(2, min(8, (os.cpu_count() or 1) // 4))
        ).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def probe(host: str, port: int) -> None:
    """Raise OSError if nobody could listen there: Robyn would wait for an answer on the terminal, or share
    the port silently.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the server does: yesterday's connections do not count
        listener.bind((host, port))
        listener.listen()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

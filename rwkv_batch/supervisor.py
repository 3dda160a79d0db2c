"""Starts the engine and the front ends, restarts what dies, drains on a signal and leaves nothing behind."""

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path

from rwkv_batch import packages
from rwkv_batch.config import EngineConfig, FrontendConfig, ServerConfig, is_url, on_each
from rwkv_batch.disk import uploads
from rwkv_batch.keys.records import KeysError, read_and_copy
from rwkv_batch.logs import begin_logging
from rwkv_batch.ops.compiled.bytecode import keep_bytecode
from rwkv_batch.ops.compiled.gpu_context import pci_address, prepare_context
from rwkv_batch.ops.torch_libraries import loading_libraries
from rwkv_batch.processes.acknowledging import Acknowledged
from rwkv_batch.processes.announcing import announce
from rwkv_batch.processes.changes import ChangeQueue
from rwkv_batch.processes.child import FAILED, REFUSED, CannotStart, Child, LaterStarts, end_all
from rwkv_batch.processes.cores import stay_near
from rwkv_batch.processes.databases import Databases
from rwkv_batch.processes.engines import EngineProcess
from rwkv_batch.processes.folder import SOCKET, NoFolder, runtime_folder
from rwkv_batch.processes.limits import TooFewFiles, allow_open_files
from rwkv_batch.processes.listening import CannotListen, take
from rwkv_batch.processes.pulse import Pulse
from rwkv_batch.processes.streams import keep_streams
from rwkv_batch.processes.supervised import FrontendPlace
from rwkv_batch.wire.host.merging import serving_of_all
from rwkv_batch.wire.placing import homes
from rwkv_batch.wire.supervision import (
    Begun,
    CatchUp,
    ChangeOver,
    ChangeWanted,
    DatabaseNeeded,
    Drain,
    EngineLost,
    FrontendBroken,
    FrontendLost,
    LoadFailure,
    Ping,
    Restarts,
    Serving,
    Stalled,
    Stop,
    Taken,
)

SAVE_SECONDS = 60.0  # the engine's time to commit what is not stored yet, once no request is running
CUT_OFF_SECONDS = 2.0  # the front ends' time, past the deadline, to end the requests that are still running
KILLED_WITHIN = 10.0  # seconds in which a process ends that is killed, unless a device or a disk keeps it
FRONTEND, BATCHES = "frontend", "batches"  # kinds of front ends
KINDS = {FRONTEND: "frontends", BATCHES: "batches"}  # as /health/ready counts them
# In the runtime folder: where front ends count, keys as last read, and which engine has a session.
COUNTS, KEYS, HOMES = "counts", "keys.json", "homes"

SERVING = attrgetter("serving")
FromFrontend = Begun | Taken | LoadFailure | ChangeWanted | ChangeOver
FromEngine = Serving | LoadFailure | DatabaseNeeded | FrontendBroken | Ping

log = logging.getLogger(__name__)


def run_engine(
    configs: tuple[EngineConfig, ...], address: str, changes: Sequence[bytes], control: Connection
) -> None:
    keep_streams()
    if configs[0].replicas > 1:  # which share the cores, unless somebody has divided them already
        threads = max(1, len(os.sched_getaffinity(0)) // configs[0].replicas)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        first = configs[0].device.partition(",")[0]
        stay_near(configs[0].place, None if first == "cpu" else pci_address(first) or "unknown")
    # oneDNN keeps what it makes for every shape of a product; batches have hundreds of shapes, and making one
    # anew costs nothing. Torch reads both when it is imported.
    os.environ |= {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    keep_bytecode("torch")
    prepare_context(configs[0].device)  # while torch is imported
    gc.disable()  # collections would look through the modules again and again, which all stay
    from rwkv_batch.text.tokenizer import Tokenizer

    with loading_libraries():
        Tokenizer()  # reads the vocabulary, which is kept
    try:
        packages.load("the engine needs", packages.BASE, "torch")
    except packages.PackageError as error:  # as of libraries of a GPU that do not fit
        control.send(LoadFailure(str(error)))
        sys.exit(REFUSED)
    from rwkv_batch.engine.serving.process import run

    gc.freeze()
    gc.enable()
    run(configs, address, control, changes)


def run_frontend(
    config: FrontendConfig, name: str, addresses: Sequence[str], counts: str, control: Connection
) -> None:
    keep_streams()
    # The folder in which all front ends count; what one has counted stays when it dies. prometheus_client
    # reads it when it is imported.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts
    try:
        packages.load("a front end needs", packages.BASE, "robyn")  # which no other process does
    except packages.PackageError as error:
        control.send(LoadFailure(str(error)))
        sys.exit(REFUSED)
    from routes.server import run

    run(config, name, addresses, control)


def run_batches(
    config: FrontendConfig, name: str, addresses: Sequence[str], counts: str, control: Connection
) -> None:
    keep_streams()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts  # which is read when the routes are imported
    from routes.batching import run

    run(config, name, addresses, control)


def run_database(log_format: str, path: str, address: str, first: bool, control: Connection) -> None:
    keep_streams()
    begin_logging("INFO", log_format, "database")
    from rwkv_batch.state.host.service import DatabaseService, serve

    serve(DatabaseService(path, address, first), control)


class Supervisor:
    """Owns every process of the server."""

    _folder: Path
    _databases: Databases
    _port: socket.socket  # kept for the front ends, until these end

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._engines: list[EngineProcess] = []
        self._places: list[FrontendPlace] = []
        self._frontends: list[Child] = []  # that run
        self._frontends_started = 0
        self._began = False  # whether all engines have been ready
        self._changes = ChangeQueue(self._frontends, lambda: filter(None, map(SERVING, self._living)))
        self._restarts = Restarts()
        self._kept: list[Child] = []  # that were killed and have not ended
        self._later = LaterStarts()
        self._acknowledged = Acknowledged(self._frontends)
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What nohup ignores, or a shell for what it runs in the background, stays ignored.
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # the byte in the pipe is the message

    def run(self) -> int:
        """Serve until a signal. Returns the exit code: 2 if the configuration cannot be served.

        Where a process does not end though it is killed, this one ends at once, with that code.
        """
        try:
            allow_open_files()
            self._port = take(self._config.frontend.host, self._config.frontend.port)
            with self._port, runtime_folder() as folder:
                code = self._run_in(folder)
        except (TooFewFiles, CannotListen, NoFolder, KeysError) as error:
            return refuse(str(error))
        if self._kept:
            names = " and ".join(child.name for child in self._kept)
            log.error(
                "%s cannot be ended, as a device or a disk keeps it; the server ends without waiting", names
            )
            logging.shutdown()
            os._exit(code)  # multiprocessing would wait for it
        return code

    def _run_in(self, folder: Path) -> int:
        self._folder, self._databases = (
            folder,
            Databases(folder, partial(run_database, self._config.log_format)),
        )
        devices = self._config.devices
        models = on_each(self._config.engines, devices, folder)
        for number, configs in enumerate(models):
            name, socket_ = (
                ("engine", SOCKET) if len(devices) == 1 else (f"engine-{number}", f"{SOCKET}-{number}")
            )
            pulse = Pulse(self._config.hung_seconds)
            address = f"ipc://{folder / socket_}"
            self._engines.append(EngineProcess(number, name, run_engine, configs, address, pulse))
        try:
            (folder / COUNTS).mkdir()
            frontend = replace(self._config.frontend, uploads=str(folder))
            self._config = replace(self._config, frontend=frontend)
            self._copy_keys(folder / KEYS)
            if self._several:
                self._make_homes(folder / HOMES)
            try:
                for config in models[0] if self._several else ():
                    if config.state_db and not is_url(config.state_db):
                        self._databases.need(config.state_db)
                if (refusal := self._databases.until_ready(self._signals)) is not None:
                    return refuse(refusal) if refusal else 0
                for engine in self._engines:
                    engine.start(self._changes.made)
                frontends = self._config.frontends or max(2, min(8, (os.cpu_count() or 1) // 4))
                batches = 1 if self._config.frontend.batch_dir else 0
                self._places += map(FrontendPlace, [FRONTEND] * frontends + [BATCHES] * batches)
                for place in self._places:
                    self._start_frontend(place)
                return self._watch()
            finally:
                self._kill_all()
        except OSError as error:
            log.error("the server ends, as a process cannot be started (%s)", error.strerror or error)
            return 1

    def _copy_keys(self, copy: Path) -> None:
        """For front ends that begin while the file of keys cannot be read. Raises KeysError."""
        frontend = self._config.frontend
        if frontend.keys is not None:
            read_and_copy(frontend.keys, copy)
            self._config = replace(self._config, frontend=replace(frontend, keys_copy=str(copy)))

    def _make_homes(self, file: Path) -> None:
        """For front ends, also those that are started later. Raises OSError."""
        homes.create(file, len(self._engines))
        frontend = replace(self._config.frontend, homes=str(file))
        self._config = replace(self._config, frontend=frontend)

    @property
    def _living(self) -> list[EngineProcess]:
        return [engine for engine in self._engines if not engine.gone and not engine.absent]

    def _watch(self) -> int:
        code = None
        while code is None:
            engines = self._living
            deaf = [engine.child for engine in engines if engine.deaf]
            children = [engine.child for engine in engines] + self._frontends
            # Which keeps those that end: no other process has their descriptors while `ready` is looked at.
            watched = children + self._databases.children
            sentinels = [child.process.sentinel for child in watched]
            controls = [child.control for child in children if child not in deaf]
            ready = wait([self._signals, *controls, *sentinels], self._until_next)
            if self._signals in ready:
                os.read(self._signals, 64)
                return self._drain()
            for engine in self._living:
                control, ended = engine.child.control, engine.child.process.sentinel in ready
                if control in ready or (ended and not engine.deaf and control.poll()):
                    code = self._receive(engine)  # also what it has said just before it has ended
                elif ended:
                    code = self._restart_engine(engine)
                if code is not None:
                    return code
            self._databases.look(ready)
            self._later.look()
            for place in [place for place in self._places if place.child in self._frontends]:
                frontend = place.child
                if frontend.process.sentinel in ready:
                    while frontend.control.poll() and self._receive_frontend(place):
                        pass
                    code = self._restart_frontend(place)
                elif frontend.control in ready:
                    self._receive_frontend(place)
                if code is not None:
                    return code
            self._ping()
            self._acknowledged.look()
        return code

    @property
    def _several(self) -> bool:
        return len(self._engines) > 1

    @property
    def _until_next(self) -> float | None:
        """Seconds until engines are asked whether they live, or a process is due; None: neither will be."""
        waits = [
            self._databases.due,
            self._later.due,
            self._acknowledged.due,
            self._engines[0].pulse.every,
        ]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def _ping(self) -> None:
        """End the engines that have not answered for too long; one that loads is not asked."""
        for engine in self._living:
            match engine.pulse.look():
                case "ask":
                    engine.child.send(Ping())
                case "late":
                    self._note_silence(engine, engine.pulse.silent)
                case "hung":
                    log.error("%s has made no step for %.0f s; it is ended", engine.name, engine.pulse.silent)
                    engine.child.process.kill()
                    engine.killed = True
                    self._lose(engine)  # now: one that waits for a device ends later, if ever

    def _note_silence(self, engine: EngineProcess, seconds: float) -> None:
        """It has made no step for so long, or it goes on (0)."""
        if engine.pulse.late == bool(seconds):
            return
        engine.pulse.late = bool(seconds)
        if seconds:
            log.warning("%s has made no step for %.0f s, and does not count as ready", engine.name, seconds)
        else:
            log.info("%s makes steps again", engine.name)
        self._broadcast(Stalled(engine.number, seconds))

    def _receive(self, engine: EngineProcess) -> int | None:
        """Take a message from an engine. Returns an exit code if it is the end."""
        try:
            message: FromEngine = engine.child.control.recv()
        except (EOFError, OSError):  # its sentinel says when it has ended
            self._lose(engine)
            return None
        match message:
            case LoadFailure(message=sentence, passes=passes):
                if not self._began:
                    return refuse(sentence, FAILED if passes else REFUSED)
                # It ends now, and is started again: what it lacks may be there soon, as open files.
                log.error("%s: %s", engine.name, sentence)
            case DatabaseNeeded(path=path):
                self._databases.need(path)
            case FrontendBroken(name=name):
                for frontend in self._frontends:
                    if frontend.name == name:
                        frontend.process.kill()  # its sentinel says when it has ended
            case Ping(waited=waited):
                engine.pulse.answer()
                self._note_silence(engine, waited if engine.pulse.is_late(waited) else 0.0)
            case Serving():
                self._serves(engine, message)
        return None

    def _serves(self, engine: EngineProcess, serving: Serving) -> None:
        """An engine is ready, or its models have changed. At the start all begin at once.

        Later one begins when it has made the changes of the others, and none is under way.
        """
        engine.failures = 0
        if self._began and engine.serving is None:
            if engine.missing:
                engine.child.send(CatchUp(engine.missing))
                engine.missing = []
                return
            if self._changes.under_way:
                engine.held = serving
                return
        first, engine.serving = engine.serving is None, serving
        engine.pulse.serve(max((info.step_seconds for info in serving.models), default=0.0))
        begun = [serving] if self._began else [each.serving for each in self._engines if each.serving]
        if not self._began and len(begun) < len(self._engines):
            return
        self._began = True
        for each in begun:
            self._acknowledged.serves(each, first)
        if first:  # later it is a change of the models
            servings = [engine.serving for engine in self._living if engine.serving]
            models = serving_of_all(servings).models
            served = models, self._config.frontend, len(servings), self._config.log_format
            try:
                threading.Thread(target=announce, args=served, name="announce", daemon=True).start()
            except RuntimeError:
                log.warning("the address is not printed, as no thread can be started for it")

    def _receive_frontend(self, place: FrontendPlace) -> bool:
        """Take a message from a front end. Returns whether there was one; if not, it has died."""
        frontend = place.child
        try:
            message: FromFrontend = frontend.control.recv()
        except (EOFError, OSError):
            return False
        match message:
            case Begun():
                place.begins()
                self._count()
            case Taken():
                self._acknowledged.taken(frontend)
            case LoadFailure(message=sentence):
                place.refusal = message
                log.error("%s: %s", frontend.name, sentence)
            case ChangeWanted(command=command):
                self._changes.wanted(frontend, command)
            case ChangeOver(made=made):
                self._release(self._changes.over(frontend, made))
        return True

    def _release(self, made: bytes | None) -> None:
        """A change is over: engines serve that are ready and have waited for that, and the next may begin.

        made: what engines have to make that do not serve yet; None: nothing.
        """
        for engine in self._living:
            if made is not None and engine.serving is None:
                engine.missing.append(made)
        for engine in self._living:
            if engine.held:
                serving, engine.held = engine.held, None
                self._serves(engine, serving)
        self._changes.grant()

    def _lose(self, engine: EngineProcess) -> None:
        """It serves no more, though its process may not have ended yet."""
        if not engine.deaf and (engine.serving or not self._several):
            self._broadcast(EngineLost(engine.number))
        engine.deaf, engine.serving, engine.held = True, None, None
        engine.pulse.rest()
        self._acknowledged.ends(engine.number)

    def _broadcast(self, message: object) -> None:
        for frontend in self._frontends:
            frontend.send(message)

    def _restart_engine(self, engine: EngineProcess) -> int | None:
        """Returns an exit code if starting it once more is of no use."""
        self._lose(engine)
        engine.child.close()
        engine.failures += 1
        code = engine.child.process.exitcode
        if not self._began:
            log.error("%s died while loading (exit code %s)", engine.name, code)
            return 1
        if engine.spent:
            return engine.leave_out(self._engines)
        log.error("%s died (exit code %s); it is started again", engine.name, code)
        self._count(engine=1)
        self._later.start(lambda: engine.start(self._changes.made))
        return None

    def _start_frontend(self, place: FrontendPlace) -> None:
        """One that answers HTTP, or that runs batches. Raises CannotStart."""
        self._frontends_started += 1
        name = f"{place.kind}-{self._frontends_started}"
        try:
            uploads.remove_of_others(self._folder, {child.process.pid for child in self._frontends})
        except OSError as error:
            raise CannotStart(name, error) from error
        target = run_batches if place.kind == BATCHES else run_frontend
        addresses = [engine.address for engine in self._engines]
        frontend = Child(name, target, self._config.frontend, name, addresses, str(self._folder / COUNTS))
        place.start(frontend)
        self._frontends.append(frontend)
        for engine in self._living if self._began else ():
            if engine.serving:
                self._acknowledged.joins(frontend, engine.serving)
            if engine.pulse.late:
                frontend.send(Stalled(engine.number, engine.pulse.silent))
        frontend.send(self._restarts)  # the last that it takes before it listens
        self._changes.grant()

    def _restart_frontend(self, place: FrontendPlace) -> int | None:
        """Returns an exit code if none of its kind could ever begin: at the start of the server."""
        dead = place.child
        dead.close()
        self._frontends.remove(dead)
        self._changes.lost(dead)
        self._acknowledged.lost(dead)
        for engine in self._living:
            engine.child.send(FrontendLost(dead.name))
        place.failures += 1
        if place.spent:
            code = place.leave_out(each for each in self._places if each.kind == place.kind)
            if code is not None and place.refusal:
                return refuse(place.refusal.message, FAILED if place.refusal.passes else REFUSED)
            return code
        pause = place.pause(time.monotonic() - dead.started)
        again = f"in {pause:.1f} s" if pause else "now"
        log.warning("%s died (exit code %s); another is started %s", dead.name, dead.process.exitcode, again)
        self._count(frontend=1)
        self._later.start(partial(self._start_frontend, place), pause)
        return None

    def _count(self, engine: int = 0, frontend: int = 0) -> None:
        """Tell front ends of restarts, and how many of them are down, if that has changed."""
        before = self._restarts
        down = Counter(KINDS[place.kind] for place in self._places if place.failures)
        self._restarts = Restarts(before.engine + engine, before.frontend + frontend, dict(down))
        if self._restarts != before:
            self._broadcast(self._restarts)

    def _drain(self) -> int:
        """Let running requests end, then let the engine commit what is not stored yet. Returns the exit code.

        The deadline or a second signal cuts requests off.
        """
        seconds = self._config.drain_seconds
        log.info("draining: requests under way may finish within %d s", seconds)
        self._broadcast(Drain(seconds))
        self._port.close()  # another server may begin when no front end listens any more
        deadline = time.monotonic() + seconds + CUT_OFF_SECONDS
        frontends = {frontend.process.sentinel for frontend in self._frontends}
        for engine in self._living:
            if engine.serving is None:  # it loads, and has nothing to store
                engine.child.process.kill()
                engine.killed = True
        engines = {engine.child.process.sentinel: engine for engine in self._living if not engine.killed}
        while frontends and (left := deadline - time.monotonic()) > 0:
            writers = [child.process.sentinel for child in self._databases.children]
            ready = set(wait([self._signals, *engines, *frontends, *writers], self._databases.within(left)))
            self._databases.look(ready)
            if self._signals in ready:
                log.warning("second signal: requests under way are cut off")
                os.read(self._signals, 64)
                break
            for sentinel in engines.keys() & ready:
                engine = engines.pop(sentinel)
                log.error(
                    "%s died (exit code %s) while requests were under way",
                    engine.name,
                    engine.child.process.exitcode,
                )
                self._lose(engine)
            frontends -= ready
        for engine in self._living:
            engine.child.send(Stop())
        self._await_end([engine.child for engine in self._living if not engine.killed], self._databases)
        self._await_end(self._databases.stop())
        return 0

    def _await_end(self, children: Iterable[Child], databases: Databases | None = None) -> None:
        """Until they have stored everything, or a signal. `databases`: where they store it, which go on."""
        deadline = time.monotonic() + SAVE_SECONDS
        waited = {child.process.sentinel for child in children}
        while waited and (left := deadline - time.monotonic()) > 0:
            writers = [child.process.sentinel for child in databases.children] if databases else []
            patience = databases.within(left) if databases else left
            ready = set(wait([self._signals, *waited, *writers], patience))
            if self._signals in ready:
                return
            if databases:
                databases.look(ready)
            waited -= ready

    def _kill_all(self) -> None:
        engines = [engine.child for engine in self._living if engine.started]
        self._kept = end_all([*self._frontends, *engines, *self._databases.children], KILLED_WITHIN)


def refuse(message: str, code: int = REFUSED) -> int:
    """Say why the server does not start; the exit code. For REFUSED nothing starts it again."""
    print(f"error: {message}", file=sys.stderr)
    return code

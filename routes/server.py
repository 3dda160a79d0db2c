"""A front end's process: HTTP on one side, the engine's wire on the other, and the supervisor's pipe."""

import gc
import logging
import math
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

from routes.guard.connections import Connections
from routes.guard.limits import FORM_ROOM, Limits
from routes.guard.reads import Guard, Unguarded
from routes.http.frontend import Frontend
from rwkv_batch.audit.lines import AuditError
from rwkv_batch.chat.checkpoints import settings_for
from rwkv_batch.config import FrontendConfig, file_name
from rwkv_batch.keys.records import KeysError
from rwkv_batch.logs import begin_logging
from rwkv_batch.wire.client import Client, Wire
from rwkv_batch.wire.host.engines import Engines
from rwkv_batch.wire.host.turns import ChangeTurns
from rwkv_batch.wire.supervision import (
    AllServe,
    Begun,
    ChangeGranted,
    Drain,
    EngineLost,
    LoadFailure,
    Restarts,
    Serving,
    Stalled,
    Taken,
)

TICK = 0.1  # seconds
REFUSED = 2  # the exit code of what cannot do its work
FLUSH_SECONDS = 0.3  # for the last bytes to leave after the last request has ended
CORES = 8  # cores a front end may use; it seldom keeps two busy
FILES_PER_WORKER = 7  # that an HTTP worker has open by itself
WAITING_PER_CORE = 512  # an HTTP worker can wait for this many streams, divided by the cores it sees

FromSupervisor = Serving | AllServe | EngineLost | Stalled | ChangeGranted | Restarts | Drain

log = logging.getLogger(__name__)


def run(config: FrontendConfig, name: str, addresses: Sequence[str], control: Connection) -> None:
    """Serve until the supervisor sends `Drain`, then exit 0.

    `name`: one that no other front end has. `addresses`: where the engines listen. `control`: the pipe to the
    supervisor; when its end closes, the process exits at once. Signals are left to the supervisor.
    """
    # before any thread, which inherits it
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    cores = use_few_cores()
    begin_logging(config.log_level, config.log_format)
    for library in ("robyn", "actix_server", "actix_web", "actix_http", "asyncio", "tracing"):
        logging.getLogger(library).setLevel(logging.WARNING)
    front = begin(config, wire_to(addresses, name, config, control), control, addresses)
    threading.Thread(
        target=receive, args=(front, control, config, _drain), name="supervisor", daemon=True
    ).start()
    # Robyn reads the command line and its own environment variables, which are not meant for it here
    sys.argv = sys.argv[:1]
    for variable in [v for v in os.environ if v.startswith("ROBYN_")]:
        del os.environ[variable]
    from routes.table import application

    guard = guarded(config)
    threading.Thread(target=_tick, args=(front, guard), name="tick", daemon=True).start()
    workers = config.max_streams // (WAITING_PER_CORE // cores) + 1  # so that all streams progress together
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY:
        workers = min(workers, max(1, limit // FILES_PER_WORKER // 3))  # the rest is for connections
    served = application(front, guard, workers)
    served.startup_handler(partial(control.send, Begun()))  # which Robyn calls once it listens
    front.shared.informed.wait()  # one that is started later does not say that nothing serves
    gc.freeze()  # a collection that looked through all modules would stop every stream for some 25 ms
    served.start(config.host, config.port, _check_port=False)


def begin(config: FrontendConfig, wire: Wire, control: Connection, addresses: Sequence[str] = ()) -> Frontend:
    """The front end. Ends the process if a file of it cannot be used, as the supervisor is told."""
    try:
        return Frontend(config, wire, addresses)
    except (KeysError, AuditError) as error:
        control.send(LoadFailure(str(error)))
        raise SystemExit(REFUSED) from None


def wire_to(addresses: Sequence[str], name: str, config: FrontendConfig, control: Connection) -> Wire:
    """To the engine, or to all of them, where the supervisor says when a change may be made."""
    if len(addresses) == 1:
        return Client(addresses[0], name)
    engines = Engines(addresses, name, config.homes)
    engines.commands.turns = ChangeTurns(control.send, file_name)
    return engines


def guarded(config: FrontendConfig) -> Guard:
    """The guard of this process, before Robyn where that can be."""
    from robyn import robyn

    from routes.table import takes_file

    guard = Guard(limits_of(config, takes_file))
    try:
        guard.install(robyn.__file__)
    except Unguarded as error:
        log.error("%s Put a proxy in front that reads requests whole; docs/deploy.md has nginx's.", error)
    return guard


def limits_of(config: FrontendConfig, takes_file: Callable[[str], bool]) -> Limits:
    """What the connections of a front end may do. `takes_file`: of a path."""
    return Limits(
        body=config.max_body,
        file=config.max_state + FORM_ROOM,
        takes_file=takes_file,
        head_seconds=config.header_timeout or math.inf,
        body_seconds=config.body_timeout or math.inf,
        idle_seconds=config.keep_alive_timeout or math.inf,
        unread_seconds=config.send_timeout or math.inf,
        connections=config.max_connections,
    )


def use_few_cores() -> int:
    """Stay on some of the machine's cores and return how many.

    With more, each HTTP worker could wait for fewer streams.
    """
    if not hasattr(os, "sched_setaffinity"):
        return os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > CORES:
        cores = random.sample(cores, CORES)
        os.sched_setaffinity(0, cores)
    return len(cores)


def receive(
    front: Frontend, control: Connection, config: FrontendConfig, drain: Callable[[Frontend, float], None]
) -> None:
    """Act on the supervisor's messages. Ends the process when the supervisor has died, or by `drain`."""
    logged: dict[str, str] = {}  # the fingerprints of models whose chat template has been
    while True:
        try:
            message: FromSupervisor = control.recv()
        except (EOFError, OSError):
            os._exit(1)
        try:
            _act(message, front, config, drain, logged)
            if isinstance(message, Serving):
                control.send(Taken())
        except Exception:  # another front end is started, and learns everything
            log.exception("a message of the supervisor could not be carried out; the front end ends")
            os._exit(1)


def _act(
    message: FromSupervisor,
    front: Frontend,
    config: FrontendConfig,
    drain: Callable[[Frontend, float], None],
    logged: dict[str, str],
) -> None:
    match message:
        case Serving():
            serving = front.client.serves(message)
            for info in serving.models:
                if logged.get(info.model) != info.fingerprint:
                    logged[info.model] = info.fingerprint
                    template = settings_for(info, config).chat_template
                    log.info("chat template of %s: %s (--chat-template chooses)", info.model, template)
            front.serve(serving.models)
            front.shared.loading = serving.loading
        case AllServe(engine=engine):
            front.readiness.serves(engine)
        case Restarts():
            front.shared.restarts = message
            front.shared.informed.set()
        case EngineLost(engine=engine):
            front.engine_lost(engine)
        case Stalled(engine=engine, seconds=seconds):
            front.readiness.stalled(engine, seconds)
        case ChangeGranted():
            front.client.may_change(message)
        case Drain(seconds=seconds):
            try:
                threading.Thread(target=drain, args=(front, seconds), name="drain", daemon=True).start()
            except RuntimeError:  # there can be no further thread, and no message is to come
                drain(front, seconds)


def _drain(front: Frontend, seconds: float) -> None:
    front.drain(seconds)
    time.sleep(FLUSH_SECONDS)
    front.close()
    logging.shutdown()
    os._exit(0)


def _tick(front: Frontend, guard: Guard) -> None:
    """Enter Python often, because Robyn lets go of a dropped stream then; close abandoned streams.

    Connections that take too long are ended too, and where files are scarce those that ask for nothing.
    """
    from robyn.robyn import get_version

    connections = Connections()
    while True:
        time.sleep(TICK)
        get_version()
        try:
            front.tick()
            guard.watch.tick()
            connections.make_room(waiting=front.busy)
        except Exception:
            log.exception("streams and connections could not be looked at; that is tried again")

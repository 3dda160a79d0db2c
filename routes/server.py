"""A front-end process: HTTP on one side, the engine's wire on the other, the supervisor's pipe on
the third.
"""

import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection

from routes.http.frontend import Frontend
from routes.settings import Drain, EngineLost, FrontendSettings
from rwkv_batch.wire.client import Client
from rwkv_batch.wire.protocol import EngineInfo

TICK = 0.1  # seconds
SENT_WITHIN = 0.3  # seconds for the last bytes to leave after the last request has ended
CORES = 8  # cores a front end may use; it seldom keeps two busy
WAITING_PER_CORE = 512  # an HTTP worker can wait for this many streams, divided by the cores it sees

log = logging.getLogger(__name__)


def run(settings: FrontendSettings, control: Connection) -> None:
    """Serve until the supervisor says otherwise through `control`.

    It sends EngineInfo (the engine is ready), EngineLost and Drain, after which the process exits 0. When its
    end of the pipe closes, the process ends at once. Signals are left to the supervisor.
    """
    signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )  # before any thread, which inherits it
    cores = use_few_cores()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("robyn", "actix_server", "actix_web", "actix_http", "asyncio", "tracing"):
        logging.getLogger(name).setLevel(logging.WARNING)
    front = Frontend(settings, Client(settings.engine_address, settings.name))
    threading.Thread(target=follow, args=(front, control), name="supervisor", daemon=True).start()
    # Robyn reads the command line and its own environment variables, which are not meant for it here
    sys.argv = sys.argv[:1]
    for variable in [v for v in os.environ if v.startswith("ROBYN_")]:
        del os.environ[variable]
    from routes.table import application

    threading.Thread(target=_tick, args=(front,), name="tick", daemon=True).start()
    host = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][4][0]
    application(front, http_workers(settings.max_streams, cores)).start(
        str(host), settings.port, _check_port=False
    )


def use_few_cores() -> int:
    """Stay on some of the machine's cores and return how many: with more, each HTTP worker could wait for
    fewer streams.
    """
    if not hasattr(os, "sched_setaffinity"):
        return os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > CORES:
        cores = random.sample(cores, CORES)
        os.sched_setaffinity(0, cores)
    return len(cores)


def http_workers(max_streams: int, cores: int) -> int:
    """Worker threads that let `max_streams` streams progress together."""
    return max_streams // (WAITING_PER_CORE // cores) + 1


def follow(front: Frontend, control: Connection) -> None:
    """Do what the supervisor says. Ends the process."""
    while True:
        try:
            message = control.recv()
        except (EOFError, OSError):
            os._exit(1)
        match message:
            case EngineInfo():
                front.engine = message
            case EngineLost():
                front.engine_lost()
            case Drain(seconds=seconds):
                threading.Thread(target=_drain, args=(front, seconds), name="drain", daemon=True).start()


def _drain(front: Frontend, seconds: float) -> None:
    front.drain(seconds)
    time.sleep(SENT_WITHIN)
    logging.shutdown()
    os._exit(0)


def _tick(front: Frontend) -> None:
    """Robyn lets go of a dropped stream when it next enters Python, so enter it often; look for abandoned
    streams meanwhile.
    """
    from robyn.robyn import get_version

    while True:
        time.sleep(TICK)
        get_version()
        front.close_abandoned()

"""A front-end process: HTTP on one side, the engine's wire on the other, the supervisor's pipe on the third."""
import logging
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection

from routes.frontend import Frontend
from routes.settings import FrontendSettings
from rwkv_batch.client import Client
from rwkv_batch.protocol import EngineInfo

TICK = 0.1        # seconds
SENT_WITHIN = 0.3  # seconds for the last bytes to leave after the last request has ended

log = logging.getLogger(__name__)


def run(settings: FrontendSettings, control: Connection) -> None:
    """Serve until the supervisor says otherwise through `control`.

    It sends an EngineInfo (the engine is ready), "engine-lost", and "drain" or ("drain", seconds): finish what is live
    and exit 0. When its end closes, the process ends at once. Signals are left to the supervisor.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # before any thread, which inherits it
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("robyn", "actix_server", "actix_web", "actix_http", "asyncio", "tracing"):
        logging.getLogger(name).setLevel(logging.WARNING)
    front = Frontend(settings, Client(settings.address, settings.name))
    threading.Thread(target=follow, args=(front, control), name="supervisor", daemon=True).start()
    # Robyn reads the command line and its own environment variables, which are not meant for it here
    sys.argv = sys.argv[:1]
    for variable in [v for v in os.environ if v.startswith("ROBYN_")]:
        del os.environ[variable]
    from routes.mount import application
    threading.Thread(target=_tick, args=(front,), name="tick", daemon=True).start()
    application(front).start(socket.gethostbyname(settings.host), settings.port, _check_port=False)


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
            case "engine-lost":
                front.engine_lost()
            case "drain":
                threading.Thread(target=_drain, args=(front, None), name="drain", daemon=True).start()
            case ("drain", seconds):
                threading.Thread(target=_drain, args=(front, seconds), name="drain", daemon=True).start()


def _drain(front: Frontend, seconds: float | None) -> None:
    front.drain(seconds)
    time.sleep(SENT_WITHIN)
    logging.shutdown()
    os._exit(0)


def _tick(front: Frontend) -> None:
    """Robyn lets go of a dropped stream when it next enters Python, so enter it often; look for abandoned streams meanwhile."""
    from robyn.robyn import get_version
    while True:
        time.sleep(TICK)
        get_version()
        front.close_abandoned()

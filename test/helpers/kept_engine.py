#!/usr/bin/env python3
"""The server of app.py with an engine that does not end, not even when it is killed.

So is one that waits for a device which has hung. SIGKILL from elsewhere ends it.
"""

import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import app
from rwkv_batch import supervisor
from rwkv_batch.wire.supervision import EngineInfo, Serving

kill = BaseProcess.kill


def serve_for_ever(configs: object, address: str, changes: object, control: Connection) -> None:
    """In place of supervisor.run_engine."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address.removeprefix("ipc://"))
    listener.listen()
    control.send(Serving([EngineInfo("kept", 1, 64, 1, "float32", "cpu", 4, 65536, "0" * 16, "kept")]))
    while True:
        time.sleep(1000)


def kill_others(process: BaseProcess) -> None:
    if process.name != "engine":
        kill(process)


if __name__ == "__main__":
    supervisor.run_engine = serve_for_ever
    supervisor.SAVE_SECONDS = supervisor.KILLED_WITHIN = 0.3
    BaseProcess.kill = kill_others
    sys.exit(app.main(sys.argv[1:]))

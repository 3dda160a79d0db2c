"""Whole servers placed and watched by Ray Serve. No request goes through Ray.

deploy/cluster/serve.yaml says how many there are and what each needs. A replica starts app.py as its child,
says where it listens (`Directory`), and is healthy as long as the server is. When it is taken away, HAProxy
sends it no new requests, and the server drains.

    options   of `Server`, in serve.yaml as `args` of the application
        flags         of app.py, such as {"--model-path": "/models/rwkv7-g1-1.5b.pth"}; None: a flag alone
        host          where it listens; None: at the address of its node
        python        the interpreter that has the server's packages, from the repository's folder; None: this
        slots         most servers that there may be; HAProxy has as many (haproxy.py --slots)
        start_seconds until the server answers
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import ray
from ray import serve

from deploy.cluster.asking import ask
from deploy.cluster.directory import Directory
from deploy.cluster.scaling import said

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE, DIRECTORY = "rwkv", "directory"
KNOWN_AFTER = 1.5  # seconds until every HAProxy knows that a server leaves
END_SECONDS = 90.0  # of a server that drains


def directory(slots: int) -> Any:
    """The actor, which is made if there is none; it is started again wherever there is room."""
    actor = ray.remote(Directory).options(
        name=DIRECTORY,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=1,
    )
    return actor.remote(slots)


@serve.deployment(name="server")
class Server:
    """One server. See above for `options`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._id, self._slot, self._options = uuid.uuid4().hex, 0, options
        self._directory = directory(options.get("slots", 64))
        self._address = f"{options.get('host') or ray.util.get_node_ip_address()}:{_free_port()}"
        host, _, port = self._address.rpartition(":")
        words = [
            word
            for flag, value in options.get("flags", {}).items()
            for word in (flag, value)
            if word is not None
        ]
        python = options.get("python") or sys.executable
        command = [python, ROOT / "app.py", "--host", host, "--port", port, *words]
        self._child = subprocess.Popen(
            [sys.executable, ROOT / "deploy/cluster/child.py", *map(str, command)],
            stdin=subprocess.PIPE,
            cwd=ROOT,
        )
        until = time.monotonic() + options.get("start_seconds", 600)
        while not self._get("/health/ready"):
            if self._child.poll() is not None:
                raise RuntimeError(
                    f"app.py ended with the exit code {self._child.returncode}; its log says why"
                )
            if time.monotonic() > until:
                self._child.terminate()
                raise RuntimeError(
                    "app.py has not become ready in time; raise start_seconds or look at its log"
                )
            time.sleep(0.1)

    async def check_health(self) -> None:
        """Raises RuntimeError when Serve should replace this replica."""
        if self._child.poll() is not None:
            raise RuntimeError(f"the server ended with the exit code {self._child.returncode}")
        if not await asyncio.to_thread(self._get, "/health/live"):
            raise RuntimeError("the server does not answer")
        if not await asyncio.to_thread(self._get, "/health/ready"):
            return  # it drains, or starts its engine again, and takes nothing before it says where it is
        with contextlib.suppress(Exception):  # the directory is started again elsewhere; the server is well
            said = self._directory.announce.remote(self._id, self._address, self._slot)
            self._slot = await asyncio.wait_for(said, KNOWN_AFTER)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The rows that wait or run, as a share of those that may run at once; nothing where it is silent."""
        return said(await asyncio.to_thread(self._get, "/stats"))

    async def __del__(self) -> None:
        """No new requests come, then the server drains."""
        with contextlib.suppress(Exception):  # nothing may keep it from ending
            await asyncio.wait_for(self._directory.leave.remote(self._id), KNOWN_AFTER)
            await asyncio.sleep(KNOWN_AFTER)
        self._child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._child.wait, END_SECONDS)

    async def __call__(self) -> str:
        """Where the server is, for handles. Requests do not come here."""
        return self._address

    def _get(self, path: str) -> bytes:
        """A reply of the server's; empty if it does not answer with 200."""
        return ask(self._address, path, os.environ.get("RWKV_METRICS_PASSWORD", ""))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def application(options: dict[str, Any]) -> serve.Application:
    """What serve.yaml imports."""
    return Server.bind(options)

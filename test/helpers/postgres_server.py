#!/usr/bin/env python3
"""A PostgreSQL server for tests: `python test/helpers/postgres_server.py` installs the program where it may.

It listens on a Unix socket only, and does not sync what it writes, as no test cuts its power.
"""

import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PLACES = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin")
PACKAGE = "postgresql"
CLUSTER = Path("/etc/postgresql-common/createcluster.conf")  # of Debian: whether one is made and started
KEEP = ("-o", "Dpkg::Options::=--force-confold")  # that file
INSTALL = ("apt-get", "install", "-y", "-q", "--no-install-recommends", *KEEP)
PATIENCE = 120.0  # seconds


def find() -> Path | None:
    """The folder of the server's programs, the newest."""
    if path := shutil.which("initdb"):
        return Path(path).resolve().parent
    folders = (folder for place in PLACES for folder in Path("/").glob(place[1:]))
    found = [folder for folder in folders if (folder / "initdb").exists()]
    return max(found, key=_version, default=None)


def _version(folder: Path) -> list[int]:
    return [int(part) for part in folder.parts if part.isdecimal()]


class PostgresServer:
    """Its folder goes with it. `url`: of its database. durable: what it commits is synced, to measure it."""

    process: subprocess.Popen[bytes]

    def __init__(self, programs: Path, *options: str, durable: bool = False) -> None:
        self._programs, self._options = programs, [*options, f"fsync={'on' if durable else 'off'}"]
        self.folder = Path(tempfile.mkdtemp(prefix="rwkv-pg-", dir="/tmp"))  # a path that is short enough
        self.url = f"postgresql://postgres@/postgres?host={self.folder}"
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:  # as whom it does not run
            user = next(name for name in ("postgres", "nobody") if _exists(name))
            self._user = {"user": user, "extra_groups": []}
            shutil.chown(self.folder, user)
        command = [programs / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        self._run(*command, "--no-sync", "--no-instructions", "--locale=C")
        self.start()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self) -> None:
        """Returns when it answers."""
        flags = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self.folder}"]
        settings = ("max_connections=60", "shared_buffers=16MB", "autovacuum=off", "deadlock_timeout=100ms")
        flags += [word for setting in (*settings, *self._options) for word in ("-c", setting)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self._programs / "postgres", "-D", self.data, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                **self._user,
            )
        deadline = time.monotonic() + PATIENCE
        asked = [self._programs / "pg_isready", "-q", "-h", self.folder, "-U", "postgres"]
        while subprocess.run(asked).returncode:
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.02)

    def stop(self, how: int = signal.SIGINT) -> None:
        """Connections are cut off; SIGQUIT: as by a crash."""
        self.process.send_signal(how)
        self.process.wait(PATIENCE)

    def kill(self) -> None:
        """kill -9 of the process that has started all others, which end for that. Returns when they have."""
        others = self._others()
        self.process.kill()
        self.process.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while any(map(_runs, others)):
            assert time.monotonic() < deadline, "processes of PostgreSQL stay"
            time.sleep(0.02)

    def _others(self) -> list[int]:
        """Processes that the first one has started."""
        running = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        return [pid for pid in running if _status(pid)[1:] == [str(self.process.pid)]]

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, **self._user)
        assert done.returncode == 0, done.stdout + done.stderr


def _status(pid: int) -> list[str]:
    """Its state and the process that has started it; empty: there is none. For Linux."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    return []


def _runs(pid: int) -> bool:
    """One that only waits to be reaped does not."""
    return _status(pid)[:1] not in ([], ["Z"])


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def main() -> None:
    if find():
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"There is no PostgreSQL for tests; run {shlex.join([*INSTALL, PACKAGE])}.")
    CLUSTER.parent.mkdir(exist_ok=True)
    if not CLUSTER.exists():
        CLUSTER.write_text("create_main_cluster = false\n", encoding="utf-8")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run([*INSTALL, PACKAGE], env=environment, stdout=subprocess.DEVNULL).returncode:
        subprocess.run(["apt-get", "update", "-q"], env=environment, stdout=subprocess.DEVNULL)
        subprocess.run([*INSTALL, PACKAGE], env=environment, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Keep the servers of a HAProxy those that Ray has, while it runs.

    python -m deploy.cluster.sync_haproxy --socket /run/haproxy-rwkv.sock [--ray ADDRESS]

Run one beside each HAProxy, whose file haproxy.py has written with --slots. A slot whose server leaves takes
no new requests, and those under way go on. While Ray does not answer, the servers stay what they are, and
HAProxy's own checks say which of them live.
"""

import argparse
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.cluster.directory import SILENT

log = logging.getLogger("sync_haproxy")

BACKENDS = ("anywhere", "sessions")
PERIOD = 0.5  # seconds
MAINTENANCE, DRAINING = 0x01, 0x08  # of srv_admin_state


@dataclass(frozen=True)
class Slot:
    """Of one backend, as HAProxy has it."""

    backend: str
    number: int
    address: str
    state: int

    @property
    def serves(self) -> bool:
        return not self.state & (MAINTENANCE | DRAINING)


class Haproxy:
    """A HAProxy that listens at this socket. Methods raise OSError when it does not."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)

    def ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.connect(self._path)
            connection.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def slots(self) -> list[Slot]:
        """Those of both backends."""
        _, header, *rows = self.ask("show servers state").strip().split("\n")
        names = header.removeprefix("# ").split()
        found = [dict(zip(names, row.split(), strict=False)) for row in rows]
        return [
            Slot(
                row["be_name"],
                int(row["srv_id"]),
                f"{row['srv_addr']}:{row['srv_port']}",
                int(row["srv_admin_state"]),
            )
            for row in found
            if row["be_name"] in BACKENDS
        ]

    def apply(self, servers: Mapping[int, str], complete: bool) -> None:
        """Have these servers in their slots. complete: the others drain."""
        for slot in self.slots():
            name, wanted = f"{slot.backend}/s{slot.number}", servers.get(slot.number)
            if wanted is None:
                if complete and slot.serves:
                    log.info("%s takes no new requests", name)
                    self.ask(f"set server {name} state drain")
                continue
            if wanted != slot.address:
                host, _, port = wanted.rpartition(":")
                log.info("%s is %s now", name, wanted)
                self.ask(f"set server {name} addr {host} port {port}")
            if not slot.serves:
                self.ask(f"set server {name} state ready")


def main() -> None:
    import ray

    from deploy.cluster.servers import DIRECTORY, NAMESPACE

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--socket", default="/run/haproxy-rwkv.sock", help="HAProxy's stats socket")
    parser.add_argument(
        "--ray", default="auto", metavar="ADDRESS", help="of Ray's head (default: this host's)"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    haproxy = Haproxy(given.socket)
    directory: Any = None
    while True:
        try:
            if not ray.is_initialized():
                ray.init(address=given.ray, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False)
            directory = directory or ray.get_actor(DIRECTORY, NAMESPACE)
            servers, complete = ray.get(directory.servers.remote(), timeout=SILENT)
            haproxy.apply(servers, complete)
        except Exception as error:  # Ray or HAProxy may be there again later
            log.warning("nothing is changed: %s", str(error).partition("\n")[0] or type(error).__name__)
            directory = None
        time.sleep(PERIOD)


if __name__ == "__main__":
    main()

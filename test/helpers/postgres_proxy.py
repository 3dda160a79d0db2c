"""A connection between a server and its PostgreSQL that tests cut: all of them, or one at its commit."""

import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

COMMITTED = b"COMMIT\0"  # in what PostgreSQL says of a transaction that is committed
Cut = Literal["before", "after"]  # the transaction is committed


class PostgresProxy:
    """`url`: of the database through it. `folder`: where PostgreSQL listens."""

    def __init__(self, folder: Path) -> None:
        self._target = str(folder / ".s.PGSQL.5432")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"postgresql://postgres@127.0.0.1:{self._listener.getsockname()[1]}/postgres"
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._away = False
        self._cut: Cut | None = None
        self.was_cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_next_commit(self, when: Cut) -> None:
        """The next transaction's connection is lost, before it is committed or before that is said."""
        self.was_cut.clear()
        self._cut = when

    def go_away(self) -> None:
        """All connections are lost, and new ones too, until `come_back`."""
        self._away = True
        self._close_all()

    def come_back(self) -> None:
        self._away = False

    def close(self) -> None:
        self._away = True
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends the thread that waits for connections
        self._listener.close()
        self._close_all()

    def _close_all(self) -> None:
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._away:
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                with self._lock:
                    self._sockets |= {client, server}
                try:
                    server.connect(self._target)
                except OSError:
                    self._drop(client, server)
                    continue
                for source, target in ((client, server), (server, client)):
                    arguments = source, target, source is client
                    threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._cut == ("before" if asks else "after") and self._commits(data, asks):
                    self._cut = None
                    self._drop(source, target)
                    self.was_cut.set()
                    return
                target.sendall(data)
        self._drop(source, target)

    @staticmethod
    def _commits(data: bytes, asks: bool) -> bool:
        return (b"COMMIT" if asks else COMMITTED) in data

    def _drop(self, *sockets: socket.socket) -> None:
        with self._lock:
            for each in sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
                self._sockets.discard(each)

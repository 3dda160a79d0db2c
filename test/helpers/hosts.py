"""A database of several engines: the process that writes for them, and what they have of it."""

import multiprocessing
import socket
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from rwkv_batch.state.host.service import DatabaseService, HostWriter, serve
from rwkv_batch.state.host.store import HostStore
from rwkv_batch.state.log.store import Store

spawn = multiprocessing.get_context("spawn")


class Host:
    """`path`: of the database. `stores` are closed at the end, before the one that writes."""

    def __init__(self, path: Path) -> None:
        self.path, self._stores = path, list[HostStore]()
        self._folder = tempfile.TemporaryDirectory(prefix="rwkv-")  # with a path that is short enough
        self.address = f"ipc://{self._folder.name}/commit"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self._stores:
            store.close()
        self.stop()
        self._folder.cleanup()

    def open(self, limit: int | None = None) -> HostStore:
        """The database as one more engine sees it."""
        store = HostStore(self.path, self.address, limit)
        self._stores.append(store)
        return store

    def start(self) -> None:
        """Begin to write."""
        raise NotImplementedError

    def stop(self) -> None:
        """Write what has arrived, and end."""
        raise NotImplementedError


class ThreadHost(Host):
    """It writes in a thread of this process."""

    _thread: threading.Thread

    def start(self) -> None:
        self.store = Store(self.path, serves_others=True)
        writer = HostWriter(self.store, self.address)
        self._stop, theirs = socket.socketpair()
        self._thread = threading.Thread(target=writer.run, args=(theirs,), daemon=True)
        self._theirs = theirs
        self._thread.start()

    def stop(self) -> None:
        self._stop.send(b"x")
        self._thread.join()
        self._stop.close()
        self._theirs.close()
        self.store.close()


class ProcessHost(Host):
    """It writes in a process of its own, as for a server."""

    process: multiprocessing.process.BaseProcess
    _control: Connection

    def start(self, first: bool = True) -> None:
        self._control, theirs = spawn.Pipe()
        service = DatabaseService(str(self.path), self.address, first)
        self.process = spawn.Process(target=serve, args=(service, theirs), daemon=True)
        self.process.start()
        theirs.close()
        refusal = self._control.recv()
        assert refusal is None, refusal

    def stop(self) -> None:
        self._control.close()
        self.process.join()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()
        self._control.close()

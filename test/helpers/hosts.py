"""A database of several engines: the process that writes for them, and what they have of it."""

import multiprocessing
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import pytest

from rwkv_batch.state.entries import Operation
from rwkv_batch.state.host import service
from rwkv_batch.state.host.service import UNUSED_SECONDS, DatabaseService, HostWriter, refuse, serve
from rwkv_batch.state.host.store import HostStore
from rwkv_batch.state.log.store import Store

spawn = multiprocessing.get_context("spawn")


class Host(ABC):
    """`path`: of the database. `stores` are closed at the end, before the one that writes."""

    def __init__(self, path: Path) -> None:
        self.path, self.stores = path, list[HostStore]()
        self._folder = tempfile.TemporaryDirectory(prefix="rwkv-")  # with a path that is short enough
        self.address = f"ipc://{self._folder.name}/commit"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self.stores:
            store.close()
        self.stop()
        self.close()

    def close(self) -> None:
        """When nobody writes any more."""
        self._folder.cleanup()

    def open(self, limit: int | None = None) -> HostStore:
        """The database as one more engine sees it."""
        store = HostStore(self.path, self.address, limit)
        self.stores.append(store)
        return store

    @abstractmethod
    def start(self) -> None:
        """Begin to write."""

    @abstractmethod
    def stop(self) -> None:
        """Write what has arrived, and end."""


class ThreadHost(Host):
    """It writes in a thread of this process."""

    _thread: threading.Thread
    unused = UNUSED_SECONDS  # for how long it goes on without an engine

    def start(self) -> None:
        self.store = Store(self.path, serves_others=True)
        self._stop, self._theirs = multiprocessing.Pipe()
        self._begin()

    def stop(self) -> None:
        if not self._stop.closed:
            self._stop.send(None)
        self.join()
        self._stop.close()
        self._theirs.close()
        self.store.close()

    def lose_the_next_answer(self) -> None:
        """End when something has been committed, without a word of it."""
        commit = self.store.commit

        def last(groups: Sequence[Sequence[Operation]]) -> NoReturn:
            self.store.commit = commit  # type: ignore[method-assign]
            commit(groups)
            raise SystemExit

        self.store.commit = last  # type: ignore[method-assign]

    def answer_again(self) -> None:
        """When it has died."""
        self.join()
        self._begin()

    def orphan(self) -> None:
        """Leave the processes as a killed supervisor does."""
        self._stop.close()

    def join(self) -> None:
        """Until it has ended."""
        self._thread.join()

    @contextmanager
    def refused(self, sentence: str) -> Iterator[None]:
        """In place of it there is one, meanwhile, that cannot use the database."""
        arguments = self.address, sentence, self._theirs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "REFUSING_SECONDS", 3600.0)  # until it is ended
            refusing = threading.Thread(target=refuse, args=arguments, daemon=True)
            refusing.start()
            yield
            self._stop.send(None)
            refusing.join()
            self._theirs.recv()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        with suppress(SystemExit):
            HostWriter(self.store, self.address).run(self._theirs, self.unused)


class ProcessHost(Host):
    """It writes in a process of its own, as for a server. context: how that is started."""

    def __init__(self, path: Path, context: BaseContext = spawn) -> None:
        super().__init__(path)
        self._context = context

    process: multiprocessing.process.BaseProcess
    _control: Connection

    def start(self, first: bool = True) -> None:
        self._control, theirs = self._context.Pipe()
        database = DatabaseService(str(self.path), self.address, first)
        self.process = self._context.Process(target=serve, args=(database, theirs), daemon=True)
        self.process.start()
        theirs.close()
        refusal = self._control.recv()
        assert refusal is None, refusal

    def stop(self) -> None:
        self._control.send(None)
        self.process.join()
        self._control.close()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()
        self._control.close()

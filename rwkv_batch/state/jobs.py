"""The state pool's two threads: the mover runs jobs in order, the writer commits what is queued in groups."""

import logging
import queue
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import TypeVar

from rwkv_batch.state.entries import Operation, StoreBroken, StoreError, Tables, written_bytes
from rwkv_batch.state.snapshot import SnapshotError
from rwkv_batch.state.store import MemoryStore, Store

log = logging.getLogger(__name__)

GROUP_BYTES = 256 << 20  # one transaction's states: the log cannot be shorter than that

T = TypeVar("T")
Finished = Callable[[T | None, Exception | None], None]  # takes a job's result, or None and its error
Committed = Callable[[Exception | None], None]
Commit = tuple[Sequence[Operation], Committed]
Report = Callable[[Callable[[], None]], None]  # has a callback run by the thread that polls


class Mover(Thread):
    """Runs jobs one after the other, in the order they were given."""

    def __init__(self, report: Report) -> None:
        super().__init__(name="state mover", daemon=True)
        self._report = report
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def put(self, work: Callable[[], T], finished: Finished[T] | None = None) -> None:
        """Run `work`; `finished` is reported with its result or its error."""
        self._jobs.put(partial(self._run_job, work, finished))

    def discard(self, value: object) -> None:
        """Drop the caller's last reference on this thread: freeing tens of megabytes takes milliseconds."""
        self.put(partial(id, value))

    def close(self) -> None:
        """Returns when all jobs are done."""
        self._jobs.put(None)
        self.join()

    def run(self) -> None:
        while job := self._jobs.get():
            job()
            del job  # and with it the states that it holds, before the next one is waited for

    def _run_job(self, work: Callable[[], T], finished: Finished[T] | None) -> None:
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            if not isinstance(raised, StoreError | SnapshotError):
                log.exception("a job of the state pool failed")
            error = raised
        if finished:
            self._report(partial(finished, result, error))


class Writer(Thread):
    """Commits operations in the order they were given.

    `renewed` is reported, with the rows of the new database, when the old one was broken and is replaced.
    """

    def __init__(self, store: Store | MemoryStore, report: Report, renewed: Callable[[Tables], None]) -> None:
        super().__init__(name="state writer", daemon=True)
        self._store, self._report, self._renewed = store, report, renewed
        self._queue: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        self.start()

    def put(self, operations: Sequence[Operation], committed: Committed) -> None:
        """Commit them in one transaction; `committed` is reported with None or the error."""
        self._queue.put((operations, committed))

    def close(self) -> None:
        """Returns when all operations are done."""
        self._queue.put(None)
        self.join()

    def run(self) -> None:
        closing = False
        while not closing:
            group: list[Commit] = []
            size = 0
            while batch := self._queue.get():
                group.append(batch)
                size += written_bytes(batch[0])
                if size > GROUP_BYTES or self._queue.empty():
                    break
            closing = batch is None
            if group:
                self._commit(group)

    def _commit(self, group: list[Commit], renew: bool = True) -> None:
        error: Exception | None = None
        try:
            self._store.commit([operation for operations, _ in group for operation in operations])
        except StoreBroken as broken:
            if renew and self._renew(broken):
                self._commit(group, renew=False)
                return
            error = broken
        except StoreError as failed:
            if len(group) > 1:  # some may fit where all together do not
                for batch in group:
                    self._commit([batch])
                return
            error = failed
        except Exception as unexpected:
            log.exception("the database could not be written")
            error = unexpected
        for _, committed in group:
            self._report(partial(committed, error))
        self._store.checkpoint(quiet=self._queue.empty())

    def _renew(self, broken: StoreBroken) -> bool:
        """Replace the broken database; whether that succeeded."""
        try:
            self._store.restart()
        except (StoreError, OSError) as error:
            log.error("%s A new one cannot be begun: %s", broken, error)
            return False
        self._report(partial(self._renewed, self._store.rows))
        return True

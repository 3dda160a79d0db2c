"""Threads of the state pool that run jobs in order."""

import logging
import queue
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import Thread, current_thread
from typing import TypeVar

from rwkv_batch.state.entries import SnapshotError, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")
Finished = Callable[[T | None, Exception | None], None]  # takes a job's result, or None and its error
Report = Callable[[Callable[[], None]], None]  # has a callback run by the thread that polls


class JobThread(Thread):
    """Runs jobs one after the other, in the order they were given. `report`: see Report.

    `expected`: errors that jobs may have beside those of the state pool; others are logged.
    """

    def __init__(self, name: str, report: Report, *expected: type[Exception]) -> None:
        super().__init__(name=f"state {name}", daemon=True)
        self.report = report
        self._expected: tuple[type[Exception], ...] = (StoreError, SnapshotError, *expected)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def put(self, work: Callable[[], T], finished: Finished[T] | None = None) -> None:
        """Run `work`; `finished` is reported with its result or its error."""
        self._jobs.put(partial(self._run_job, work, finished))

    def discard(self, value: object) -> None:
        """Drop the caller's last reference on this thread: freeing tens of megabytes takes milliseconds."""
        self.put(partial(id, value))

    def close(self) -> None:
        """Returns when all jobs are done; of itself, when all others are."""
        self._jobs.put(None)
        if self is not current_thread():
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
            if not isinstance(raised, self._expected):
                log.exception("a job of the state pool failed")
            error = raised
        if finished:
            self.report(partial(finished, result, error))


class PoolThreads:
    """The threads of copies and of reads, and the callbacks of all that threads have done.

    `wake` is called, from any thread, when `poll` has something to do.
    """

    def __init__(self, wake: Callable[[], None], *, remote: bool = False) -> None:
        """remote: whether the database is; see SessionStore."""
        self._wake = wake
        self._callbacks: deque[Callable[[], None]] = deque()
        with ExitStack() as on_error:
            self.copier = JobThread("copies", self.report)
            on_error.callback(self.copier.close)
            self.reader = JobThread("reads", self.report)
            on_error.callback(self.reader.close)
            self.finder = JobThread("finds", self.report) if remote else None
            on_error.pop_all()

    def close(self) -> None:
        """End them."""
        for thread in (self.copier, self.reader, self.finder):
            if thread:
                thread.close()

    def report(self, callback: Callable[[], None]) -> None:
        """From any thread: run the callback in the next `poll`."""
        self._callbacks.append(callback)
        self._wake()

    def poll(self) -> None:
        """Run the callbacks of what has been done since the last call."""
        while self._callbacks:
            self._callbacks.popleft()()

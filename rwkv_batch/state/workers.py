"""The state pool's two threads: the mover carries out jobs in order, the writer commits whatever is queued in
one transaction.
"""

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

from rwkv_batch.state.snapshot import SnapshotError
from rwkv_batch.state.store import Delete, Put, Store, StoreBroken, StoreError, Volatile

log = logging.getLogger(__name__)

GROUP_BYTES = 256 << 20  # one transaction's states: the log cannot be shorter than that

Finish = Callable[[Any, Exception | None], None]  # takes a job's result or its error
Report = Callable[[Finish, Any, Exception | None], None]  # hands them over to the thread that asked


class Mover(Thread):
    """Runs jobs one after the other, in the order they were given."""

    def __init__(self, report: Report) -> None:
        super().__init__(name="state mover", daemon=True)
        self._report = report
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Finish] | None] = queue.SimpleQueue()
        self.start()

    def put(self, work: Callable[[], Any], finish: Finish) -> None:
        """`finish` is reported with what `work` returns or raises."""
        self._jobs.put((work, finish))

    def close(self) -> None:
        """Returns when all jobs are done."""
        self._jobs.put(None)
        self.join()

    def discard(self, value: object) -> None:
        """Let the caller's last reference go on this thread: giving tens of megabytes back to the system
        takes milliseconds.
        """
        self._jobs.put((partial(id, value), nothing))

    def run(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        """Do a job, and let go of it before waiting for another."""
        job = self._jobs.get()
        if job is None:
            return False
        work, finish = job
        try:
            result, error = work(), None
        except Exception as raised:
            if not isinstance(raised, StoreError | SnapshotError):
                log.exception("a job of the state pool failed")
            result, error = None, raised
        if finish is not nothing:
            self._report(finish, result, error)
        return True


def nothing(result: Any, error: Exception | None) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class _Item:
    operations: Sequence[Put | Delete]
    finish: Finish
    size: int


class Writer(Thread):
    """Commits operations in the order they were given. `renewed` is reported when the database was broken and
    a new one was begun.
    """

    def __init__(self, store: Store | Volatile, report: Report, renewed: Finish) -> None:
        super().__init__(name="state writer", daemon=True)
        self._store, self._report, self._renewed = store, report, renewed
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self.start()

    def put(self, operations: Sequence[Put | Delete], finish: Finish) -> None:
        self._items.put(
            _Item(operations, finish, sum(op.row.size for op in operations if isinstance(op, Put)))
        )

    def close(self) -> None:
        """Returns when all operations are done."""
        self._items.put(None)
        self.join()

    def run(self) -> None:
        last = False
        while not last:
            group: list[_Item] = []
            size = 0
            while item := self._items.get():
                group.append(item)
                size += item.size
                if size > GROUP_BYTES or self._items.empty():
                    break
            last = item is None
            if group:
                self._commit(group)

    def _commit(self, group: list[_Item], renew: bool = True) -> None:
        error: Exception | None = None
        try:
            self._store.commit([operation for item in group for operation in item.operations])
        except StoreBroken as broken:
            if renew and self._renew(broken):
                self._commit(group, renew=False)
                return
            error = broken
        except StoreError as failed:
            if len(group) > 1:  # some may fit where all together do not
                for item in group:
                    self._commit([item])
                return
            error = failed
        except Exception as unexpected:
            log.exception("the database could not be written")
            error = unexpected
        for item in group:
            self._report(item.finish, None, error)
        self._store.checkpoint(quiet=self._items.empty())

    def _renew(self, broken: StoreBroken) -> bool:
        try:
            self._store.restart()
        except (StoreError, OSError) as error:
            log.error("%s A new one cannot be begun: %s", broken, error)
            return False
        self._report(self._renewed, self._store.rows, None)
        return True

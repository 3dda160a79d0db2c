"""The thread that writes to the database: all that waits in one transaction."""

import logging
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread

from rwkv_batch.state.entries import Dangling, Operation, PutTurn, Removed, StoreBroken, StoreError
from rwkv_batch.state.jobs import Report
from rwkv_batch.state.log.store import Store

log = logging.getLogger(__name__)

Committed = Callable[[Removed | None, Exception | None], None]


@dataclass(frozen=True)
class _Commit:
    operations: Sequence[Operation]
    committed: Committed
    retry: bool  # until it succeeds, in front of what comes later


class Writer(Thread):
    """Commits operations in the order they were given: all that wait in one transaction.

    `renewed` is reported when the old database was broken and has been replaced.
    """

    def __init__(self, store: Store, report: Report, renewed: Callable[[], None]) -> None:
        super().__init__(name="state writer", daemon=True)
        self._store, self._report, self._renewed = store, report, renewed
        self._queue: queue.SimpleQueue[_Commit | None] = queue.SimpleQueue()
        self._failed: list[_Commit] = []  # to be tried again
        self._last_error = ""  # of the commit before, so that each is logged once
        self.counted = Counter(turns=0, transactions=0)  # that were committed
        self.start()

    def put(self, operations: Sequence[Operation], committed: Committed, retry: bool = False) -> None:
        """Commit them in one transaction, of which `committed` is reported with the outcome, or the error.

        With `retry` nobody waits for that: what fails is tried again with every later commit.
        """
        self._queue.put(_Commit(operations, committed, retry))

    def close(self) -> None:
        """Returns when all operations are done."""
        self._queue.put(None)
        self.join()

    def run(self) -> None:
        closing = False
        while not closing:
            group: list[_Commit] = []
            while commit := self._queue.get():
                group.append(commit)
                if self._queue.empty():
                    break
            closing = commit is None
            group = self._failed + group
            self._failed = []
            if group:
                self._commit(group)
        if self._failed:
            log.error("%d changes of sessions could not be stored and are lost.", len(self._failed))

    def _commit(self, group: list[_Commit], renew: bool = True) -> None:
        error: Exception | None = None
        removed: Sequence[Removed | None] = [None] * len(group)
        try:
            removed = self._store.commit([commit.operations for commit in group])
        except StoreBroken as broken:
            if renew and self._renew(broken):
                self._commit(group, renew=False)
                return
            error = broken
        except StoreError as failed:
            if len(group) > 1:  # some may fit where all together do not
                for commit in group:
                    self._commit([commit])
                return
            error = failed
        except Exception as unexpected:
            log.exception("the database could not be written")
            error = unexpected
        if not error:
            turns = (isinstance(operation, PutTurn) for commit in group for operation in commit.operations)
            self.counted.update(transactions=1, turns=sum(turns))
        if error and not isinstance(error, Dangling) and str(error) != self._last_error:
            again = ", which is tried again" if any(commit.retry for commit in group) else ""
            log.error("Changes of sessions could not be stored%s: %s", again, error)
        self._last_error = str(error) if error else ""
        for commit, its_removed in zip(group, removed, strict=True):
            # What this one builds on may be among those that have failed before it.
            hopeless = isinstance(error, Dangling) and not self._failed
            if error and commit.retry and not hopeless:
                self._failed.append(commit)
            else:
                self._report(partial(commit.committed, its_removed, error))
        self._store.checkpoint(quiet=self._queue.empty())

    def _renew(self, broken: StoreBroken) -> bool:
        """Replace the broken database; whether that succeeded."""
        try:
            self._store.restart()
        except (StoreError, OSError) as error:
            log.error("%s A new one cannot be begun: %s", broken, error)
            return False
        self._report(self._renewed)
        return True

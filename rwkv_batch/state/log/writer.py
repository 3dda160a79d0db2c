"""Group commit: all that waits in one transaction. `Writer` is a thread that does it for one process."""

import logging
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread

from rwkv_batch.state.entries import (
    DiskFailed,
    Operation,
    PutTurn,
    Refused,
    Removed,
    StoreAway,
    StoreBroken,
    StoreError,
)
from rwkv_batch.state.jobs import Report
from rwkv_batch.state.log.protocol import Committed, Outcome, SessionStore

AGAIN = 1.0  # seconds until what has failed is tried again, if nothing else is to be committed before

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """Operations of one transaction, and what is reported of it."""

    operations: Sequence[Operation]
    committed: Committed
    retry: bool  # until it succeeds or is refused, in front of what comes later


class GroupCommit:
    """Commits groups, and those once more that have failed. `renewed`: see SessionStore.commit_queue."""

    def __init__(self, store: SessionStore, report: Report, renewed: Callable[[], None]) -> None:
        self._store, self._report, self._renewed = store, report, renewed
        self.failed: list[Commit] = []  # to be tried again
        self._last_error = ""  # of the commit before, so that each is logged once
        self.counted = Counter(turns=0, transactions=0)  # that were committed

    def run(self, group: list[Commit]) -> None:
        """Commit these in one transaction, behind what has failed before."""
        group = self.failed + group
        self.failed = []
        if group:
            self._commit(group)

    def _commit(self, group: list[Commit], doubted: bool = True, renew: bool = True) -> None:
        """doubted: where damage is found it is tried again, as it may be the disk (sqlite.unreadable)."""
        error: Exception | None = None
        outcomes: Sequence[Outcome | None] = [None] * len(group)
        try:
            outcomes = self._store.commit([commit.operations for commit in group])
        except StoreBroken as broken:
            if doubted:
                self._commit(group, doubted=False)
                return
            if renew and self._renew(broken):
                self._commit(group, doubted=False, renew=False)
                return
            error = broken
        except StoreError as failed:
            # Some may fit where all together do not.
            away = isinstance(failed, StoreAway) and not isinstance(failed, DiskFailed)
            if len(group) > 1 and not away:
                for commit in group:
                    self._commit([commit])
                return
            error = failed
        except Exception as unexpected:
            log.exception("the database could not be written")
            error = unexpected
        if not error:
            self._count(group, outcomes)
        elif str(error) != self._last_error:
            again = ", which is tried again" if any(commit.retry for commit in group) else ""
            log.error("Changes of sessions could not be stored%s: %s", again, error)
        self._last_error = str(error) if error else ""
        for commit, outcome in zip(group, outcomes, strict=True):
            removed = outcome if isinstance(outcome, Removed) else None
            its_error = error or (outcome if isinstance(outcome, Refused) else None)
            # What this one builds on may be among those that have failed before it.
            hopeless = isinstance(its_error, Refused) and not self.failed
            if its_error and commit.retry and not hopeless:
                self.failed.append(commit)
            else:
                self._report(partial(commit.committed, removed, its_error))

    def _count(self, group: list[Commit], outcomes: Sequence[Outcome | None]) -> None:
        self.counted["transactions"] += 1
        self.counted["turns"] += sum(
            isinstance(operation, PutTurn)
            for commit, outcome in zip(group, outcomes, strict=True)
            if isinstance(outcome, Removed)
            for operation in commit.operations
        )

    def _renew(self, broken: StoreBroken) -> bool:
        """Replace the broken database; whether that succeeded."""
        try:
            self._store.restart()
        except (StoreError, OSError) as error:
            log.error("%s A new one cannot be begun: %s", broken, error)
            return False
        self._report(self._renewed)
        return True


class Writer(Thread):
    """Commits operations in the order they were given. See CommitQueue."""

    def __init__(self, store: SessionStore, report: Report, renewed: Callable[[], None]) -> None:
        super().__init__(name="state writer", daemon=True)
        self._store, self._commits = store, GroupCommit(store, report, renewed)
        self._queue: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        self.counted = self._commits.counted
        self.start()

    def put(self, operations: Sequence[Operation], committed: Committed, retry: bool = False) -> None:
        self._queue.put(Commit(operations, committed, retry))

    def close(self) -> None:
        self._queue.put(None)
        self.join()

    def run(self) -> None:
        closing = False
        while not closing:
            group: list[Commit] = []
            with suppress(queue.Empty):
                while not closing:
                    commit = self._queue.get(timeout=AGAIN if self._commits.failed else None)
                    if commit:
                        group.append(commit)
                    closing = commit is None
                    if self._queue.empty():
                        break
            self._commits.run(group)
            if group:
                self._store.checkpoint(quiet=self._queue.empty())
        if self._commits.failed:
            log.error("%d changes of sessions could not be stored and are lost.", len(self._commits.failed))

"""The database as an engine of several sees it: read directly, written to by one process for all of them."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event

from rwkv_batch.state.entries import (
    Conflict,
    Dangling,
    Operation,
    PutModel,
    PutTurn,
    Refused,
    Removed,
    StoreError,
)
from rwkv_batch.state.host.link import CLOSE_SECONDS, SILENT, Link
from rwkv_batch.state.jobs import Report
from rwkv_batch.state.log import turn_ids
from rwkv_batch.state.log.protocol import CommitQueue, Committed, Outcome
from rwkv_batch.state.log.reads import StoreConnection, StoreReads
from rwkv_batch.state.sql import sqlite, tables
from rwkv_batch.state.sql.claim import real_path

COMMIT_SECONDS = 30.0  # that a caller waits who cannot go on without a commit

log = logging.getLogger(__name__)


class HostStore(StoreReads):
    """A store that another process writes. Raises StoreError if that does not answer (service.py)."""

    shared = True

    def __init__(self, path: str | Path, address: str, limit: int | None = None) -> None:
        self.limit = limit
        place = real_path(path)
        super().__init__(place, *(StoreConnection(place, sqlite.connect_to_read) for _ in range(2)))
        self._renewed: Callable[[], None] = lambda: None
        self._file: tuple[int, int] | None = None  # device and inode of the file that is read
        self._link = Link(address, self._look)
        self._file = _identity(place)

    def model_id(self, fingerprint: str, vocabulary: int) -> int:
        """The id of a model in the database. Waits for a commit if it is not noted yet."""
        id_ = tables.id_of_model(fingerprint)
        query = "SELECT fingerprint, vocabulary FROM models WHERE id = ?"
        found = self._ask(self._reader, lambda db: db.execute(query, (id_,)).fetchone())
        if found is None or found[0] != fingerprint or found[1] < vocabulary:
            self.commit([[PutModel(fingerprint, vocabulary)]])
        return id_

    def turn_numbers(self) -> Iterator[int]:
        """Ids for new turns; see SessionStore."""
        return turn_ids.in_random_blocks(self._has_turns)

    def commit_queue(self, report: Report, renewed: Callable[[], None]) -> CommitQueue:
        """What a pool commits with; see SessionStore."""
        self._renewed = partial(report, renewed)
        return HostQueue(self._link, report)

    def commit(self, groups: Sequence[Sequence[Operation]]) -> list[Outcome]:
        """Carry out groups; see SessionStore.

        Of groups that fail for another reason than being refused, others may be done.
        """
        outcomes: list[Removed | Exception | None] = [None] * len(groups)
        waiting = Event()

        def done(place: int, removed: Removed | None, error: Exception | None) -> None:
            outcomes[place] = error or removed
            if None not in outcomes:
                waiting.set()

        for place, operations in enumerate(groups):
            self._link.put(operations, partial(done, place))
        if groups and not waiting.wait(COMMIT_SECONDS):
            raise StoreError(SILENT)
        found: list[Outcome] = []
        for outcome in outcomes:
            if not isinstance(outcome, Removed | Refused):
                raise outcome or StoreError("Nothing is known of a commit.")
            found.append(outcome)
        return found

    def checkpoint(self, quiet: bool) -> None:
        """The process that writes does that."""

    def restart(self) -> None:
        """The process that writes does that. Raises StoreError."""
        raise StoreError("Only the process that writes to the database can replace it.")

    def size(self) -> int:
        """Bytes of the database and of all images; see SessionStore."""
        return self._ask(self._reader, tables.size)

    def close(self) -> None:
        """End the use of the database; see SessionStore."""
        self._link.close()
        self._disconnect()

    def _has_turns(self, first: int, behind: int) -> bool:
        query = "SELECT 1 FROM turns WHERE id >= ? AND id < ? LIMIT 1"
        found = self._ask(self._finder, lambda db: db.execute(query, (first, behind)).fetchone())
        return found is not None

    def _look(self) -> None:
        """On the link's thread: read the file that has the name now."""
        assert self.path
        found = _identity(self.path)
        if found == self._file or found is None:
            return
        self._file = found
        self._disconnect()
        log.error("The database %s has been replaced, as it was damaged.", self.path)
        self._renewed()

    def _disconnect(self) -> None:
        with ExitStack() as nobody_else:
            for connection in (self._finder, self._reader):
                nobody_else.enter_context(connection.closed())


class HostQueue:
    """Commits to another process: many are under way together, each until it is on the disk."""

    def __init__(self, link: Link, report: Report) -> None:
        self._link, self._report = link, report
        self.counted = Counter(turns=0, transactions=0)

    def put(self, operations: Sequence[Operation], committed: Committed, retry: bool = False) -> None:
        turns = sum(isinstance(operation, PutTurn) for operation in operations)

        def done(removed: Removed | None, error: Exception | None) -> None:
            if not error:
                self.counted["turns"] += turns
            elif isinstance(error, Dangling):  # another engine has removed it
                error = Conflict("What this goes on from has been changed meanwhile; send the request again.")
            self._report(partial(committed, removed, error))

        self._link.put(operations, done, retry)

    def close(self) -> None:
        """Returns when all commits are done. The link goes on, for what the store commits at the end."""
        ended = Event()
        self._link.put([], lambda removed, error: ended.set())
        ended.wait(CLOSE_SECONDS)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:  # while it is replaced
        return None
    return found.st_dev, found.st_ino

"""Reads from a database on another machine what the pool's thread asks for next, which must not wait."""

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from rwkv_batch.state.entries import Done, StoreAway, StoreError, message
from rwkv_batch.state.jobs import JobThread
from rwkv_batch.state.log.protocol import SessionStore, Wanted

log = logging.getLogger(__name__)


class Refresher:
    """A thread of its own, which asks for all that waits together."""

    def __init__(self, store: SessionStore, thread: JobThread) -> None:
        self._store, self._thread = store, thread
        self._waiting: deque[tuple[Wanted, Done]] = deque()

    def put(self, wanted: Wanted, done: Done) -> None:
        """`done` is reported when it has been read."""
        self._waiting.append((wanted, done))
        self._thread.put(self._refresh)

    def close(self) -> None:
        """Returns when all has been read."""
        self._thread.close()

    def _refresh(self) -> None:
        together = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not together:  # it has been read with one before
            return
        self._read(together)

    def _read(self, together: Sequence[tuple[Wanted, Done]]) -> None:
        error: Exception | None = None
        try:
            self._store.refresh(Wanted.together([wanted for wanted, _ in together]))
        except Exception as failed:  # whoever waits must not wait for ever
            if len(together) > 1 and not isinstance(failed, StoreAway):  # which of them it is about
                for one in together:
                    self._read([one])
                return
            if not isinstance(failed, StoreError):
                log.exception("the database could not be read")
            error = failed
        for _, done in together:
            self._thread.report(partial(done, message(error)))

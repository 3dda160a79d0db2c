"""The way of states into the database: queued in order, committed by the writer, retried when that fails."""

import logging
from collections.abc import Callable, KeysView
from dataclasses import dataclass
from functools import partial

from rwkv_batch.state.entries import SESSIONS, Done, Image, Put, Row, message
from rwkv_batch.state.workers import Mover, Writer

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Write:
    """An image that is not in the database yet."""

    key: str
    image: Image
    done: Done | None  # None: has been called, or there is none
    dropped: bool = False  # its session has been deleted, or a newer state of it committed

    def put(self) -> Put:
        """The operation that commits it. Raises StoreError if there is no snapshot."""
        snapshot = self.image.whole()
        row = Row(self.image.updated, self.image.tokens, len(snapshot))
        return Put(SESSIONS, self.key, row, snapshot.numpy().data)

    def finish(self, error: Exception | None) -> None:
        """Call `done`, once."""
        done, self.done = self.done, None
        if done:
            done(message(error))


class Writeback:
    """Images that are not committed yet, by session. All methods are called by the pool's thread.

    `committed(key, row)` and `failed(key, image)` are called before the write's own callback. Up to `lag`
    images are done as soon as they are in host memory, the others when they are committed.
    """

    def __init__(
        self,
        mover: Mover,
        writer: Writer,
        lag: int,
        committed: Callable[[str, Row], None],
        failed: Callable[[str, Image], None],
    ) -> None:
        self._mover, self._writer, self._lag = mover, writer, lag
        self._on_commit, self._on_failure = committed, failed
        self._unwritten: dict[str, list[_Write]] = {}  # oldest first
        self._to_retry: list[_Write] = []  # done before their commit failed; retried after the next commit

    def __contains__(self, key: str) -> bool:
        return key in self._unwritten

    def keys(self) -> KeysView[str]:
        return self._unwritten.keys()

    def newest(self, key: str) -> Image | None:
        """The state that the session has once all its writes are done; None if there are none."""
        return self._unwritten[key][-1].image if key in self._unwritten else None

    def add(self, key: str, image: Image, done: Done | None) -> None:
        """Commit the image, whose snapshot is there when all of the mover's earlier jobs are done."""
        write = _Write(key, image, done)
        self._unwritten.setdefault(key, []).append(write)
        self._submit(write)

    def drop(self, key: str) -> None:
        """The session has been deleted: its writes have no effect, and are done without an error."""
        for write in self._unwritten.pop(key, []):
            write.dropped = True

    def unwritten(self) -> list[Put]:
        """What commits the newest state of each session, after both threads have ended."""
        newest = [writes[-1] for writes in self._unwritten.values()]
        return [write.put() for write in newest if write.image.snapshot is not None]

    def _submit(self, write: _Write) -> None:
        self._mover.put(partial(self._forward, write), partial(self._forwarded, write))

    def _forward(self, write: _Write) -> None:
        """On the mover's thread: hand over to the writer."""
        put = write.put()
        self._writer.put([] if write.dropped else [put], partial(self._committed, write, put.row))

    def _forwarded(self, write: _Write, _: None, error: Exception | None) -> None:
        if error:
            self._fail(write, error)
        elif sum(map(len, self._unwritten.values())) <= self._lag:
            write.finish(None)

    def _committed(self, write: _Write, row: Row, error: Exception | None) -> None:
        if error:
            self._fail(write, error)
        else:
            self._succeed(write, row)
        self._mover.discard(write.image)

    def _succeed(self, write: _Write, row: Row) -> None:
        if not write.dropped:
            writes = self._unwritten[write.key]
            for older in writes[: writes.index(write)]:  # they failed, and must not be written after this one
                older.dropped = True
                self._remove(older)
            self._remove(write)
            self._on_commit(write.key, row)
            self._retry()
        write.finish(None)

    def _fail(self, write: _Write, error: Exception) -> None:
        if write.dropped:
            write.finish(None)
        elif write.done is None:
            log.error("A session could not be written, which is tried again: %s", error)
            self._to_retry.append(write)
        else:
            self._remove(write)
            self._on_failure(write.key, write.image)
            write.finish(error)

    def _retry(self) -> None:
        """Submit the writes that failed before, but for those that a newer one of their session replaces."""
        writes, self._to_retry = self._to_retry, []
        for write in writes:
            if not write.dropped and self._unwritten[write.key][-1] is write:
                self._submit(write)
            elif not write.dropped:
                self._remove(write)

    def _remove(self, write: _Write) -> None:
        self._unwritten[write.key].remove(write)
        if not self._unwritten[write.key]:
            del self._unwritten[write.key]

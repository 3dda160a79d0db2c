"""The way of states into the database: handed over in order, answered when they are committed or before,
tried again when that fails.
"""

import logging
from collections.abc import Callable, KeysView
from functools import partial

from rwkv_batch.state.entries import Answer, Image, Write, put_of
from rwkv_batch.state.events import Event
from rwkv_batch.state.store import Put, Row
from rwkv_batch.state.workers import Mover, Writer

log = logging.getLogger(__name__)


class Writes:
    """Images that are not in the database yet, by session.

    All methods are called by the pool's thread. `tell` takes an event; `ended` a write that is over, and the
    row it has become or the error. Up to `behind` images are answered as soon as they are in host memory, the
    others when they are committed.
    """

    def __init__(
        self,
        mover: Mover,
        writer: Writer,
        behind: int,
        tell: Callable[[Event], None],
        ended: Callable[[Write, Row | None, Exception | None], None],
    ) -> None:
        self._mover, self._writer, self._behind, self._tell, self._ended = mover, writer, behind, tell, ended
        self._waiting: dict[str, list[Write]] = {}  # not committed yet, oldest first
        self._failed: list[
            Write
        ] = []  # answered, but their commit failed: tried again after the next that succeeds

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def keys(self) -> KeysView[str]:
        return self._waiting.keys()

    def newest(self, key: str) -> Image | None:
        """The state that the session has once all its writes are done; None if none is under way."""
        return self._waiting[key][-1].image if key in self._waiting else None

    def add(self, key: str, image: Image, answer: Answer | None) -> None:
        """Commit the image, whose snapshot is there when all jobs given before are done."""
        write = Write(key, image, answer)
        self._waiting.setdefault(key, []).append(write)
        self._send(write)

    def drop(self, key: str) -> None:
        """The session has been deleted: what is under way comes to nothing."""
        for write in self._waiting.pop(key, []):
            write.dropped = True

    def again(self) -> None:
        """Send the writes once more that failed before, unless there are newer ones of their sessions."""
        failed, self._failed = self._failed, []
        for write in failed:
            if not write.dropped and self._waiting[write.key][-1] is write:
                self._send(write)
            elif not write.dropped:
                self._waiting[write.key].remove(write)

    def rest(self) -> list[Put]:
        """What would commit the newest of each session, when both threads have ended."""
        return [
            put_of(writes[-1]) for writes in self._waiting.values() if writes[-1].image.snapshot is not None
        ]

    def _send(self, write: Write) -> None:
        self._mover.put(partial(self._forward, write), partial(self._forwarded, write))

    def _forwarded(self, write: Write, _: object, error: Exception | None) -> None:
        if error:
            self._over(write, None, error)
        elif write.answer and sum(map(len, self._waiting.values())) <= self._behind:
            self._tell(write.answer(None, []))
            write.answer = None

    def _committed(self, write: Write, row: Row, _: object, error: Exception | None) -> None:
        self._over(write, row, error)
        self._mover.discard(write.image)

    def _over(self, write: Write, row: Row | None, error: Exception | None) -> None:
        if error and not write.dropped and write.answer is None:
            log.error("A session could not be written, which is tried again: %s", error)
            self._failed.append(write)
            return
        if not write.dropped:
            self._remove(write, older=error is None)
        self._ended(write, row, error)

    def _remove(self, write: Write, older: bool) -> None:
        """It does not wait for the disk any more, nor do `older` ones of its session, which must not be
        written after it.
        """
        writes = self._waiting[write.key]
        at = writes.index(write)
        for passed in writes[:at] if older else []:
            passed.dropped = True
        self._waiting[write.key] = writes[at + 1 :] if older else writes[:at] + writes[at + 1 :]
        if not self._waiting[write.key]:
            del self._waiting[write.key]

    def _forward(self, write: Write) -> None:
        """On the mover's thread: hand over to the writer."""
        put = put_of(write)
        self._writer.put([] if write.dropped else [put], partial(self._committed, write, put.row))

"""Which states are stored as images, and what becomes of those that are."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from rwkv_batch.state import images
from rwkv_batch.state.entries import Head, Operation, PutImage, Removed, StoreError
from rwkv_batch.state.jobs import JobThread
from rwkv_batch.state.log.protocol import SessionStore
from rwkv_batch.state.pool.image_writer import ImageWriter
from rwkv_batch.state.pool.token_log import TokenLog
from rwkv_batch.state.snapshot import SnapshotLayout, seal

log = logging.getLogger(__name__)

MOST_LOST = 4096  # images that could not be stored, of which it is remembered
SHUTDOWN_SECONDS = 15.0  # for the images of what L1 and L2 hold


class ImageCache:
    """All methods are for the pool's thread. Where the store is in memory there are no images."""

    def __init__(
        self,
        store: SessionStore,
        layout: SnapshotLayout,
        replay_rate: float,
        token_log: TokenLog,
        copier: JobThread,
    ) -> None:
        """`replay_rate`: tokens a second that the model is fed when a session is replayed."""
        self._store, self._layout, self._log, self._copier = store, layout, token_log, copier
        self._folder: Path | None = store.images_folder
        self._writer: ImageWriter | None = None
        # Images that could not be stored, by their tokens: the tokens of the nearest image before. Two of as
        # many tokens cost one image too much, and nothing else.
        self._lost: dict[int, int] = {}
        self._last_error = ""  # of the image before
        self._held: dict[int, Tensor] = {}  # by turn
        if self._folder:
            known, alone = store.image_turns, not store.shared
            self._writer = ImageWriter(self._folder, layout, replay_rate, known, alone)

    def find(self, turn: int) -> Tensor | None:
        """An image that is not stored yet, or is held in memory. Also for other threads."""
        held = self._held.get(turn)
        return held if held is not None or self._writer is None else self._writer.find(turn)

    @property
    def stores(self) -> bool:
        """Whether images are written; otherwise there are those of `hold` alone."""
        return self._writer is not None

    def hold(self, turn: int, image: Tensor) -> None:
        """Hold the image in memory for as long as the turn is in the log."""
        self._held[turn] = image

    @property
    def waiting(self) -> int:
        """Images that are not stored yet."""
        return self._writer.waiting if self._writer else 0

    def note_read(self, size: int, seconds: float) -> None:
        """An image of so many bytes has been read."""
        if self._writer:
            self._writer.note_read(size, seconds)

    def worthwhile(self, head: Head) -> bool:
        """Whether the image would save more time than it takes to read."""
        head = self.known(head)
        return self._writer is not None and head.imaged < head.tokens and self._writer.worthwhile(head)

    def known(self, head: Head) -> Head:
        """The head without images that were under way when it was made, and could not be stored."""
        while head.imaged in self._lost:
            head = replace(head, imaged=self._lost[head.imaged])
        return head

    def offer(self, head: Head, image: Tensor | None) -> None:
        """Write the image of a turn's end behind."""
        if image is None or self._writer is None or self._log.awaits_its_state(head.turn):
            return

        def written(_: Head, error: StoreError | None) -> None:
            self._copier.report(partial(stored, error))

        def stored(error: StoreError | None) -> None:
            if error:
                if str(error) != self._last_error:  # once, as every turn of a long session tries again
                    log.warning("%s Sessions are kept all the same: their tokens are stored.", error)
                self._last_error = str(error)
                self._forget([head.turn])
                if head.imaged < head.tokens:
                    self._lost[head.tokens] = head.imaged
                    while len(self._lost) > MOST_LOST:
                        del self._lost[next(iter(self._lost))]
            else:
                self._lost.pop(head.tokens, None)
                self._last_error = ""
                self._log.commit(self._put(head), lambda _, error: self.stored([head.turn], bool(error)))

        self._writer.offer(head, image, written)

    def require(
        self, head: Head, image: Tensor, done: Callable[[Sequence[Operation], StoreError | None], None]
    ) -> None:
        """Store the image at once; `done` gets the operations that enter it, or the error."""
        if self._writer is None:
            done([], None)
            return

        def written(_: Head, error: StoreError | None) -> None:
            self._copier.report(lambda: done([] if error else self._put(head), error))

        self._writer.offer(head, image, written, required=True)

    def clean(self, removed: Removed) -> None:
        """Drop the images that belonged to rows that have been removed."""
        for turn in removed.turns:
            self._held.pop(turn, None)
        self._forget(removed.turns)
        self._remove(removed.images)

    def _remove(self, turns: Iterable[int]) -> None:
        if self._folder and (turns := [*turns]):
            self._copier.put(partial(images.remove, self._folder, turns))

    def stored(self, turns: Iterable[int], failed: bool = False) -> None:
        """The images of these turns are committed. failed: they are not, and their files go."""
        self._forget(turns)
        if failed:
            self._remove(turns)

    def close(self) -> None:
        """Write what is required and, while there is time, what waits."""
        if self._writer:
            self._writer.close(SHUTDOWN_SECONDS)

    def write_all(self, heads: Sequence[Head], state: Callable[[int], Tensor]) -> None:
        """At the end, on the calling thread: the images most worth writing, while there is time."""
        if self._folder is None:
            return
        written = self._write_most(self._folder, heads, state)
        operations = [operation for head in written for operation in self._put(head)]
        unwanted = [head.turn for head in written]  # whose files go
        try:
            if operations and isinstance(outcome := self._store.commit([operations])[0], Removed):
                unwanted = outcome.images
        except StoreError as error:
            log.warning("Images of sessions cannot be stored, whose tokens are: %s", error)
        images.remove(self._folder, unwanted)

    def _write_most(self, folder: Path, heads: Sequence[Head], state: Callable[[int], Tensor]) -> list[Head]:
        """Files for the most worth of these, while there is time and room."""
        wanted = sorted(filter(self.worthwhile, heads), key=lambda head: head.imaged - head.tokens)
        deadline, written = time.monotonic() + SHUTDOWN_SECONDS, list[Head]()
        try:
            for head in wanted:
                if time.monotonic() > deadline:
                    left = len(wanted) - len(written)
                    log.info("%d sessions will be brought back by feeding their tokens.", left)
                    break
                image = state(head.turn)
                seal(image, self._layout, head.tokens, time.time(), head.digest)
                images.write(images.prepared_folder(folder), head.turn, image)
                written.append(head)
        except OSError as error:
            log.warning("Images of sessions cannot be written, whose tokens are stored: %s", error)
        return written

    def _put(self, head: Head) -> list[Operation]:
        saves, size = head.tokens - head.imaged or head.tokens, self._layout.size
        image = PutImage(head.turn, head.model, head.tokens, saves, size, time.time())
        return [image, *self._log.shrink(size)]

    def _forget(self, turns: Iterable[int]) -> None:
        if self._writer:
            for turn in turns:
                self._writer.forget(turn)

"""The thread that writes images behind.

An image is a cache. It is written only if reading it back takes less time than feeding the tokens that it
saves, in the order of those savings, and with a bounded share of the disk's time.

The state of a turn whose past is unknown is in its image only. Such an image is `required`: it is written at
once, and on the disk before its row is committed.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rwkv_batch.disk.syncing import sync
from rwkv_batch.state import images
from rwkv_batch.state.entries import DiskFailed, Head, StoreError
from rwkv_batch.state.snapshot import SnapshotLayout, seal

SHARE = 0.5  # of its time, at most, the thread writes images that are not required
BACKLOG_BYTES = 1 << 30  # of images that wait; past it the least worth are not written
READ_RATE = 500e6  # bytes a second, until images have been read
LEFT_SECONDS = 86400.0  # of age, from which on no process can be writing a file that has no row yet

log = logging.getLogger(__name__)

Written = Callable[[Head, StoreError | None], None]


@dataclass(eq=False)
class _Waiting:
    head: Head
    image: Tensor
    required: bool
    written: Written
    begun: bool = False

    @property
    def worth(self) -> tuple[bool, int]:
        return self.required, self.head.tokens - self.head.imaged


class ImageWriter(threading.Thread):
    """Writes images behind. All methods are for the pool's thread; `written` is called on this thread."""

    def __init__(
        self,
        folder: Path,
        layout: SnapshotLayout,
        replay_rate: float,
        known: Callable[[], set[int]],
        alone: bool = True,
    ) -> None:
        """`replay_rate`: tokens a second that the model is fed when a session is replayed.

        `known`: the turns that have images in the database. Other files, left by processes that were killed,
        are removed; unless this one is `alone`, those that no process can be writing any more.
        """
        super().__init__(name="state images", daemon=True)
        self._known, self._age = known, 0.0 if alone else LEFT_SECONDS
        self._images, self._layout, self._replay_rate = folder, layout, replay_rate
        self.read_rate = READ_RATE
        self._waiting: dict[int, _Waiting] = {}
        self._changed = threading.Condition()
        self._closing = False
        self.start()

    def worthwhile(self, head: Head) -> bool:
        """Whether reading this image back is cheaper than feeding what it saves."""
        return (head.tokens - head.imaged) / self._replay_rate > self._layout.size / self.read_rate

    def offer(self, head: Head, image: Tensor, written: Written, required: bool = False) -> None:
        """Write the image (a snapshot, sealed or not) when its turn comes. It can be found meanwhile.

        An image for which there is no memory is given up, and its `written` called at once.
        """
        with self._changed:
            if head.turn in self._waiting:
                return
            self._waiting[head.turn] = _Waiting(head, image, required, written)
            while len(self._waiting) * self._layout.size > BACKLOG_BYTES:
                idle = [entry for entry in self._waiting.values() if not entry.begun and not entry.required]
                if not idle:
                    break
                least = min(idle, key=lambda entry: entry.worth)
                del self._waiting[least.head.turn]
                sentence = "More states wait to be written than there is memory for."
                least.written(least.head, StoreError(sentence))
            self._changed.notify()

    def find(self, turn: int) -> Tensor | None:
        """An image that waits to be written, or whose row is not committed yet."""
        entry = self._waiting.get(turn)
        return entry.image if entry else None

    @property
    def waiting(self) -> int:
        """Images that are not stored yet."""
        return len(self._waiting)

    def forget(self, turn: int) -> None:
        """Its row is committed, or nobody wants it any longer."""
        with self._changed:
            self._waiting.pop(turn, None)

    def note_read(self, size: int, seconds: float) -> None:
        """An image has been read; the rate that `worthwhile` reckons with follows."""
        self.read_rate += (size / max(seconds, 1e-6) - self.read_rate) / 4

    def close(self, seconds: float) -> int:
        """Write for so long what still waits, and all that is required; returns how many were not written."""
        with self._changed:
            self._closing, self._deadline = True, time.monotonic() + seconds
            self._changed.notify()
        self.join()
        return sum(1 for entry in self._waiting.values() if not entry.begun)

    def run(self) -> None:
        with suppress(StoreError):
            images.sweep(self._images, self._known, self._age)
        while entry := self._next():
            began = time.monotonic()
            error = self._write(entry)
            entry.written(entry.head, error)
            if not entry.required:
                with self._changed:
                    pause = (time.monotonic() - began) * (1 / SHARE - 1)
                    self._changed.wait_for(lambda: self._closing or self._required(), pause)

    def _next(self) -> _Waiting | None:
        """The image most worth writing; None when the thread is to end."""
        with self._changed:
            while True:
                idle = [entry for entry in self._waiting.values() if not entry.begun]
                if self._closing and time.monotonic() > self._deadline:
                    idle = [entry for entry in idle if entry.required]
                if idle:
                    entry = max(idle, key=lambda entry: entry.worth)
                    entry.begun = True
                    return entry
                if self._closing:
                    return None
                self._changed.wait()

    def _required(self) -> bool:
        return any(entry.required and not entry.begun for entry in self._waiting.values())

    def _write(self, entry: _Waiting) -> StoreError | None:
        head = entry.head
        try:
            seal(entry.image, self._layout, head.tokens, time.time(), head.digest)
            images.write(images.prepared_folder(self._images), head.turn, entry.image)
            if entry.required:
                sync(self._images)
        except OSError as error:
            return DiskFailed(
                f"A state could not be written to {self._images} ({error.strerror}); make room there."
            )
        except Exception as error:  # what waits for it must not wait for ever
            log.exception("a state could not be written")
            return StoreError(f"A state could not be written ({type(error).__name__}); try again.")
        return None

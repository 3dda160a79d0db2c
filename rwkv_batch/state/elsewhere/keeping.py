"""The thread that keeps a server's images in step with what other servers do.

- Images on this disk are copied to the store that servers share, if there is one.
- Objects there are removed when their turns have been, by any server, and when no server knows of them: one
  may have been killed while it wrote.
- Images on this disk of turns that other servers have removed are removed.
- What servers that were killed have left of deleted sessions is removed.

It has a connection to the database for itself, and nothing waits for it.
"""

import logging
import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from rwkv_batch.state import images
from rwkv_batch.state.elsewhere.image_index import ImageIndex
from rwkv_batch.state.elsewhere.objects import Objects
from rwkv_batch.state.elsewhere.whereabouts import Whereabouts
from rwkv_batch.state.entries import PutImage, RowDamaged, StoreAway, StoreError, Unread

MOST_WAITING = 1024  # images that wait to be copied; the oldest are left out
WRITE_SECONDS = 60.0  # for an object
REST = 10.0  # seconds without a try after one that has failed
SWEEP = 600.0  # seconds between two looks at what others have removed
SWEEP_ROWS = 3600.0  # at those that no server has noted
TOGETHER = 1000  # turns that are asked about together
LOOKED_AT = 10_000  # objects, about, of which some may be those that nobody knows
LIST_SECONDS = 60.0  # for their names

log = logging.getLogger(__name__)


class Keeper(threading.Thread):
    """`share`, `sweep` and `close` are for any thread.

    `objects`: None: no store is shared. `tidy`: removes what servers that were killed have left in the
    database; asked every SWEEP_ROWS. Raises StoreError.
    """

    def __init__(
        self,
        whereabouts: Whereabouts,
        index: ImageIndex,
        objects: Objects | None,
        tidy: Callable[[], object],
    ) -> None:
        super().__init__(name="state sharing", daemon=True)
        self._whereabouts, self._index, self._objects, self._tidy = whereabouts, index, objects, tidy
        self._waiting: OrderedDict[int, PutImage] = OrderedDict()
        self._changed = threading.Condition()
        self._sweeps, self._removes, self._works, self._closing = True, False, False, False
        self._swept = time.monotonic()
        self._last_error, self._rests_until = "", 0.0
        self._rows_swept = time.monotonic()
        self.start()

    def share(self, image: PutImage) -> None:
        """This image has been written to the disk."""
        if self._objects:
            with self._changed:
                self._waiting[image.turn] = image
                while len(self._waiting) > MOST_WAITING:
                    self._waiting.popitem(last=False)
                self._changed.notify_all()

    def removed(self) -> None:
        """Turns have been removed by this server: their objects can go."""
        if self._objects:
            with self._changed:
                self._removes = True
                self._changed.notify_all()

    def sweep(self) -> None:
        """Look now for what others have removed, which happens every SWEEP seconds."""
        with self._changed:
            self._sweeps = True
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Wait until nothing is left that can be done now; False: after so long there still is something."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._works or self._sweeps or self._removes or self._may_copy()), seconds
            )

    def close(self, seconds: float) -> None:
        """Copy for so long what waits, and end. Does not wait for a store that does not answer."""
        end = time.monotonic() + seconds
        if self._objects:
            self.settle(seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.join(max(0.1, end - time.monotonic()))

    def run(self) -> None:
        while True:
            with self._changed:
                self._works = False
                self._changed.notify_all()
                if not (self._closing or self._sweeps or self._removes or self._may_copy()):
                    now = time.monotonic()
                    until = self._rests_until if self._waiting else self._swept + SWEEP
                    self._changed.wait(min(SWEEP, max(0.01, until - now)))
                if self._closing:
                    return
                self._works = True
                self._sweeps |= time.monotonic() >= self._swept + SWEEP
                # What is deleted goes first: images may always be waiting.
                tidies = self._sweeps or self._removes
                image = next(iter(self._waiting.values())) if self._may_copy() and not tidies else None
                if image is None:
                    sweeps, self._sweeps, self._removes = self._sweeps, False, False
            try:
                if image:
                    self._copy(image)
                    with self._changed:
                        self._waiting.pop(image.turn, None)
                else:
                    if sweeps:
                        self._sweep()
                    self._remove_objects()
                self._last_error = ""
            except StoreError as error:
                self._rests_until = time.monotonic() + REST
                if str(error) != self._last_error:
                    log.warning("%s Sessions are kept all the same: their tokens are stored.", error)
                self._last_error = str(error)

    def _may_copy(self) -> bool:
        return bool(self._waiting) and time.monotonic() >= self._rests_until

    def _copy(self, image: PutImage) -> None:
        """Raises StoreError when the store or the database is away."""
        assert self._objects
        try:
            data = images.read(self._index.states, image.turn, pinned=False).numpy().tobytes()
        except Unread as error:
            with self._changed:
                if image.turn in self._waiting:
                    self._waiting.move_to_end(image.turn)
            reason = getattr(error.__cause__, "strerror", None) or error
            raise StoreAway(f"A state cannot be copied to the image store now ({reason}).") from error
        except RowDamaged:  # others have needed its room
            return
        if not self._whereabouts.begin(image.turn, self._objects.url, len(data)):
            return
        self._objects.write(image.turn, data, WRITE_SECONDS)
        if not self._whereabouts.finish(image.turn):  # who removes such objects may have been there before it
            self._objects.remove(image.turn, WRITE_SECONDS)
            self.removed()

    def _sweep(self) -> None:
        """Images on this disk whose turns others have removed. Raises StoreError."""
        self._swept = time.monotonic()
        turns = [*self._index.turns()]
        for first in range(0, len(turns), TOGETHER):
            removed = self._whereabouts.removed(turns[first : first + TOGETHER])
            images.remove(self._index.states, self._index.drop(removed))
        if time.monotonic() - self._rows_swept > SWEEP_ROWS:
            self._rows_swept = time.monotonic()
            self._tidy()
            self._whereabouts.sweep()
            self._adopt_objects()

    def _adopt_objects(self) -> None:
        """Have those removed of which no server knows. Each time another part of them is looked through."""
        if not self._objects:
            return
        url = self._objects.url
        parts = self._whereabouts.count(url) / LOOKED_AT
        digits = math.ceil(math.log10(parts)) if parts > 1 else 0
        part = str(random.randrange(10 ** (digits - 1), 10**digits)) if digits else ""
        try:
            turns = self._objects.turns(part, LIST_SECONDS)
        except StoreError as error:  # it may be one whose names nobody may list
            log.info("Whether there are objects that no server knows is not seen: %s", error)
            return
        for first in range(0, len(turns), TOGETHER):
            if found := self._whereabouts.adopt(turns[first : first + TOGETHER], url):
                log.info("%d objects of which no server knows are removed from the image store.", found)

    def _remove_objects(self) -> None:
        """Raises StoreError."""
        if not self._objects:
            return
        while turns := self._whereabouts.unwanted(self._objects.url):
            for turn in turns:
                self._objects.remove(turn, WRITE_SECONDS)
            self._whereabouts.forget(turns)

"""Start states: named states in which sequences begin, in place of that before any token.

Each is the end of a turn of no tokens, whose past is not known, under a session that is hidden. So what
begins in one has it as its past, and is brought back from there like any session. Its image is kept in
memory, and stays in the database until nothing refers to the turn.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rwkv_batch.state.entries import (
    EMPTY_DIGEST,
    HIDDEN,
    Done,
    Head,
    Session,
    Start,
    StoreError,
    Turn,
    message,
)
from rwkv_batch.state.jobs import JobThread
from rwkv_batch.state.log.documents import Documents
from rwkv_batch.state.log.sessions import Sessions
from rwkv_batch.state.pool.image_cache import ImageCache
from rwkv_batch.state.pool.resume import Resumer
from rwkv_batch.state.pool.session_files import StoreWithState
from rwkv_batch.state.pool.token_log import TokenLog
from rwkv_batch.state.slots import States
from rwkv_batch.state.snapshot import PREFIX, SnapshotError, Transfer, parts, seal

log = logging.getLogger(__name__)

KEY = f"{HIDDEN}start:"  # and a name: of the session, and of the document with its description
ON_DEVICE = 4  # states that are kept on the device too, those used last


@dataclass(frozen=True)
class StoredStart:
    """A start state. Two of one name and turn are the same."""

    name: str
    session: Session
    image: Tensor  # a snapshot in host memory
    description: bytes  # by whoever stored it

    @property
    def turn(self) -> int:
        return self.session.head.turn


class StartStates:
    """Methods and callbacks are like those of the pool that it belongs to."""

    def __init__(
        self,
        sessions: Sessions,
        log: TokenLog,
        documents: Documents,
        images: ImageCache,
        resumer: Resumer,
        states: States,
        transfer: Transfer,
        reader: JobThread,
        store_with_state: StoreWithState,
    ) -> None:
        """With those of this model that are stored. Raises StoreError."""
        self._sessions, self._log, self._documents, self._images = sessions, log, documents, images
        self._resumer, self._reader = resumer, reader
        self._states, self._transfer = states, transfer
        self._store_with_state = store_with_state
        self._device: dict[int, Tensor] = {}  # by turn, the least recently used first
        self._starts = {start.name: start for start in self._stored()}

    def names(self) -> list[str]:
        """In their order."""
        return sorted(self._starts)

    def find(self, name: str) -> StoredStart | None:
        """The start state of that name."""
        return self._starts.get(name)

    def digest(self, names: Sequence[str]) -> bytes:
        """What follows from the states of these names; empty if none of them is a start state."""
        found = [self._starts[name].session.head.digest if name in self._starts else b"" for name in names]
        return b"".join(digest or EMPTY_DIGEST for digest in found) if any(found) else b""

    def contents(self, start: StoredStart) -> Tensor:
        """The bytes of a slot that holds it, on the model's device."""
        held = self._device.pop(start.turn, None)
        if held is None:
            held = start.image[PREFIX:].to(self._states.device, non_blocking=True)
        self._device[start.turn] = held
        while len(self._device) > ON_DEVICE:
            del self._device[next(iter(self._device))]
        return held

    def put(
        self,
        name: str,
        read: Callable[[], tuple[Tensor, Tensor, bytes]],
        description: bytes,
        done: Callable[[Exception | None], None],
    ) -> None:
        """Store a start state in place of any older one of the name.

        `read`, run on the reading thread: shift `[layers, 2, C]`, wkv `[layers, heads, value, key]` and a
        digest of 16 bytes that follows from them. `done` gets what it raises: StoreError or SnapshotError.
        """

        def made(found: tuple[Tensor, bytes] | None, error: Exception | None) -> None:
            if found is None:
                done(error)
                return
            image, digest = found
            turn = replace(self._log.unknown_past(0), digest=digest)
            self._documents.put(KEY + name, description, lambda error: None)
            self._announce(name, turn, image, description, stored)

        def stored(error: str | None) -> None:
            done(StoreError(error) if error else None)

        self._reader.put(lambda: self._image(*read()), made)

    def describe(self, name: str, description: bytes, done: Done) -> None:
        """Give it another description."""
        self._starts[name] = replace(self._starts[name], description=description)
        self._documents.put(KEY + name, description, done)

    def remove(self, names: Sequence[str], done: Callable[[int, str | None], None]) -> None:
        """Forget the names; what has begun in these states goes on. `done` gets how many there were."""
        found = [name for name in names if self._starts.pop(name, None)]
        for name in found:
            self._documents.remove(KEY + name, lambda count, error: None)
        if found:
            keys = [KEY + name for name in found]
            self._log.delete(keys, lambda error: done(len(found), message(error)))
        else:
            self._reader.report(partial(done, 0, None))

    def store_again(self) -> None:
        """The database is a new one."""
        for start in self._starts.values():
            head = start.session.head
            turn = replace(self._log.unknown_past(0), id=head.turn, digest=head.digest)
            self._documents.put(KEY + start.name, start.description, lambda error: None)
            self._announce(start.name, turn, start.image, start.description, lambda error: None)

    def _announce(self, name: str, turn: Turn, image: Tensor, description: bytes, done: Done) -> None:
        session = self._log.announce(KEY + name, [turn], imaged=0)
        self._images.keep(turn.id, image)
        before = self._starts.get(name)
        self._starts[name] = start = StoredStart(name, session, image, description)

        def stored(error: str | None) -> None:
            if error and self._starts.get(name) is start:
                del self._starts[name]
                if before:
                    self._starts[name] = before
            done(error)

        self._store_with_state(session, [turn], session.head, stored, image)

    def _image(self, shift: Tensor, wkv: Tensor, digest: bytes) -> tuple[Tensor, bytes]:
        """A snapshot. Raises SnapshotError."""
        layout = self._transfer.layout
        image = torch.empty(layout.size, dtype=torch.uint8, pin_memory=self._transfer.pinned)
        for source, target in zip((shift, wkv), parts(image, layout), strict=True):
            target.copy_(source.flatten())
            if not target.isfinite().all():
                kind = str(target.dtype).removeprefix("torch.")
                raise SnapshotError(f"The state holds numbers that {kind} cannot; use --wkv fp32.")
        seal(image, layout, 0, time.time(), digest)
        return image, digest

    def _stored(self) -> list[StoredStart]:
        found = []
        for key in self._sessions.keys(KEY):
            session = self._sessions.find(key)
            if session is None or session.head.model != self._resumer.model.id:
                continue
            try:
                image = self._read(session.head)
                description = self._documents.read(key) or b""
            except (StoreError, SnapshotError) as error:
                log.error("The start state %s is lost: %s", key.removeprefix(KEY), error)
                continue
            self._images.keep(session.head.turn, image)
            found.append(StoredStart(key.removeprefix(KEY), session, image, description))
        return found

    def _read(self, head: Head) -> Tensor:
        """Raises StoreError, SnapshotError."""
        image = self._resumer.find(Start([], head.turn), head).image
        if image is None:
            raise StoreError("its image is missing")
        return image

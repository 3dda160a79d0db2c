"""Start states: named states in which rows begin, in place of that before any token.

Each is the end of a turn of no tokens, whose past is not known, under a session that is hidden. So what
begins in one has it as its past, and is brought back from there like any session. Its image is kept in
memory, and stays in the database until nothing refers to the turn.

A state may scale what rows read out of their states. Then its turn is one of an adapted model
(`AdaptedModels`), and what follows is, too.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rwkv_batch.ops.host_memory import pinned_if_possible
from rwkv_batch.ops.torch_ops import as_stored
from rwkv_batch.state.entries import (
    ANY,
    EMPTY_DIGEST,
    HIDDEN,
    UNKNOWN,
    Done,
    Head,
    Session,
    SessionAt,
    SnapshotError,
    Start,
    StoreAway,
    StoreError,
    Turn,
    Unread,
    as_error,
    message,
)
from rwkv_batch.state.pool.parts import PoolParts
from rwkv_batch.state.pool.session_files import StoreWithState
from rwkv_batch.state.snapshot import PREFIX, parts, seal
from rwkv_batch.state.starts.contents import Offsets, StartContents, StoredStart

log = logging.getLogger(__name__)

KEY = f"{HIDDEN}start:"  # and a name: of the session, and of the document with its description
OFFSETS = f"{HIDDEN}offsets:"  # and a digest: of the document with the numbers
ON_DEVICE = 4  # states that are kept on the device too, those used last


class StartStates:
    """Methods and callbacks are like those of the pool that it belongs to."""

    def __init__(self, parts: PoolParts, store_with_state: StoreWithState) -> None:
        """With those of this model that are stored. Raises StoreError."""
        self._parts, self._store_with_state = parts, store_with_state
        self._device: dict[int, Tensor] = {}  # by turn, the least recently used first
        self._coming: list[str] = []  # digests of offsets whose states are being stored
        self._unread: set[str] = set()  # names of those that could not be read when it was tried last
        self._starts = {start.name: start for start in self._stored()}

    def names(self) -> list[str]:
        """In their order."""
        if self._parts.store.shared:
            with suppress(StoreError):
                for key in self._parts.sessions.keys(KEY):
                    self._look_again(key.removeprefix(KEY))
            for name in [*self._starts]:
                self._look_again(name)
        for name in [*self._unread]:
            self._look_again(name)
        return sorted(self._starts)

    def find(self, name: str) -> StoredStart | None:
        """The start state of that name."""
        if self._parts.store.shared or name in self._unread:
            self._look_again(name)
        return self._starts.get(name)

    def digest(self, names: Sequence[str]) -> bytes:
        """What follows from the states of these names; empty if none of them is a start state."""
        starts = map(self.find, names)
        found = [start.session.head.digest if start else b"" for start in starts]
        return b"".join(digest or EMPTY_DIGEST for digest in found) if any(found) else b""

    def contents(self, start: StoredStart) -> Tensor:
        """The bytes of a slot that holds it, on the model's device."""
        held = self._device.pop(start.turn, None)
        if held is None:
            held = start.image[PREFIX:].to(self._parts.states.device, non_blocking=True)
        self._device[start.turn] = held
        while len(self._device) > ON_DEVICE:
            del self._device[next(iter(self._device))]
        return held

    def put(
        self,
        name: str,
        read: Callable[[], StartContents],
        description: bytes,
        done: Callable[[Exception | None], None],
    ) -> None:
        """Store a start state in place of any older one of the name.

        `read` runs on the reading thread. `done` gets what it raises: StoreError.
        """

        at = self._parts.sessions.at(KEY + name)

        def make() -> tuple[StartContents, Tensor, int | None]:
            contents = read()
            offsets = contents.offsets
            image = self._image(contents)
            return contents, image, self._parts.adapted.add(offsets.digest) if offsets else None

        def made(found: tuple[StartContents, Tensor, int | None] | None, error: Exception | None) -> None:
            if found is None:
                done(error)
                return
            contents, image, model = found
            turn = replace(self._parts.log.unknown_past(0, model), digest=contents.digest)
            announce = partial(self._announce, at, turn, image, description, contents.offsets, stored)

            def described(error: str | None) -> None:  # which it may not be without either
                if error:
                    stored(error)
                else:
                    announce()

            describe = partial(self._parts.documents.put, at.key, description, described)
            if contents.offsets is None:
                describe()
                return
            digest = contents.offsets.digest
            self._coming.append(digest)

            def stored_offsets(error: str | None) -> None:  # which the turn may not be without
                self._coming.remove(digest)
                if error:
                    stored(error)
                else:
                    describe()

            self._parts.documents.put(OFFSETS + digest, contents.offsets.data, stored_offsets)

        def stored(error: str | None) -> None:
            done(as_error(error))

        self._parts.threads.reader.put(make, made)

    def describe(self, name: str, description: bytes, done: Done) -> None:
        """Give it another description. After an error it has the one before."""
        before = self._starts[name]
        self._starts[name] = described = replace(before, description=description)

        def stored(error: str | None) -> None:
            if error and self._starts.get(name) is described:
                self._starts[name] = before
            done(error)

        self._parts.documents.put(KEY + name, description, stored)

    def remove(self, names: Sequence[str], done: Callable[[int, str | None], None]) -> None:
        """Forget the names; what has begun in these states goes on. `done` gets how many there were.

        After an error they are still there.
        """
        gone = {name: self._starts.pop(name) for name in names if self.find(name)}

        def deleted(error: Exception | None) -> None:
            if error:
                self._starts = gone | self._starts
            for name, start in gone.items() if not error else ():
                if name not in self._starts:  # again
                    self._parts.documents.drop(KEY + name)
                self._forget_offsets(start)
            done(0 if error else len(gone), message(error))

        if gone:
            self._parts.log.delete({KEY + name: start.turn for name, start in gone.items()}, deleted)
        else:
            self._parts.threads.reader.report(partial(done, 0, None))

    def store_again(self) -> None:
        """The database is a new one."""
        for start in self._starts.values():
            head = start.session.head
            model, offsets = None, start.offsets
            if offsets:
                model = self._parts.adapted.of(offsets.digest)
                self._parts.documents.put(OFFSETS + offsets.digest, offsets.data, lambda error: None)
            turn = replace(self._parts.log.unknown_past(0, model), id=head.turn, digest=head.digest)
            at = SessionAt(KEY + start.name, ANY)
            self._parts.documents.put(at.key, start.description, lambda error: None)
            self._announce(at, turn, start.image, start.description, offsets, lambda error: None)

    def _announce(
        self,
        at: SessionAt,
        turn: Turn,
        image: Tensor,
        description: bytes,
        offsets: Offsets | None,
        done: Done,
    ) -> None:
        name = at.key.removeprefix(KEY)
        session = self._parts.log.announce(at, [turn], imaged=0)
        self._parts.images.hold(turn.id, image)
        before = self._starts.get(name)
        self._starts[name] = start = StoredStart(name, session, image, description, offsets)

        def stored(error: str | None) -> None:
            if error and self._starts.get(name) is start:
                del self._starts[name]
                if before:
                    self._starts[name] = before
                if UNKNOWN not in error:
                    self._describe_again(name, before)
            elif not error and before:
                self._forget_offsets(before)
            done(error)

        self._store_with_state(session, [turn], session.head, stored, image)

    def _describe_again(self, name: str, start: StoredStart | None) -> None:
        """Another one of the name, which has been described already, could not be stored."""
        if start:
            self._parts.documents.put(KEY + name, start.description, lambda error: None)
        else:
            self._parts.documents.drop(KEY + name)

    def _forget_offsets(self, start: StoredStart) -> None:
        """Of one that is gone, if no other has the same."""
        used = [other.offsets.digest for other in self._starts.values() if other.offsets]
        if start.offsets and start.offsets.digest not in used + self._coming:
            self._parts.documents.drop(OFFSETS + start.offsets.digest)

    def _image(self, contents: StartContents) -> Tensor:
        """A snapshot."""
        layout = self._parts.transfer.layout
        pinned = self._parts.transfer.pinned
        image = pinned_if_possible(torch.empty, layout.size, dtype=torch.uint8, wanted=pinned)
        for source, target in zip((contents.shift, contents.wkv), parts(image, layout), strict=True):
            target.copy_(as_stored(source.flatten(), target.dtype))
        seal(image, layout, 0, time.time(), contents.digest)
        return image

    def _stored(self) -> list[StoredStart]:
        sessions = map(self._parts.sessions.find, self._parts.sessions.keys(KEY))
        return [start for session in sessions if session and (start := self._load(session))]

    def _look_again(self, name: str) -> None:
        """Another process may have stored another one under the name, described or removed it."""
        with suppress(StoreError):
            session, known = self._parts.sessions.find(KEY + name), self._starts.get(name)
            self._unread.discard(name)
            if known and session and known.turn == session.head.turn:
                description = self._parts.documents.read(KEY + name)
                if description is not None and description != known.description:
                    self._starts[name] = replace(known, description=description)
                return
            self._starts.pop(name, None)
            if session and (start := self._load(session)):
                self._starts[name] = start

    def _load(self, session: Session) -> StoredStart | None:
        """A start state of this model from the database; None if it is not whole, or another model's.

        One that cannot be read now is looked for again.
        """
        name = session.key.removeprefix(KEY)
        try:
            if not self._parts.adapted.is_of_this_model(session.head):
                return None
            offsets = self._offsets(session.head)
            image = self._read(session.head)
            description = self._parts.documents.read(session.key) or b""
        except (StoreAway, Unread) as error:
            log.error("The start state %s cannot be read now: %s", name, error)
            self._unread.add(name)
            return None
        except (StoreError, SnapshotError) as error:
            log.error("The start state %s is lost: %s", name, error)
            return None
        self._parts.images.hold(session.head.turn, image)
        return StoredStart(name, session, image, description, offsets)

    def _offsets(self, head: Head) -> Offsets | None:
        """Raises StoreError."""
        digest = self._parts.adapted.digest(head)
        if not digest:
            return None
        data = self._parts.documents.read(OFFSETS + digest)
        if data is None:
            raise StoreError("its time_offset is missing")
        shape = self._parts.states.shape
        numbers = torch.frombuffer(bytearray(data), dtype=torch.float32)
        offsets = Offsets(numbers.view(shape.layers, shape.width))
        if offsets.digest != digest:
            raise StoreError("its time_offset is damaged")
        self._parts.adapted.of(digest)
        return offsets

    def _read(self, head: Head) -> Tensor:
        """Raises StoreError, SnapshotError."""
        image = self._parts.resumer.find(Start([], head.turn), head).image
        if image is None:
            raise StoreError("its image is missing")
        return image

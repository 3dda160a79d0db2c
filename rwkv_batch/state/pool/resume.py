"""How a session is brought back: the nearest state before its end, and the tokens from there on."""

import logging
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from rwkv_batch.state import exported, images
from rwkv_batch.state.elsewhere.fetching import Elsewhere
from rwkv_batch.state.entries import (
    EMPTY_DIGEST,
    NONE,
    Head,
    NotInFile,
    RowDamaged,
    Session,
    SnapshotError,
    Start,
    StoreError,
    Turn,
    Unread,
    digest,
)
from rwkv_batch.state.exported import Imported, What
from rwkv_batch.state.log.adapted import AdaptedModels
from rwkv_batch.state.log.protocol import SessionStore
from rwkv_batch.state.snapshot import Damaged, Transfer, seal, tensor_from_bytes

log = logging.getLogger(__name__)

_OTHER_PAST = "A part of the session is stored damaged: it is not what came before the rest."


class Resumer:
    """Finds starts, on the reading thread. `held`: whether an upper tier has the state at a turn's end.

    `replay_rate`: tokens a second that the model is fed when a session is replayed.
    """

    def __init__(
        self,
        store: SessionStore,
        transfer: Transfer,
        served: AdaptedModels,
        held: Callable[[int], bool],
        replay_rate: float,
    ) -> None:
        self._store, self._transfer, self._served, self.model = store, transfer, served, served.plain
        self.held, self._replay_rate = held, replay_rate

    def find(self, start: Start, head: Head) -> Start:
        """Go back from a start to the nearest one with a state. `head`: where its turns end.

        Images that are damaged or missing are passed over with a warning. Raises StoreError, SnapshotError.
        """
        found = self._find_here(start, head)
        return (self._store.elsewhere and self._fetch(self._store.elsewhere, found)) or found

    def _fetch(self, elsewhere: Elsewhere, start: Start) -> Start | None:
        """A nearer start in a state of another server, if that is fetched sooner than the tokens are fed."""
        savings, places, tokens = dict[int, float](), dict[int, int](), len(start.tokens)
        for place, turn in enumerate(start.turns):  # the newest first
            if self._served.serves(turn.model):
                savings[turn.id], places[turn.id] = tokens / self._replay_rate, place
            tokens -= len(turn.tokens)
        for fetched in elsewhere.fetch(savings, self._transfer.layout.size):
            turn = start.turns[places[fetched.turn]]
            try:
                header, image = self._transfer.fitted(tensor_from_bytes(fetched.data))
                if header.digest != turn.digest:
                    raise RowDamaged("The state is not that of these tokens.")
            except (RowDamaged, SnapshotError) as error:
                log.warning("A state from %s is passed over: %s", fetched.source, error)
                if isinstance(error, RowDamaged | Damaged):  # otherwise it is only of another version
                    fetched.refuse()
                continue
            turns = start.turns[: places[fetched.turn]]
            return Start(turns, turn.id, image, unusable=start.unusable, fetched=True)
        return None

    def _find_here(self, start: Start, head: Head) -> Start:
        """In memory or on this server's disk. See `find`."""
        unusable: Exception | None = None
        while start.turn != NONE and not self.held(start.turn):
            try:
                start.image = self._image(start, head)
            except (RowDamaged, SnapshotError) as error:
                log.warning("An image is passed over, and tokens are fed in its place: %s", error)
                if isinstance(error, Unread):
                    start.unread = error
                else:
                    start.unusable.append(start.turn)
                unusable = error
            if start.image is not None:
                return start
            turn = self._read_turn(start, head)
            if not self._served.serves(turn.model):
                refusal = self._served.refusal(turn.model, turn.past_unknown)
                if refusal:
                    raise StoreError(refusal)
            if turn.past_unknown:
                raise unusable or RowDamaged("The session's state is missing, and its tokens are not known.")
            start.go_back(turn)
        self._check_beginning(start)
        return start

    def read_turns(self, start: Start, head: Head) -> list[Turn]:
        """All turns up to a head, the oldest first; `start` has the newest of them. Raises StoreError."""
        while start.turn != NONE:
            start.go_back(self._read_turn(start, head))
        self._check_beginning(start)
        return start.turns[::-1]

    def read_some_turns(self, start: Start, numbers: range) -> list[Turn]:
        """Turns with these numbers, the oldest first, without reading those before and behind them.

        `start` has the newest turns of the session. Raises StoreError.
        """
        newest = [turn for turn in reversed(start.turns) if turn.number in numbers]
        wanted = range(numbers.start, min(numbers.stop, newest[0].number if newest else numbers.stop))
        found = self._store.turn_ids(start.turn, wanted) if wanted and start.turn != NONE else []
        turns = [*map(self._store.read_turn, found), *newest]
        for before, turn in pairwise(turns):
            if digest(before.digest, turn.prompt, turn.completion) != turn.digest:
                raise RowDamaged(_OTHER_PAST)
        return turns

    def export(
        self,
        session: Session,
        start: Start,
        newest: Start,
        what: What,
        image: Tensor | None,
        kept: Callable[[int], Tensor | None],
    ) -> bytes:
        """A file with a session. Raises StoreError (NotInFile for what it does not have), SnapshotError.

        `newest`: its turns that are not committed. `image`: the state at `start`, if there is one. `kept`:
        the image at a turn's end, if it is in memory.
        """
        head = session.head
        turns = self.read_turns(newest, head)
        past_unknown, position = turns[0].past_unknown, head.tokens - len(start.tokens)
        if what == "state" or (what == "both" and past_unknown and len(turns) == 1):
            if self._served.digest(head):
                raise NotInFile(
                    f"An adapter made the session {session.key}, which a file of its state cannot say; "
                    "export its tokens."
                )
            if image is None or start.turns:
                raise start.unread or NotInFile(
                    f"The state at the end of {session.key} is not at hand; export its tokens, or continue "
                    "it first."
                )
            return self._sealed(image, position, session.updated)
        if what == "tokens" and past_unknown:
            raise NotInFile(f"The first tokens of {session.key} are not known; export it with its state.")
        if past_unknown and image is None:
            raise NotInFile(f"The state of {session.key} is not at hand at the moment; try again.")
        state = b"" if image is None else self._sealed(image, position, session.updated)
        beginning = b""
        if past_unknown and position > turns[0].end:
            beginning = self._beginning(session, turns[0], turns[1], kept(turns[0].id))
        model = (
            self._store.model(head.model)
            if image is None or self._served.serves(head.model)
            else (self.model.fingerprint, self.model.vocabulary)
        )
        position = position if state else 0
        return exported.encode(exported.from_turns(turns, model, position, state, beginning))

    def _beginning(self, session: Session, first: Turn, second: Turn, kept: Tensor | None) -> bytes:
        """The state in which the session begins, to which it can be taken back; none if it is lost.

        Raises NotInFile where nothing else would say that there was one, Unread.
        """
        image = kept
        try:
            if image is None:
                image = self._image(Start([second], first.id), session.head)
        except Unread:  # it is there, and a file without it could not be taken back to it
            raise
        except (RowDamaged, SnapshotError) as error:
            log.warning("The state in which %s begins is left out of a file: %s", session.key, error)
        if image is not None:
            return self._sealed(image, first.end, session.updated)
        if not first.end:
            raise NotInFile(
                f"The state in which {session.key} begins is not at hand; export it with what=state."
            )
        return b""

    def snapshot(self, turn: int, head: Head | None, image: Tensor | None, folder: Path | None) -> bytes:
        """The state at the end of a turn with a digest of its tokens, empty if it cannot be had.

        `image`: the state at `head`, from memory. Otherwise it is read from the folder of images.
        """
        if head is not None and image is not None:
            copy = image.clone()  # another thread may be writing it
            seal(copy, self._transfer.layout, head.tokens, time.time(), head.digest)
            return copy.numpy().tobytes()
        if folder is None:
            return b""
        try:
            return images.read(folder, turn, pinned=False).numpy().tobytes()
        except RowDamaged:
            return b""

    def read_file(self, data: bytes, tokens: bool) -> Imported:
        """A session from a file. Raises SnapshotError."""
        model = self.model.fingerprint, self.model.vocabulary
        return exported.read(data, self._transfer, model, any_model=self._served.any_model, tokens=tokens)

    def _sealed(self, image: Tensor, tokens: int, created: float) -> bytes:
        copy = image.clone()  # another thread may be writing it
        seal(copy, self._transfer.layout, tokens, created)
        return copy.numpy().tobytes()

    def _read_turn(self, start: Start, head: Head) -> Turn:
        """The turn that ends where the start is. Raises RowDamaged, StoreError."""
        turn = self._store.read_turn(start.turn)
        if not _follows(turn.digest, start, head):
            raise RowDamaged(_OTHER_PAST)
        return turn

    def _check_beginning(self, start: Start) -> None:
        """Raises RowDamaged if the first turn is not what its digest says, where that can be known."""
        if start.turn == NONE and start.turns and not start.turns[-1].past_unknown:
            first = start.turns[-1]
            if digest(EMPTY_DIGEST, first.prompt, first.completion) != first.digest:
                raise RowDamaged("The beginning of the session is stored damaged.")

    def _image(self, start: Start, head: Head) -> Tensor | None:
        """The image of the turn, None if there is none. Raises StoreError (RowDamaged), SnapshotError."""
        try:
            return self._read_image(start, head)
        except (RowDamaged, SnapshotError):
            if not self._store.fetch_image(start.turn):
                raise
            return self._read_image(start, head)

    def _read_image(self, start: Start, head: Head) -> Tensor | None:
        """Of this disk."""
        folder = self._store.images_folder
        if folder is None:
            return None
        model = self._store.image_model(start.turn)
        if model is None or not self._served.serves(model):
            return None
        began = time.perf_counter()
        header, image = self._transfer.fitted(images.read(folder, start.turn, self._transfer.pinned))
        if not _follows(header.digest, start, head):
            raise RowDamaged("The state is not that of these tokens.")
        start.read_seconds = time.perf_counter() - began
        return image


def _follows(end: bytes, start: Start, head: Head) -> bool:
    """Whether a turn with this digest is the one before those of the start, or is the head itself."""
    if not start.turns:
        return end == head.digest
    after = start.turns[-1]
    return digest(end, after.prompt, after.completion) == after.digest

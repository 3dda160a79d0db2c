"""Sessions out of files and into them (exported.py)."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from rwkv_batch.state import exported
from rwkv_batch.state.entries import Done, Head, Session, SessionAt, Start, StoreError, Turn, message
from rwkv_batch.state.exported import Imported, What
from rwkv_batch.state.pool.parts import PoolParts

StoreWithState = Callable[[Session, Sequence[Turn], Head, Done, Tensor | None], None]


class SessionFiles:
    """Methods and callbacks are like those of the pool that it belongs to."""

    def __init__(self, parts: PoolParts, store_with_state: StoreWithState) -> None:
        self._parts, self._store_with_state = parts, store_with_state

    def export(self, key: str, what: What, done: Callable[[bytes | None, Exception | None], None]) -> None:
        """`done` gets the session as a file, or None and the error.

        `what`: its tokens, its state, or its tokens and the nearest state that there is.
        """
        session = self._parts.sessions.find(key)
        if session is None:
            self._parts.threads.reader.report(partial(done, None, StoreError(f"There is no session {key}.")))
            return
        newest = self._parts.log.newest_turns(session.head)

        def write(start: Start, image: Tensor | None) -> None:
            kept = self._parts.images.find
            work = partial(self._parts.resumer.export, session, start, newest, what, image, kept)
            self._parts.threads.reader.put(work, done)

        def with_state(start: Start) -> None:
            if start.image is None and self._parts.tiers.tier(start.turn):
                self._parts.tiers.image(start.turn, partial(write, start))
            else:
                write(start, start.image if start.image is not None else self._parts.images.find(start.turn))

        def found(start: Start | None, error: Exception | None) -> None:
            if start is None:
                done(None, error)
            else:
                with_state(start)

        if what == "tokens":
            write(newest, None)
            return
        start = self._parts.log.newest_turns(session.head, self._parts.resumer.held)
        if self._parts.resumer.held(start.turn):
            with_state(start)
        else:
            self._parts.threads.reader.put(partial(self._parts.resumer.find, start, session.head), found)

    def state(self, turn: int, done: Callable[[bytes | None, Exception | None], None]) -> None:
        """`done` gets the state at a turn's end as a snapshot, for another server; empty: it is not here."""
        tiers, folder = self._parts.tiers, self._parts.store.images_folder

        def write(head: Head | None, image: Tensor | None) -> None:
            work = partial(self._parts.resumer.snapshot, turn, head, image, folder)
            self._parts.threads.reader.put(work, done)

        if (head := tiers.head(turn)) is not None:
            tiers.image(turn, partial(write, head))
        else:
            write(None, None)

    def import_(self, key: str, data: bytes, *, tokens: bool, done: Done) -> None:
        """Store an exported file as the session `key`, unless it is damaged or of another model.

        `tokens`: whether they may be stored; otherwise the file needs the state at its end.
        """
        at = self._parts.sessions.at(key)

        def checked(found: Imported | None, error: Exception | None) -> None:
            if found is None:
                done(message(error))
                return
            content, image, beginning = found
            log = self._parts.log
            turns = exported.to_turns(content, log.unknown_past(content.start), log.new_id)
            ends = [turn for turn in turns if turn.end == content.position]
            states = [] if beginning is None else [(turns[0], beginning)]
            if image is not None and ends:
                states.append((ends[-1], image))
            if states:
                self._store(at, turns, states, done)
            else:
                log.put_announced(log.announce(at, turns, imaged=0), turns, [], done)

        self._parts.threads.reader.put(partial(self._parts.resumer.read_file, data, tokens), checked)

    def _store(
        self, at: SessionAt, turns: Sequence[Turn], states: Sequence[tuple[Turn, Tensor]], done: Done
    ) -> None:
        """Store a session with the states at the ends of some turns, of which nothing replaces the first."""
        (first, needed), *later = states
        session = self._parts.log.announce(at, turns, first.end)
        if later and not self._parts.images.stores:
            self._parts.images.hold(first.id, needed)
        last, state = states[-1]
        if last.id == session.head.turn:
            self._parts.tiers.hold(at.key, session.head, state)

        def stored(error: str | None) -> None:
            for turn, image in later if not error else ():
                self._parts.images.offer(turn.head(first.end), image)
                self._parts.tiers.imaged(turn.id)
            done(error)

        self._store_with_state(session, turns, first.head(first.end), stored, needed)

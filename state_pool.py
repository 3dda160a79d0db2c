"""Sessions in three tiers: L1 slots of the device, L2 host memory, L3 a SQLite file and images beside it.

A session is its tokens, and a state is a cache of them (rwkv_batch/state/entries.py). A turn is stored when
its tokens are in the log; its state stays in its slot. A state leaves L1 and L2 when others have been used
more recently, and its image is written if feeding the tokens again would take longer than reading it.

All methods of `StatePool` are called by one thread, and none of them waits. Copies run on a thread of their
own, as do reads, commits and images; `poll` runs the callbacks of what they have done.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from torch import Tensor

from rwkv_batch.state.entries import (
    ANY,
    HIDDEN,
    NONE,
    UNKNOWN,
    Conflict,
    Done,
    DropImages,
    Head,
    KeptState,
    Loaded,
    Operation,
    Removed,
    RowDamaged,
    Session,
    SessionAt,
    SessionEntry,
    Start,
    Status,
    StoreError,
    Tier,
    Turn,
    Unread,
    ignore_result,
    message,
)
from rwkv_batch.state.jobs import PoolThreads
from rwkv_batch.state.log.adapted import AdaptedModels
from rwkv_batch.state.log.documents import Documents
from rwkv_batch.state.log.protocol import SessionStore, Wanted
from rwkv_batch.state.log.refreshing import Refresher
from rwkv_batch.state.log.sessions import Sessions
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.pool.image_cache import ImageCache
from rwkv_batch.state.pool.options import PoolOptions, PoolSlots
from rwkv_batch.state.pool.parts import PoolParts
from rwkv_batch.state.pool.resume import Resumer
from rwkv_batch.state.pool.savepoints import Savepoints
from rwkv_batch.state.pool.session_files import SessionFiles
from rwkv_batch.state.pool.state_copies import StateCopies
from rwkv_batch.state.pool.tiers import Tiers
from rwkv_batch.state.pool.token_log import TokenLog
from rwkv_batch.state.slots import States
from rwkv_batch.state.snapshot import Damaged, Transfer
from rwkv_batch.state.starts.start_states import StartStates

log = logging.getLogger(__name__)


class StatePool:
    """Sessions by key; `documents`: opaque bytes by key; `files`: exported sessions; `images`: stored states;
    `starts`: named states in which rows begin; `copies`: of slots; `savepoints`: of running turns;
    `adapted`: models by their adapters.

    A method's `done` is called once, inside a later `poll`. Its last argument is None or a sentence that says
    what failed.

    `model`: fingerprint and vocabulary; states of another one are refused. `store`: None keeps everything in
    memory; the pool closes it. `wake` is called, from any thread, when `poll` has something to do.
    """

    def __init__(
        self,
        states: States,
        model: tuple[str, int],
        *,
        slots: PoolSlots,
        options: PoolOptions,
        store: SessionStore | None,
        wake: Callable[[], None],
    ) -> None:
        self._states, self._model, self._slots, self.options = states, model, slots, options
        self._wake = wake
        self._counted: Counter[str] = Counter()  # over databases that it had before
        self._open(store)

    def attach(self, store: SessionStore | None) -> None:
        """Keep sessions in this database from now on; what was stored in the one before stays there."""
        if not self._closed:  # as after a database that could not be opened
            self.close()
            self._counted = self.counted
        self._open(store)

    def _open(self, store: SessionStore | None) -> None:
        self._closed = False
        store, states, options = store or Store(None), self._states, self.options
        transfer = Transfer(states, self._model[0])
        with ExitStack() as on_error:  # then no thread stays
            self._threads = threads = PoolThreads(self._wake, remote=store.remote)
            on_error.callback(threads.close)
            adapted = AdaptedModels(store, *self._model, options.replay_on_new_model)
            writer = store.commit_queue(threads.report, self._renewed)
            on_error.callback(writer.close)
            sessions = Sessions(store, threads.reader, writer)
            self._log = TokenLog(
                store,
                writer,
                sessions,
                adapted,
                durable=options.durable,
                clean=self._clean,
                report=threads.report,
            )
            self._tiers = Tiers(states, transfer, threads.copier, self._slots, self._left)
            images = ImageCache(store, transfer.layout, options.replay_rate, self._log, threads.copier)
            on_error.callback(images.close)
            self.parts = PoolParts(
                states=states,
                transfer=transfer,
                threads=threads,
                store=store,
                writer=writer,
                adapted=adapted,
                sessions=sessions,
                log=self._log,
                images=images,
                tiers=self._tiers,
                resumer=Resumer(store, transfer, adapted, self._held, options.replay_rate),
                refresher=Refresher(store, threads.finder) if threads.finder else None,
                documents=Documents(store, threads.reader, writer, texts=options.token_log or not store.path),
            )
            self.savepoints = Savepoints(states, self._tiers, self._comes_back, options.replay_rate)
            self.copies = StateCopies(states, transfer, threads.copier)
            self.files = SessionFiles(self.parts, self._store_with_state)
            self.starts = StartStates(self.parts, self._store_with_state)
            on_error.pop_all()

    @property
    def token_log(self) -> bool:
        return self.options.token_log

    @property
    def store(self) -> SessionStore:
        return self.parts.store

    @property
    def adapted(self) -> AdaptedModels:
        return self.parts.adapted

    @property
    def images(self) -> ImageCache:
        return self.parts.images

    @property
    def documents(self) -> Documents:
        return self.parts.documents

    # Sessions

    def refresh(self, wanted: Wanted, done: Done) -> None:
        """Read what `find` and others are asked for next, where the store is `remote`."""
        assert self.parts.refresher
        self.parts.refresher.put(wanted, done)

    def find(self, key: str) -> Session | None:
        """The session, None if there is none."""
        return self.parts.sessions.find(key)

    def find_request(self, request: bytes) -> tuple[str, Turn] | None:
        """The turn of this request (Turn.request), and the key of a session that ends with it."""
        return self._log.find_request(request)

    def tier(self, session: Session) -> Tier:
        """The fastest place that has the state at the session's end."""
        return self._tiers.tier(session.head.turn) or "L3"

    def keys(self, prefix: str) -> list[str]:
        """The keys of all sessions that begin with `prefix`."""
        return self.parts.sessions.keys(prefix)

    def status(
        self, after: str | None, limit: int | None, done: Callable[[Status | None, str | None], None]
    ) -> None:
        """`done` gets the sessions behind a key, in the order of their keys, at most so many.

        Without both all are listed, tier by tier: L1 and L2 from the least recently used, L3 from the newest.
        """

        def listed(found: list[Session], error: Exception | None) -> None:
            if error:
                done(None, message(error))
                return
            entries = [
                SessionEntry(s.key, s.head.turn, self.tier(s), s.updated, s.head.tokens) for s in found
            ]
            if after is None and limit is None:
                places = {turn: place for place, turn in enumerate(self._tiers.all_turns())}
                entries.sort(key=lambda entry: (entry.tier, places.get(entry.turn, -entry.updated)))
            count = partial(self.store.status, entries, self._tiers.turns("L1"), self._tiers.turns("L2"))
            self._threads.reader.put(count, lambda status, error: done(status, message(error)))

        self.parts.sessions.list(after, limit, listed)

    def turns(
        self, session: Session, numbers: range, done: Callable[[list[Turn] | None, str | None], None]
    ) -> None:
        """`done` gets the turns that have these numbers, the oldest first; number 0 is an unknown past.

        Where the session has been changed meanwhile and they are not there any more, the error is Moved.
        """
        known = range(max(numbers.start, 1), min(numbers.stop, session.head.number + 1))

        def found(turns: list[Turn] | None, error: Exception | None) -> None:
            try:
                if turns is None or len(turns) < len(known):
                    now = self.find(session.key)
                    if now is None or now.head.turn != session.head.turn:
                        sentence = f"The session {session.key} has been changed meanwhile."
                        turns, error = None, Conflict(sentence)
            except StoreError as unread:
                turns, error = None, error or unread
            done(turns, message(error))

        read = partial(self.parts.resumer.read_some_turns, self._log.newest_turns(session.head), numbers)
        self._threads.reader.put(read, found)

    def settled(self, keys: Sequence[str], done: Callable[[], None]) -> bool:
        """Whether no change of these sessions waits for its commit; otherwise `done` is called after that."""
        if not self.parts.sessions.changing(keys):
            return True
        self.parts.writer.put([], lambda removed, error: done())
        return False

    def undecided(self, key: str) -> bool:
        """Whether the session is being deleted, or made to end with another turn, which may be refused still.

        What is stored under another key because of that would stay. A new turn that is refused takes those
        behind it along.
        """
        return self._log.undecided(key)

    def at(self, key: str) -> SessionAt:
        """The session as a change finds it that begins now."""
        return self.parts.sessions.at(key)

    def point(self, at: SessionAt, head: Head, done: Done) -> None:
        """Let a session end where another one does, or with an earlier turn; nothing is copied."""
        self._tiers.share(head.turn)
        self._log.point(at, head, done)

    def delete(self, key: str, prefix: bool, done: Callable[[int, str | None], None]) -> None:
        """Remove the session, with `prefix` also all whose keys start with "{key}:".

        What other sessions have in common with it stays theirs. `done` gets how many there were, when it is
        committed. After an error they are still there.
        """
        if self.parts.sessions.deleting(key, prefix):  # what is not committed may be refused
            self.parts.writer.put([], lambda removed, error: self.delete(key, prefix, done))
            return
        try:
            wanted = {key, *(self.keys(f"{key}:") if prefix else ())}
            ends = {name: session.head.turn for name in sorted(wanted) if (session := self.find(name))}
        except StoreError as error:
            self._threads.report(partial(done, 0, message(error)))
            return
        if ends:
            self._log.delete(ends, lambda error: done(len(ends), message(error)))
        else:
            self._threads.report(partial(done, 0, None))

    # Turns

    def pin(self, head: Head) -> None:
        """The caller continues from here: until `unpin` the turn stays in the log, though sessions go."""
        self._log.pin(head.turn)

    def unpin(self, head: Head) -> None:
        """Undo one `pin`; call it as often."""
        self._log.unpin(head.turn)
        self._tiers.rest(head.turn)

    def begin(self, head: Head, last: bool) -> tuple[Tensor, Head] | None:
        """The bytes of the state at this head, to be copied at once, if L1 has it; None: `load` it.

        last: before `unpin` it is wanted again only if the turn fails. With the bytes comes the head, with
        what is known of its images.
        """
        known = self._tiers.head(head.turn) or head
        state = self._tiers.begin(head.turn, last and self._comes_back)
        return None if state is None else (state, known)

    def load(self, session: Session, slot: int, done: Callable[[Loaded | None, str | None], None]) -> None:
        """Fill a slot of the caller's with a state of the session's past, the nearest there is to its end.

        The slot must not be used until then. After an error its contents are undefined.
        """
        start = self._log.newest_turns(session.head, self._held)
        if start.turn == NONE or self._held(start.turn):
            return self._restore(session, start, slot, done)

        def found(nearer: Start | None, error: Exception | None) -> None:
            if nearer is None:
                if self.store.shared and (moved := self._changed_elsewhere(session)):
                    error = moved
                self._delete_damaged(session, error)
                done(None, message(error))
            else:
                self._restore(session, nearer, slot, done)

        self._threads.reader.put(partial(self.parts.resumer.find, start, session.head), found)

    def commit(
        self,
        at: SessionAt,
        parent: Head | None,
        prompt: Sequence[int],
        completion: Sequence[int],
        done: Done,
        model: int | None = None,
        request: bytes = b"",
    ) -> Head:
        """A turn of a session has ended; `parent`: what it continued, None: the beginning.

        The session ends with it from now on. After an error it ends where it did before; if it has been
        changed by others since `at`, with what they have stored.
        """
        turn = self._log.new_turn(parent, prompt, completion, model, request)
        head = turn.head(parent.imaged if parent else 0)
        self._log.put(at, turn, head, done)
        return head

    def keep(self, states: Sequence[KeptState]) -> None:
        """The caller's slots hold the states at the ends of sessions; the slots are L1's from now on."""
        self._states.flush([state.slot for state in states])
        for state in states:
            head = self.images.known(state.head)
            self._tiers.keep(state.key, head, state.slot, state.before)
            if self.store.images_folder and head.tokens - head.imaged >= self.options.replay_tokens:
                self._tiers.image(head.turn, partial(self.images.offer, head))
                self._tiers.imaged(head.turn)

    def save(self, at: SessionAt, slot: int, tokens: int, done: Done, model: int | None = None) -> None:
        """The caller's slot holds the state of a session whose tokens are not to be stored.

        After an error the session is what was stored last.
        """
        self._states.flush([slot])
        turn = self._log.unknown_past(tokens, model)
        session = self._log.announce(at, [turn], tokens)
        self._tiers.keep(at.key, session.head, slot, NONE)
        self._tiers.image(turn.id, partial(self._store_with_state, session, [turn], session.head, done))

    # The loop

    @property
    def counted(self) -> Counter[str]:
        """What has been committed (`turns`, `transactions`), and states copied `to_host` and `to_device`."""
        return self._counted + self.parts.writer.counted + self.parts.transfer.counted

    def poll(self) -> None:
        """Run the callbacks of what has been done since the last call."""
        self._threads.poll()

    def close(self) -> None:
        """Store what is not stored yet, and stop all threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.parts.refresher:
            self.parts.refresher.close()
        for thread in (self._threads.copier, self.images, self.parts.writer, self._threads.reader):
            thread.close()
            self.poll()
        heads = [head for turn in self._tiers.all_turns() if (head := self._tiers.head(turn))]
        self.images.write_all(heads, self._tiers.image_now)
        self.store.close()

    def close_soon(self, before: Callable[[], None]) -> None:
        """Call `before` and close, on a thread of the pool, where nobody else has it. Waits for nothing."""
        self._threads.copier.put(before)
        self._threads.copier.put(self.close)

    # States

    @property
    def _comes_back(self) -> bool:
        """Whether a state can be had again without L1 and L2."""
        return self.options.token_log or self.store.images_folder is not None

    def _held(self, turn: int) -> bool:
        """Whether the state at a turn's end is in memory. Also for other threads, which look again."""
        return self._tiers.tier(turn) is not None or self.images.find(turn) is not None

    def _restore(
        self, session: Session, start: Start, slot: int, done: Callable[[Loaded | None, str | None], None]
    ) -> None:
        """Fill the slot with the start's state."""
        try:
            self._fill(session, start, slot, done)
        except Exception as error:
            log.exception("the state of a session could not be brought to a slot")
            self._threads.report(partial(done, None, message(error)))

    def _fill(
        self, session: Session, start: Start, slot: int, done: Callable[[Loaded | None, str | None], None]
    ) -> None:
        if start.unusable:
            self._log.commit([DropImages(start.unusable)])
        replay, known = start.tokens, self._tiers.head(start.turn)
        position = session.head.tokens - len(replay)
        stored = start.image is not None and not start.fetched
        imaged = position if stored else known.imaged if known else 0
        loaded = Loaded(replace(session.head, imaged=imaged), replay)

        def restored(error: Exception | None) -> None:
            done(None if error else loaded, message(error))

        if start.image is not None:
            if stored:
                self.images.note_read(len(start.image), start.read_seconds)
            if not replay:
                self._tiers.hold(session.key, loaded.head, start.image)
            self._copy_in(start.image, slot, restored)
        elif start.turn == NONE:
            self._states.clear([slot])
            self._threads.report(partial(restored, None))
        elif not self._tiers.copy(start.turn, slot, restored):
            if (waiting := self.images.find(start.turn)) is not None:
                self._copy_in(waiting, slot, restored)
            else:  # it has left memory meanwhile
                self.load(session, slot, done)

    def _copy_in(self, image: Tensor, slot: int, done: Callable[[Exception | None], None]) -> None:
        work = partial(self.parts.transfer.restore, image, self._states.access(slot))
        self._threads.copier.put(work, lambda _, error: done(error))

    def _left(self, key: str, head: Head, image: Tensor) -> None:
        """A state has left L2."""
        if self.images.worthwhile(head):
            self.images.offer(head, image)
        elif head.number == 0 and self.store.images_folder is None:  # nothing can bring it back
            session = self.find(key)
            if session and session.head.turn == head.turn:
                self._log.delete({key: head.turn}, lambda error: None)

    def _store_with_state(
        self, session: Session, turns: Sequence[Turn], head: Head, done: Done, image: Tensor | None
    ) -> None:
        """Store an announced session with the state at `head`; None: the copy of it has failed."""
        finish = done if self.options.durable else ignore_result

        def written(operations: Sequence[Operation], error: StoreError | None) -> None:
            if error:
                self._log.lose(session, turns, error)
                finish(message(error))
            else:
                self._log.put_announced(session, turns, operations, committed)

        def committed(error: str | None) -> None:
            self.images.stored([head.turn], failed=bool(error) and UNKNOWN not in str(error))
            finish(error)

        if image is None:
            error = StoreError("The session's state could not be copied into memory.")
            self._log.lose(session, turns, error)
            done(message(error))
            return
        self.images.require(head, image, written)
        if not self.options.durable:
            self._threads.report(partial(done, None))

    # The database

    def _clean(self, removed: Removed) -> None:
        """Drop what belonged to rows that have been removed."""
        # What is pinned has its tokens still; without them nothing else could bring its state back.
        self._tiers.drop(removed.turns + (removed.pinned if self.options.token_log else []))
        self.images.clean(removed)

    def _changed_elsewhere(self, session: Session) -> Conflict | None:
        """Why its turns are not found: they have been removed by another process."""
        with suppress(StoreError):
            if self.find(session.key) != session:
                key = session.key.removeprefix(HIDDEN)
                return Conflict(f"The session {key} has been changed meanwhile; send the request again.")
        return None

    def _delete_damaged(self, session: Session, error: Exception | None) -> None:
        """Delete a session that cannot be continued because of damage, if it is still the same.

        Not on another machine, where what this server does not find may be there all the same.
        """
        if self.store.remote or isinstance(error, Unread):
            return
        with suppress(StoreError):  # then the next turn finds the damage again
            if isinstance(error, RowDamaged | Damaged) and self.find(session.key) == session:
                log.error("The session %s is lost: %s", session.key.removeprefix(HIDDEN), error)
                self._log.delete({session.key: session.head.turn}, lambda error: None)

    def _renewed(self) -> None:
        """The database was broken and is replaced. Store once more what is in memory and not in it."""
        self.adapted.note_again()
        self.starts.store_again()
        for key, head in self._tiers.contents().items():
            if not self._log.is_stored(head.turn):
                continue
            with suppress(StoreError):
                if self.store.find_session(key):  # it is whole, and may be further on by another engine
                    continue
            try:
                self.store.read_turn(head.turn)
            except StoreError:
                past = self._log.unknown_past(head.tokens, head.model)
                turn = replace(past, id=head.turn, digest=head.digest)
                session = self._log.announce(SessionAt(key, ANY), [turn], head.tokens)
                self._tiers.image(
                    head.turn, partial(self._store_with_state, session, [turn], head, ignore_result)
                )

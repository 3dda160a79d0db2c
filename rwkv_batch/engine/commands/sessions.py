"""Session commands: what front ends do with stored sessions and documents outside of turns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.rows.rows import Refusal
from rwkv_batch.engine.rows.stored_turns import Turns
from rwkv_batch.state.entries import (
    Head,
    Moved,
    NotInFile,
    Session,
    SessionAt,
    Status,
    StoreError,
    Turn,
    Unavailable,
    message,
)
from rwkv_batch.wire.commands import (
    DeleteSession,
    ExportSession,
    FetchState,
    ForkSession,
    GetDocument,
    ImportSession,
    ListDocuments,
    ListSessions,
    PutDocument,
    RemoveDocument,
    RewindSession,
    SessionCommand,
    SessionHistory,
)
from rwkv_batch.wire.protocol import RequestKey, SessionInfo, TurnInfo


class SessionCommands:
    """Carries commands out. Their replies are events, at once or from a later `StatePool.poll`."""

    def __init__(self, parts: EngineParts, turns: Turns) -> None:
        self._pool, self._scheduler, self._rows = parts.pool, parts.scheduler, parts.rows
        self._turns, self._tokenizer = turns, parts.tokenizer

    def run(self, request: RequestKey, command: SessionCommand) -> None:
        repeat = partial(self._repeat, request, command)
        match command:  # who has a turn's answer may go on from it at once
            case ForkSession(target=key) | RewindSession(key=key) | ImportSession(key=key):
                if not self._turns.over(key, repeat):
                    return
        match command:
            case ForkSession() | RewindSession() | SessionHistory() | ExportSession():
                keys = [command.key, command.target] if isinstance(command, ForkSession) else [command.key]
                if not self._pool.settled(keys, repeat):
                    return  # what is not committed may be refused: nobody is told of it
                session = self._pool.find(command.key)
                if session is None:
                    raise Refusal("not_found", f"There is no session {command.key}.")
                self._run_on(session, request, command)
            case ImportSession(key=key, data=data):
                done = partial(self._imported, request, key)
                with self._locking(key):
                    self._pool.files.import_(key, data, tokens=self._pool.token_log, done=done)
            case DeleteSession(key=key, prefix=prefix):
                begun = self._turns.discard(key, prefix)

                def deleted(found: int, error: str | None) -> None:
                    self._rows.reply(request, error, found=found + begun)

                self._pool.delete(key, prefix, deleted)
            case FetchState(turn=turn):
                self._pool.files.state(turn, partial(self._exported, request))
            case ListSessions(after=after, limit=limit):
                self._pool.status(after, limit, partial(self._listed, request))
            case PutDocument(key=key, data=data):
                self._pool.documents.put(key, data, partial(self._rows.reply, request))
            case GetDocument(key=key):
                self._pool.documents.get(
                    key, lambda data, error: self._rows.reply(request, error, data=data or b"")
                )
            case RemoveDocument(key=key):
                self._pool.documents.remove(
                    key, lambda found, error: self._rows.reply(request, error, found=found)
                )
            case ListDocuments(prefix=prefix):
                self._pool.documents.keys(
                    prefix, lambda keys, error: self._rows.reply(request, error, keys=keys)
                )

    def _run_on(
        self,
        session: Session,
        request: RequestKey,
        command: ForkSession | RewindSession | SessionHistory | ExportSession,
    ) -> None:
        match command:
            case ForkSession(turn=int(number)) | RewindSession(turn=number) if number and (
                reason := self._no_turns(session)
            ):
                raise Refusal("conflict", f"There is no turn {number} in {session.key}: {reason}.")
            case SessionHistory() if not self._pool.token_log and (reason := self._no_turns(session)):
                raise Refusal("conflict", f"There is no history of {session.key}: {reason}.")
            case ExportSession(what="tokens") if reason := self._no_turns(session):
                sentence = f"There are no tokens of {session.key}: {reason}; export it with its state."
                raise Refusal("conflict", sentence)
            case ForkSession(target=target, replace=False) if self._pool.find(target):
                raise Refusal("exists", f"There is a session {target} already.")
            case ForkSession(target=target, turn=number):
                with self._locking(target):
                    at = self._pool.at(target)
                    if number is None:
                        self._point(request, at, session.head)
                    else:
                        self._find_turn(request, session, number, at)
            case RewindSession(key=key, turn=number):
                with self._locking(key):
                    self._find_turn(request, session, number, SessionAt(key, session.head.turn))
            case SessionHistory(after=after, limit=limit):
                last = session.head.number if limit is None else min(session.head.number, after + limit)
                numbers = range(after + 1, last + 1)
                self._pool.turns(session, numbers, partial(self._send_turns, request, session, command))
            case ExportSession(key=key, what=what):
                self._pool.files.export(key, what, partial(self._exported, request))

    def _no_turns(self, session: Session) -> str | None:
        """Why nothing is known of the session but a state; None: there are turns, or it has just begun."""
        if session.head.number or not session.head.tokens:
            return None
        if self._pool.token_log:
            return "it is known as a state, without its turns"
        return "the server stores states in place of turns (--no-token-log)"

    def _find_turn(self, request: RequestKey, session: Session, number: int, at: SessionAt) -> None:
        """Let the session `at`, which is locked, end with the session's turn of this number."""
        target = at.key

        def found(turns: list[Turn] | None, error: str | None) -> None:
            if turns is None:
                self._unlock(target, partial(self._rows.reply, request), error)
                return
            if turns and not (turns[0].past_unknown and turns[0].end):  # a start state has no tokens
                imaged = session.head.imaged
                self._point(request, at, turns[0].head(imaged if imaged <= turns[0].end else 0))
            elif number == 0:
                self._pool.delete(
                    target,
                    False,
                    lambda _, error: self._unlock(target, partial(self._rows.reply, request), error),
                )
            else:
                self._scheduler.unlock(target)
                sentence = f"There is no turn {number} in {session.key}, which has {session.head.number}."
                self._rows.reply(request, Refusal("not_found", sentence))

        self._pool.turns(session, range(number, number + 1), found)

    def _point(self, request: RequestKey, at: SessionAt, head: Head) -> None:
        """Let the session `at`, which is locked, end with this turn."""
        done = partial(self._rows.reply, request, position=head.tokens)
        self._pool.point(at, head, partial(self._unlock, at.key, done))

    def _send_turns(
        self,
        request: RequestKey,
        session: Session,
        command: SessionHistory,
        turns: list[Turn] | None,
        error: str | None,
    ) -> None:
        if isinstance(error, Moved):  # it is another one now, or gone
            self._repeat(request, command)
            return
        infos = [
            TurnInfo(
                turn.number,
                turn.start,
                turn.end,
                self._tokenizer.decode(turn.prompt),
                self._tokenizer.decode(turn.completion),
                list(turn.prompt),
                list(turn.completion),
                turn.created,
            )
            for turn in turns or []
        ]
        found = {"position": session.head.tokens, "turns": infos, "updated": session.updated}
        self._rows.reply(request, error, **found)

    def _repeat(self, request: RequestKey, command: SessionCommand) -> None:
        try:
            self.run(request, command)
        except (Refusal, StoreError) as error:
            self._rows.reply(request, error)

    def _exported(self, request: RequestKey, data: bytes | None, error: Exception | None) -> None:
        why = Refusal("conflict", str(error)) if isinstance(error, NotInFile) else message(error)
        self._rows.reply(request, why, data=data or b"")

    def _imported(self, request: RequestKey, key: str, error: str | None) -> None:
        self._scheduler.unlock(key)
        why: str | Refusal | None = error
        if error and not isinstance(error, Moved | Unavailable):
            why = Refusal("invalid", error)
        self._rows.reply(request, why)

    def _listed(self, request: RequestKey, status: Status | None, error: str | None) -> None:
        if status is None:
            self._rows.reply(request, error)
            return
        sessions = [SessionInfo(s.key, s.tier, s.updated, s.tokens) for s in status.sessions]
        self._rows.reply(request, None, sessions=sessions, total=status.total, l1=status.l1, l2=status.l2)

    @contextmanager
    def _locking(self, key: str) -> Iterator[None]:
        """Keep turns of the session waiting until `_unlock`, which follows unless what is inside raises.

        Raises Refusal if a turn is under way.
        """
        if key in self._scheduler.queues:
            raise Refusal("overloaded", "That session is busy with a turn or a copy; try again in a moment.")
        self._scheduler.lock(key)
        try:
            yield
        except BaseException:  # as where the database cannot be read
            self._scheduler.unlock(key)
            raise

    def _unlock(self, key: str, done: Callable[[str | None], None], error: str | None) -> None:
        self._scheduler.unlock(key)
        done(error)

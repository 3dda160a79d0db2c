"""Session commands: what front ends do with stored sessions and documents outside of turns."""

from functools import partial

from rwkv_batch.engine.scheduler import Scheduler
from rwkv_batch.engine.sequence import Outbox, RequestKey
from rwkv_batch.engine.turns import Turns
from rwkv_batch.wire.protocol import (
    DeleteSession,
    ExportSession,
    Failed,
    ForkSession,
    GetDocument,
    ImportSession,
    ListSessions,
    PutDocument,
    Rejected,
    RemoveDocument,
    SessionCommand,
    SessionInfo,
    SessionReply,
)
from state_pool import StatePool


class SessionCommands:
    """Carries commands out. Their replies go to the outbox, at once or from a later `StatePool.poll`."""

    def __init__(self, pool: StatePool, scheduler: Scheduler, turns: Turns, outbox: Outbox) -> None:
        self._pool, self._scheduler, self._turns, self._outbox = pool, scheduler, turns, outbox

    def run(self, request: RequestKey, command: SessionCommand) -> None:
        match command:
            case ForkSession(target=key) | ImportSession(key=key) if key in self._scheduler.queues:
                message = "That session is busy with a turn or a copy; try again in a moment."
                self._reject(request, "overloaded", message)
            case ForkSession(key=key) | ExportSession(key=key) if self._pool.find(key) is None:
                self._reject(request, "not_found", f"There is no session {key}.")
            case ForkSession(target=key, replace=False) if self._pool.find(key):
                self._reject(request, "exists", f"There is a session {key} already.")
            case ForkSession(key=key, target=target):
                self._scheduler.lock(target)
                self._pool.fork(key, target, partial(self._forked, request, target))
            case ImportSession(key=key, data=data):
                self._scheduler.lock(key)
                self._pool.import_(key, data, partial(self._imported, request, key))
            case ExportSession(key=key):
                self._pool.export(key, lambda data, error: self._reply(request, error, data=data))
            case DeleteSession(key=key, prefix=prefix):
                self._turns.discard(key, prefix)
                self._pool.delete(key, prefix, lambda found, error: self._reply(request, error, found))
            case ListSessions():
                sessions = [SessionInfo(s.key, s.tier, s.updated, s.tokens) for s in self._pool.status()]
                self._outbox.append((request, SessionReply(request[1], sessions=sessions)))
            case PutDocument(key=key, data=data):
                self._pool.documents.put(key, data, partial(self._reply, request))
            case GetDocument(key=key):
                self._pool.documents.get(key, lambda data, error: self._reply(request, error, data=data))
            case RemoveDocument(key=key):
                self._pool.documents.remove(key, lambda found, error: self._reply(request, error, found))

    def _forked(self, request: RequestKey, target: str, error: str | None) -> None:
        self._scheduler.unlock(target)
        self._reply(request, error)

    def _imported(self, request: RequestKey, key: str, error: str | None) -> None:
        self._scheduler.unlock(key)
        if error:
            self._reject(request, "invalid", error)
        else:
            self._reply(request, None)

    def _reject(self, request: RequestKey, reason: str, message: str) -> None:
        self._outbox.append((request, Rejected(request[1], reason, message)))

    def _reply(
        self, request: RequestKey, error: str | None, found: int = 0, data: bytes | None = None
    ) -> None:
        reply = SessionReply(request[1], found=found, data=data or b"")
        self._outbox.append((request, Failed(request[1], error) if error else reply))

"""What has just been read of sessions, for callers that must not wait for the database.

It was read for a request that has arrived. What this server commits from then on is read again. What others
commit is noticed when the request's turn is committed, which is refused then.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Generic, TypeVar

from rwkv_batch.state.entries import (
    REQUEST_ID,
    DeleteSessions,
    Operation,
    PutSession,
    PutTurn,
    RemoveDocuments,
    Session,
    StoreDocument,
    Turn,
)
from rwkv_batch.state.log.protocol import Wanted

SECONDS = 10.0  # for which what was read counts

T = TypeVar("T")


class _Values(Generic[T]):
    """By key, with the time at which they were read, the oldest first."""

    def __init__(self) -> None:
        self._values: dict[str | bytes, tuple[float, T]] = {}

    def put(self, key: str | bytes, value: T) -> None:
        now = time.monotonic()
        self._values.pop(key, None)
        self._values[key] = now, value
        while (oldest := next(iter(self._values))) and self._values[oldest][0] < now - SECONDS:
            del self._values[oldest]

    def get(self, key: str | bytes) -> tuple[T] | None:
        """The value; None: it is not known."""
        found = self._values.get(key)
        return (found[1],) if found and found[0] >= time.monotonic() - SECONDS else None

    def drop(self, key: str | bytes) -> None:
        self._values.pop(key, None)

    def clear(self) -> None:
        self._values.clear()


class RecentReads:
    """For any thread. Each method returns what is known in a tuple, and None if nothing is."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sessions: _Values[Session | None] = _Values()
        self._lists: _Values[list[Session]] = _Values()  # of all that begin with a prefix
        self._documents: _Values[bytes | None] = _Values()
        self._requests: _Values[tuple[str, Turn] | None] = _Values()
        self._changed: set[str | bytes] = set()  # what is committed while something is read

    def session(self, key: str) -> tuple[Session | None] | None:
        """Of a key."""
        with self._lock:
            known = self._sessions.get(key)
            if known is None and any(self._lists.get(prefix) for prefix in prefixes(key)):
                return (None,)  # which the list would have had
            return known

    def sessions(self, prefix: str) -> tuple[list[Session]] | None:
        """Of all keys that begin with it."""
        with self._lock:
            return self._lists.get(prefix)

    def document(self, key: str) -> tuple[bytes | None] | None:
        """Of a key."""
        with self._lock:
            return self._documents.get(key)

    def request(self, request: bytes) -> tuple[tuple[str, Turn] | None] | None:
        """The turn of a request."""
        with self._lock:
            return self._requests.get(request[:REQUEST_ID])

    def forget(self) -> None:
        """All of it is read again."""
        with self._lock:
            for values in (self._sessions, self._lists, self._documents, self._requests):
                values.clear()

    def begin(self) -> None:
        """Something is going to be read; `put` follows. One at a time."""
        with self._lock:
            self._changed.clear()

    def put(
        self,
        wanted: Wanted,
        sessions: Mapping[str, Session],
        lists: Mapping[str, Sequence[Session]],
        documents: Mapping[str, bytes | None],
        requests: Mapping[bytes, tuple[str, Turn] | None],
    ) -> None:
        """It has been read. What has been committed meanwhile may have come too late for that."""
        with self._lock:
            for key in self._unchanged(wanted.keys):
                self._sessions.put(key, sessions.get(key))
            for prefix, found in lists.items():
                if not any(isinstance(key, str) and key.startswith(prefix) for key in self._changed):
                    self._lists.put(prefix, list(found))
                    for session in found:
                        self._sessions.put(session.key, session)
            for key in self._unchanged(documents):
                self._documents.put(key, documents[key])
            for request, turn in requests.items():
                if request not in self._changed:
                    self._requests.put(request, turn)

    def changing(self, operations: Iterable[Operation]) -> None:
        """These are going to be committed, or have been: what they change is read again."""
        with self._lock:
            for operation in operations:
                match operation:
                    case PutSession(session=session):
                        self._change(session.key)
                    case DeleteSessions(keys=keys):
                        for key in keys:
                            self._change(key)
                    case StoreDocument(key=key):
                        self._changed.add(key)
                        self._documents.drop(key)
                    case RemoveDocuments(keys=keys):
                        self._changed.update(keys)
                        for key in keys:
                            self._documents.drop(key)
                    case PutTurn(turn=turn) if turn.request:
                        self._changed.add(turn.request[:REQUEST_ID])
                        self._requests.drop(turn.request[:REQUEST_ID])

    def _unchanged(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self._changed]

    def _change(self, key: str) -> None:
        self._changed.add(key)
        self._sessions.drop(key)
        for prefix in prefixes(key):
            self._lists.drop(prefix)


def prefixes(key: str) -> list[str]:
    """With which lists are asked for that have the key in them."""
    return [key[: place + 1] for place, letter in enumerate(key) if letter == ":"]

"""Documents: opaque bytes by key, in the same database as the sessions and unrelated to them."""

import time
from collections.abc import Callable
from functools import partial

from rwkv_batch.state.entries import (
    Done,
    Removed,
    RemoveDocuments,
    RowDamaged,
    StoreDocument,
    Unread,
    message,
)
from rwkv_batch.state.jobs import JobThread
from rwkv_batch.state.log.protocol import CommitQueue, SessionStore


class Documents:
    """Methods and callbacks are like those of the pool that it belongs to.

    `texts`: whether they may hold what users wrote.
    """

    def __init__(self, store: SessionStore, reader: JobThread, writer: CommitQueue, texts: bool) -> None:
        self._store, self._reader, self._writer, self.texts = store, reader, writer, texts

    def put(self, key: str, data: bytes, done: Done) -> None:
        """Store the bytes in place of any older ones; `done` when they are committed."""
        self._writer.put([StoreDocument(key, time.time(), data)], lambda _, error: done(message(error)))

    def get(self, key: str, done: Callable[[bytes | None, str | None], None]) -> None:
        """`done` gets the bytes, None if there is no such document, and the error."""

        def read(data: bytes | None, error: Exception | None) -> None:
            if isinstance(error, RowDamaged) and not isinstance(error, Unread):
                self._writer.put([RemoveDocuments([key], damaged=True)], lambda removed, error: None)
            done(data, message(error))

        self._reader.put(partial(self._store.read_document, key), read)

    def read(self, key: str) -> bytes | None:
        """The bytes, at once. Raises StoreError."""
        return self._store.read_document(key)

    def remove(self, key: str, done: Callable[[int, str | None], None]) -> None:
        """`done` gets how many documents there were, when the removal is committed, and the error."""

        def committed(removed: Removed | None, error: Exception | None) -> None:
            done(removed.documents if removed else 0, message(error))

        self._writer.put([RemoveDocuments([key])], committed)

    def drop(self, key: str) -> None:
        """Remove it, which nobody waits for: it is tried until it succeeds."""
        self._writer.put([RemoveDocuments([key])], lambda removed, error: None, retry=True)

    def keys(self, prefix: str, done: Callable[[list[str], str | None], None]) -> None:
        """`done` gets the keys that begin with `prefix`, which is not empty, in their order."""
        list_keys = partial(self._store.document_keys, prefix)
        self._reader.put(list_keys, lambda keys, error: done(keys or [], message(error)))

"""Documents: opaque bytes by key, in the same database as the sessions and unrelated to them."""

import time
from collections.abc import Callable
from functools import partial

from rwkv_batch.state.catalog import Catalog
from rwkv_batch.state.entries import Done, message
from rwkv_batch.state.memory_store import MemoryStore
from rwkv_batch.state.rows import DOCUMENTS, Delete, Put, Row, RowDamaged
from rwkv_batch.state.store import Store
from rwkv_batch.state.workers import Mover


class Documents:
    """Methods and callbacks like those of the pool that it belongs to."""

    def __init__(self, store: Store | MemoryStore, catalog: Catalog, mover: Mover) -> None:
        self._store, self._catalog, self._mover = store, catalog, mover

    def put(self, key: str, data: bytes, done: Done) -> None:
        """Store the bytes in place of any older ones; `done` when they are committed."""
        row = Row(time.time(), 0, len(data))

        def committed(error: Exception | None) -> None:
            if error is None:
                self._catalog.add(DOCUMENTS, key, row)
            done(message(error))

        self._catalog.commit([Put(DOCUMENTS, key, row, data)], committed)

    def get(self, key: str, done: Callable[[bytes | None, str | None], None]) -> None:
        """`done` gets the bytes, None if there is no such document, and the error."""
        self._catalog.touch(DOCUMENTS, key)

        def read(data: bytes | None, error: Exception | None) -> None:
            if isinstance(error, RowDamaged) and self._catalog.get(DOCUMENTS, key):
                self._catalog.delete(DOCUMENTS, [key])
            done(data, message(error))

        self._mover.put(partial(self._read, key), read)

    def remove(self, key: str, done: Callable[[int, str | None], None]) -> None:
        """`done` gets how many documents there were, when the removal is committed, and the error."""

        def committed(error: Exception | None) -> None:
            found = error is None and self._catalog.remove(DOCUMENTS, key)
            done(int(found), message(error))

        self._catalog.commit([Delete(DOCUMENTS, [key])], committed)

    def _read(self, key: str) -> bytes | None:
        """On the mover's thread."""
        data = self._store.read(DOCUMENTS, key)
        return None if data is None else data.numpy().tobytes()

"""The store of a server without a database."""

from collections.abc import Sequence

from torch import Tensor

from rwkv_batch.state.rows import DOCUMENTS, Operation, Put, Tables
from rwkv_batch.state.snapshot import tensor_from_bytes


class MemoryStore:
    """Keeps documents, in memory, and no sessions. The same interface as `Store`."""

    keeps_sessions = False
    limit = None

    def __init__(self) -> None:
        self.rows: Tables = {}
        self._documents: dict[str, Tensor] = {}

    def commit(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if operation.table != DOCUMENTS:
                continue
            if isinstance(operation, Put):
                self._documents[operation.key] = tensor_from_bytes(operation.data)
            else:
                for key in operation.keys:
                    self._documents.pop(key, None)

    def read(self, table: str, key: str, pinned: bool = False) -> Tensor | None:
        return self._documents.get(key) if table == DOCUMENTS else None

    def checkpoint(self, quiet: bool) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

"""What the state pool and its database hold of sessions and documents, and what can go wrong with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rwkv_batch.state.snapshot import SnapshotError

Done = Callable[[str | None], None]  # called once, with None or with a sentence that says what failed

TABLES = SESSIONS, DOCUMENTS = "sessions", "documents"


class StoreError(Exception):
    """The store cannot be used, or an operation failed; the message is one sentence."""


class StoreBroken(StoreError):
    """The file itself is damaged, so that nothing can be written to it."""


class RowDamaged(StoreError):
    """One row cannot be read."""


@dataclass(frozen=True)
class Row:
    """What is known of a stored session or document without reading it."""

    updated: float  # seconds since 1970
    tokens: int  # that a session's state has seen
    size: int  # bytes of its data


@dataclass(frozen=True)
class Put:
    """Write a row in place of any older one. `data`: a contiguous run of bytes."""

    table: str
    key: str
    row: Row
    data: bytes | memoryview


@dataclass(frozen=True)
class Delete:
    """Delete rows; missing ones are ignored."""

    table: str
    keys: Sequence[str]


Operation = Put | Delete
Tables = dict[str, dict[str, Row]]  # rows by table and key


@dataclass(frozen=True)
class SessionEntry:
    """A session in a list of them."""

    key: str
    tier: Literal["L1", "L2", "L3"]  # the fastest place that has it
    updated: float  # seconds since 1970
    tokens: int  # that its state has seen


@dataclass(eq=False)
class Image:
    """A state in host memory. It never changes once the snapshot is there, so that sessions may share it."""

    tokens: int
    updated: float
    snapshot: Tensor | None = None  # filled in by the mover

    def whole(self) -> Tensor:
        """The snapshot, on the mover's thread. Raises StoreError if the copy into it has failed."""
        if self.snapshot is None:
            raise StoreError("The session's state could not be copied into memory.")
        return self.snapshot


@dataclass(eq=False)
class L1Entry:
    """A session that holds a slot of the device."""

    slot: int
    image: Image
    copies: int = 0  # in flight; the slot may not change before they are done
    evicted: bool = False  # has left L1: the slot is freed after the last copy


def written_bytes(operations: Sequence[Operation]) -> int:
    """Bytes of all rows that the operations write."""
    return sum(operation.row.size for operation in operations if isinstance(operation, Put))


def message(error: Exception | None) -> str | None:
    """The sentence that a client gets about an error."""
    if error is None or isinstance(error, StoreError | SnapshotError):
        return str(error) if error else None
    return f"The session's state could not be moved ({type(error).__name__})."

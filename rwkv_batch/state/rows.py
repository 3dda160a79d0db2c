"""What a store holds, the operations on it, and what can go wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

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

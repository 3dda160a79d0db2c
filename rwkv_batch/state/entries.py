"""What the state pool keeps of a session: its state in host memory, its place in L1, and how it is listed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rwkv_batch.state.rows import StoreError
from rwkv_batch.state.snapshot import SnapshotError

Done = Callable[[str | None], None]  # called once, with None or with a sentence that says what failed


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


def message(error: Exception | None) -> str | None:
    """The sentence that a client gets about an error."""
    if error is None or isinstance(error, StoreError | SnapshotError):
        return str(error) if error else None
    return f"The session's state could not be moved ({type(error).__name__})."

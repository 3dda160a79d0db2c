"""What the state pool holds: states in host memory, entries of L1, and states on their way into
the database.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rwkv_batch.state.events import Event
from rwkv_batch.state.snapshot import SnapshotError
from rwkv_batch.state.store import SESSIONS, Put, Row, StoreError

Answer = Callable[[str | None, list[int]], Event]  # makes the event from an error and the slots that it frees


@dataclass(eq=False)
class Image:
    """A state in host memory, never changed once it is there, so that sessions may share it."""

    tokens: int
    updated: float
    snapshot: Tensor | None = None  # filled in by the mover


@dataclass(eq=False)
class Hot:
    """An entry of L1."""

    slot: int
    image: Image
    copies: int = 0  # under way; the slot may not change before they are done
    gone: bool = False  # has left L1 meanwhile; the slot is free after the last copy


@dataclass(eq=False)
class Write:
    """An image that is not in the database yet."""

    key: str
    image: Image
    answer: Answer | None  # None: the event has been sent
    dropped: bool = False  # its session has been deleted


def release(hot: Hot) -> list[int]:
    """The slot of an entry that has left L1; none while it is being copied (the last copy's end
    asks again).
    """
    hot.gone = True
    return [] if hot.copies else [hot.slot]


def whole(image: Image) -> Tensor:
    """The snapshot, on the mover's thread. Raises StoreError if the copy into it has failed."""
    if image.snapshot is None:
        raise StoreError("The session's state could not be copied into memory.")
    return image.snapshot


def put_of(write: Write) -> Put:
    """The operation that commits it. Raises StoreError like `whole`."""
    snapshot = whole(write.image)
    return Put(
        SESSIONS,
        write.key,
        Row(write.image.updated, write.image.tokens, len(snapshot)),
        snapshot.numpy().data,
    )


def sentence(error: Exception | None) -> str | None:
    """What a client is told of it."""
    if error is None or isinstance(error, StoreError | SnapshotError):
        return str(error) if error else None
    return f"The session's state could not be moved ({type(error).__name__})."

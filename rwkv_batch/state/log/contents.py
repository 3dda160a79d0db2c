"""All that a database holds, as it is copied into another one."""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from rwkv_batch.state.entries import Session, StoreDocument, StoreError, Turn

State = tuple[int, int, bytes]  # turn, model and image
Model = tuple[int, str, int]  # id, fingerprint and vocabulary

T = TypeVar("T")


class Contents(Protocol):
    """A database that is open to be read or to be filled. Methods raise StoreError."""

    @property
    def left_out(self) -> int:
        """Rows that could not be read."""

    def models(self) -> Iterator[Model]:
        """All of them."""

    def turns(self) -> Iterator[Turn]:
        """In any order."""

    def sessions(self) -> Iterator[Session]:
        """Those that are hidden too."""

    def documents(self) -> Iterator[StoreDocument]:
        """All of them."""

    def states(self) -> Iterator[State]:
        """Of turns whose past is not known, which nothing else could bring back."""

    def fill(self, source: "Contents") -> "Counted":
        """Put all of another one in, or nothing. Raises StoreError also if something is there already."""


class Counted:
    """What has been copied."""

    def __init__(self) -> None:
        self.turns = self.sessions = self.documents = 0

    def count(self, name: str, entries: Iterable[T]) -> Iterator[T]:
        """The entries, which are counted under this name."""
        for entry in entries:
            setattr(self, name, getattr(self, name) + 1)
            yield entry


def not_empty(name: str) -> StoreError:
    return StoreError(f"There are sessions or documents in {name} already; name an empty database.")

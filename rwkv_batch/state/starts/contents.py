"""What is kept of a start state."""

import hashlib
from dataclasses import dataclass

from torch import Tensor

from rwkv_batch.state.entries import Session


@dataclass(frozen=True)
class Offsets:
    """By what a start state scales what is read out of states: `y (1 + offset)`."""

    numbers: Tensor  # [layers, C], fp32

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that follow from the numbers."""
        return hashlib.blake2b(self.data, digest_size=16).hexdigest()

    @property
    def data(self) -> bytes:
        return self.numbers.numpy().tobytes()


@dataclass(frozen=True)
class StartContents:
    """What is stored of a start state: shift `[layers, 2, C]`, wkv `[layers, heads, value, key]`.

    digest: 16 bytes that follow from all of it.
    """

    shift: Tensor
    wkv: Tensor
    offsets: Offsets | None
    digest: bytes


@dataclass(frozen=True)
class StoredStart:
    """A start state. Two of one name and turn are the same."""

    name: str
    session: Session
    image: Tensor  # a snapshot in host memory
    description: bytes  # by whoever stored it
    offsets: Offsets | None

    @property
    def turn(self) -> int:
        return self.session.head.turn

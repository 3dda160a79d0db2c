"""Messages between engines and the process that writes for them: msgpack.

A process that writes has a number of its own for as long as it runs. Commits name it, so that what was meant
for one that has died is not taken for another one's: the engine sends that again itself.
"""

from collections.abc import Sequence

import msgspec

from rwkv_batch.state.entries import (
    CommittedBefore,
    Conflict,
    Dangling,
    DiskFailed,
    Operation,
    Removed,
    StoreAway,
    StoreBroken,
    StoreError,
)

_ERRORS = {
    kind.__name__: kind for kind in (CommittedBefore, Conflict, Dangling, DiskFailed, StoreAway, StoreBroken)
}


class HostMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One of these messages."""


class Hello(HostMessage, frozen=True):
    """Replied to with Welcome."""


class SentCommit(msgspec.Struct, frozen=True, array_like=True):
    """Operations of one transaction. `retry`: see CommitQueue.put."""

    number: int  # those of a client are numbered from 1
    operations: Sequence[Operation]
    retry: bool


class Commits(HostMessage, frozen=True):
    """To be carried out in this order; each is replied to in Outcomes."""

    writer: int  # that they are meant for
    client: int
    known: int  # see Stamp
    commits: list[SentCommit]


class Welcome(HostMessage, frozen=True):
    """The number of the process that writes."""

    writer: int


class SentOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What has become of a commit: what it has removed, or the error."""

    number: int
    removed: Removed | None
    kind: str = ""  # of the error
    sentence: str = ""

    @classmethod
    def from_result(cls, number: int, removed: Removed | None, error: Exception | None) -> "SentOutcome":
        if error is None:
            return cls(number, removed)
        return cls(number, None, type(error).__name__, str(error))

    @property
    def error(self) -> StoreError | None:
        return _ERRORS.get(self.kind, StoreError)(self.sentence) if self.kind else None


class Outcomes(HostMessage, frozen=True):
    """Of commits that have been carried out together."""

    outcomes: list[SentOutcome]


class Renewed(HostMessage, frozen=True):
    """The database was broken, and another file has taken its place."""


class Unusable(HostMessage, frozen=True):
    """The database cannot be used, and the process ends."""

    sentence: str  # why


ToWriter = Hello | Commits
ToEngine = Welcome | Outcomes | Renewed | Unusable

_encoder = msgspec.msgpack.Encoder()
_to_writer: msgspec.msgpack.Decoder[ToWriter] = msgspec.msgpack.Decoder(ToWriter)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def encode(message: HostMessage | SentCommit) -> bytes:
    """Raises UnicodeEncodeError for a key that is no text."""
    return _encoder.encode(message)


def decode_to_writer(data: bytes) -> ToWriter:
    """Raises msgspec.DecodeError."""
    return _to_writer.decode(data)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.DecodeError."""
    return _to_engine.decode(data)

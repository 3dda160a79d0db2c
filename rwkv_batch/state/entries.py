"""What the state pool and its database hold, and what can go wrong with them.

A session is its tokens. They lie in a log of turns; each turn has a parent, so that the turns of sessions
that were forked form a tree. A session is a name for the end of a turn. A state is a cache of the tokens
before it, and an image is a stored state.
"""

import hashlib
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:  # the process that writes for all engines of a host runs without torch
    from torch import Tensor

Done = Callable[[str | None], None]  # called once, with None or with a sentence that says what failed

Tier = Literal["L1", "L2", "L3"]

REQUEST_ID = 16  # bytes of Turn.request by which the turn is found, as no two have the same
NONE = 0  # in place of a turn's id: the beginning, where nothing has been fed
EMPTY_DIGEST = bytes(16)
_CODES = {2: "H", 4: "I"}  # of arrays of ids, by the bytes of each
# In place of the id of the turn that a change of a session follows:
ANY = -1  # in place of the turn that the session ends with: any
DAMAGED = -2  # nothing, as its row cannot be read
# Of a commit to which no answer has come:
UNKNOWN = "It is not known whether this has been stored; look at the session before it is sent again."
TOO_LITTLE_MEMORY = "The engine has too little memory for this request; try again later."
HIDDEN = "\0"  # what keys of sessions and documents begin with that are not listed, nor dropped for room


class SnapshotError(Exception):
    """A snapshot that cannot be used here; the message is one sentence."""


class StoreError(Exception):
    """The store cannot be used, or an operation failed; the message is one sentence."""


class StoreBroken(StoreError):
    """The file itself is damaged, so that nothing can be written to it."""


class StoreAway(StoreError):
    """The database cannot be reached, or has no room. What has failed may be sent again later."""


class DiskFailed(StoreAway):
    """The disk of the database has no room, or refuses something. Of several changes some may be stored."""


class RowDamaged(StoreError):
    """One row cannot be read."""


class Unread(RowDamaged):
    """The disk could not give a row or a state just now: it may be whole, and is not removed for that."""


class NotInFile(StoreError):
    """A file cannot hold what it was asked to hold of a session."""


class Refused(StoreError):
    """A change that cannot be made, while others of the same transaction can."""


class NotNow(Refused, StoreAway):
    """A change that this server cannot make just now, while others of the same transaction can."""


class Dangling(Refused):
    """What an operation builds on is not in the database."""


class Conflict(Refused):
    """A session does not end with the turn that a change of it follows."""


class CommittedBefore(Refused):
    """The database has this change already. `removed`: what it removed then, where that is known."""

    def __init__(self, sentence: str, removed: "Removed | None" = None) -> None:
        super().__init__(sentence)
        self.removed = removed


class Moved(str):
    """The sentence about a Conflict: clients get it as one (409), not as a failure of the server."""

    __slots__ = ()


class Unavailable(str):
    """The sentence about StoreAway: clients get it as a matter of time (503)."""

    __slots__ = ()


@dataclass(frozen=True)
class Head:
    """The end of a turn: what a session points to, and what a state belongs to."""

    turn: int  # id of the turn
    number: int  # turns from the beginning of the conversation to here; 0: a state whose past is unknown
    tokens: int  # that the state has seen
    digest: bytes  # of the tokens, and of what they started from
    model: int  # id of the model that made the turn
    imaged: int = 0  # of the tokens, those before the nearest stored image, as far as is known


@dataclass(frozen=True)
class Turn:
    """An entry of the token log. For its id see rwkv_batch/state/log/turn_ids.py."""

    id: int
    parent: int  # id of the turn that it continues; NONE: zero state, or a state whose past is unknown
    number: int  # see Head
    start: int  # tokens before it
    prompt: Sequence[int]
    completion: Sequence[int]
    created: float  # seconds since 1970
    model: int
    digest: bytes
    # Of a request that may be sent again: its id (REQUEST_ID bytes), and what the engine notes of it
    request: bytes = b""

    @classmethod
    def from_parent(
        cls, id_: int, parent: Head | None, prompt: Sequence[int], completion: Sequence[int], model: int
    ) -> "Turn":
        """The next turn after `parent`, now; None: at the beginning."""
        return cls(
            id_,
            parent.turn if parent else NONE,
            parent.number + 1 if parent else 1,
            parent.tokens if parent else 0,
            prompt,
            completion,
            time.time(),
            model,
            digest(parent.digest if parent else EMPTY_DIGEST, prompt, completion),
        )

    @property
    def end(self) -> int:
        return self.start + len(self.prompt) + len(self.completion)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.completion]

    @property
    def past_unknown(self) -> bool:
        """Whether it stands for a state whose past is unknown, so that only its image can bring that back."""
        return self.number == 0

    def head(self, imaged: int) -> Head:
        return Head(self.id, self.number, self.end, self.digest, self.model, imaged)


@dataclass(frozen=True)
class Session:
    """A session as it is listed."""

    key: str
    head: Head
    updated: float  # seconds since 1970


@dataclass(frozen=True)
class SessionAt:
    """A session that is to be changed, as the change finds it: whoever changes it first, wins."""

    key: str
    turn: int = NONE  # that it ends with; NONE: there is no such session


@dataclass(frozen=True)
class Loaded:
    """A slot that holds a state of a session's past."""

    head: Head  # the session's end, with what is known of its images
    replay: list[int]  # tokens between the slot's state and the session's end, to be fed first


@dataclass(frozen=True)
class KeptState:
    """A slot that holds the state at a session's end."""

    key: str
    head: Head
    slot: int
    before: int = NONE  # the session's turn before, whose state it takes the place of


@dataclass(frozen=True)
class SessionEntry:
    """A session in a list of them."""

    key: str
    turn: int  # that it ends with
    tier: Tier  # the fastest place that has its state
    updated: float  # seconds since 1970
    tokens: int  # that its state has seen


@dataclass(frozen=True)
class Status:
    """Some of the sessions, and how many there are in all and in the upper tiers."""

    sessions: list[SessionEntry]
    total: int
    l1: int
    l2: int


@dataclass
class Start:
    """Where a session is continued from."""

    turns: list[Turn]  # to be fed again, the newest first
    turn: int  # the turn before them; NONE: the beginning
    image: "Tensor | None" = None  # the state at the end of `turn`, unless an upper tier has it
    read_seconds: float = 0.0  # that reading the image took
    fetched: bool = False  # whether the image is another server's: none is stored here
    unusable: list[int] = field(default_factory=list)  # turns whose images are damaged or missing
    unread: Unread | None = None  # why an image nearer to the end could not be read just now

    @property
    def tokens(self) -> list[int]:
        """What is fed again."""
        return [token for turn in reversed(self.turns) for token in turn.tokens]

    def go_back(self, turn: Turn) -> None:
        """Over the turn that ends here."""
        self.turns.append(turn)
        self.turn = turn.parent


# Operations on the database. Those with `pinned` may leave turns without a use, which are then removed with
# their images, but for the pinned ones. Those with `follows` raise Conflict for a session that ends with
# another turn than that.


class _Operation(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A change that can be sent to the process that writes."""


class PutTurn(_Operation, frozen=True):
    """Add a turn to the log. Its parent must be there."""

    turn: Turn


class PutSession(_Operation, frozen=True):
    """Let a session end with a turn, which must be there. `follows`: the one that it ends with until then."""

    session: Session
    pinned: frozenset[int] = frozenset()
    follows: int = ANY


class DeleteSessions(_Operation, frozen=True):
    """Missing ones are ignored. `follows`: the turns that they end with; empty: any."""

    keys: Sequence[str]
    pinned: frozenset[int] = frozenset()
    follows: Sequence[int] = ()


class Collect(_Operation, frozen=True):
    """Remove these turns if nothing uses them any longer."""

    turns: Sequence[int]
    pinned: frozenset[int] = frozenset()


class PutImage(_Operation, frozen=True):
    """The image of this turn's end has been written. Nothing happens if the turn has gone meanwhile."""

    turn: int
    model: int
    tokens: int  # before the end of the turn
    saves: int  # of them, those that need not be fed again because of it
    size: int  # bytes
    used: float  # seconds since 1970


class DropImages(_Operation, frozen=True):
    """These images are damaged or gone."""

    turns: Sequence[int]


class Shrink(_Operation, frozen=True):
    """Remove images, the least worth first, then whole sessions, the oldest first, until `limit` is met.

    Sessions that end with pinned turns stay: they are being continued.
    """

    limit: int  # bytes
    pinned: frozenset[int] = frozenset()


class StoreDocument(_Operation, frozen=True):
    """Write a document in place of any older one."""

    key: str
    updated: float
    data: bytes


class RemoveDocuments(_Operation, frozen=True):
    """Missing ones are ignored. `damaged`: only those that cannot be read."""

    keys: Sequence[str]
    damaged: bool = False


class PutModel(_Operation, frozen=True):
    """Note a model under the id that follows from its fingerprint. `vocabulary` 0: not known."""

    fingerprint: str
    vocabulary: int


class Stamp(_Operation, frozen=True):
    """Note that this commit of a client has been carried out. Raises CommittedBefore if it has been.

    The commits of a client are numbered from 1. `known`: it knows what became of those up to this number.
    """

    client: int
    number: int
    known: int


Operation = (
    PutTurn
    | PutSession
    | DeleteSessions
    | Collect
    | PutImage
    | DropImages
    | Shrink
    | StoreDocument
    | RemoveDocuments
    | PutModel
    | Stamp
)


def written_bytes(operation: Operation) -> int:
    """Bytes of tokens and documents that the operation writes."""
    if isinstance(operation, PutTurn):
        return 2 * len(operation.turn.tokens)
    return len(operation.data) if isinstance(operation, StoreDocument) else 0


@dataclass
class Removed:
    """What an operation, or a group of them, has removed."""

    turns: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)  # of these turns, which may still be there
    sessions: list[str] = field(default_factory=list)  # by Shrink
    pinned: list[int] = field(default_factory=list)  # turns without a use that were kept
    documents: int = 0


def digest(parent: bytes, prompt: Sequence[int], completion: Sequence[int]) -> bytes:
    """Of all tokens up to the end of a turn, given that up to its start."""
    counts = len(prompt).to_bytes(8, "little")
    return hashlib.blake2b(parent + counts + pack(prompt) + pack(completion), digest_size=16).digest()


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes: the bytes of each id, 2 or 4, then the ids, the lowest byte first."""
    data = _in_order(array("I", tokens)).tobytes()
    if max(tokens, default=0) < 1 << 16:
        return b"\2" + array("H", data)[::2].tobytes()
    return b"\4" + data


def unpack(data: bytes) -> list[int]:
    """Raises ValueError if these are no packed ids."""
    if not data or data[0] not in _CODES:
        raise ValueError("no token ids")
    ids = array(_CODES[data[0]])
    ids.frombytes(memoryview(data)[1:])
    return _in_order(ids).tolist()


def _in_order(ids: "array[int]") -> "array[int]":
    """With the lowest byte of each first, or back."""
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def ignore_result(error: str | None) -> None:
    """In place of a Done."""


def as_error(sentence: str | None) -> StoreError | None:
    """The error of which a Done was called."""
    if sentence is None:
        return None
    if isinstance(sentence, Unavailable):
        return StoreAway(sentence)
    return Conflict(sentence) if isinstance(sentence, Moved) else StoreError(sentence)


def moved(key: str) -> Conflict:
    """What a change of this session is refused with if another one came before it."""
    return Conflict(
        f"The session {key.removeprefix(HIDDEN)} has been changed meanwhile; send the request again to go on "
        "from what it is now."
    )


def message(error: Exception | None) -> str | None:
    """The sentence that a client gets about an error."""
    if isinstance(error, Conflict):
        return Moved(error)
    if isinstance(error, StoreAway | Unread):
        return Unavailable(error)
    if error is None or isinstance(error, StoreError | SnapshotError):
        return str(error) if error else None
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _is_out_of_memory(error)):
        return Unavailable(TOO_LITTLE_MEMORY)
    return f"The session's state could not be moved ({type(error).__name__})."


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether it is torch's, which is loaded where it was raised."""
    from rwkv_batch.ops.device import is_out_of_memory

    return is_out_of_memory(error)

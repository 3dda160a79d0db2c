"""What `StatePool.poll` brings. `token` is what the caller gave to the method that the event answers; `error`
is a sentence.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Loaded:
    """The slot holds the session's state; after an error its contents are undefined. It has been the caller's
    all the time.
    """

    key: str
    slot: int
    tokens: int  # that the state has seen
    error: str | None
    token: object = None


@dataclass(frozen=True)
class Saved:
    """The state is stored, or, after an error, is not, and its slot is among those that are the caller's
    again.
    """

    key: str
    error: str | None
    freed: list[int]
    token: object = None


@dataclass(frozen=True)
class Freed:
    """These slots have left L1 and are the caller's."""

    slots: list[int]


@dataclass(frozen=True)
class Deleted:
    """So many sessions are gone for good; after an error they are in the database still, and back when it is
    opened again.
    """

    key: str
    found: int
    error: str | None
    token: object = None


@dataclass(frozen=True)
class Forked:
    """`key` is the copy."""

    key: str
    error: str | None
    token: object = None


@dataclass(frozen=True)
class Exported:
    """The session as a file."""

    key: str
    data: bytes | None
    error: str | None
    token: object = None


@dataclass(frozen=True)
class Imported:
    """The file is stored as the session `key`."""

    key: str
    error: str | None
    token: object = None


@dataclass(frozen=True)
class DocumentDone:
    """A document has been put or removed (found: how many there were), or read (data: None if
    there is none).
    """

    key: str
    data: bytes | None
    found: int
    error: str | None
    token: object = None


Event = Loaded | Saved | Freed | Deleted | Forked | Exported | Imported | DocumentDone

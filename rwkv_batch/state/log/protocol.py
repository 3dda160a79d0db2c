"""The contract of a database of sessions and documents: what the state pool asks of one.

`Store` (rwkv_batch/state/log/store.py) is one SQLite file, or memory, for one process. `HostStore`
(rwkv_batch/state/host/store.py) is the same file for several processes of a host, for which one of them
writes. `PostgresStore` (rwkv_batch/state/postgres/store.py) is for several servers.
test/state/test_store_contract.py says what each has to do; a further database is one more fixture there.

A change names the turn that a session ends with until then (`follows` of the operations). If the session has
been changed before, by any process, the change is refused with Conflict, and nothing of it is done. That
is all there is to keep processes apart: no locks, no owners. Images of states are files (images.py) in
`images_folder`; the database is their only index, and a reader passes over one that is missing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rwkv_batch.state.elsewhere.fetching import Elsewhere
from rwkv_batch.state.entries import Operation, Refused, Removed, Session, SessionEntry, Status, Turn
from rwkv_batch.state.jobs import Report

Committed = Callable[[Removed | None, Exception | None], None]
Outcome = Removed | Refused  # of a group of operations


@dataclass
class Wanted:
    """What is going to be asked of a database."""

    keys: list[str] = field(default_factory=list)  # sessions
    prefixes: list[str] = field(default_factory=list)  # of all sessions that begin with one
    documents: list[str] = field(default_factory=list)  # by key
    requests: list[bytes] = field(default_factory=list)  # turns by Turn.request

    def __bool__(self) -> bool:
        return bool(self.keys or self.prefixes or self.documents or self.requests)

    @classmethod
    def together(cls, several: Sequence["Wanted"]) -> "Wanted":
        """Each once."""
        return cls(
            [*dict.fromkeys(key for wanted in several for key in wanted.keys)],
            [*dict.fromkeys(prefix for wanted in several for prefix in wanted.prefixes)],
            [*dict.fromkeys(key for wanted in several for key in wanted.documents)],
            [*dict.fromkeys(request for wanted in several for request in wanted.requests)],
        )


class CommitQueue(Protocol):
    """Commits behind, for one pool, in the order they were given."""

    counted: Counter[str]  # `turns` and `transactions` that were committed

    def put(self, operations: Sequence[Operation], committed: Committed, retry: bool = False) -> None:
        """Commit them in one transaction, of which `committed` is reported with the outcome, or the error.

        With `retry` nobody waits for that: what fails is tried again with every later commit, and once a
        second, unless it has been refused.
        """

    def close(self) -> None:
        """Returns when all operations are done."""


class SessionStore(Protocol):
    """An open database. Reading methods raise StoreError, and RowDamaged for a row that cannot be read.

    `commit` and `checkpoint` are for one thread, `find_session` and `find_request` for another, everything
    else for a third.
    `limit`: bytes that it and all images should take at most; None: any number. `path`: of its file; None: it
    ends with the process. `shared`: whether other processes change it, too. `remote`: whether to ask it takes
    a round trip, so that what must not wait is `refresh`ed first.
    """

    limit: int | None
    path: Path | None
    shared: bool
    remote: bool
    elsewhere: Elsewhere | None  # states that other servers have made

    @property
    def images_folder(self) -> Path | None:
        """The folder of the images; None: none are stored."""

    def model_id(self, fingerprint: str, vocabulary: int) -> int:
        """The id of a model in this database, which is noted if need be."""

    def model(self, model: int) -> tuple[str, int]:
        """Fingerprint and vocabulary of a model."""

    def turn_numbers(self) -> Iterator[int]:
        """Ids for new turns, which no process gets twice."""

    def commit_queue(self, report: Report, renewed: Callable[[], None]) -> CommitQueue:
        """What a pool commits with. `renewed` is reported when a broken database has been replaced."""

    def commit(self, groups: Sequence[Sequence[Operation]]) -> list[Outcome]:
        """Carry out all groups in one transaction, each as a whole or, if it is refused, not at all.

        What is committed is on the disk. Raises StoreError, and then none of them is carried out; after
        StoreBroken the database can only be replaced (`restart`).
        """

    def checkpoint(self, quiet: bool) -> None:
        """Called after commits have been reported. quiet: no others wait."""

    def restart(self) -> None:
        """Replace a broken database by one with what is whole of it."""

    def size(self) -> int:
        """Bytes of the database and of all images."""

    def refresh(self, wanted: Wanted) -> None:
        """Read this again: for some seconds methods that ask for it do not wait. From any thread.

        Where the database is not `remote` there is nothing to do.
        """

    def find_session(self, key: str) -> Session | None:
        """The session as it was committed last, by any process."""

    def find_request(self, request: bytes) -> tuple[str, Turn] | None:
        """The committed turn whose `request` begins with these REQUEST_ID bytes, by any process.

        With it comes the key of a session that ends with it; "": none does. No two turns have the same ones:
        the commit of a second is a Conflict.
        """

    def list_sessions(self, after: str | None, limit: int, prefix: str = "") -> list[Session]:
        """Up to `limit` sessions behind a key, in the order of their keys as bytes."""

    def status(self, listed: list[SessionEntry], l1: Sequence[int], l2: Sequence[int]) -> Status:
        """A list with the numbers of all sessions, and of those that end with these turns."""

    def read_turn(self, turn: int) -> Turn:
        """Raises RowDamaged also if there is no such turn."""

    def turn_ids(self, turn: int, numbers: range) -> list[int]:
        """Of the turns up to this one that have these numbers, the oldest first."""

    def image_model(self, turn: int) -> int | None:
        """The model whose state the turn's image holds; None: there is no image."""

    def fetch_image(self, turn: int) -> bool:
        """The image on this disk cannot be used: whether the database had it, and it is another one now."""

    def image_turns(self) -> set[int]:
        """Ids of all turns that have images."""

    def read_document(self, key: str) -> bytes | None:
        """None if there is no such document."""

    def document_keys(self, prefix: str) -> list[str]:
        """Those that begin with `prefix`, which is not empty, in their order."""

    def close(self) -> None:
        """After all threads of the pool have stopped. Idempotent."""

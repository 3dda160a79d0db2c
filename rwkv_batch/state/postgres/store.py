"""The database of several servers: PostgreSQL. Images of states are on each server's own disk.

Every process that has a state pool opens it for itself, also where a host has several engines: what waits in
one is committed together.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from rwkv_batch.state import images
from rwkv_batch.state.elsewhere.fetching import NOWHERE, Elsewhere, Sources
from rwkv_batch.state.elsewhere.image_index import ImageIndex
from rwkv_batch.state.elsewhere.keeping import Keeper
from rwkv_batch.state.elsewhere.objects import Objects
from rwkv_batch.state.elsewhere.whereabouts import Whereabouts
from rwkv_batch.state.entries import (
    HIDDEN,
    CommittedBefore,
    Conflict,
    Dangling,
    DropImages,
    NotNow,
    Operation,
    PutImage,
    Removed,
    RowDamaged,
    Session,
    SessionEntry,
    Shrink,
    Status,
    StoreAway,
    StoreError,
    Turn,
)
from rwkv_batch.state.jobs import Report
from rwkv_batch.state.log import turn_ids
from rwkv_batch.state.log.protocol import CommitQueue, Committed, Outcome, Wanted
from rwkv_batch.state.log.recent import RecentReads
from rwkv_batch.state.log.writer import Writer
from rwkv_batch.state.postgres.changes import GroupChanges, collect_left, put_model
from rwkv_batch.state.postgres.committing import Transactions
from rwkv_batch.state.postgres.database import rows, schema
from rwkv_batch.state.postgres.database.connection import (
    STOPPED_MS,
    Database,
    Outage,
    PostgresConnection,
    with_waits,
)
from rwkv_batch.state.sql.tables import id_of_model

SHARE_SECONDS = 5.0  # at the end, for images on their way to the store that servers share
PATIENCE = 30.0  # seconds that an outage may last before what needs the database fails
GONE = "What this goes on from has been changed meanwhile; send the request again."

log = logging.getLogger(__name__)

T = TypeVar("T")


class PostgresStore:
    """An open database; see SessionStore. Raises StoreError.

    `folder`: in which the folder of this server's states is made. `name`: of the schema. `limit`: bytes of
    the states there. What PostgreSQL holds has no limit. `sources`: where states of other servers are.
    """

    path: Path | None = None
    shared = remote = True

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        limit: int | None = None,
        name: str = schema.DEFAULT,
        patience: float = PATIENCE,
        stopped_ms: int = STOPPED_MS,
        sources: Sources = NOWHERE,
    ) -> None:
        self.limit = limit
        self._outage = outage = Outage(patience)
        url, begins = with_waits(url), schema.settings(name, stopped_ms)
        self._writer = PostgresConnection(url, begins, outage)
        self._reader = PostgresConnection(url, begins, outage)
        self._refresher = PostgresConnection(url, begins, outage)
        self._finder = PostgresConnection(url, begins, outage)
        self._sharing = PostgresConnection(url, begins, outage)
        self._recent = RecentReads()
        self._models: dict[int, tuple[str, int]] = {}
        self._past: dict[int, tuple[Turn, int | None]] = {}  # turns that were read together with a later one
        self._index: ImageIndex | None = None
        self._keeper: Keeper | None = None
        try:
            identity = self._writer.run(partial(schema.migrate, schema=name))
            shared = Objects(sources.objects, identity) if sources.objects else None
            self._index = ImageIndex(folder / f"rwkv_states-{identity}")
            asks, keeps = (partial(each.run, waits=False) for each in (self._reader, self._sharing))
            self.elsewhere: Elsewhere | None = Elsewhere(Whereabouts(asks), sources.peers, shared)
            self._keeper = Keeper(Whereabouts(keeps), self._index, shared, partial(keeps, collect_left))
        except BaseException:
            self.close()
            raise
        self._transactions = Transactions(self._writer, self._image, sources.address)

    @property
    def index(self) -> ImageIndex:
        assert self._index
        return self._index

    @property
    def keeper(self) -> Keeper:
        assert self._keeper
        return self._keeper

    @property
    def images_folder(self) -> Path:
        """The folder of this server's images."""
        return self.index.states

    def model_id(self, fingerprint: str, vocabulary: int) -> int:
        """The id of a model in this database. From any thread."""
        id_ = id_of_model(fingerprint)
        self._finder.run(lambda db: put_model(db, id_, fingerprint, vocabulary))
        self._models.pop(id_, None)
        return id_

    def model(self, model: int) -> tuple[str, int]:
        """Fingerprint and vocabulary. Raises RowDamaged if there is no such model."""
        if model not in self._models:
            query = "SELECT fingerprint, vocabulary FROM models WHERE id = %s"
            found = self._find(lambda db: db.execute(query, (model,)).fetchone())
            if found is None:
                raise RowDamaged("The model of a session is missing from the database.")
            self._models[model] = str(found[0]), int(found[1])
        return self._models[model]

    def turn_numbers(self) -> Iterator[int]:
        """Ids for new turns; see SessionStore."""
        return turn_ids.in_random_blocks(self._has_turns)

    def commit_queue(self, report: Report, renewed: Callable[[], None]) -> CommitQueue:
        """What a pool commits with; see SessionStore. No database is replaced here."""
        return SharedWriter(self, report, renewed)

    def commit(self, groups: Sequence[Sequence[Operation]]) -> list[Outcome]:
        """Carry out all groups in one transaction; see SessionStore."""
        if not groups:
            return []
        changed = [operation for operations in groups for operation in operations]
        self._recent.changing(changed)
        try:
            done = self._transactions.run(groups)
        finally:
            self._recent.changing(changed)
        for outcome, changes in done:
            if isinstance(outcome, Removed):
                self._change_images(outcome, changes)
        return [outcome for outcome, _ in done]

    def checkpoint(self, quiet: bool) -> None:
        """PostgreSQL does that itself."""

    def restart(self) -> None:
        """Raises StoreError: no other database takes its place."""
        raise StoreError("A database in PostgreSQL is not replaced by a server.")

    def size(self) -> int:
        """Bytes of the states on this server's disk."""
        return self.index.size()

    def refresh(self, wanted: Wanted) -> None:
        """Read again what the pool's thread asks for next; see SessionStore. Waits for an outage to end."""
        self._recent.begin()
        self._recent.put(wanted, *self._refresher.run(partial(rows.read_wanted, wanted=wanted)))

    def find_session(self, key: str) -> Session | None:
        """The session as it was committed last by any server when it was refreshed, or is now."""
        known = self._recent.session(key)
        return known[0] if known else self._find(partial(rows.find_sessions, keys=[key])).get(key)

    def find_request(self, request: bytes) -> tuple[str, Turn] | None:
        """The committed turn of a request; see SessionStore."""
        known = self._recent.request(request)
        return known[0] if known else self._find(partial(rows.find_request, request=request))

    def list_sessions(self, after: str | None, limit: int, prefix: str = "") -> list[Session]:
        """Some of the sessions in the order of their keys; see SessionStore."""
        if not prefix:
            return self._ask(partial(rows.list_sessions, after=after, limit=limit, prefix=prefix))
        if after is None and (known := self._recent.sessions(prefix)):
            return known[0][:limit]
        return self._find(partial(rows.list_sessions, after=after, limit=limit, prefix=prefix))

    def status(self, listed: list[SessionEntry], l1: Sequence[int], l2: Sequence[int]) -> Status:
        """A list with the number of all sessions, which is estimated where these are many."""
        return self._ask(
            lambda db: Status(
                listed, rows.count_sessions(db), rows.count_ends(db, l1), rows.count_ends(db, l2)
            ),
            waits=False,  # for metrics
        )

    def read_turn(self, turn: int) -> Turn:
        """Raises RowDamaged, StoreError."""
        if (known := self._past.pop(turn, None)) is not None:
            return known[0]
        try:
            return self._ask(partial(rows.read_turn, turn=turn))
        except RowDamaged:  # as a rule another server has changed the session since it was read
            self._recent.forget()
            raise

    def turn_ids(self, turn: int, numbers: range) -> list[int]:
        """Of the turns up to this one that have these numbers, the oldest first. Raises StoreError."""
        return self._ask(partial(rows.turn_ids, turn=turn, numbers=numbers))

    def image_model(self, turn: int) -> int | None:
        """The model whose state the turn's image holds; None: there is no image.

        One that only the database has is brought to this disk first. As a rule the turns before this one are
        asked for next, so they are read with it.
        """
        if (model := self.index.model(turn)) is not None:
            return model
        if turn not in self._past:
            self._past = {each[0].id: each for each in self._ask(partial(rows.read_past, turn=turn))}
        found = self._past.get(turn)
        if found is None or found[1] is None:
            return None
        return found[1] if self._fetch(found[0], found[1]) else None

    def fetch_image(self, turn: int) -> bool:
        """Bring the image from the database once more; see SessionStore."""
        past = self._ask(partial(rows.read_past, turn=turn))
        return bool(past) and past[0][1] is not None and self._fetch(past[0][0], past[0][1])

    def image_turns(self) -> set[int]:
        """Ids of all turns that have images on this disk."""
        return self.index.turns()

    def read_document(self, key: str) -> bytes | None:
        """None if there is no such document. Raises StoreError."""
        if known := self._recent.document(key):
            return known[0]
        question = partial(rows.read_document, key=key)
        return self._find(question) if key.startswith(HIDDEN) else self._ask(question)

    def document_keys(self, prefix: str) -> list[str]:
        """Those that begin with `prefix`, which is not empty, in their order. Raises StoreError."""
        return self._ask(partial(rows.document_keys, prefix=prefix))

    def close(self) -> None:
        """End the use of the database; see SessionStore."""
        if self._keeper:
            self._keeper.close(SHARE_SECONDS)
        for connection in (self._sharing, self._finder, self._refresher, self._reader, self._writer):
            connection.close()
        if self._index:
            self._index.close()

    def _ask(self, question: Callable[[Database], T], *, waits: bool = True) -> T:
        return self._reader.run(question, waits=waits)

    def _has_turns(self, first: int, after: int) -> bool:
        try:
            return self._find(partial(rows.has_turns, first=first, after=after))
        except StoreAway:  # a turn must not fail for that; PostgreSQL takes no number twice
            return False

    def _find(self, question: Callable[[Database], T]) -> T:
        """For the pool's thread, which does not wait for the end of an outage."""
        return self._finder.run(question, waits=False)

    def _change_images(self, removed: Removed, changes: GroupChanges) -> None:
        """Of a group that is committed."""
        removed.images += self.index.drop(removed.turns)
        if removed.turns:
            self.keeper.removed()
        for operation in changes.images:
            match operation:
                case PutImage() if self.index.put(operation):
                    self.keeper.share(operation)
                case PutImage(turn=turn):
                    removed.images.append(turn)
                case DropImages(turns=turns):
                    self.index.drop(turns)
                    removed.images += turns
                case Shrink(limit=limit):
                    removed.images += self.index.shrink(limit)

    def _image(self, turn: int) -> bytes:
        """The image of a turn whose past is not known, as it is on this disk. Raises NotNow."""
        try:
            return images.read(self.images_folder, turn, pinned=False).numpy().tobytes()
        except RowDamaged as error:
            reason = getattr(error.__cause__, "strerror", None) or "it is not whole"
            raise NotNow(
                f"A state cannot be read again from this server's disk ({reason}); send the request again."
            ) from error

    def _fetch(self, turn: Turn, model: int) -> bool:
        """Bring a state from the database to this disk; whether it is there now. Raises StoreError."""
        query = "SELECT data FROM states WHERE turn = %s"
        row = self._ask(lambda db: db.execute(query, (turn.id,), binary=True).fetchone())
        if row is None:
            return False
        import torch  # not needed to copy a database

        try:
            data = torch.frombuffer(bytearray(row[0]), dtype=torch.uint8)
            images.write(self.images_folder, turn.id, data)
        except OSError as error:  # it is not lost
            reason = error.strerror or error
            raise StoreAway(
                f"The session's state cannot be brought to this server's disk ({reason}); try again later."
            ) from None
        if not self.index.put(PutImage(turn.id, model, turn.end, turn.end, len(data), turn.created)):
            images.remove(self.images_folder, [turn.id])
            raise StoreAway(
                "The session's state cannot be brought to this server's disk (its index of states cannot be "
                "written); try again later."
            )
        return True


class SharedWriter(Writer):
    """A Writer to a database that other servers change."""

    def put(self, operations: Sequence[Operation], committed: Committed, retry: bool = False) -> None:
        def done(removed: Removed | None, error: Exception | None) -> None:
            if isinstance(error, CommittedBefore):  # by a transaction whose answer was lost
                removed, error = Removed(), None
            elif isinstance(error, Dangling):  # what is missing has been removed by another server
                error = Conflict(GONE)
            committed(removed, error)

        super().put(operations, done, retry)

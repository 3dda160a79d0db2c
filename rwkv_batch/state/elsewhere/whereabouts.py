"""What the database that servers share knows of their states: two tables of PostgreSQL's."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:  # who has no such database has no psycopg
    import psycopg

SOME = 500  # objects that are removed together
UNFINISHED = "1 hour"  # after which an object that has been begun is given up

T = TypeVar("T")

_FIND = """
    SELECT t.id, coalesce(w.address, ''), coalesce(o.place = %s AND o.stored AND NOT o.gone, false)
    FROM turns t LEFT JOIN writers w ON w.id = t.writer LEFT JOIN objects o ON o.turn = t.id
    WHERE t.id = ANY(%s) AND (w.address IS NOT NULL OR o.stored)"""
# The turn is held, so that who removes it sees this row.
_BEGIN = """
    INSERT INTO objects AS o (turn, place, size, stored, gone, changed)
    SELECT id, %s, %s, false, false, now() FROM turns WHERE id = %s FOR KEY SHARE
    ON CONFLICT (turn) DO UPDATE SET place = excluded.place, size = excluded.size, stored = false,
        gone = false, changed = now()
    WHERE o.place <> excluded.place OR o.gone OR NOT o.stored"""

_UNWANTED = f"(gone OR NOT stored AND changed < now() - interval '{UNFINISHED}')"


class Copy(NamedTuple):
    """Where a state may be: at the server that made its turn, in the store that servers share, or both."""

    turn: int
    address: str  # of that server, "host:port"; "": it is not known
    stored: bool  # whether the store has it


class AsksDatabase(Protocol):
    """Gives the answer of the database to a question. Raises StoreError."""

    def __call__(self, question: Callable[["psycopg.Connection[tuple[Any, ...]]"], T], /) -> T: ...


class Whereabouts:
    """Methods raise StoreError, and wait for no outage of the database to end. From any thread.

    `place`: the URL of the store.
    """

    def __init__(self, run: AsksDatabase) -> None:
        self._run = run

    def find(self, turns: Sequence[int], place: str) -> list[Copy]:
        """What is known of the states at the ends of these turns; nothing of most."""
        return self._run(lambda db: [Copy(*row) for row in db.execute(_FIND, (place, [*turns])).fetchall()])

    def begin(self, turn: int, place: str, size: int) -> bool:
        """An object of so many bytes is going to be written there; False: it is there, or nobody wants it."""
        return self._run(lambda db: db.execute(_BEGIN, (place, size, turn)).rowcount > 0)

    def finish(self, turn: int) -> bool:
        """The object has been written; False: the turn has been removed meanwhile."""
        query = "UPDATE objects SET stored = true, changed = now() WHERE turn = %s AND NOT gone"
        return self._run(lambda db: db.execute(query, (turn,)).rowcount > 0)

    def unwanted(self, place: str) -> list[int]:
        """Turns whose objects there can go, not all at once."""
        query = f"SELECT turn FROM objects WHERE place = %s AND {_UNWANTED} LIMIT {SOME}"
        return self._run(lambda db: [int(turn) for (turn,) in db.execute(query.encode(), (place,))])

    def refuse(self, turn: int) -> None:
        """The object of this turn is damaged or missing: it can go."""
        self._run(lambda db: db.execute("UPDATE objects SET gone = true WHERE turn = %s", (turn,)))

    def forget(self, turns: Iterable[int]) -> None:
        """Their objects are gone. One that has been begun again meanwhile is not forgotten."""
        query = f"DELETE FROM objects WHERE turn = ANY(%s) AND {_UNWANTED}"
        self._run(lambda db: db.execute(query.encode(), ([*turns],)))

    def count(self, place: str) -> int:
        """Objects there that are known."""
        query = "SELECT count(*) FROM objects WHERE place = %s"
        rows = self._run(lambda db: db.execute(query, (place,)).fetchall())
        return int(rows[0][0])

    def adopt(self, turns: Sequence[int], place: str) -> int:
        """Objects of these turns that are there and not known can go; how many these are.

        Who writes an object has entered it before. So one that is not known is nobody's, or its turn has been
        removed while it was written.
        """
        query = """
            INSERT INTO objects (turn, place, size, stored, gone, changed)
            SELECT found, %s, 0, false, true, now() FROM unnest(%s::bigint[]) AS found
            WHERE NOT EXISTS (SELECT 1 FROM objects o WHERE o.turn = found)
            ON CONFLICT DO NOTHING"""
        return self._run(lambda db: db.execute(query, (place, [*turns])).rowcount)

    def removed(self, turns: Sequence[int]) -> list[int]:
        """Which of these turns there are no longer."""
        query = "SELECT id FROM turns WHERE id = ANY(%s)"
        there = self._run(lambda db: {int(id_) for (id_,) in db.execute(query, ([*turns],))})
        return [turn for turn in turns if turn not in there]

    def sweep(self) -> None:
        """Objects whose turns a server of an earlier version has removed can go, too."""
        query = """
            UPDATE objects o SET gone = true
            WHERE NOT gone AND NOT EXISTS (SELECT 1 FROM turns t WHERE t.id = o.turn)"""
        self._run(lambda db: db.execute(query))

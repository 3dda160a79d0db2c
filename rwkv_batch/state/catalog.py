"""What the database holds, known without asking it."""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from rwkv_batch.state.store import SESSIONS, Row

Name = tuple[str, str]  # table, key


class Catalog:
    """Committed rows of both tables, the one that has not been used for the longest time first."""

    def __init__(self, tables: dict[str, dict[str, Row]]) -> None:
        self._rows: OrderedDict[Name, Row] = OrderedDict()
        self._size = 0
        rows = [(table, key, row) for table, of in tables.items() for key, row in of.items()]
        for table, key, row in sorted(rows, key=lambda entry: entry[2].updated):
            self.put(table, key, row)

    def get(self, table: str, key: str) -> Row | None:
        return self._rows.get((table, key))

    def put(self, table: str, key: str, row: Row) -> None:
        self.remove(table, key)
        self._rows[table, key] = row
        self._size += row.size

    def touch(self, table: str, key: str) -> None:
        """It is in use."""
        if (table, key) in self._rows:
            self._rows.move_to_end((table, key))

    def remove(self, table: str, key: str) -> bool:
        """Whether there was such a row."""
        row = self._rows.pop((table, key), None)
        self._size -= row.size if row else 0
        return row is not None

    def sessions(self) -> Iterator[tuple[str, Row]]:
        return ((key, row) for (table, key), row in self._rows.items() if table == SESSIONS)

    def surplus(self, limit: int, in_use: Callable[[Name], bool]) -> list[Name]:
        """Take out the rows that have to go so that the rest takes at most `limit` bytes; none that is in
        use.
        """
        victims: list[Name] = []
        over = self._size - limit
        for name, row in self._rows.items():
            if over <= 0:
                break
            if not in_use(name):
                victims.append(name)
                over -= row.size
        for name in victims:
            self.remove(*name)
        return victims

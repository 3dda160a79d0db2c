"""Which states lie in files on this server's own disk. A cache: other servers have their own.

FOLDER/states/          the files (rwkv_batch/state/images.py)
FOLDER/index.db         their rows, in SQLite
FOLDER/lock             held by each process that uses the folder
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import RLock

from rwkv_batch.disk.shared import use_write_ahead_log
from rwkv_batch.state import images
from rwkv_batch.state.entries import PutImage, StoreError

BUSY_SECONDS = 10.0  # that a statement waits for another process
SHRUNK = 0.95  # of its limit: what is kept when something has to go

log = logging.getLogger(__name__)


class ImageIndex:
    """For any thread. Raises StoreError if the folder cannot be used; later errors cost images only."""

    def __init__(self, folder: Path) -> None:
        self.states = folder / "states"
        self._lock = RLock()
        self._left: set[int] = set()  # turns whose rows could not be removed: their files go all the same
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            images.prepared_folder(self.states)
            with ExitStack() as on_error:
                self._file = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
                on_error.callback(os.close, self._file)
                self._database = sqlite3.connect(
                    folder / "index.db", isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS
                )
                on_error.callback(self._database.close)
                use_write_ahead_log(self._database, BUSY_SECONDS)
                # The last statement changes nothing, and fails where SQLite could open the file to be read
                # only: then no image would have a row, and files would come without end.
                self._database.executescript("""
                    PRAGMA synchronous = NORMAL;
                    CREATE TABLE IF NOT EXISTS images (
                        turn INTEGER PRIMARY KEY, model INTEGER NOT NULL, saves INTEGER NOT NULL,
                        tokens INTEGER NOT NULL, size INTEGER NOT NULL, used REAL NOT NULL);
                    DELETE FROM images WHERE false;""")
                with suppress(BlockingIOError):  # alone in it, what has no row is of an earlier run
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    known = {int(turn) for (turn,) in self._database.execute("SELECT turn FROM images")}
                    images.sweep(self.states, lambda: known)
                fcntl.flock(self._file, fcntl.LOCK_SH)
                on_error.pop_all()
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise StoreError(
                f"The folder {folder} cannot hold states ({reason}); name another one with --image-store."
            ) from None

    def model(self, turn: int) -> int | None:
        """The model whose state the turn's image holds; None: there is no image."""
        rows = self._rows("SELECT model FROM images WHERE turn = ?", turn)
        return int(rows[0][0]) if rows and turn not in self._left else None

    def tokens(self, turn: int) -> int:
        """Tokens before the end of the turn, if it has an image; 0: it has none."""
        rows = self._rows("SELECT tokens FROM images WHERE turn = ?", turn)
        return int(rows[0][0]) if rows else 0

    def turns(self) -> set[int]:
        """Those that have images."""
        return {int(turn) for (turn,) in self._rows("SELECT turn FROM images")}

    def size(self) -> int:
        """Bytes of all images."""
        rows = self._rows("SELECT coalesce(sum(size), 0) FROM images")
        return int(rows[0][0]) if rows else 0

    def put(self, image: PutImage) -> bool:
        """It has been written. False: it cannot be noted, so its file should go."""
        noted = self._rows(
            "INSERT OR REPLACE INTO images (turn, model, saves, tokens, size, used) "
            "VALUES (?, ?, ?, ?, ?, ?) RETURNING turn",
            image.turn,
            image.model,
            image.saves,
            image.tokens,
            image.size,
            image.used,
        )
        if noted:
            self._left.discard(image.turn)
        return bool(noted)

    def drop(self, turns: Iterable[int]) -> list[int]:
        """Forget these; which of them there were, or may have been, and whose files go.

        A row that cannot be removed now goes with the next ones.
        """
        found = list[int]()
        with self._lock:
            for turn in {*self._left, *turns}:
                rows = self._ask("DELETE FROM images WHERE turn = ? RETURNING turn", turn)
                if rows is None:
                    self._left.add(turn)
                else:
                    self._left.discard(turn)
                if rows is None or rows:
                    found.append(turn)
        return found

    def shrink(self, limit: int) -> list[int]:
        """Forget the least worth until the limit is met: tokens that are saved, by the time without use."""
        excess = self.size() - int(limit * SHRUNK) if self.size() > limit else 0
        victims = []
        for turn, size in self._rows(
            "SELECT turn, size FROM images ORDER BY saves / ((SELECT max(used) FROM images) - used + 60.0)"
        ):
            if excess <= 0:
                break
            victims.append(int(turn))
            excess -= size
        return self.drop(victims)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._file >= 0:
                self._database.close()
                os.close(self._file)
                self._file = -1

    def _rows(self, statement: str, *values: object) -> list[tuple[int, ...]]:
        return self._ask(statement, *values) or []

    def _ask(self, statement: str, *values: object) -> list[tuple[int, ...]] | None:
        """The rows; None: the index cannot be used."""
        with self._lock:
            try:
                return self._database.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                log.warning("The index of states on this disk cannot be used: %s", error)
                return None

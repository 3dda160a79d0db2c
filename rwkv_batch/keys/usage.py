"""What keys have used, by model and day, in a SQLite file beside the file of keys.

Front ends add to it in transactions; what one could not write waits in its memory until it can.
"""

import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from rwkv_batch.disk.shared import use_write_ahead_log
from rwkv_batch.keys.records import KeysError

FIRST_DAY, LAST_DAY = "0000-00-00", "9999-99-99"  # before and behind all others
BUSY_SECONDS = 5.0  # that a transaction waits for those of other front ends
TABLE = """CREATE TABLE IF NOT EXISTS usage (
    key TEXT NOT NULL, model TEXT NOT NULL, day TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (key, model, day)) WITHOUT ROWID"""
ADD = """INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens"""


class Used(NamedTuple):
    """What one key has used of one model on one day."""

    key: str
    model: str
    day: str  # YYYY-MM-DD, UTC
    requests: int
    prompt_tokens: int
    cached_tokens: int  # of these, tokens that were not computed again
    completion_tokens: int


def usage_file(keys: str | Path) -> Path:
    """The file that belongs to a file of keys."""
    return Path(f"{keys}.usage.db")


def day_of(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


class UsageStore:
    """The file, open. For one thread at a time. Methods raise sqlite3.Error."""

    def __init__(self, path: str | Path) -> None:
        """Raises KeysError."""
        try:
            # For its owner alone. One that is there is not opened here: to close it would end the locks that
            # SQLite has of it in this process.
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with ExitStack() as on_error:
                self._database = sqlite3.connect(
                    path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
                )
                on_error.callback(self._database.close)
                use_write_ahead_log(self._database, BUSY_SECONDS)
                self._database.execute("PRAGMA synchronous = NORMAL")
                self._database.execute(TABLE)
                # Where a file cannot be opened to be written SQLite opens it to be read, for as long as the
                # connection lasts: what writes nothing fails then, too.
                self._database.execute("DELETE FROM usage WHERE false")
                on_error.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise KeysError(
                f"{path}, where usage is counted, cannot be used ({error}); make room, or put the file of "
                "--keys into a folder that the server may write to"
            ) from None

    def add(self, used: Iterable[Used]) -> None:
        """All of it or nothing."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._database.executemany(ADD, used)
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def read(self, key: str | None = None, first: str = FIRST_DAY, last: str = LAST_DAY) -> list[Used]:
        """Of one key or of all, from the first day to the last, in the order of days."""
        found = self._database.execute(
            "SELECT * FROM usage WHERE (?1 IS NULL OR key = ?1) AND day BETWEEN ?2 AND ?3 "
            "ORDER BY day, key, model",
            (key, first, last),
        )
        return [Used(*row) for row in found]

    def close(self) -> None:
        self._database.close()

"""SQLite files that several processes have open at once."""

import sqlite3
import time

RETRY_SECONDS = 0.01


def use_write_ahead_log(database: sqlite3.Connection, seconds: float) -> None:
    """Let others read while one writes. Raises sqlite3.Error, after `seconds` in which others keep it busy.

    The connection's own timeout does not do: of two processes that make a new file at once both have read its
    first page and want to write it, and SQLite makes neither wait, as they would wait for each other.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)

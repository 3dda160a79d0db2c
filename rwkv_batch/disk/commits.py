"""Commits of SQLite that have failed, and must not be found after a crash."""

import sqlite3


def may_be_found(error: BaseException) -> bool:
    """Whether a COMMIT of SQLite that has failed so may be whole in its log.

    Its sync has failed, as a rule. Whoever opens the file after a crash takes it for one that has succeeded.
    """
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


def take_back(database: sqlite3.Connection) -> None:
    """Write over what `may_be_found`: by the next commit, which changes nothing. Raises sqlite3.Error."""
    version = database.execute("PRAGMA user_version").fetchone()[0]
    database.execute(f"PRAGMA user_version = {version}")

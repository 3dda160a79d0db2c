"""A connection to PostgreSQL that is made again when it is lost, and what errors of the database mean.

An outage begins when a connection is lost or cannot be made, and ends when one works. What is asked for
meanwhile waits; once the outage has lasted for `patience` seconds it fails, with StoreAway.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rwkv_batch.state.entries import DiskFailed, StoreAway, StoreError

log = logging.getLogger(__name__)
logging.getLogger("psycopg").setLevel(logging.ERROR)  # it warns of each connection that is lost

T = TypeVar("T")
Database = psycopg.Connection[tuple[Any, ...]]

AWAY = "The database of sessions cannot be reached; try again later."
REFUSED = "The database of sessions cannot be used ({}); look at the URL of --state-db and at its role."
HELD = "Another server or transaction holds what is needed in the database; try again later."
TRY_AGAIN = 0.2  # seconds between attempts to connect
# What libpq waits for by default is longer than an outage may last.
WAITS: dict[str, str | int] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "application_name": "rwkv-batch",
}
# A server that is stopped in a transaction holds locks on sessions; PostgreSQL ends it then.
STOPPED_MS = 5000
# Beside lost connections: a server that ends, starts, has no room for one, or only reads as another writes.
_AWAY = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.TooManyConnections,
    errors.ReadOnlySqlTransaction,
    errors.IdleInTransactionSessionTimeout,
)
# Classes of codes (errcodes-appendix) of what passes: transactions in each other's way, too few resources, an
# operator who intervenes, the system below.
_FOR_NOW = ("40", "53", "57", "58")
_PASSING = ("starting up", "shutting down", "too many", "remaining connection slots", "recovery")


class Outage:
    """The outage that all connections of a server see."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._since: float | None = None
        self.has_been_reached = False
        self._waiting = 0  # callers, who see when it ends
        self._lock = Lock()

    @contextmanager
    def waits(self) -> Iterator[None]:
        """A caller waits for its end."""
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    @property
    def is_waited_for(self) -> bool:
        """Whether it lasts, and a caller will see when it ends."""
        return self._since is not None and self._waiting > 0

    def lasts(self, error: Exception) -> bool:
        """Something has failed because of it; whether it lasts too long to be waited for."""
        with self._lock:
            if self._since is None:
                self._since = time.monotonic()
                log.error("The database cannot be reached; what needs it waits: %s", one_line(error))
            return time.monotonic() - self._since >= self.patience

    def ended(self) -> None:
        """Something has worked."""
        self.has_been_reached = True
        if self._since is None:
            return
        with self._lock:
            since, self._since = self._since, None
        if since is not None:  # else another caller has seen it meanwhile
            log.info("The database is reached again, after %.1f s.", time.monotonic() - since)


class Renew(Exception):
    """The work is to be done again, by a new connection."""


class PostgresConnection:
    """For one kind of caller; opened when it is first used. From any thread, one at a time.

    `settings`: SQL that each connection begins with.
    """

    def __init__(self, url: str, settings: str, outage: Outage) -> None:
        self._url, self._settings, self._outage = url, settings, outage
        self._open: Database | None = None
        self._lock = RLock()
        self._closed = False

    @property
    def patience(self) -> float:
        """Seconds that an outage may last before what waits for its end fails."""
        return self._outage.patience

    def run(self, work: Callable[[Database], T], *, waits: bool = True) -> T:
        """The result of `work`, which is called again if the connection was lost. Raises StoreError.

        waits: for the end of an outage. Who does not wait tries only where nobody else does: it may take long
        until a host says nothing.
        """
        if waits:
            with self._outage.waits():
                return self._run(work, waits)
        if self._outage.is_waited_for:
            raise StoreAway(AWAY)
        return self._run(work, waits)

    def _run(self, work: Callable[[Database], T], waits: bool) -> T:
        again = True  # at once, as a connection may have been lost long ago
        # Others may be answered meanwhile, and no outage last, where it is this work that costs connections.
        deadline: float | None = None
        while True:
            was_open = self._open is not None
            try:
                with self._lock:
                    result = work(self._connected())
                self._outage.ended()
                return result
            except Renew:
                self._disconnect()
            except psycopg.Error as error:
                if not self._is_lost(error):
                    raise explained(error) from error
                self._disconnect()
                if was_open and again:
                    again = False
                    continue
                deadline = deadline or time.monotonic() + self.patience
                lasts = self._outage.lasts(error) or time.monotonic() >= deadline
                if self._is_refused(error):
                    raise StoreError(REFUSED.format(one_line(error))) from None
                if lasts or not waits or self._closed:
                    # Where it has been reached clients get the sentence, and the reason is for the log alone.
                    reason = "" if self._outage.has_been_reached else f" ({one_line(error)})"
                    raise StoreAway(AWAY.replace(";", f"{reason};")) from None
                time.sleep(TRY_AGAIN)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        with self._lock:
            if self._open:
                self._open.close()
            self._open = None

    def _connected(self) -> Database:
        if self._open is None:
            opened = psycopg.connect(self._url, autocommit=True)
            try:
                opened.execute(self._settings.encode())
            except BaseException:  # without them it would read another schema
                opened.close()
                raise
            self._open = opened
        return self._open

    def _is_refused(self, error: psycopg.Error) -> bool:
        """Whether a first connection has failed for a reason that does not pass, such as a wrong password."""
        text = str(error)
        final = ("FATAL:" in text and not any(map(text.count, _PASSING))) or "invalid" in text
        return final and not self._outage.has_been_reached

    def _is_lost(self, error: psycopg.Error) -> bool:
        if isinstance(error, _AWAY):
            return True
        # PostgreSQL or a pooler has ended it, as an idle one or for a limit of time.
        if self._open is not None and self._open.closed:
            return True
        known = error.sqlstate is not None and not error.sqlstate.startswith("08")
        return isinstance(error, psycopg.OperationalError) and not known


def with_waits(url: str) -> str:
    """The URL with bounds to what libpq waits for, and of several hosts with the one that writes.

    What it sets itself counts. Raises StoreError.
    """
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # which would name the password
        raise StoreError(
            "The URL of the database is not understood; write postgresql://user@host:5432/database."
        ) from None
    wanted = dict(WAITS)
    if any("," in str(given.get(name, "")) for name in ("host", "hostaddr")):
        wanted["target_session_attrs"] = "read-write"  # one that only reads may lag behind the others
    return make_conninfo(url, **{name: value for name, value in wanted.items() if name not in given})


def explained(error: psycopg.Error) -> StoreError:
    """The error to raise in place of one of PostgreSQL's."""
    if isinstance(error, errors.DiskFull):
        return StoreAway(
            "The disk of the database is full; nothing can be stored before there is room again."
        )
    if isinstance(error, errors.LockNotAvailable):
        return StoreAway(HELD)
    if isinstance(error, psycopg.DataError | psycopg.IntegrityError):
        return StoreError(f"The database takes no such values ({one_line(error)}).")
    if (error.sqlstate or "")[:2] in _FOR_NOW:
        return DiskFailed(f"The database cannot be used now ({one_line(error)}); try again later.")
    return StoreError(f"The database cannot be used ({one_line(error)}).")


def one_line(error: Exception) -> str:
    """Its first line, which names no password."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__

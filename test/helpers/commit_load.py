"""Processes that commit turns to one database without pause: through one that writes, or each by itself."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from hosts import ProcessHost

from rwkv_batch.state.entries import NONE, Head, PutSession, PutTurn, Removed, Session, Turn
from rwkv_batch.state.host.store import HostStore
from rwkv_batch.state.log import store as store_module
from rwkv_batch.state.log import turn_ids
from rwkv_batch.state.log.protocol import SessionStore
from rwkv_batch.state.postgres.store import PostgresStore

fork = multiprocessing.get_context("fork")
PROMPT, COMPLETION = list(range(1000, 1100)), list(range(2000, 2100))


class _NoClaim:
    """Of a database to which several processes write, each by itself."""

    def __init__(self, path: Path) -> None: ...

    def take_file(self, create: bool = False) -> None: ...

    def close(self) -> None: ...


def alone(path: Path) -> SessionStore:
    """A database that does not ask whose it is."""
    store_module.Claim = _NoClaim  # type: ignore[assignment, misc]
    store = store_module.Store(path)
    store.turn_numbers = lambda: turn_ids.in_random_blocks(lambda first, behind: False)  # type: ignore[method-assign]
    return store


@dataclass(frozen=True)
class CommitFigures:
    """Of one run. Seconds are from a turn's commit being asked for to its outcome."""

    turns_a_second: float
    median: float
    p99: float
    worst: float
    refused: int


def _client(open_store: Callable[[], SessionStore], at_once: int, control: Connection) -> None:
    store = open_store()
    ids = store.turn_numbers()
    commits = store.commit_queue(lambda callback: callback(), lambda: None)
    waits: list[float] = []
    failures: list[Exception] = []
    control.send(None)
    seconds: float = control.recv()
    end = time.perf_counter() + seconds

    def put(key: str, parent: Head | None) -> None:
        turn = Turn.from_parent(next(ids), parent, PROMPT, COMPLETION, 1)
        session = Session(key, turn.head(0), turn.created)
        follows = PutSession(session, follows=parent.turn if parent else NONE)
        done = partial(stored, key, session.head, time.perf_counter())
        commits.put([PutTurn(turn), follows], done)

    def stored(key: str, head: Head, asked: float, _: Removed | None, error: Exception | None) -> None:
        now = time.perf_counter()
        waits.append(now - asked)
        if error:
            failures.append(error)
        elif now < end:
            put(key, head)

    for number in range(at_once):
        put(f"{next(ids)}-{number}", None)
    time.sleep(max(0.0, end - time.perf_counter()))
    commits.close()
    store.close()
    control.send((waits, len(failures)))


def measure(
    engines: int, at_once: int, seconds: float, through_one: bool, url: str | None = None
) -> CommitFigures:
    """Each of so many processes has `at_once` turns under way, each of a session of its own.

    url: of a database in PostgreSQL, in place of a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        if url:
            opened = partial(PostgresStore, url, Path(folder), name="commit_load")
            opened().close()
            return _run(opened, engines, at_once, seconds)
        path = Path(folder) / "sessions.db"
        if not through_one:
            alone(path).close()
            return _run(partial(alone, path), engines, at_once, seconds)
        with ProcessHost(path, fork) as host:
            return _run(partial(HostStore, path, host.address), engines, at_once, seconds)


def _run(open_store: Callable[[], SessionStore], engines: int, at_once: int, seconds: float) -> CommitFigures:
    pipes = [fork.Pipe() for _ in range(engines)]
    for _, theirs in pipes:
        fork.Process(target=_client, args=(open_store, at_once, theirs), daemon=True).start()
    for ours, _ in pipes:
        ours.recv()
    for ours, _ in pipes:
        ours.send(seconds)
    found = [ours.recv() for ours, _ in pipes]
    waits = sorted(wait for waits, _ in found for wait in waits)
    share = [waits[int(part * (len(waits) - 1))] for part in (0.5, 0.99, 1.0)]
    return CommitFigures(len(waits) / seconds, *share, sum(failures for _, failures in found))

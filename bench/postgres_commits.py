#!/usr/bin/env python3
"""How many turns PostgreSQL commits, and what one takes there: `python bench/postgres_commits.py`.

Processes commit groups of turns as servers do, one after the other, to a PostgreSQL of this machine that
syncs each commit. Printed are turns a second of all, the milliseconds of a commit, and bytes a turn.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test" / "helpers")]

import psycopg  # noqa: E402
from postgres_server import PostgresServer, find  # noqa: E402

from rwkv_batch.state.entries import NONE, Head, PutSession, PutTurn, Session, Turn  # noqa: E402
from rwkv_batch.state.postgres.store import PostgresStore  # noqa: E402

SESSIONS = 1000  # of each process


def commit(url: str, number: int, seconds: float, group: int, tokens: int, pipe: object) -> None:
    """One process: what it has committed, and the seconds of each commit."""
    with tempfile.TemporaryDirectory() as folder:
        store = PostgresStore(url, Path(folder))
        model, ids = store.model_id("m", 65536), store.turn_numbers()
        heads: dict[str, Head] = {}
        took: list[float] = []
        turns, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            groups = []
            for place in range(group):
                key = f"{number}/{(turns + place) % SESSIONS}"
                before = heads.get(key)
                turn = Turn.from_parent(next(ids), before, [7] * (tokens // 2), [9] * (tokens // 2), model)
                turn = replace(turn, request=turn.id.to_bytes(16, "big") + turn.digest)
                heads[key] = turn.head(0)
                session = Session(key, turn.head(0), turn.created)
                groups.append([PutTurn(turn), PutSession(session, follows=before.turn if before else NONE)])
            began = time.perf_counter()
            store.commit(groups)
            took.append(time.perf_counter() - began)
            turns += group
        store.close()
    pipe.send((turns, took))  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", default="1,2,4", help="how many at once, one after the other")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each")
    parser.add_argument("--group", type=int, default=20, help="turns of a transaction")
    parser.add_argument("--tokens", type=int, default=200, help="of a turn")
    given = parser.parse_args()
    programs = find()
    assert programs, "There is no PostgreSQL; install it."
    print("| processes | turns/s | commit, ms, median | P99 | bytes a turn |\n|---|---|---|---|---|")
    for processes in map(int, given.processes.split(",")):
        server = PostgresServer(programs, "fsync=on", "autovacuum=on", "shared_buffers=256MB")
        try:
            PostgresStore(server.url, Path(tempfile.mkdtemp(dir=server.folder))).close()  # the tables
            pipes = [multiprocessing.Pipe() for _ in range(processes)]
            work = [
                multiprocessing.Process(
                    target=commit,
                    args=(server.url, number, given.seconds, given.group, given.tokens, pipe[1]),
                )
                for number, pipe in enumerate(pipes)
            ]
            for each in work:
                each.start()
            found = [pipe[0].recv() for pipe in pipes]
            for each in work:
                each.join()
            with psycopg.connect(server.url) as database:
                query = (
                    "SELECT pg_total_relation_size('rwkv.turns') + pg_total_relation_size('rwkv.sessions')"
                )
                size = database.execute(query).fetchone()
            turns, took = sum(count for count, _ in found), sorted(t for _, times in found for t in times)
            print(
                f"| {processes} | {turns / given.seconds:,.0f} | {1e3 * statistics.median(took):.1f} "
                f"| {1e3 * took[int(0.99 * len(took))]:.1f} | {(size[0] if size else 0) / turns:.0f} |"
            )
        finally:
            server.close()


if __name__ == "__main__":
    main()

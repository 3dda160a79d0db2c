#!/usr/bin/env python3
"""Options of the database: page size, when the log is moved into the file, and what syncing costs.

    python bench/database_options.py [--turns 4000] [--folder DIR]

For each choice, sessions of 40 tokens a turn are committed as the server does: first one turn in each
transaction, as with one user, then 64 in each, as with many. The sessions take turns, so that each has
several. Choices alternate over the rounds; the table has medians of rounds. The first line is what the server
has.
"""

import argparse
import itertools
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from rwkv_batch.state.entries import Head, PutSession, PutTurn, Session, Turn
from rwkv_batch.state.log import sqlite, store

TOKENS = 40  # of a turn
TOGETHER = 64  # turns in a transaction
SESSIONS = 500
MIB = 1 << 20


@dataclass(frozen=True)
class DatabaseOptions:
    page: int  # bytes
    checkpoint: int  # bytes of the log after which it is moved into the file
    synced: bool  # each commit


OWN = DatabaseOptions(sqlite.PAGE, store.CHECKPOINT_BYTES, True)
CHOICES = [
    OWN,
    *(DatabaseOptions(page, OWN.checkpoint, True) for page in (1024, 8192, 16384)),
    *(DatabaseOptions(OWN.page, size * MIB, True) for size in (1, 16, 64)),
    DatabaseOptions(OWN.page, OWN.checkpoint, False),
]


def measure(choice: DatabaseOptions, turns: int, folder: Path) -> tuple[float, float, float, float]:
    """Milliseconds of a commit of one turn, their P99, turns a second in groups, and MB on the disk."""
    rng, heads = np.random.default_rng(0), dict[int, Head]()
    ids = itertools.count(1)
    with (
        mock.patch.object(sqlite, "PAGE", choice.page),
        mock.patch.object(store, "CHECKPOINT_BYTES", choice.checkpoint),
    ):
        database = store.Store(folder / "sessions.db")
        model = database.model_id("0123456789abcdef", 65536)
        if not choice.synced:
            with database._writer.use() as connection:
                connection.execute("PRAGMA synchronous = NORMAL")

        def operations() -> list[PutTurn | PutSession]:
            number = next(ids)
            before = heads.get(number % SESSIONS)
            tokens = rng.integers(1, 65536, TOKENS).tolist()
            turn = Turn.from_parent(number, before, tokens[: TOKENS // 2], tokens[TOKENS // 2 :], model)
            head = heads[number % SESSIONS] = turn.head(0)
            return [PutTurn(turn), PutSession(Session(f"s{number % SESSIONS}", head, turn.created))]

        single = []
        for _ in range(turns // 4):
            given = [operations()]
            began = time.perf_counter()
            database.commit(given)
            single.append(time.perf_counter() - began)
            database.checkpoint(quiet=True)
        groups = [[operations() for _ in range(TOGETHER)] for _ in range(turns // TOGETHER)]
        began = time.perf_counter()
        for group in groups:
            database.commit(group)
            database.checkpoint(quiet=False)
        rate = len(groups) * TOGETHER / (time.perf_counter() - began)
        database.close()
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    return statistics.median(single) * 1e3, float(np.percentile(single, 99)) * 1e3, rate, size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=4000, help="of each choice and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="on the disk to measure (default: the one for temporary files)")
    options = parser.parse_args()
    found: dict[DatabaseOptions, list[tuple[float, float, float, float]]] = {choice: [] for choice in CHOICES}
    for _ in range(options.rounds):
        for choice in CHOICES:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                found[choice].append(measure(choice, options.turns, Path(folder)))
    print(
        f"{platform.system()} {platform.release()}, SQLite {sqlite3.sqlite_version}, {TOKENS} tokens a turn"
    )
    print(
        "\n| page | log, MB | synced | commit of a turn, ms | P99 | turns a second, 64 at once | MB on disk |"
    )
    print("|---|---|---|---|---|---|---|")
    for choice, rounds in found.items():
        commit, p99, rate, size = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"| {choice.page} | {choice.checkpoint / MIB:.0f} | {'yes' if choice.synced else 'no'} "
            f"| {commit:.2f} | {p99:.2f} | {rate:.0f} | {size:.1f} |"
        )


if __name__ == "__main__":
    main()

"""A process that stores something, then something else when its input says so, and is killed at once:
python failed_sync.py sessions|batches|files FOLDER

It prints when it waits, and what the second became.
"""

import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from stores import next_turn, session  # noqa: E402

from rwkv_batch.batches.records import BatchRecord, new_id  # noqa: E402
from rwkv_batch.batches.store import BatchStore, file_of  # noqa: E402
from rwkv_batch.state.entries import PutSession, PutTurn, StoreError  # noqa: E402
from rwkv_batch.state.log.store import Store  # noqa: E402

ONE = next_turn(1)
TWO = next_turn(2, ONE)


def sessions(folder: Path) -> Iterator[Callable[[], object]]:
    store = Store(folder / "sessions.db")
    for turn in (ONE, TWO):
        yield lambda turn=turn: store.commit([[PutTurn(turn), PutSession(session("a", turn), turn.parent)]])


def batches(folder: Path) -> Iterator[Callable[[], object]]:
    store = BatchStore(folder)
    name = store.add_file(file_of("anna", "one.jsonl"), lambda path: path.write_text("one")).id
    now = int(time.time())
    for _ in range(2):
        batch = BatchRecord(
            id=new_id("batch_"),
            owner="anna",
            endpoint="/v1/chat/completions",
            input_file=name,
            window="24h",
            created=now,
            expires=now + 86400,
        )
        yield lambda batch=batch: store.add_batch(batch)


def files(folder: Path) -> Iterator[Callable[[], object]]:
    store = BatchStore(folder)
    for name in ("one", "two"):
        file = file_of("anna", f"{name}.jsonl")
        yield lambda file=file, name=name: store.add_file(file, lambda path: path.write_text(name))


def main(what: str, folder: Path) -> None:
    """Does not return."""
    first, second = {"sessions": sessions, "batches": batches, "files": files}[what](folder)
    first()
    print("one is stored", flush=True)
    sys.stdin.readline()
    try:
        second()
        print("two is stored", flush=True)
    except (StoreError, sqlite3.Error) as error:
        print(error, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

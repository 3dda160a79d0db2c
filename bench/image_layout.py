#!/usr/bin/env python3
"""Where images of states belong: files beside the database, or rows in it.

    python bench/image_layout.py [--sizes 0.3 2.4 17.3] [--images 40] [--folder DIR]

For each size in MB, images are written one after the other: as files (rwkv_batch/state/images.py), as rows of
a second database, and as rows of the database of the turns. Meanwhile turns are committed, a row of 300 bytes
each, every 5 ms: how long such a commit takes is how long the last event of a turn waits. Then the images are
read, from the page cache. Prints a table.
"""

import argparse
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from rwkv_batch.state import images
from rwkv_batch.state.log import sqlite

TURN_EVERY = 0.005  # seconds
TURN = os.urandom(300)
LOG_BYTES = 4 << 20
WAYS = {"files": "files", "own": "rows of a database of their own", "same": "rows of the same database"}


class ByteRows:
    """Rows of bytes, in a database that is opened as the product does."""

    def __init__(self, path: Path) -> None:
        self._rows = sqlite.connect(path, LOG_BYTES)
        self._rows.execute("CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY, data BLOB)")
        self._lock, self._logged = threading.Lock(), 0  # the product commits on one thread

    def put(self, data: bytes | memoryview) -> None:
        with self._lock:
            self._rows.execute("BEGIN IMMEDIATE")
            self._rows.execute("INSERT INTO entries (data) VALUES (?)", (data,))
            self._rows.execute("COMMIT")
            self._logged += len(data) + sqlite.PAGE
            if self._logged > LOG_BYTES:
                self._rows.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                self._logged = 0

    def get(self, number: int) -> bytes:
        query = "SELECT data FROM entries WHERE id = ?"
        data: bytes = self._rows.execute(query, (number,)).fetchone()[0]
        return data


class TurnCommits(threading.Thread):
    """Commits a turn every few milliseconds until `stop`; `seconds` of each commit."""

    def __init__(self, database: ByteRows) -> None:
        super().__init__()
        self._database, self._over = database, threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        while not self._over.wait(TURN_EVERY):
            began = time.perf_counter()
            self._database.put(TURN)
            self.seconds.append(time.perf_counter() - began)

    def stop(self) -> None:
        self._over.set()
        self.join()


def measure(way: str, folder: Path, size: int, count: int) -> str:
    """The cells of a row: MB/s written and read, milliseconds of a commit meanwhile."""
    database = ByteRows(folder / "turns.db")
    own = database if way == "same" else ByteRows(folder / "images.db")
    place = images.prepared_folder(folder / "images")
    image = torch.randint(0, 256, (size,), dtype=torch.uint8)

    def write(number: int) -> None:
        if way == "files":
            images.write(place, number, image)
        else:
            own.put(image.numpy().data)

    def read(number: int) -> object:
        return images.read(place, number, pinned=False) if way == "files" else own.get(number)

    turns = TurnCommits(database)
    turns.start()
    began = time.perf_counter()
    for i in tqdm(range(1, count + 1), desc=way, leave=False, disable=None):
        write(i)
    written = time.perf_counter() - began
    turns.stop()
    if way == "same":  # the ids of the images are among those of the turns
        query = "SELECT id FROM entries WHERE length(data) = ?"
        ids = [row[0] for row in sqlite3.connect(folder / "turns.db").execute(query, (size,))]
    else:
        ids = list(range(1, count + 1))
    began = time.perf_counter()
    for i in ids:
        read(i)
    seconds = time.perf_counter() - began
    waits = statistics.quantiles(turns.seconds, n=100) if len(turns.seconds) > 1 else [0.0] * 99
    rates = " | ".join(three_digits(size * count / took / 1e6) for took in (written, seconds))
    return f"{rates} | {waits[49] * 1e3:.1f} | {waits[98] * 1e3:.1f}"


def three_digits(rate: float) -> str:
    """The rate with three significant digits, as a slow disk writes small images at less than 1 MB/s."""
    return f"{float(f'{rate:.3g}'):g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.3, 2.4, 17.3], help="in MB")
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    system = f"{platform.system()} {platform.release()}, SQLite {sqlite3.sqlite_version}"
    print(f"{system}, {options.images} images of each size\n")
    print("| image, MB | as | written, MB/s | read, MB/s | commit of a turn meanwhile, ms | P99 |")
    print("|---|---|---|---|---|---|")
    for megabytes in options.sizes:
        for way, name in WAYS.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                cells = measure(way, Path(folder), int(megabytes * 1e6), options.images)
            print(f"| {megabytes:g} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

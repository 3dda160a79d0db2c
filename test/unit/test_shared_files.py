"""SQLite files and folders that several processes make at once."""

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pytest

from rwkv_batch.batches.store import BatchStore
from rwkv_batch.disk import shared
from rwkv_batch.disk.shared import use_write_ahead_log
from rwkv_batch.keys.usage import UsageStore
from rwkv_batch.state import images
from rwkv_batch.state.elsewhere.image_index import ImageIndex

AT_ONCE = 6
TIMES = 20


class Opened(Protocol):
    def close(self) -> None: ...


@pytest.mark.parametrize(
    "open_in",
    [
        pytest.param(lambda folder: ImageIndex(folder / "states"), id="images"),
        pytest.param(lambda folder: BatchStore(folder / "batches"), id="batches"),
        pytest.param(lambda folder: UsageStore(folder / "usage.db"), id="usage"),
    ],
)
def test_what_is_new_is_opened_by_several_at_once(open_in: Callable[[Path], Opened], tmp_path: Path) -> None:
    gate, errors = threading.Barrier(AT_ONCE), list[Exception]()

    def start(folder: Path) -> None:
        gate.wait()
        try:
            open_in(folder).close()
        except Exception as error:
            errors.append(error)

    for turn in range(TIMES):
        folder = tmp_path / str(turn)
        folder.mkdir()
        threads = [threading.Thread(target=start, args=(folder,)) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_a_folder_that_another_server_makes_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mkdir = tmp_path / "states", Path.mkdir

    def behind_another(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        mkdir(path)
        mkdir(path, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", behind_another)
    assert images.prepared_folder(folder).is_dir()


def test_a_file_that_others_keep_busy_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new.db"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as other,
        closing(sqlite3.connect(path, timeout=0)) as ours,
    ):
        other.execute("BEGIN EXCLUSIVE")
        waits = list[float]()

        def end_the_other(seconds: float) -> None:
            waits.append(seconds)
            other.execute("COMMIT")

        monkeypatch.setattr(shared.time, "sleep", end_the_other)
        use_write_ahead_log(ours, 60)
        assert len(waits) == 1
        assert ours.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_file_that_stays_busy_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as other,
        closing(sqlite3.connect(path, timeout=0)) as ours,
    ):
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            use_write_ahead_log(ours, 0)

"""What was refused because the disk could not sync SQLite's log is not found after a crash."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from errno import EIO
from pathlib import Path

import failed_sync
import pytest
from failed_sync import ONE, TWO
from faults import ALWAYS, Call, Faults
from power_cut import missing
from tools import absent

from rwkv_batch.batches.store import UNCERTAIN, BatchStore
from rwkv_batch.state.entries import UNKNOWN
from rwkv_batch.state.log.store import Store


def found_sessions(folder: Path) -> list[str]:
    with closing(Store(folder / "sessions.db")) as store:
        ends = {ONE.id: "one", TWO.id: "two"}
        return [ends[each.head.turn] for each in store.list_sessions(None, 10)]


def found_batches(folder: Path) -> list[str]:
    with closing(BatchStore(folder)) as store:
        return ["one"] * len(store.batches())


def found_files(folder: Path) -> list[str]:
    with closing(BatchStore(folder)) as store:
        return [store.path(file.id).read_text() for file in store.files()]


FOUND: dict[str, Callable[[Path], list[str]]] = {
    "sessions": found_sessions,
    "batches": found_batches,
    "files": found_files,
}


def said(what: str, folder: Path, call: Call, times: int = 1) -> str:
    """What became of the second that was to be stored: so many calls of this kind on the log failed."""
    if reason := missing():
        absent(reason)
    place = folder / "disk"
    place.mkdir()
    faults = Faults(folder, place)
    with subprocess.Popen(
        [sys.executable, failed_sync.__file__, what, place],
        env=os.environ | faults.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "one is stored\n"
        faults.arm(call, EIO, 0, "-wal", times)
        process.stdin.write("go on\n")
        process.stdin.flush()
        outcome = process.stdout.read().strip()
    assert faults.disarm()
    return outcome


@pytest.mark.parametrize("what", FOUND)
def test_what_was_refused_does_not_come_back(tmp_path: Path, what: str) -> None:
    outcome = said(what, tmp_path, Call.SYNC)
    assert "disk I/O error" in outcome and "not known" not in outcome
    assert FOUND[what](tmp_path / "disk") == ["one"]


@pytest.mark.parametrize(
    ("what", "sentence"), [("sessions", UNKNOWN), ("batches", UNCERTAIN), ("files", UNCERTAIN)]
)
def test_where_nothing_can_be_synced_it_is_said_that_it_is_not_known(
    tmp_path: Path, what: str, sentence: str
) -> None:
    outcome = said(what, tmp_path, Call.SYNC, ALWAYS)
    assert "disk I/O error" in outcome and outcome.endswith(sentence)
    assert FOUND[what](tmp_path / "disk") == ["one"], "only a power cut can bring it back"


@pytest.mark.parametrize("what", FOUND)
def test_where_nothing_can_be_written_it_is_known(tmp_path: Path, what: str) -> None:
    outcome = said(what, tmp_path, Call.WRITE, ALWAYS)
    assert "disk I/O error" in outcome and "not known" not in outcome
    assert FOUND[what](tmp_path / "disk") == ["one"]

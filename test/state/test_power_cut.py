"""A hundred crashes: kill -9, and power cuts that keep only what was synced and a part of the rest.

Every session is as it was acknowledged last, or as it was asked for later, with the state of its tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import pool_workload
import power_cut
import pytest
from pool_workload import VARIANTS, Recording
from power_cut import Cut, Disk, Kind, Names, Operation
from tools import absent

pytestmark = pytest.mark.thorough

SEED = 1
OPERATIONS = 40  # of each process
# How many crashes of each recording, of which every variant has two.
CRASHES: dict[str, tuple[int, Sequence[Names | None]]] = {
    "kill -9": (3, (None,)),
    "power cut": (7, ("any", "synced", "all")),
}
ROOT = Path("/disk")
NEW = Operation(Kind.OPEN, 3, 0, "/disk/file", b"")
FOLDER = Operation(Kind.OPEN, 4, 0, "/disk", b"")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[Recording]:
    if reason := power_cut.missing():
        absent(reason)
    return pool_workload.record(tmp_path_factory.mktemp("recordings"), SEED, OPERATIONS)


@pytest.mark.parametrize("kind", CRASHES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_acknowledged_is_lost_and_no_wrong_state_is_found(
    recordings: list[Recording], variant: str, kind: str
) -> None:
    count, names = CRASHES[kind]
    outcomes = [
        outcome
        for recording in recordings
        if recording.variant == variant
        for outcome in recording.check(power_cut.cuts(recording.operations, count, names, SEED))
    ]
    wrong = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert not wrong, "\n".join(wrong)
    assert len(outcomes) == 2 * count


def test_the_first_session_of_a_new_database_outlives_a_power_cut(recordings: list[Recording]) -> None:
    """Without a token log it is an image, in a folder that has just been made."""
    recording = next(recording for recording in recordings if recording.variant == "no token log")
    first = next(
        place
        for place, operation in enumerate(recording.operations, 1)
        if operation.kind is Kind.MARK and b"done" in operation.data
    )
    outcomes = recording.check(Cut(first, names) for names in ("synced", "any", "all"))
    assert not [outcome for outcome in outcomes if isinstance(outcome, str)]


def test_a_recording_has_everything_that_happened_to_the_disk(
    recordings: list[Recording], tmp_path: Path
) -> None:
    for recording in recordings:
        end = Cut(len(recording.operations))
        replayed = tmp_path / recording.disk.name
        Disk(recording.disk, recording.operations, recording.base).rebuild(end, replayed)
        assert power_cut.contents(replayed) == power_cut.contents(recording.disk)


def sync(descriptor: int, *during: Operation) -> list[Operation]:
    begin, end = (
        Operation(kind, descriptor, descriptor, "", b"") for kind in (Kind.SYNC_BEGIN, Kind.SYNC_END)
    )
    return [begin, *during, end]


def write(offset: int, data: bytes) -> Operation:
    return Operation(Kind.WRITE, 3, offset, "", data)


def found(operations: list[Operation], folder: Path, names: Names | None) -> list[dict[str, bytes]]:
    """What is there after all operations, by many chances."""
    outcomes = []
    for seed in range(50):
        target = folder / f"{len(operations)}-{names}-{seed}"
        Disk(ROOT, operations).rebuild(Cut(len(operations), names, seed), target)
        outcomes.append(power_cut.contents(target))
    return outcomes


def test_a_write_is_certain_when_its_file_was_synced_after_it(tmp_path: Path) -> None:
    operations = [FOLDER, NEW, *sync(4), write(0, b"ab"), *sync(3, write(2, b"cd")), write(0, b"x")]
    contents = {disk["file"] for disk in found(operations, tmp_path, "synced")}
    assert contents == {b"ab", b"abc", b"abcd", b"xb", b"xbc", b"xbcd"}
    assert all(disk == {"file": b"xbcd"} for disk in found(operations, tmp_path, None))


def test_a_name_is_certain_when_its_folder_was_synced_after_it(tmp_path: Path) -> None:
    rename = Operation(Kind.RENAME, -1, 0, "/disk/file", b"/disk/other")
    operations = [FOLDER, NEW, write(0, b"a"), *sync(3), *sync(4), rename]
    a = b"a"
    assert all(disk == {"file": a} for disk in found(operations, tmp_path, "synced"))
    assert all(disk == {"other": a} for disk in found(operations, tmp_path, "all"))
    assert all(disk == {"other": a} for disk in found([*operations, *sync(4)], tmp_path, "any"))
    disks = found(operations, tmp_path, "any")
    assert {tuple(disk) for disk in disks} == {(), ("file",), ("other",), ("file", "other")}

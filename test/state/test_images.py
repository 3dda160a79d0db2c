"""Images: files that are whole when they have their names."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import names, sealed, tiny_layout

from rwkv_batch.state import images
from rwkv_batch.state.entries import RowDamaged
from rwkv_batch.state.snapshot import PREFIX, Damaged, fitted

LAYOUT = tiny_layout()
RATE = 1000.0  # tokens a second that a model is fed, in these tests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return images.prepared_folder(tmp_path / "sessions.db.images")


def full_disk(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_folder_lies_beside_the_database_for_this_user_only(tmp_path: Path) -> None:
    folder = images.folder(tmp_path / "sessions.db")
    assert folder == tmp_path / "sessions.db.images" and not folder.exists()
    assert images.prepared_folder(images.prepared_folder(folder)) == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_was_written_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = sealed(LAYOUT, 5, b"digest")
    images.write(folder, 3, image)
    assert torch.equal(images.read(folder, 3, pinned=False), image)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:1000]))  # disks may take less
    monkeypatch.setattr(images, "READ_BYTES", 999)
    images.write(folder, 4, image)
    assert torch.equal(images.read(folder, 4, pinned=False), image)
    images.write(folder, 3, other := sealed(LAYOUT, 6, seed=1))
    assert torch.equal(images.read(folder, 3, pinned=False), other) and len(names(folder)) == 2


def test_two_processes_that_write_the_state_of_one_turn_hinder_each_other_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, sync, others = sealed(LAYOUT, 5, b"digest"), os.fdatasync, [1, 2]

    def behind_others(file: int) -> None:
        if others:
            others.pop()
            images.write(folder, 3, image)
        sync(file)

    monkeypatch.setattr(os, "fdatasync", behind_others)
    images.write(folder, 3, image)
    assert others == [] and names(folder) == {"3.state"}
    assert torch.equal(images.read(folder, 3, pinned=False), image)


def test_a_file_is_whole_on_the_disk_before_it_has_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.write(folder, 1, sealed(LAYOUT))
    (name,) = names(folder)
    (folder / name).unlink()
    image, synced = sealed(LAYOUT, seed=1), []

    def sync(file: int) -> None:
        (part,) = names(folder)
        assert part != name and (folder / part).stat().st_ino == os.fstat(file).st_ino
        synced.append((folder / part).read_bytes())

    monkeypatch.setattr(os, "fdatasync", sync)
    images.write(folder, 1, image)
    assert synced == [image.numpy().tobytes()] and names(folder) == {name}


@pytest.mark.parametrize("place", [(os, "write"), (os, "fdatasync"), (os, "open"), (Path, "rename")])
def test_an_error_leaves_no_file_behind_and_an_older_one_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[object, str]
) -> None:
    images.write(folder, 1, old := sealed(LAYOUT))
    before = names(folder)
    with monkeypatch.context() as patched:
        patched.setattr(*place, full_disk)
        for turn in (1, 2):
            with pytest.raises(OSError, match="No space"):
                images.write(folder, turn, sealed(LAYOUT, seed=1))
    assert names(folder) == before and torch.equal(images.read(folder, 1, pinned=False), old)


def test_an_error_in_the_middle_of_a_file_leaves_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = os.write, []

    def until_full(file: int, data: memoryview) -> int:
        if written:
            full_disk()
        written.append(write(file, data[:1000]))
        return written[0]

    monkeypatch.setattr(os, "write", until_full)
    with pytest.raises(OSError, match="No space"):
        images.write(folder, 1, sealed(LAYOUT))
    assert written == [1000] and names(folder) == set()


def test_a_missing_file_is_a_damaged_row(folder: Path, tmp_path: Path) -> None:
    for place in (folder, tmp_path / "nowhere"):
        with pytest.raises(RowDamaged, match="cannot be read"):
            images.read(place, 1, pinned=False)


def test_a_cut_file_is_found(folder: Path) -> None:
    images.write(folder, 1, sealed(LAYOUT))
    (name,) = names(folder)
    whole = (folder / name).read_bytes()
    for length in (0, 1, PREFIX, len(whole) - 1):
        (folder / name).write_bytes(whole[:length])
        with pytest.raises((RowDamaged, Damaged)):
            fitted(images.read(folder, 1, pinned=False), LAYOUT)


def test_a_file_that_is_cut_while_it_is_read_is_a_damaged_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.write(folder, 1, sealed(LAYOUT))
    (name,) = names(folder)
    empty = torch.empty

    def cut(*arguments: Any, **options: Any) -> torch.Tensor:
        os.truncate(folder / name, 1000)  # its length is known, and nothing is read yet
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", cut)
    with pytest.raises(RowDamaged, match="cut short"):
        images.read(folder, 1, pinned=False)


def test_removing_ignores_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    for turn in (1, 2, 3):
        images.write(folder, turn, sealed(LAYOUT))
    images.remove(folder, [1, 7, 3])
    assert torch.equal(images.read(folder, 2, pinned=False), sealed(LAYOUT)) and len(names(folder)) == 1
    images.remove(tmp_path / "nowhere", [1])


def test_files_that_no_row_stands_for_are_removed(folder: Path, tmp_path: Path) -> None:
    for turn in (1, 2, 30):
        images.write(folder, turn, sealed(LAYOUT))
    for name in ("1.part", "5.part", "something else"):
        (folder / name).write_bytes(b"")
    images.sweep(folder, lambda: {1, 30, 99})
    assert len(names(folder)) == 2
    assert all(torch.equal(images.read(folder, turn, pinned=False), sealed(LAYOUT)) for turn in (1, 30))
    images.sweep(tmp_path / "nowhere", set)


def test_files_that_are_written_while_others_are_removed_stay(folder: Path) -> None:
    images.write(folder, 1, sealed(LAYOUT))

    def known() -> set[int]:
        images.write(folder, 2, sealed(LAYOUT))  # its row is committed later
        return set()

    images.sweep(folder, known)
    assert names(folder) == {"2.state"}

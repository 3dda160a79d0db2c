"""Files that the system does not let go at once."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import until

from rwkv_batch.disk import removal
from rwkv_batch.disk.removal import Removal

SOON = 30.0  # seconds


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Path]]:
    """Lets so many calls of unlink fail, and tries again at once; what was to be unlinked."""
    path_unlink, tried = Path.unlink, list[Path]()
    monkeypatch.setattr(removal, "AGAIN", 0.01)

    def keep(times: int) -> list[Path]:
        def unlink(path: Path, missing_ok: bool = False) -> None:
            tried.append(path)
            if len(tried) <= times:
                raise OSError(errno.EIO, "Input/output error")
            path_unlink(path, missing_ok=missing_ok)

        monkeypatch.setattr(Path, "unlink", unlink)
        return tried

    return keep


def test_a_file_goes_by_itself_as_soon_as_it_can(tmp_path: Path, kept: Callable[[int], list[Path]], caplog):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"x")
    tried, remove = kept(4), Removal().remove
    for file in [*files, tmp_path / "missing"]:
        remove(file)
    until(lambda: not any(file.exists() for file in files), SOON)
    assert len(tried) >= 6 and caplog.text.count("cannot be removed now (Input/output error)") >= 2


def test_one_that_cannot_be_looked_at_for_a_while_goes_all_the_same(
    tmp_path: Path, kept: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch
):
    file, os_stat, looks = tmp_path / "a", os.stat, list[object]()
    file.write_bytes(b"x")

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if path == file:
            looks.append(path)
            if len(looks) == 2:  # when it is tried again for the first time
                raise OSError(errno.EIO, "Input/output error")
        return os_stat(path, *arguments, **options)

    kept(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        Removal().remove(file)
        until(lambda: len(looks) > 2, SOON)
    until(lambda: not file.exists(), SOON)


def test_another_file_of_its_name_stays(tmp_path: Path, kept: Callable[[int], list[Path]]):
    file, later, mark = tmp_path / "a", tmp_path / "new", tmp_path / "mark"
    for each in (file, later, mark):
        each.write_text(each.name)
    tried, remove = kept(2), Removal().remove
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(removal, "AGAIN", 0.5)
        remove(file)
        later.rename(file)
        remove(mark)
    until(lambda: not mark.exists(), SOON)
    assert file.read_text() == "new" and tried.count(file) == 1


def test_where_there_can_be_no_thread_the_next_file_has_it_tried_again(
    tmp_path: Path, kept: Callable[[int], list[Path]], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "a"
    file.write_bytes(b"x")
    kept(1)
    remove = Removal().remove

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        remove(file)
    assert file.exists()
    remove(tmp_path / "another")
    until(lambda: not file.exists(), SOON)

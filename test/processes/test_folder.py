"""The folder of a running server: somewhere that can be written, with a path short enough for a socket."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from rwkv_batch.processes.folder import SOCKET, NoFolder, runtime_folder

UNWRITABLE = "/proc"  # by anybody


@pytest.fixture
def long_path(tmp_path: Path) -> str:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    return str(folder)


@pytest.fixture
def short_path() -> str:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@pytest.mark.parametrize("unfit", ["long", "unwritable", "missing"])
def test_a_place_that_is_unfit_is_passed_over(unfit: str, long_path: str, short_path: str) -> None:
    place = {"long": long_path, "unwritable": UNWRITABLE, "missing": "/no/such/place"}[unfit]
    with runtime_folder([place, short_path]) as folder:
        assert folder.parent == Path(short_path) and folder.stat().st_mode & 0o777 == 0o700
        assert list(folder.iterdir()) == []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / SOCKET))
        (folder / "more").touch()
    assert os.listdir(short_path) == [] and (unfit != "long" or os.listdir(place) == [])


def test_without_any_place_a_sentence_says_what_to_do(long_path: str) -> None:
    with (
        pytest.raises(NoFolder, match=r"/proc .*; name one with TMPDIR") as refused,
        runtime_folder([UNWRITABLE, long_path]),
    ):
        raise AssertionError("there is no such folder")
    assert f"{long_path} (AF_UNIX path too long)" in str(refused.value) and "\n" not in str(refused.value)


def test_pythons_own_temporary_files_go_there_if_it_has_no_place(
    short_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setenv("TMPDIR", "")  # so that it is as before afterwards
    monkeypatch.delenv("TMPDIR")
    with runtime_folder([short_path]) as folder:
        assert os.environ["TMPDIR"] == str(folder)


def test_the_users_choice_comes_first(short_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", short_path)
    with runtime_folder() as folder:
        assert folder.parent == Path(short_path)
    monkeypatch.setenv("TMPDIR", UNWRITABLE)
    with runtime_folder() as folder:
        assert folder.parent != Path(UNWRITABLE)

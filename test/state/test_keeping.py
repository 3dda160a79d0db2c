"""The thread that copies states to a store that servers share, without a database."""

import threading
from pathlib import Path

import pytest
import torch

from rwkv_batch.state import images
from rwkv_batch.state.elsewhere import keeping
from rwkv_batch.state.entries import PutImage, Unread

PATIENCE = 60.0  # seconds until something that does not come is a failure


class NothingMissing:
    """In place of Whereabouts: a database in which nothing is missing."""

    def begin(self, turn: int, url: str, size: int) -> bool:
        return True

    def finish(self, turn: int) -> bool:
        return True

    def unwanted(self, url: str) -> list[int]:
        return []


class DiskImages:
    """In place of ImageIndex."""

    def __init__(self, states: Path) -> None:
        self.states = states

    def turns(self) -> set[int]:
        return set()

    def drop(self, turns: list[int]) -> list[int]:
        return []


class MemoryObjects:
    """A store in memory."""

    url = "memory://"

    def __init__(self, count: int) -> None:
        self.kept: list[int] = []
        self.full, self._count = threading.Event(), count

    def write(self, turn: int, data: bytes, seconds: float) -> None:
        self.kept.append(turn)
        if len(self.kept) == self._count:
            self.full.set()


def test_a_state_that_the_disk_does_not_give_just_now_is_copied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for turn in (1, 2):
        images.write(tmp_path, turn, torch.ones(8, dtype=torch.uint8))
    refused, read = list[int](), images.read

    def refuses_once(folder: Path, turn: int, pinned: bool) -> torch.Tensor:
        if turn == 1 and not refused:
            refused.append(turn)
            raise Unread("The file of a state cannot be read now.") from OSError(24, "Too many open files")
        return read(folder, turn, pinned)

    monkeypatch.setattr(keeping, "REST", 0.01)
    monkeypatch.setattr(keeping.images, "read", refuses_once)
    objects = MemoryObjects(2)
    keeper = keeping.Keeper(NothingMissing(), DiskImages(tmp_path), objects, lambda: None)
    for turn in (1, 2):
        keeper.share(PutImage(turn, 1, 8, 8, 8, 1.5))
    assert objects.full.wait(PATIENCE)
    keeper.close(PATIENCE)
    assert refused == [1] and sorted(objects.kept) == [1, 2]

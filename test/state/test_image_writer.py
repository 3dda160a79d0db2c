"""The thread that writes images behind."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from stores import PATIENCE, body, head, names, sealed, tiny_layout

from rwkv_batch.state import images
from rwkv_batch.state.entries import Head, StoreError
from rwkv_batch.state.pool import image_writer
from rwkv_batch.state.pool.image_writer import ImageWriter
from rwkv_batch.state.snapshot import PREFIX, fitted

LAYOUT = tiny_layout()
RATE = 1000.0  # tokens a second that a model is fed, in these tests


def full_disk(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Disk:
    """Stands between the thread and the files. The thread waits at each file until it is let through."""

    images: Path
    gate: threading.Event = field(default_factory=threading.Event)  # open: nothing waits
    began: threading.Event = field(default_factory=threading.Event)  # a file has been begun
    order: list[int] = field(default_factory=list)  # turns whose files were begun
    synced: list[int] = field(default_factory=list)  # how many files had been begun when names were synced
    full: bool = False
    results: dict[int, tuple[Head, StoreError | None]] = field(default_factory=dict)
    told: threading.Condition = field(default_factory=threading.Condition)

    def written(self, head: Head, error: StoreError | None) -> None:
        with self.told:
            self.results[head.turn] = head, error
            self.told.notify()

    def wait(self, *turns: int) -> None:
        """Until the thread has told of these."""
        with self.told:
            assert self.told.wait_for(lambda: self.results.keys() >= {*turns}, PATIENCE)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path / "sessions.db.images")
    write = images.write

    def gated(folder: Path, turn: int, image: torch.Tensor) -> None:
        disk.order.append(turn)
        disk.began.set()
        assert disk.gate.wait(PATIENCE)
        if disk.full:
            full_disk()
        write(folder, turn, image)

    monkeypatch.setattr(images, "write", gated)

    def sync(folder: Path) -> None:
        if folder == disk.images:
            disk.synced.append(len(disk.order))

    monkeypatch.setattr(image_writer, "sync", sync)
    yield disk
    disk.gate.set()


@pytest.fixture
def writer(disk: Disk) -> Iterator[ImageWriter]:
    writer = ImageWriter(disk.images, LAYOUT, RATE, set)
    yield writer
    disk.gate.set()
    writer.close(PATIENCE)


Offer = Callable[..., torch.Tensor]


@pytest.fixture
def offer(disk: Disk, writer: ImageWriter) -> Offer:
    """Offers an image of a turn."""

    def offer(turn: int, tokens: int = 100, imaged: int = 0, required: bool = False) -> torch.Tensor:
        image = body(LAYOUT, turn)
        writer.offer(head(turn, tokens, imaged), image, disk.written, required)
        return image

    return offer


def occupy(disk: Disk, offer: Offer) -> None:
    """The thread is in the middle of the file of turn 1."""
    offer(1)
    assert disk.began.wait(PATIENCE)


def test_an_image_is_sealed_and_written_and_reported(disk: Disk, offer: Offer) -> None:
    disk.gate.set()
    image = offer(1, 123)
    disk.wait(1)
    assert disk.results == {1: (head(1, 123), None)}
    description, stored = fitted(images.read(disk.images, 1, pinned=False), LAYOUT)
    assert (description.tokens, description.digest) == (123, head(1).digest)
    assert torch.equal(stored[PREFIX:], image[PREFIX:])


def test_required_images_are_written_first_and_of_each_kind_the_most_worth_first(
    disk: Disk, offer: Offer
) -> None:
    occupy(disk, offer)
    offer(2, 5000, imaged=4990)
    offer(3, 200)
    offer(4, 5000, imaged=4700)
    offer(5, 7, required=True)
    offer(6, 9, required=True)
    disk.gate.set()
    disk.wait(1, 2, 3, 4, 5, 6)
    assert disk.order == [1, 6, 5, 4, 3, 2]


def test_the_names_of_required_images_are_on_the_disk_when_that_is_reported(disk: Disk, offer: Offer) -> None:
    disk.gate.set()
    offer(1, required=True)
    disk.wait(1)
    assert disk.synced == [1]
    offer(2)
    disk.wait(2)
    assert disk.synced == [1]  # the others are caches


def test_an_image_is_found_until_it_is_forgotten(disk: Disk, writer: ImageWriter, offer: Offer) -> None:
    assert writer.find(1) is None
    occupy(disk, offer)
    image = offer(2, 50)
    assert writer.find(1) is not None and writer.find(2) is image
    disk.gate.set()
    disk.wait(1, 2)
    assert writer.find(2) is image  # its row is not committed yet
    writer.forget(2)
    writer.forget(77)
    assert writer.find(2) is None and writer.find(1) is not None


def test_an_image_that_is_forgotten_while_it_waits_is_not_written(
    disk: Disk, writer: ImageWriter, offer: Offer
) -> None:
    occupy(disk, offer)
    offer(2)
    offer(3)
    writer.forget(2)
    disk.gate.set()
    disk.wait(1, 3)
    assert disk.order == [1, 3] and writer.find(2) is None


def test_an_image_that_is_offered_twice_is_written_once(
    disk: Disk, writer: ImageWriter, offer: Offer
) -> None:
    occupy(disk, offer)
    first = offer(2)
    offer(2)
    disk.gate.set()
    disk.wait(1, 2)
    assert writer.find(2) is first
    assert writer.close(PATIENCE) == 0 and disk.order == [1, 2]


def kept(writer: ImageWriter) -> list[int]:
    return [turn for turn in range(1, 20) if writer.find(turn) is not None]


def test_the_least_worth_of_too_many_images_are_not_written(
    disk: Disk, writer: ImageWriter, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_writer, "BACKLOG_BYTES", 4 * LAYOUT.size)
    occupy(disk, offer)  # the file that is being written is worth least, and stays
    offer(2, 1, required=True)
    offer(3, 1000)
    offer(4, 5000, imaged=4500)
    offer(5, 700)
    assert kept(writer) == [1, 2, 3, 5]
    offer(6, 600)  # itself the least worth
    assert kept(writer) == [1, 2, 3, 5]
    for turn in (7, 8):
        offer(turn, 1, required=True)
    offer(9, 1, required=True)  # there is nothing left that could go
    assert kept(writer) == [1, 2, 7, 8, 9]
    disk.gate.set()
    disk.wait(1, 2, 7, 8, 9)
    assert writer.close(PATIENCE) == 0 and sorted(disk.order) == [1, 2, 7, 8, 9]


def test_between_images_that_are_not_required_the_disk_rests(
    disk: Disk, writer: ImageWriter, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_writer, "SHARE", 1e-9)  # longer than any test
    disk.gate.set()
    offer(1)
    disk.wait(1)
    offer(2)
    offer(3, required=True)  # does not wait for that
    disk.wait(3)
    assert disk.order[:2] == [1, 3]
    offer(4)
    assert writer.close(PATIENCE) == 0 and sorted(disk.order) == [1, 2, 3, 4]


def test_a_full_disk_is_reported_and_the_next_image_is_written(disk: Disk, offer: Offer) -> None:
    disk.full = True
    disk.gate.set()
    offer(1)
    offer(2, required=True)
    disk.wait(1, 2)
    errors = [disk.results[turn][1] for turn in (1, 2)]
    assert all("No space left" in str(error) and str(disk.images) in str(error) for error in errors)
    assert names(disk.images) == set() and disk.synced == []
    disk.full = False
    offer(3)
    disk.wait(3)
    assert disk.results[3][1] is None and names(disk.images) == {"3.state"}


def test_a_folder_that_cannot_be_made_is_reported(disk: Disk) -> None:
    disk.images.write_bytes(b"")
    writer = ImageWriter(disk.images, LAYOUT, RATE, set)
    writer.offer(head(1), body(LAYOUT), disk.written)
    disk.wait(1)
    assert isinstance(disk.results[1][1], StoreError)
    writer.close(PATIENCE)


def test_a_new_server_removes_the_files_of_earlier_ones_and_writes_its_own(disk: Disk) -> None:
    disk.gate.set()
    for turn in (1, 2):
        images.write(images.prepared_folder(disk.images), turn, sealed(LAYOUT))
    writer = ImageWriter(disk.images, LAYOUT, RATE, lambda: {2})
    writer.offer(head(3), body(LAYOUT), disk.written)
    disk.wait(3)
    assert names(disk.images) == {"2.state", "3.state"}
    writer.close(PATIENCE)


def test_images_are_written_even_if_the_database_cannot_tell_which_there_are(disk: Disk) -> None:
    def unknown() -> set[int]:
        raise StoreError("The database is damaged.")

    disk.gate.set()
    images.write(images.prepared_folder(disk.images), 1, sealed(LAYOUT))
    writer = ImageWriter(disk.images, LAYOUT, RATE, unknown)
    writer.offer(head(3), body(LAYOUT), disk.written)
    disk.wait(3)
    assert names(disk.images) == {"1.state", "3.state"}
    writer.close(PATIENCE)


def close(disk: Disk, writer: ImageWriter, seconds: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """Close it, and open the gate when it knows that it is to end."""
    join = writer.join

    def opened() -> None:
        disk.gate.set()
        join()

    monkeypatch.setattr(writer, "join", opened)
    return writer.close(seconds)


def test_closing_writes_what_still_waits(
    disk: Disk, writer: ImageWriter, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupy(disk, offer)
    offer(2, 10)
    offer(3, 20)
    offer(4, 5, required=True)
    assert close(disk, writer, PATIENCE, monkeypatch) == 0
    assert disk.order == [1, 4, 3, 2] and len(names(disk.images)) == 4 and not writer.is_alive()
    assert all(error is None for _, error in disk.results.values()) and len(disk.results) == 4


def test_closing_writes_what_is_required_even_past_its_deadline(
    disk: Disk, writer: ImageWriter, offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupy(disk, offer)
    offer(2, 10**6)
    offer(3, 10**6)
    offer(4, required=True)
    offer(5, 99, required=True)
    assert close(disk, writer, -1.0, monkeypatch) == 2
    assert disk.order == [1, 4, 5] and names(disk.images) == {"1.state", "4.state", "5.state"}


def test_an_image_is_worthwhile_if_reading_it_takes_less_time_than_feeding_what_it_saves(
    writer: ImageWriter,
) -> None:
    def least(rate: float) -> int:
        """The least tokens that make an image worthwhile when so many bytes a second are read."""
        for _ in range(100):
            writer.note_read(int(rate), 1.0)
        return next(tokens for tokens in range(10**6) if writer.worthwhile(head(1, tokens)))

    seconds = 0.0505  # that reading an image takes
    assert least(LAYOUT.size / seconds) == 51  # at 1000 tokens a second
    assert least(LAYOUT.size / (10 * seconds)) == 506
    assert not writer.worthwhile(head(1, 5000, imaged=4600)) and writer.worthwhile(head(1, 5000, imaged=4400))


def test_one_slow_read_does_not_make_images_worthless(writer: ImageWriter) -> None:
    assert writer.worthwhile(head(1, 100))
    writer.note_read(LAYOUT.size, 1000.0)
    assert writer.worthwhile(head(1, 100))
    for _ in range(100):
        writer.note_read(LAYOUT.size, 1000.0)
    assert not writer.worthwhile(head(1, 100))

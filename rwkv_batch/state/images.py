"""Images: states in files beside the database, whose rows are their only index."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from rwkv_batch.disk import removal
from rwkv_batch.disk.syncing import sync
from rwkv_batch.state.entries import RowDamaged, Unread

if TYPE_CHECKING:  # the process that writes for all engines of a host runs without torch
    from torch import Tensor

READ_BYTES = 1 << 20  # at a time; other threads run in between


def folder(database: Path) -> Path:
    """Where the images of this database are."""
    return database.with_name(database.name + ".images")


def prepared_folder(path: Path) -> Path:
    """Make the folder if need be, on the disk too. Raises OSError."""
    if not path.is_dir():
        path.mkdir(mode=0o700, exist_ok=True)  # another server may be as far
        with suppress(PermissionError):  # a folder that may not be listed
            sync(path.parent)
    return path


def write(images: Path, turn: int, image: "Tensor") -> None:
    """Write a sealed snapshot. The file is whole on the disk when it has its name. Raises OSError.

    Several processes may write that of one turn at once, as each finds that it is missing.
    """
    part, data = images / f"{turn}.{token_hex(8)}.part", image.numpy().data
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        part.rename(_file(images, turn))
    except OSError:
        removal.remove(part)
        raise


def read(images: Path, turn: int, pinned: bool) -> "Tensor":
    """The bytes, uint8. Raises RowDamaged if there is no such file, and Unread if it cannot be read."""
    import torch

    from rwkv_batch.ops.host_memory import pinned_if_possible

    try:
        with _file(images, turn).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            image = pinned_if_possible(torch.empty, size, dtype=torch.uint8, wanted=pinned)
            data, place = image.numpy().data, 0
            while place < len(data):
                count = file.readinto(data[place : place + READ_BYTES])
                if not count:
                    raise RowDamaged("The file of a state is cut short.")
                place += count
    except FileNotFoundError as error:
        raise RowDamaged(f"The file of a state cannot be read ({error.strerror}).") from error
    except OSError as error:
        sentence = f"The file of a state cannot be read now ({error.strerror}); send the request again."
        raise Unread(sentence) from error
    return image


def remove(images: Path, turns: Iterable[int]) -> None:
    """Missing files are ignored."""
    for turn in turns:
        removal.remove(_file(images, turn))


def sweep(images: Path, known: Callable[[], set[int]], age: float = 0.0) -> None:
    """Remove files that no row stands for, before any are written. `known` says what has a row.

    age: seconds; of an age below that they stay, as others may be writing them.
    """
    with suppress(OSError):
        files = list(images.iterdir())
        names = {_file(images, turn).name for turn in known()}
        before = time.time() - age
        for file in files:
            if file.name not in names:
                with suppress(OSError):
                    if not age or file.stat().st_mtime < before:
                        removal.remove(file)


def _file(images: Path, turn: int) -> Path:
    return images / f"{turn}.state"

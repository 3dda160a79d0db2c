"""Files that a front end writes for an engine to read; the supervisor removes those of one that has died."""

import os
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from rwkv_batch.disk import removal

PREFIX = "upload"  # then the number of the process that has written it


def write(data: bytes, folder: str | None) -> str:
    """The path of a new file of these bytes, which the caller removes. Raises OSError; then none is left.

    Its bytes say what it is, and nothing that a client sends is a part of its name. A folder of None is that
    for temporary files.
    """
    own = f"{PREFIX}-{os.getpid()}-"
    with tempfile.NamedTemporaryFile(prefix=own, dir=folder, delete=False) as file, ExitStack() as undo:
        undo.callback(removal.remove, Path(file.name))
        file.write(data)
        file.flush()
        undo.pop_all()  # it is whole
    return file.name


def remove_of_others(folder: Path, pids: Collection[int | None]) -> None:
    """Remove those that none of these processes has written. Raises OSError if the folder cannot be read."""
    for file in folder.iterdir():
        kind, _, rest = file.name.partition("-")
        if kind == PREFIX and int(rest.partition("-")[0]) not in pids:
            removal.remove(file)

"""Where compiled kernels are kept: a library for each version of its sources, built once."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class BuildError(Exception):
    """The kernels cannot be built or used; the message says why and what to do."""


def digest(inputs: Iterable[Path], words: Iterable[str]) -> str:
    """Of the files that a library is made of, and of what else it depends on: 16 hexadecimal digits."""
    found = hashlib.sha256()
    for file in inputs:
        found.update(file.name.encode() + file.read_bytes())
    for word in words:
        found.update(word.encode())
    return found.hexdigest()[:16]


def library(name: str, digest: str, build: Callable[[Path], None]) -> Path:
    """The path of a library. If there is none yet, `build` makes kernels.so in a folder that it is given."""
    file = home() / f"{name}-{digest}" / "kernels.so"
    if file.is_file():
        return file
    home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home()) as folder:
        build(Path(folder))
        file.parent.mkdir(exist_ok=True)
        os.replace(Path(folder) / file.name, file)  # atomic: two processes may build at once
    return file


def home() -> Path:
    """Where libraries are kept: in the repository, or in the user's cache where that is read-only."""
    if os.access(ROOT, os.W_OK):
        return ROOT / "build" / "kernels"
    return Path.home() / ".cache" / "rwkv-batch" / "kernels"

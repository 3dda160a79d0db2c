"""Where compiled kernels are kept: a library for each version of its sources, built once."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from rwkv_batch.ops.compiled import kernel_cache

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
    """The path of a library. If there is none yet, `build` makes kernels.so in a folder that it is given.

    Raises BuildError, as `build` may.
    """
    try:
        file = kernel_cache.folder() / f"{name}-{digest}" / "kernels.so"
        if not file.is_file():
            with kernel_cache.building(file) as folder:
                if folder:
                    build(folder)
    except kernel_cache.CacheError as error:
        raise BuildError(str(error)) from error
    return file

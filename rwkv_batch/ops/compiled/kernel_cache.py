"""Where built kernels are kept: in the user's cache, where all checkouts find them.

That is the folder RWKV_BATCH_CACHE if the environment names one, else rwkv-batch under XDG_CACHE_HOME or
~/.cache.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

BUILDING = "building-"  # the folders of builds begin so
WAY_OUT = "name another folder in the environment's RWKV_BATCH_CACHE."


class CacheError(Exception):
    """There is no folder to write to; one sentence with the way out."""


def folder() -> Path:
    """Of all libraries. Raises CacheError."""
    if named := os.environ.get("RWKV_BATCH_CACHE"):
        return Path(named).absolute() / "kernels"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # then it does not count (XDG Base Directory Specification)
        try:
            cache = Path.home() / ".cache"
        except RuntimeError as error:
            raise CacheError(
                f"The kernels are kept in the user's cache, and this user has no home; {WAY_OUT}"
            ) from error
    return cache / "rwkv-batch" / "kernels"


@contextmanager
def building(library: Path) -> Iterator[Path | None]:
    """A folder in which a file of the same name is to be made; None if there is the library by now.

    One process at a time is inside. The library appears when it is whole, also if the machine fails
    meanwhile. Raises CacheError when its folder cannot be written.
    """
    place = library.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with (place / "lock").open("wb") as lock:  # which ends with the process, however that ends
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process builds the kernels; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if library.is_file():
                yield None
                return
            for left in place.glob(f"{BUILDING}*"):  # by a build that was killed
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=place, prefix=BUILDING) as inside:
                yield Path(inside)
                with (Path(inside) / library.name).open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(Path(inside) / library.name, library)
    except OSError as error:
        raise CacheError(
            f"The kernels cannot be written to {place} ({error.strerror or error}); {WAY_OUT}"
        ) from error

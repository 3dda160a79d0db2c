"""Files that are removed: if not now, then later."""

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

AGAIN = 10.0  # seconds until a file that could not be removed is tried again

log = logging.getLogger(__name__)

Identity = tuple[int, int]  # of a file, whatever its name


class Removal:
    """Removes files of this process, for any thread. What cannot be removed now is tried again until it can.

    Another file that has taken its place meanwhile stays.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[Path, Identity | None] = {}  # None: it could not be looked at
        self._thread: threading.Thread | None = None

    def remove(self, path: Path) -> None:
        """A missing file is ignored."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be removed now (%s)", path, error.strerror)
            self._note(path)
        with self._lock:
            if self._left and self._thread is None:
                self._thread = threading.Thread(target=self._try_again, name="removal", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # there can be no further thread now; the next file starts one
                    self._thread = None

    def _note(self, path: Path) -> None:
        """It could not be removed."""
        try:
            identity = _identity(path)
        except FileNotFoundError:
            return
        except OSError:
            identity = None
        with self._lock:
            self._left[path] = identity

    def _try_again(self) -> None:
        while True:
            time.sleep(AGAIN)
            with self._lock:
                for path, before in [*self._left.items()]:
                    with suppress(OSError):
                        _remove_the_same(path, before)
                        del self._left[path]
                if not self._left:
                    self._thread = None
                    return


def _remove_the_same(path: Path, before: Identity | None) -> None:
    """Raises OSError if the file is there as before and cannot be removed, or cannot be looked at."""
    with suppress(FileNotFoundError):
        if before is None or _identity(path) == before:
            path.unlink()


def _identity(path: Path) -> Identity:
    """Raises OSError."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


remove = Removal().remove  # of this process

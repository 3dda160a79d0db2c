"""Calls that fail once: which of their kind, counted over all threads of a process.

`FaultPoints.reach` is called where such a call is about to be made. While nothing is armed it costs a look
at one number.
"""

import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(str(ROOT / name) for name in ("rwkv_batch", "routes", "state_pool.py", "app.py"))


class FaultPoints:
    """The points of one kind. From any thread."""

    def __init__(self) -> None:
        self.armed: int | None = None  # which one fails, from 1 on; None: none, and they are not counted
        self.count = 0  # since `arm`
        self.places: list[str] | None = None  # of all, where they are wanted
        self.hit = ""  # the place of the one that has failed; empty: none has
        self._at = ""  # frames that a place must have to count
        self._lock = threading.Lock()

    def arm(self, number: int, places: bool = False, at: str = "") -> None:
        """Let the one of this number fail, once; 0: none. places: whether all of them are noted.

        at: only those whose place has these frames count.
        """
        with self._lock:
            self.count, self.hit, self.armed, self._at = 0, "", number, at
            self.places = [] if places else None

    def disarm(self) -> None:
        with self._lock:
            self.armed = None

    def reach(self, error: Callable[[], BaseException]) -> None:
        """Raises the error if this is the point that fails."""
        if self.armed is None:
            return
        frame = inspect.currentframe()
        with self._lock:
            if self.armed is None:
                return
            if not (place := place_of(frame)) or self._at not in place:  # of the test itself, or another
                return
            self.count += 1
            if self.places is not None:
                self.places.append(place)
            if self.count != self.armed:
                return
            self.hit = place
        raise error()


def place_of(frame: FrameType | None, depth: int = 20) -> str:
    """The innermost frames of the product, the innermost first; empty if it is not in there."""
    found: list[str] = []
    while frame is not None and len(found) < depth:
        if frame.f_code.co_filename.startswith(PRODUCT):
            file = Path(frame.f_code.co_filename).relative_to(ROOT)
            found.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found)


def caller_of(place: str) -> str:
    """The innermost of its frames that is not of the model, its operations or the sampler."""
    inner = ("rwkv_batch/model/", "rwkv_batch/ops/", "rwkv_batch/sampling/")
    return next((frame for frame in place.split(" < ") if not frame.startswith(inner)), place)


def open_files() -> list[str]:
    """What this process has open."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(each))
    return sorted(name for name in found if not name.startswith("/proc"))


def opened_since(before: list[str]) -> list[str]:
    """What this process has open now and had not before. What others have closed meanwhile does not count."""
    return sorted((Counter(open_files()) - Counter(before)).elements())

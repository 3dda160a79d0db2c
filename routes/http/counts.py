"""The HTTP requests that all front ends have answered, in files that they share.

Each front end counts in a file of its own (prometheus_client's multiprocess mode), which stays when it dies.
"""

import logging
import os
from pathlib import Path

from prometheus_client import Counter, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from rwkv_batch.wire.metrics import PREFIX, SERVER

log = logging.getLogger(__name__)

NAME = "http_requests"
FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the variable that names it, as prometheus_client has it
ROOM = 1 << 20  # bytes of a file, as prometheus_client makes it
OTHER = "other"  # in place of a route or a method that is not there
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")


class HttpCounts:
    """One per process."""

    def __init__(self) -> None:
        _reserve()
        family = SERVER[NAME]
        self._counter = Counter(PREFIX + NAME, family.help, family.labels, registry=None)
        self._series: dict[tuple[str, str, int], Counter] = {}  # by labels; there are few

    def add(self, route: str, method: str, status: int) -> None:
        """A request of this route was answered. Safe from any thread."""
        key = route, method if method in METHODS else OTHER, status
        if (series := self._series.get(key)) is None:
            series = self._series[key] = self._counter.labels(*map(str, key))
        series.inc()

    def of_all(self) -> list[Metric]:
        """What all front ends have counted since the server began, of keys too."""
        files = Path(os.environ[FOLDER]).glob("*.db")
        # One is empty until its process has counted, and stays so if there was no room for it, or no time.
        begun = [str(file) for file in files if file.stat().st_size]
        return list(MultiProcessCollector.merge(begun))  # type: ignore[no-untyped-call]


def _reserve() -> None:
    """Take the room of this process's file on the disk.

    The file is written as memory: without room for a page of it the system ends the process (SIGBUS).
    """
    if folder := os.environ.get(FOLDER):
        try:
            with (Path(folder) / f"counter_{os.getpid()}.db").open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, ROOM)
        except OSError as error:
            log.warning("%s has no room for counts of requests (%s); make some.", folder, error.strerror)

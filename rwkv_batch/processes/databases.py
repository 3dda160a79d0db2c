"""The processes that write to databases where several engines share them."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing.connection import wait
from pathlib import Path

from rwkv_batch.config import writer_address
from rwkv_batch.processes.child import REFUSED, START_AGAIN, CannotStart, Child
from rwkv_batch.processes.supervised import Deaths
from rwkv_batch.wire.supervision import Stop

WANTED = 60.0  # seconds for which an engine's word counts that it needs one

log = logging.getLogger(__name__)


class _Database:
    """Over all processes that it has had. `child` is None between two of them."""

    def __init__(self, path: str) -> None:
        self.path, self.needed = path, -math.inf  # when an engine last said so
        self.child: Child | None = None
        self.first = True  # whether the process is the first since engines use the database
        self.deaths, self.due = Deaths(), 0.0  # and when it is started again


class Databases:
    """One process for each path. All methods are for the supervisor's thread.

    `target`: what a process runs. It is called with the path, the address where it listens, whether it is the
    first, and its end of the pipe.
    """

    def __init__(self, folder: Path, target: Callable[..., None]) -> None:
        self._folder, self._target = folder, target
        self._known: dict[str, _Database] = {}

    @property
    def children(self) -> list[Child]:
        """Those that run."""
        return [known.child for known in self._known.values() if known.child]

    @property
    def due(self) -> float | None:
        """Seconds until `restart` does something; None: nothing waits for it."""
        waiting = [known.due for known in self._known.values() if known.child is None]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def within(self, seconds: float) -> float:
        """The time until `restart` does something, and at most so many seconds."""
        due = self.due
        return seconds if due is None else min(seconds, due)

    def need(self, path: str) -> None:
        """Start the process for this path, if there is none."""
        if path not in self._known:
            self._known[path] = _Database(path)
            self.restart()
        self._known[path].needed = time.monotonic()

    def until_ready(self, signals: int) -> str | None:
        """Wait for all. Returns why one cannot be used; empty: `signals` can be read."""
        if self.due is not None:
            return "The process that writes to the database cannot be started; start the server again."
        for child in self.children:
            if signals in wait([signals, child.control]):
                return ""
            try:
                if refusal := child.control.recv():
                    return str(refusal)
            except (EOFError, OSError):
                return "The process that writes to the database has ended; start the server again."
        return None

    def look(self, ended: Collection[object]) -> None:
        """Take note of those whose sentinels are among these, and start again what is due."""
        for known in [*self._known.values()]:
            if known.child and known.child.process.sentinel in ended:
                self._ended(known, known.child)
        self.restart()

    def restart(self) -> None:
        """Start those again whose pause is over."""
        for known in self._known.values():
            if known.child is None and known.due <= time.monotonic():
                try:
                    known.child = self._begin(known.path, known.first)
                except CannotStart as error:
                    known.due = time.monotonic() + START_AGAIN
                    log.error("%s; this is tried again in %.0f s", error.strerror, START_AGAIN)

    def stop(self) -> Iterable[Child]:
        """Let them commit what has arrived, and end; returns those that run."""
        for child in self.children:
            child.send(Stop())
        return self.children

    def _begin(self, path: str, first: bool) -> Child:
        address = writer_address(self._folder, path)
        return Child(f"database {Path(path).name}", self._target, path, address, first)

    def _ended(self, known: _Database, child: Child) -> None:
        refusal, code, lasted = child.refusal(), child.process.exitcode, time.monotonic() - child.started
        child.close()
        known.child = None
        wanted = time.monotonic() - known.needed < WANTED
        if code == 0 or (code == REFUSED and known.first):
            if refusal is not None:  # the engines that need it have been told
                log.error("%s: %s", child.name, refusal)
            if code == 0 and wanted:  # one has begun to while it ended
                known.due, known.first = 0.0, True
            else:
                del self._known[known.path]
            return
        known.first = False
        pause = known.deaths.pause(lasted)
        known.due = time.monotonic() + pause
        again = f"in {pause:.1f} s" if pause else "now"
        if refusal is None:
            log.error("%s died (exit code %s); it is started again %s", child.name, code, again)
        else:
            log.error("%s: %s It is started again %s.", child.name, refusal, again)

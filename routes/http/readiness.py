"""Which engines make steps, as the supervisor says; one that has died is seen here before it says so."""

import errno
import socket
import time
from collections.abc import Sequence
from typing import Literal

NOBODY = (errno.ECONNREFUSED, errno.ENOENT)  # what the address of a process that has ended says


class Readiness:
    """Of the engines of the host. `noted` is the state that was logged last."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses`: where the engines listen; of others only the supervisor knows."""
        self.noted = "ready"
        self._addresses = addresses
        self._serving: set[int] = set()
        self._silent: dict[int, float] = {}  # of these: since when they have made no step

    @property
    def serving(self) -> bool:
        """Whether one is ready, as far as the supervisor knows."""
        return bool(self._serving)

    def serves(self, engine: int) -> None:
        """That engine is ready, and all front ends send requests to it."""
        self._serving.add(engine)

    def lost(self, engine: int) -> None:
        """That engine has died."""
        self._serving.discard(engine)
        self._silent.pop(engine, None)

    def stalled(self, engine: int, seconds: float) -> None:
        """That engine has made no step for so long; 0: it goes on."""
        self._silent.pop(engine, None)
        if seconds:
            self._silent[engine] = time.monotonic() - seconds

    def of(self, engine: int) -> Literal["ready", "stalled", "down"]:
        """Whether that engine makes steps. "down": it loads, is started again, or has been left out."""
        if engine not in self._serving or self._has_died(engine):
            return "down"
        return "stalled" if engine in self._silent else "ready"

    def _has_died(self, engine: int) -> bool:
        """Whether nobody listens where that engine did. One that is stopped, or busy, listens."""
        if engine >= len(self._addresses):
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as caller:
                return caller.connect_ex(self._addresses[engine].removeprefix("ipc://")) in NOBODY
        except OSError:  # no file is left for it
            return False

    @property
    def down(self) -> bool:
        """Whether none is there."""
        return all(self.of(engine) == "down" for engine in [*self._serving])

    @property
    def silent(self) -> float:
        """Seconds for which none of them has made a step, though it was asked or rows wait; 0: one does."""
        since = dict(self._silent)
        states = {engine: self.of(engine) for engine in [*self._serving]}
        stalled = [since[engine] for engine in states if states[engine] == "stalled" and engine in since]
        if not stalled or "ready" in states.values():
            return 0.0
        return time.monotonic() - max(stalled)

"""Which engines make steps, as the supervisor says."""

import time
from typing import Literal


class Readiness:
    """Of the engines of the host. `noted` is the state that was logged last."""

    def __init__(self) -> None:
        self.noted = "ready"
        self._serving: set[int] = set()
        self._silent: dict[int, float] = {}  # of these: since when they have made no step

    def serves(self, engine: int) -> None:
        """That engine is ready."""
        self._serving.add(engine)
        self._silent.pop(engine, None)

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
        if engine not in self._serving:
            return "down"
        return "stalled" if engine in self._silent else "ready"

    @property
    def silent(self) -> float:
        """Seconds for which none of them has made a step, though it was asked or rows wait; 0: one does."""
        if not self._serving or not self._serving <= self._silent.keys():
            return 0.0
        return time.monotonic() - max(self._silent.values())

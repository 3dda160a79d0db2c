"""What front ends are sent about engines that serve, and which of them have taken it.

Each front end answers by what it has taken. So that one is not asked that does not know of an engine yet, all
say that the server is ready once all have taken it.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence

from rwkv_batch.processes.child import Child
from rwkv_batch.wire.supervision import AllServe, Serving

PATIENCE = 10.0  # seconds after which one that is stopped is waited for no longer

log = logging.getLogger(__name__)


class Acknowledged:
    """A front end acknowledges each `Serving`, in their order."""

    def __init__(self, frontends: Sequence[Child]) -> None:
        """`frontends`: those that run; the caller changes it."""
        self._frontends = frontends
        self._sent, self._taken = Counter[Child](), Counter[Child]()  # `Serving` of each front end
        # By engine: which of its messages each front end has to take that is waited for; and until when.
        self._awaited: dict[int, tuple[dict[Child, int], float]] = {}

    def serves(self, serving: Serving, begins: bool) -> None:
        """Send this to all. begins: it has not served before, and counts as ready when all have taken it."""
        for frontend in self._frontends:
            self._send(frontend, serving)
        if begins:
            wanted = {each: self._sent[each] for each in self._frontends}
            self._awaited[serving.engine] = wanted, time.monotonic() + PATIENCE

    def joins(self, frontend: Child, serving: Serving) -> None:
        """It is started while an engine serves."""
        self._send(frontend, serving)
        if serving.engine not in self._awaited:
            frontend.send(AllServe(serving.engine))

    def taken(self, frontend: Child) -> None:
        """It acts by the next `Serving`."""
        self._taken[frontend] += 1

    def lost(self, frontend: Child) -> None:
        """It has died."""
        for counts in (self._sent, self._taken):
            counts.pop(frontend, None)
        for wanted, _ in self._awaited.values():
            wanted.pop(frontend, None)

    def ends(self, engine: int) -> None:
        """It serves no more."""
        self._awaited.pop(engine, None)

    @property
    def due(self) -> float | None:
        """Seconds until `look` does something by itself; None: nobody is waited for."""
        times = [until for _, until in self._awaited.values()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def look(self) -> None:
        """Let all say that an engine is ready for which nobody is waited any longer."""
        for engine, (wanted, until) in [*self._awaited.items()]:
            late = [each.name for each, number in wanted.items() if self._taken[each] < number]
            if late and time.monotonic() < until:
                continue
            del self._awaited[engine]
            if late:
                names = " and ".join(late)
                log.warning("%s: nothing is read that is sent there; the others count as ready", names)
            for frontend in self._frontends:
                frontend.send(AllServe(engine))

    def _send(self, frontend: Child, serving: Serving) -> None:
        frontend.send(serving)
        self._sent[frontend] += 1

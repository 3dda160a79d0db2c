"""A process of the server over all that it has been: another one follows where it dies, within limits."""

import logging
from collections.abc import Iterable

from rwkv_batch.processes.child import FAILED, Child
from rwkv_batch.wire.supervision import LoadFailure

RESTARTS = 3  # in a row, without one that has begun
PAUSES = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before one is started again that has died so often
STEADY = 5.0  # seconds after which one that dies is not taken for one that dies at once

log = logging.getLogger(__name__)


class Deaths:
    """How many processes have died in a row, each soon after its start."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def pause(self, lasted: float) -> float:
        """One has died after so many seconds. Returns those until the next one is started."""
        self._in_a_row = self._in_a_row + 1 if lasted < STEADY else 1
        return PAUSES[min(self._in_a_row, len(PAUSES)) - 1]


class Supervised:
    """What engines and front ends have in common."""

    child: Child

    def __init__(self) -> None:
        self.failures = 0  # processes that have ended since one has begun
        self.gone = False  # no further one is started

    @property
    def spent(self) -> bool:
        """Whether a further one would be one too many."""
        return self.failures > RESTARTS

    def leave_out(self, kind: Iterable["Supervised"]) -> int | None:
        """It is not started again. `kind`: all that do the same work, this one too.

        Returns an exit code, as the server ends, if none of them is started any more.
        """
        self.gone = True
        over = all(each.gone for each in kind)
        log.error(
            "%s died (exit code %s) after %d restarts in a row; %s",
            self.child.name,
            self.child.process.exitcode,
            self.failures - 1,
            "the server ends" if over else "the others go on",
        )
        return FAILED if over else None


class FrontendPlace(Supervised):
    """Of one of the front ends, or of the process of batches.

    Once one has begun, the next ones are started however often they fail: a server that serves is not ended.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.refusal: LoadFailure | None = None  # why its process cannot begin, if it has said so
        self._has_begun = False
        self._deaths = Deaths()

    @property
    def spent(self) -> bool:
        return super().spent and not self._has_begun

    def start(self, child: Child) -> None:
        """This is its process now."""
        self.child, self.refusal = child, None

    def begins(self) -> None:
        """Its process serves."""
        self.failures, self._has_begun = 0, True

    def pause(self, lasted: float) -> float:
        """Its process has died after so many seconds. Returns those until the next one is started."""
        return self._deaths.pause(lasted)

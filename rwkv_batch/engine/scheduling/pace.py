"""How many decode steps are launched together, so that the device does not wait for the host."""

from collections import deque
from collections.abc import Collection
from time import monotonic

from rwkv_batch.engine.scheduling.row import Row
from rwkv_batch.runner.protocol import LAST, Batch

# How many steps are launched together follows the time between the draws of one launch and the next, and what
# part of it the host waits for them: twice as many after a short time with little waiting, half as many after
# a long time or with much waiting.
SHORT, LONG = 0.012, 0.024  # seconds
LITTLE, MUCH = 0.25, 0.75
# A row that runs alone has as many as there can be while these take so long at most, in seconds: kernels of
# one step begin beside the end of those of the step before (`runner/one_row.py`).
BRIEF = 0.002


class Pace:
    """How many steps the host launches together: more where the device would wait for it otherwise.

    Then the host has less to do for each, but new rows and the readers of text wait for all of them. Whether
    the device waits shows in how long the host waits for draws.
    """

    def __init__(self, most: int) -> None:
        """most: as of Runner.most_steps."""
        self._most, self.steps = most, 1  # the steps of the next launch, as far as its rows allow
        self._began = self._landed_at = 0.0
        # Seconds between the draws of one launch and the next, for a step: the last two. Of two that the host
        # comes to late, the second seems to take no time.
        self._each = deque([float("inf")] * 2, maxlen=2)

    def wait(self) -> None:
        """The host begins to wait for draws."""
        self._began = monotonic()

    def land(self, steps: int) -> None:
        """It has those of so many steps, which were launched together."""
        before, now = self._landed_at, monotonic()
        self._landed_at, took, waited = now, now - before, now - self._began
        self._each.append(took / steps)
        if waited > MUCH * took or took > LONG:
            self.steps = max(steps // 2, 1)
        elif waited <= LITTLE * took and took <= SHORT:
            self.steps = min(steps * 2, self._most)

    def steps_of(self, batch: Batch, drawing: list[Row], running: Collection[Row]) -> int:
        """For a batch and the rows that draw in it, as far as these allow: a power of two.

        running: all that have slots. One left out until its last draw is known does not wait for more.
        """
        rows = len(batch.slots)
        is_brief = rows == len(running) == 1 and max(self._each) * self._most <= BRIEF
        most = self._most if is_brief else self.steps
        if most == 1 or batch.top_logprobs or batch.mixtures or batch.scored:
            return 1
        if not len(batch.tokens) == len(drawing) == batch.tokens.count(LAST) == rows:
            return 1
        if len(running) > rows and any(row.waits_for_draw for row in running):
            return 1
        least = min(row.known_draws_left for row in drawing)
        while most > 1 and most > least:
            most //= 2
        return most

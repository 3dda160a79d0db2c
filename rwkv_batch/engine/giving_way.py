"""Rows of batches give their slots to rows of others that wait.

Such a row takes part in no further step. When its last draws are known, its state goes to host memory, and
the row waits for a slot again, in front of rows that came after it. There it goes on with the same bits.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from rwkv_batch.engine.rows.lives import Fresh, SharedPrompt
from rwkv_batch.engine.rows.parts import EngineParts
from rwkv_batch.engine.scheduling.row import DECODING, LEAVING, PREFILLING, Row
from rwkv_batch.ops import device as devices

SHARE = 16  # of the host's memory, that the states of such rows take at most


class GivingWay:
    """For the engine's thread."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        most = devices.host_bytes() // SHARE // parts.runner.states.shape.nbytes
        self._most = max(1, min(most, parts.scheduler.max_rows))
        self._copied: set[Row] = set()  # whose states are on their way

    def make_room(self, has_adapter: Callable[[Row], bool]) -> None:
        """Before rows are admitted, while rows of batches run. has_adapter: as of Scheduler.admit."""
        scheduler = self._parts.scheduler
        going = len(scheduler.leaving) + len(self._copied)
        if (lacking := scheduler.lacking(has_adapter) - going) > 0:
            kept = sum(1 for row in scheduler.waiting if row.input.kept is not None)
            able = sorted(filter(_may_leave, scheduler.batch), key=lambda row: row.rank, reverse=True)
            for row in able[: max(0, min(lacking, self._most - kept - going))]:
                row.held |= LEAVING
                scheduler.leaving.add(row)
        for row in [row for row in scheduler.leaving if not row.in_flight]:
            scheduler.leaving.discard(row)
            if not row.generating:  # its last draw has ended it
                row.held &= ~LEAVING
                continue
            assert row.slot is not None
            self._copied.add(row)
            self._parts.pool.copies.move_out(row.slot, partial(self._left, row))

    def _left(self, row: Row, state: Tensor | None) -> None:
        """Its state is in host memory; None: it is not, and the row goes on where it is."""
        self._copied.discard(row)
        if row.slot is None or not row.generating:  # it has been dropped meanwhile
            return
        if state is None:
            row.held &= ~LEAVING
            return
        self._parts.counts.waits.preemptions += 1
        self._parts.scheduler.give_up(row, state)


def _may_leave(row: Row) -> bool:
    """Not a turn of a session, nor one of a mixture, nor one whose prompt others wait for."""
    if row.held or row.draws.members or not isinstance(row.life, Fresh):
        return False
    if row.state is PREFILLING:
        return not isinstance(row.life, SharedPrompt) or row.input.fed > row.life.tokens
    return row.state is DECODING

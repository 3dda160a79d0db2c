"""Copies of running slots into host memory, of what can be computed again."""

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor

from rwkv_batch.state.jobs import JobThread
from rwkv_batch.state.slots import States
from rwkv_batch.state.snapshot import Transfer

IN_FLIGHT = 4  # copies; more are not made

log = logging.getLogger(__name__)


class StateCopies:
    """For the pool's thread."""

    def __init__(self, states: States, transfer: Transfer, copier: JobThread) -> None:
        self._states, self._transfer, self._copier = states, transfer, copier
        self._in_flight = 0

    def copy_out(self, slot: int, done: Callable[[Tensor], None]) -> None:
        """Copy the slot's current state to host memory; `done` gets it, on a CPU at once.

        It is not called when the copy fails, or, on a GPU, when IN_FLIGHT are on their way already.
        """
        if self._in_flight == IN_FLIGHT:
            return
        try:
            if not self._transfer.pinned:
                return done(self._states.read(slot))
            state = self._states.clone(slot)
        except (RuntimeError, MemoryError) as error:
            log.warning("a state cannot be copied, and is computed again where it is needed: %s", error)
            return
        self._in_flight += 1

        def copied(result: Tensor | None, error: Exception | None) -> None:
            self._in_flight -= 1
            if result is not None:
                done(result)

        self._copier.put(partial(self._transfer.to_host, state), copied)

    def move_out(self, slot: int, done: Callable[[Tensor | None], None]) -> None:
        """Copy a slot to host memory that no step changes until then; `done` gets None if that fails.

        On a CPU it is called at once.
        """
        try:
            if not self._transfer.pinned:
                return done(self._states.read(slot))
            access = self._states.access(slot)
        except (RuntimeError, MemoryError) as error:
            log.warning("the state of a row cannot be copied, which stays in its slot: %s", error)
            return done(None)
        self._copier.put(partial(self._transfer.to_host, access), lambda result, _: done(result))

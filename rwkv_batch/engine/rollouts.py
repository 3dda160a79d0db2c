"""Several rows of one prompt: it is fed once, whether all of them run at once or in turns."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from rwkv_batch.engine.scheduling.sequence import Sequence
from rwkv_batch.state.pool.state_copies import StateCopies
from rwkv_batch.state.shared_prompts import LEAST_TOKENS, SharedPrompt
from rwkv_batch.state.slots import States


def share_prompts(rows: list[Sequence], n: int) -> None:
    """The rows of a request, `n` of each prompt.

    Rows that go on, turns, mixtures and rows that get logprobs of their prompts share nothing.
    """
    scored = rows[0].request.prompt_logprobs is not None
    for first in range(0, len(rows), n):
        row, tokens = rows[first], len(rows[first].prompt) - 1
        if n == 1 or row.drawn or row.mixture or row.request.turn or tokens < LEAST_TOKENS or scored:
            continue
        shared = SharedPrompt(tokens, n)
        for each in rows[first : first + n]:
            each.shared = shared


class Rollouts:
    """For the engine's thread."""

    def __init__(self, states: States, copies: StateCopies) -> None:
        self._states, self._copies = states, copies

    def begin(self, seq: Sequence, begin: Callable[[Sequence], Tensor | None]) -> dict[int, Tensor | None]:
        """What the slot of a row that has just got one begins with, where `begin` says it of one alone."""
        assert seq.slot is not None
        shared = seq.shared
        if shared is None:
            return {seq.slot: begin(seq)}
        shared.outside -= 1
        if shared.state is not None:
            seq.fed = shared.tokens
            return {seq.slot: shared.state}
        if shared.leader and shared.leader.slot is not None and shared.leader.fed < shared.tokens:
            seq.waits_for_state = True
            shared.waiting.append(seq)
            return {}
        state = begin(seq)
        if seq.fed < shared.tokens:
            shared.leader, shared.own_cut = seq, shared.tokens not in seq.cuts
            seq.cuts = sorted({*seq.cuts, shared.tokens})
        return {seq.slot: state}

    def reached(self, seq: Sequence) -> None:
        """A step has been queued that feeds a row up to one of its cuts."""
        shared = seq.shared
        if shared is None or shared.leader is not seq or seq.fed != shared.tokens or seq.slot is None:
            return
        waiting = [row for row in shared.waiting if row.slot is not None]
        self._states.spread(seq.slot, [row.slot for row in waiting if row.slot is not None])
        for row in waiting:
            row.fed, row.waits_for_state = shared.tokens, False
        shared.waiting.clear()
        if shared.outside:
            self._copies.copy_out(seq.slot, partial(setattr, shared, "state"))

"""One step: the model over some rows, then a draw for those that have come to the end of what they were fed.

On a GPU a step is only queued. The next one may be queued before the draws of this one are known: rows are
then fed sequence.LAST, and one that has drawn a stop id is left out on the device, so that its state stays as
it was before that id.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rwkv_batch.model.rwkv7 import RWKV7, States
from rwkv_batch.sampling.logprobs import RowLogprobs, logprobs, row_logprobs
from rwkv_batch.sampling.sampler import Sampler
from rwkv_batch.wire.protocol import Sampling


class Draws(Protocol):
    """What a step draws; whatever it likes for rows that had ended already."""

    def wait(self) -> list[int]:
        """The ids, in the order of the rows that draw."""

    def logprobs(self) -> list[RowLogprobs]:
        """After `wait`: those of the rows that wanted some, in the order in which they were named."""


class RowSampler(Protocol):
    """Draws for rows in slots; see sampling.Sampler."""

    def begin(self, slot: int, params: Sampling, seed: int, stream: int) -> None: ...
    def sample(self, logits: Tensor, slots: Sequence[int]) -> list[int]: ...


class Steps:
    """Steps that are over when they return. `sampler` holds the rows' parameters; all of them
    live in slots.
    """

    stops_ahead = 0  # how many stop ids a row may have to be fed LAST; 0: there is nothing to gain from it

    def __init__(self, model: RWKV7, states: States) -> None:
        self.model, self.states = model, states
        self.sampler = self._sampler()

    def begin(self, slot: int, params: Sampling, seed: int, stream: int, stop_ids: Collection[int]) -> None:
        """A new row; see Sampler.begin."""
        self.sampler.begin(slot, params, seed, stream)

    def settle(self, slots: Collection[int]) -> None:
        """What steps have put off of the states in these slots is done: before anyone but a step reads or
        replaces them.
        """
        self.model.settle(self.states, slots)

    def run(
        self,
        tokens: list[int],
        counts: Sequence[int],
        slots: Sequence[int],
        draws: Sequence[int],
        tops: Mapping[int, int],
    ) -> Draws:
        """Feed row i, which lives in `slots[i]`, `counts[i]` of the tokens `[sum(counts)]`. Draw for the rows
        in `draws`. `tops`: places in `draws` of the rows that want logprobs, and of how many of the likeliest
        tokens besides the drawn one.
        """
        logits = self.model.forward(torch.tensor(tokens), counts, slots, self.states, draws)
        kept = logits[list(tops)] if tops else None  # a copy: the sampler writes into its own
        ids = self.sampler.sample(logits, [slots[row] for row in draws]) if draws else []
        if kept is None:
            return Known(ids)
        drawn = torch.tensor([ids[place] for place in tops], device=kept.device)
        return Known(ids, row_logprobs(*logprobs(kept, drawn, max(tops.values())), tops.values()))

    def _sampler(self) -> RowSampler:
        return Sampler(len(self.states.wkv), self.model.checkpoint.vocab, self.model.device)


class Known:
    """Draws that need no waiting for."""

    def __init__(self, ids: list[int], logprobs: list[RowLogprobs] | None = None) -> None:
        self._ids, self._logprobs = ids, logprobs or []

    def wait(self) -> list[int]:
        return self._ids

    def logprobs(self) -> list[RowLogprobs]:
        return self._logprobs


def of(model: RWKV7, states: States) -> Steps:
    """What suits the model's device."""
    if model.cuda is None:
        return Steps(model, states)
    from rwkv_batch.engine.runner_cuda import CudaSteps

    return CudaSteps(model, states)

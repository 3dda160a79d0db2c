"""A runner is one model on one device: what the engine needs of a backend, and nothing of how it works.

A step is the model over some rows, then a draw for those that have come to the end of what they were fed. On
a GPU a step is only queued. The next one may be queued before the draws of this one are known: a row is then
fed `LAST`, and one that has drawn a stop id is left out on the device, so that its state stays as it
was before that id.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rwkv_batch.ops.low_rank import LowRankAdapter
from rwkv_batch.runner.limits import RunnerLimits
from rwkv_batch.sampling.logprobs import RowLogprobs
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.sampling.mixtures import MixedRows
from rwkv_batch.sampling.prompt_logprobs import ScoredRow
from rwkv_batch.state.slots import States
from rwkv_batch.wire.protocol import Sampling

NO_ADAPTER = -1  # in place of the slot of an adapter
LAST = -1  # in place of a token: what the row drew last, which the host does not know yet


@dataclass(frozen=True)
class AdapterRoom:
    """For the adapters of rows: so many slots, each for one of a rank up to `most_rank`."""

    slots: int = 0
    most_rank: int = 0


NO_ADAPTERS = AdapterRoom()


@dataclass(frozen=True)
class NewRow:
    """A row that begins in a slot."""

    sampling: Sampling
    seed: int
    stream: int  # distinguishes rows with the same seed
    stop_ids: Collection[int]
    drawn: Sequence[int] = ()  # before, where it is one that goes on
    prompt: Sequence[int] = ()  # counts for the repetition penalty


@dataclass(frozen=True)
class Batch:
    """The rows of one step. Row i lives in `slots[i]` and is fed the next `counts[i]` of `tokens`."""

    tokens: list[int]  # [sum(counts)]
    counts: list[int]
    slots: list[int]
    draws: list[int]  # the rows that draw, ascending
    # Places in `draws` of the rows that want logprobs -> how many of the likeliest besides the drawn token's.
    top_logprobs: dict[int, int] = field(default_factory=dict)
    adapters: list[int] = field(default_factory=list)  # slot of each row's, NO_ADAPTER; empty: none has one
    mixtures: list[MixedRows] = field(default_factory=list)  # their rows are places in `draws`
    scored: dict[int, ScoredRow] = field(default_factory=dict)  # rows that want logprobs of their prompts
    # How many tokens each row draws, one after the other; more than 1 only where every row is fed LAST and
    # none wants logprobs or has a mixture or a mask.
    steps: int = 1


class Draws(Protocol):
    """What a step draws. The ids of rows that had finished before mean nothing."""

    def wait(self) -> list[int]:
        """The ids `[Batch.steps * draws]`: those of a step in the order of `Batch.draws`, step after step."""

    def logprobs(self) -> list[RowLogprobs]:
        """After `wait`: those asked for, in the order of `Batch.top_logprobs`."""

    def prompt_logprobs(self) -> list[list[RowLogprobs]]:
        """After `wait`: those of the rows in `Batch.scored`, in its order."""


@dataclass(frozen=True)
class KnownDraws:
    """Draws of a step that is done."""

    ids: list[int]
    entries: list[RowLogprobs] = field(default_factory=list)
    scored: list[list[RowLogprobs]] = field(default_factory=list)

    def wait(self) -> list[int]:
        return self.ids

    def logprobs(self) -> list[RowLogprobs]:
        return self.entries

    def prompt_logprobs(self) -> list[list[RowLogprobs]]:
        return self.scored


DrawUnder = Callable[[RowMasks], Draws]  # the second half of a step; called once, before the next step


class Runner(Protocol):
    """One model on one device, for rows that live in slots. All calls come from one thread."""

    device: torch.device  # where rows are drawn
    devices: tuple[torch.device, ...]  # of its stages, the last of which that is
    limits: RunnerLimits
    dtype: torch.dtype  # of activations
    run_ahead_stop_ids: int  # how many stop ids a row may have to be fed LAST; 0: rows are never fed LAST
    most_steps: int  # of a batch

    @property
    def states(self) -> States:
        """Of all slots; after `allocate`."""

    def bytes_needed(self, rows: int, idle_slots: int, prefill_tokens: int) -> int:
        """The most that is held at any time beside the weights, on the device that holds most.

        That is with `rows` rows a step, `idle_slots` slots more, and so many prompt tokens a step.
        """

    def allocate(self, rows: int, idle_slots: int, prefill_tokens: int, late: bool = False) -> None:
        """Make states and all that steps need, captured graphs included.

        late: what only makes steps faster is left to `improve`, so that this takes less time.

        Afterwards a step never runs out of memory. Raises RuntimeError when memory runs out here.
        """

    def improve(self, idle: bool) -> bool:
        """Between two steps: do a piece of what makes later ones faster; False if there is none to do now.

        idle: no rows run. A piece takes some milliseconds, and while rows run at most about 50.
        """

    def begin(self, slot: int, row: NewRow) -> None:
        """A new row in the slot."""

    def load_adapter(self, slot: int, adapter: LowRankAdapter) -> None:
        """Copy or queue the copy of an adapter into a slot that no row of later steps has until then."""

    def run(self, batch: Batch) -> Draws:
        """Run or queue a step, which moves the states of its rows on."""

    def feed(self, batch: Batch) -> DrawUnder:
        """The first half of `run`: the model over the rows. Masks may become known while that runs."""

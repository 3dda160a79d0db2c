"""A runner on a CPU that queues steps and defers writes to states, as the one for CUDA does."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.scheduling import pace
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.runner import backends
from rwkv_batch.runner.protocol import LAST, Batch, Draws, DrawUnder, KnownDraws, NewRow
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.sampling.reference import BROKEN
from rwkv_batch.state.slots import DeviceStates

NO_MASKS = RowMasks([], np.zeros((0, 1), np.int32))
NONSENSE = 1  # an id for rows that had finished
PERIOD = 3  # steps of one token, of which the last writes the state


class LaggingStates(DeviceStates):
    """States of which the last steps of one token may not be written yet."""

    def __init__(self, states: DeviceStates) -> None:
        shape = states.shape
        super().__init__(len(states), shape.layers, shape.width, shape.shift, shape.wkv)
        self.lag: dict[int, int] = dict.fromkeys(range(len(states)), 0)
        self._deferred: dict[int, tuple[Tensor, Tensor]] = {}  # of a slot: what memory holds, and the state

    def flush(self, slots: Collection[int]) -> None:
        for slot in slots:
            self.write(slot)
            self.lag[slot] = 0

    def write(self, slot: int) -> None:
        """Bring the slot up to date."""
        if slot in self._deferred:
            held, state = self._deferred.pop(slot)
            assert self.wkv[slot].equal(held), "the deferred write would go into another state"
            self.wkv[slot] = state

    def held(self, slot: int) -> Tensor:
        """What the slot holds in memory."""
        return self._deferred[slot][0] if slot in self._deferred else self.wkv[slot].clone()

    def defer(self, slot: int, held: Tensor) -> None:
        """Take back the step's write; every third one stays."""
        self.lag[slot] = (self.lag[slot] + 1) % PERIOD
        if self.lag[slot]:
            self._deferred[slot] = held, self.wkv[slot].clone()
            self.wkv[slot] = held

    def forget(self, slot: int) -> None:
        """A new sequence begins in the slot."""
        self._deferred.pop(slot, None)
        self.lag[slot] = 0


class LateRunner(TorchRunner):
    """Does to tokens and states what the CUDA kernels do. Draws are known only after the next step."""

    run_ahead_stop_ids, most_steps = 3, 1
    states: LaggingStates

    def __init__(self, checkpoint: Checkpoint, devices: Sequence[torch.device], *more: Any, **named: Any):
        """In one stage, where others have several."""
        super().__init__(checkpoint, devices[:1], *more, **named)

    def allocate(self, rows: int, idle_slots: int, prefill_tokens: int, late: bool = False) -> None:
        super().allocate(rows, idle_slots, prefill_tokens)
        self.states = LaggingStates(self.states)
        self.last: dict[int, int] = {}
        self.stops: dict[int, frozenset[int]] = {}
        self.fed_last = 0  # tokens that the host did not know yet

    def begin(self, slot: int, row: NewRow) -> None:
        super().begin(slot, row)
        self.last.pop(slot, None)
        self.stops[slot] = frozenset(row.stop_ids)
        self.states.forget(slot)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Draws:
        found = [self.feed(batch)(NO_MASKS) for _ in range(batch.steps)]
        if batch.steps == 1:
            return found[0]
        return KnownDraws([drawn for draws in found for drawn in draws.wait()])

    @torch.inference_mode()
    def feed(self, batch: Batch) -> DrawUnder:
        tokens, slots = batch.tokens, batch.slots
        fed: list[list[int]] = []
        for count, slot in zip(batch.counts, slots, strict=True):
            piece, tokens = tokens[:count], tokens[count:]
            if piece == [LAST]:
                assert len(self.stops[slot]) <= self.run_ahead_stop_ids
                self.fed_last += 1
                ended = self.last[slot] in self.stops[slot] or self.last[slot] == BROKEN
                piece = [] if ended else [self.last[slot]]
            assert LAST not in piece
            fed.append(piece)
        alive = [row for row, piece in enumerate(fed) if piece]
        if not alive:
            return lambda masks: self._drawn(batch, fed, None)
        single = [slots[row] for row in alive if len(fed[row]) == 1]
        held = {slot: self.states.held(slot) for slot in single}
        self.states.flush([slots[row] for row in alive if len(fed[row]) > 1])
        for slot in single:
            self.states.write(slot)
        draws = batch.draws
        draw = super().feed(
            Batch(
                tokens=[token for piece in fed for token in piece],
                counts=[len(fed[row]) for row in alive],
                slots=[slots[row] for row in alive],
                draws=[alive.index(row) for row in draws if fed[row]],
                top_logprobs={
                    [row for row in draws if fed[row]].index(draws[place]): top
                    for place, top in batch.top_logprobs.items()
                    if fed[draws[place]]
                },
                adapters=[batch.adapters[row] for row in alive] if batch.adapters else [],
                scored={alive.index(row): scored for row, scored in batch.scored.items()},
            )
        )
        for slot, state in held.items():
            self.states.defer(slot, state)

        def draw_alive(masks: RowMasks) -> Draws:
            here = [place for place, row in enumerate(draws) if fed[row]]
            kept = [i for i, place in enumerate(masks.places) if place in here]
            alive_masks = RowMasks([here.index(masks.places[i]) for i in kept], masks.bits[kept])
            return self._drawn(batch, fed, draw(alive_masks))

        return draw_alive

    def _drawn(self, batch: Batch, fed: list[list[int]], known: Draws | None) -> Draws:
        """Nonsense for rows that had finished; `known`: of the others."""
        draws, tops = batch.draws, batch.top_logprobs
        ids, found = dict.fromkeys(draws, NONSENSE), dict.fromkeys(draws, (0.0, [(NONSENSE, 0.0)]))
        alive = [row for row in draws if fed[row]]
        scored = []
        if known:
            ids |= zip(alive, known.wait(), strict=True)
            found |= zip([draws[p] for p in tops if fed[draws[p]]], known.logprobs(), strict=True)
            scored = known.prompt_logprobs()
        self.last |= {batch.slots[row]: ids[row] for row in alive}
        return KnownDraws([ids[row] for row in draws], [found[draws[place]] for place in tops], scored)


class SeveralRunner(LateRunner):
    """Notes of each step how many were launched together, and how many rows it has."""

    most_steps = 4

    def allocate(self, *args: int, **options: bool) -> None:
        super().allocate(*args, **options)
        self.steps: list[int] = []
        self.rows: list[int] = []

    def feed(self, batch: Batch) -> DrawUnder:
        self.steps.append(batch.steps)
        self.rows.append(len(batch.slots))
        return super().feed(batch)


def without_time(patch: pytest.MonkeyPatch) -> None:
    """Let steps take no time, so that as many are launched together as on a fast device."""
    patch.setattr(pace, "monotonic", lambda: 0.0)


def plain_and(runner: type[LateRunner], max_rows: int) -> tuple[Engine, Engine]:
    """An engine that waits for each step's draws, and one over this runner; both of the bundled model."""
    make = partial(Engine, device="cpu", max_rows=max_rows, prefill_tokens=24, l1=2, l2=2, prefix_cache_mb=0)
    plain = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "TorchRunner", runner)
        return plain, make()

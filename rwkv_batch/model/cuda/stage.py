"""One stage of a model on several GPUs: some of its layers, with graphs and states of their own.

A stage that is not the first begins with what the one before it has left of the same tokens. What stages do
for a step is what one GPU does for it, in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.cuda.cuda_model import MANY, MEASURED_TOKENS, CudaModel, in_order
from rwkv_batch.model.cuda.steps.adapters import AdapterSlots
from rwkv_batch.model.cuda.steps.graphs import (
    PREFILL_SIZES,
    GraphLadder,
    Prefilled,
    decode_sizes,
    prefill_sizes,
)
from rwkv_batch.model.cuda.steps.late import LateWork
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.ops.cuda.buffers import StepBuffers
from rwkv_batch.ops.cuda.inputs.packing import NO_SLOT, PrefillPlan, StagedPlan, upload_plan
from rwkv_batch.ops.cuda.inputs.staging import Uploads, upload
from rwkv_batch.sampling.prompt_logprobs import PromptScores


@dataclass(frozen=True)
class StageRows:
    """Packed rows of a step, or of a part of it, which all stages get in turn. See CudaModel.run."""

    tokens: Sequence[int]
    lengths: Sequence[int]
    slots: Sequence[int]
    logits_of: Sequence[int]  # rows
    adapters: Sequence[int] = ()
    scores: PromptScores | None = None

    @cached_property
    def plan(self) -> PrefillPlan:
        """Of a prefill."""
        return PrefillPlan.from_lengths(self.lengths, self.slots)

    @cached_property
    def ids(self) -> Tensor:
        """In the order of the plan."""
        return in_order(self.tokens, self.lengths, self.plan)


@dataclass(frozen=True)
class HandedOn:
    """What a stage leaves the next one, `T` tokens with those that only pad a graph."""

    x: Tensor  # [T, C] fp32, the stream
    v_first: Tensor | None  # [T, C] fp16, the values of layer 0 of RWKV-7
    # int32; of rows that are fed one token each, as the first stage has resolved them (Feed.resolve).
    tokens: Tensor
    slots: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The last three may be none, one and one."""
        return [self.x, self.tokens, self.slots, *([] if self.v_first is None else [self.v_first])]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "HandedOn":
        """From `tensors`."""
        x, tokens, slots, *v_first = tensors
        return cls(x, v_first[0] if v_first else None, tokens, slots)


Logits = tuple[Tensor, Tensor]  # [rows, rows of the head], and the slots [rows] of these rows
PrefillInputs = tuple[StagedPlan, StepBuffers]


class Stage:
    """A model's layers over some states, for steps of up to so many rows and tokens."""

    def __init__(
        self, model: CudaModel[Any, Any], states: CudaStates, most_rows: int, most_tokens: int
    ) -> None:
        self.model, self.states = model, states
        self._most_rows, self._most_tokens = most_rows, most_tokens
        self.first = model.part.start == 0
        self._last = model.part.stop == model.checkpoint.layers
        logits = torch.empty(most_rows, len(model.weights.head), dtype=torch.float16, device=model.device)
        self._logits = logits if self._last else None
        arenas: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self._decodes: dict[bool, GraphLadder[StepBuffers, None]] = {}  # by whether some rows have adapters
        self._prefills: dict[bool, GraphLadder[PrefillInputs, Prefilled]] = {}
        for adapted in (False, True):
            adapters = model.adapters if adapted else None
            self._decodes[adapted] = self._decode_ladder(arenas[0], adapters)
            self._prefills[adapted] = self._prefill_ladder(arenas[1], adapters)
        self._uploads = Uploads(2 * most_rows)
        self._given: dict[int, tuple[Tensor, np.ndarray]] = {}  # tokens and slots [2, size], by size
        self._late: LateWork | None = None

    def capture(self, late: bool, changed: Callable[[int], None]) -> None:
        """Capture all graphs. late: `improve` does, and steps do without until then.

        changed: called with a number of tokens whose GEMMs run by other methods from then on.
        """
        model, timed = self.model, decode_sizes(self._most_rows)
        timed = [*timed, *(size for size in PREFILL_SIZES if size <= MEASURED_TOKENS)]
        if model.tuner and not late:
            model.tuner.measure(timed)
        ladders: list[GraphLadder[Any, Any]] = []
        for adapted in (False, True) if model.adapters else (False,):
            ladders += [] if model.kernels.invariant else [self._decodes[adapted]]
            ladders.append(self._prefills[adapted])
        for ladder in ladders:
            ladder.capture_later() if late else ladder.capture_all(progress=True)
        self._late = LateWork(ladders, model.tuner, timed, changed) if late else None

    def improve(self, idle: bool) -> bool:
        """Do a piece of what `capture` has left for later; see LateWork.piece."""
        return self._late is not None and self._late.piece(idle)

    def forget(self, tokens: int) -> None:
        """Graphs of so many are captured again, as another stage has found better methods."""
        if self._late:
            self._late.forget(tokens)

    def pass_on(self, rows: StageRows, given: HandedOn | None) -> HandedOn:
        """Queue the layers of a stage that is not the last. The next step overwrites what is returned.

        given: what the stage before has left; None: this is the first.
        """
        if self._begin(rows):
            b, after, tokens, slots = self._prefill(rows, given)
            self.model.fold(b, after)
            single = rows.plan.single
            return HandedOn(b.x, b.v_first, tokens[:single], slots[:single])
        b = self._decode(rows, given)
        return HandedOn(b.x, b.v_first, *b.fed)

    def finish(self, rows: StageRows, given: HandedOn) -> Logits:
        """Queue the layers of the last stage, and the head. The next step overwrites what is returned."""
        model, vocab = self.model, self.model.checkpoint.vocab
        if self._begin(rows):
            _, after, _, slots = self._prefill(rows, given)
            sizes = self._decodes[False].size
            logits, fed = model.logits_of(after, slots, rows.plan, rows.logits_of, rows.scores, sizes)
            return logits[:, :vocab], fed
        b, count = self._decode(rows, given), len(rows.slots)
        assert self._logits is not None
        logits, fed = self._logits[:count, :vocab], b.fed[1][:count]
        if rows.scores:
            rows.scores.take(logits[upload(rows.scores.places(range(count)), model.device)])
        if len(rows.logits_of) < count:
            index = upload(rows.logits_of, model.device)
            logits, fed = logits[index], fed[index]
        return logits, fed

    def _begin(self, rows: StageRows) -> bool:
        """Before a step: whether it is a prefill."""
        if self._late:
            self._late.give_up()
        self.states.feed.prepare()
        return self.model.kernels.invariant or max(rows.lengths) > 1

    def _decode(self, rows: StageRows, given: HandedOn | None) -> StepBuffers:
        ladder = self._decodes[bool(rows.adapters)]
        self.model.place(rows.adapters, ladder.size(len(rows.slots)))
        b, queue = ladder.take(len(rows.slots))
        feed, size = self.states.feed, len(b.x)
        if given is None:
            tokens, slots = self._uploaded(rows, size)
            feed.resolve(tokens, slots, b.lag, size, fed=b.fed)
        else:
            for fed, handed in zip(b.fed, (given.tokens, given.slots), strict=True):
                fed.copy_(handed, non_blocking=True)
            feed.resolve(*b.fed, b.lag, size)
            _put(b, given)
        queue()
        return b

    def _uploaded(self, rows: StageRows, size: int) -> Tensor:
        """Tokens and slots `[2, size]` on the device, as the host knows them."""
        numbers, count = np.zeros((2, size), np.int32), len(rows.slots)
        numbers[0, :count], numbers[1, :count], numbers[1, count:] = rows.tokens, rows.slots, NO_SLOT
        if size not in self._given:
            nothing = torch.empty(2, size, dtype=torch.int32, device=self.model.device)
            self._given[size] = nothing, -numbers - 1
        held, sent = self._given[size]
        if not np.array_equal(sent, numbers):  # while the same rows go on, nothing changes
            self._uploads.buffer()[: 2 * size] = numbers.ravel()
            self._uploads.send(held)
            self._given[size] = held, numbers
        return held

    def _prefill(
        self, rows: StageRows, given: HandedOn | None
    ) -> tuple[StepBuffers, Prefilled, Tensor, Tensor]:
        """Buffers, what is behind the layers, and tokens and slots as they were fed."""
        model, plan, ladder = self.model, rows.plan, self._prefills[bool(rows.adapters)]
        of_tokens = plan.of_tokens(rows.adapters)
        graph = plan.tokens <= ladder.sizes[-1] and len(plan.launches) <= 1
        if graph:
            model.place(of_tokens, ladder.size(plan.tokens))
            (inputs, b), queue = ladder.take(plan.tokens)
            inputs.fill(rows.ids, plan)
            tokens, placed = inputs.tokens, inputs.rows
        else:
            model.place(of_tokens, plan.tokens)
            placed, arena = upload_plan(plan, model.device), ladder.arena(plan.tokens)
            tokens, b = rows.ids.to(model.device), model.new_buffers(plan.tokens, arena, packed=True)
            adapters = model.adapters if rows.adapters else None
            methods = model.methods(MANY)
            queue = partial(model.prefill_rows, tokens, placed, self.states, arena, methods, adapters)
        slots = placed.rows.slots
        if given is not None:
            tokens[: plan.single].copy_(given.tokens, non_blocking=True)
            slots[: plan.single].copy_(given.slots, non_blocking=True)
            _put(b, given)
        return b, queue(), tokens, slots

    def _decode_ladder(
        self, arena: dict[str, Tensor], adapters: AdapterSlots | None
    ) -> GraphLadder[StepBuffers, None]:
        def padding(size: int) -> StepBuffers:
            b: StepBuffers = self.model.new_buffers(size, arena)
            b.fed[0].zero_()
            b.fed[1].fill_(NO_SLOT)
            b.lag.zero_()
            return b

        def step(b: StepBuffers, _: dict[str, Tensor]) -> None:
            logits = None if self._logits is None else self._logits[: len(b.x)]
            self.model.decode_resolved(b, self.states, logits, adapters)

        return GraphLadder("decode", decode_sizes(self._most_rows), padding, step, arena)

    def _prefill_ladder(
        self, arena: dict[str, Tensor], adapters: AdapterSlots | None
    ) -> GraphLadder[PrefillInputs, Prefilled]:
        model = self.model

        def padding(size: int) -> PrefillInputs:
            return StagedPlan(size, model.device), model.new_buffers(size, arena, packed=True)

        def step(inputs: PrefillInputs, into: dict[str, Tensor]) -> Prefilled:
            plan, methods = inputs[0], model.methods(len(inputs[0].tokens))
            return model.prefill_rows(plan.tokens, plan.rows, self.states, into, methods, adapters)

        return GraphLadder("prefill", prefill_sizes(self._most_tokens), padding, step, arena)


def _put(b: StepBuffers, given: HandedOn) -> None:
    """Where a stage's first kernels read it."""
    if b.v_first is not None and given.v_first is not None:
        b.v_first.copy_(given.v_first, non_blocking=True)
    b.x.copy_(given.x, non_blocking=True)  # last, see CudaModel.decode_resolved

"""The runner of a model whose stages lie on several GPUs, over the kernels; see Runner.

A step passes through the stages in groups (groups.py), and the engine queues the next one meanwhile, so that
all stages have work. What a row draws goes from the last stage to the first without the host.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.config import SamplerName
from rwkv_batch.model.cuda.cuda_model import SCORED_AT_ONCE, CudaModel
from rwkv_batch.model.cuda.stage import StageRows
from rwkv_batch.model.cuda.staged import StagedCuda
from rwkv_batch.ops.cuda.abi import STOPS
from rwkv_batch.ops.cuda.inputs.handover import Handover, Parcel, handover_bytes
from rwkv_batch.ops.cuda.inputs.packing import NO_SLOT
from rwkv_batch.ops.cuda.inputs.staging import upload
from rwkv_batch.ops.device import reserve_bytes
from rwkv_batch.ops.low_rank import LowRankAdapter
from rwkv_batch.runner.cuda_runner import MOST_STEPS, QueuedDraws
from rwkv_batch.runner.groups import Groups, Piece
from rwkv_batch.runner.limits import GPU_LIMITS
from rwkv_batch.runner.protocol import LAST, NO_ADAPTERS, AdapterRoom, Batch, Draws, DrawUnder, NewRow
from rwkv_batch.runner.warmup import launch_all_kernels, logits_bytes, run_largest_step
from rwkv_batch.sampling.logprobs import RowLogprobs, logprobs
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.sampling.mixtures import mix_logits
from rwkv_batch.sampling.prompt_logprobs import PromptScores
from rwkv_batch.sampling.sampler_cuda import CudaSampler, bytes_per_slot

TURNS = 16  # parcels of draws on their way to the first stage, at most


@dataclass(frozen=True)
class Part:
    """A group of a step's rows, as a batch, and the places of its draws among those of the step."""

    batch: Batch
    places: list[int]


@dataclass(frozen=True)
class PartDraws:
    """What a part draws."""

    part: Part
    draws: QueuedDraws


class JoinedDraws:
    """The draws of the parts of some steps."""

    def __init__(self, steps: Sequence[Sequence[PartDraws]], batch: Batch) -> None:
        self._steps, self._batch = steps, batch

    def wait(self) -> list[int]:
        found = []
        for parts in self._steps:
            ids = [0] * len(self._batch.draws)
            for each in parts:
                for place, drawn in zip(each.part.places, each.draws.wait(), strict=True):
                    ids[place] = drawn
            found += ids
        return found

    def logprobs(self) -> list[RowLogprobs]:
        found: dict[int, RowLogprobs] = {}
        for each in self._steps[0]:
            wanted = (each.part.places[place] for place in each.part.batch.top_logprobs)
            found |= zip(wanted, each.draws.logprobs(), strict=True)
        return [found[place] for place in self._batch.top_logprobs]

    def prompt_logprobs(self) -> list[list[RowLogprobs]]:
        return [row for each in self._steps[0] for row in each.draws.prompt_logprobs()]


@dataclass(frozen=True)
class Fed:
    """A part that has passed through the layers."""

    part: Part
    logits: Tensor  # of the rows that draw
    slots: Tensor  # of these rows, negative for those that had finished
    scores: PromptScores


@dataclass(frozen=True)
class SentDraws:
    """Draws on their way to the first stage."""

    parcel: Parcel
    slots: list[int]  # of the rows that drew
    void: list[int] = field(default_factory=list)  # places of slots that another row has had since


class StagedRunner:
    """The runner of a model in fp16 in stages; see Runner."""

    run_ahead_stop_ids, limits = STOPS, GPU_LIMITS
    dtype = CudaModel.dtype

    def __init__(
        self,
        models: Sequence[CudaModel[Any, Any]],
        wkv_dtype: torch.dtype,
        sampler: SamplerName,
        adapters: AdapterRoom = NO_ADAPTERS,
        groups: int | None = None,
    ) -> None:
        """models: the stages. groups: how many a step has at most; None: as many as there are GPUs."""
        self.model, self._wkv_dtype, self._sampler = StagedCuda(models), wkv_dtype, sampler
        self.devices = tuple(model.device for model in models)
        self.device = self.devices[-1]
        self._invariant = models[-1].kernels.invariant
        self.most_steps = 1 if self._invariant else MOST_STEPS
        self._adapters = adapters if models[-1].takes_adapters else NO_ADAPTERS
        self._groups = Groups(groups or len({*self.devices}))
        self._drawn: deque[SentDraws] = deque()  # that the first stage has not recorded yet, oldest first

    def bytes_needed(self, rows: int, idle_slots: int, prefill_tokens: int) -> int:
        slots, shape = rows + idle_slots, self.model.checkpoint
        needed = self.model.bytes_needed(rows, slots, prefill_tokens, self._wkv_dtype, self._room)
        needed[self.device] += logits_bytes(shape, rows, SCORED_AT_ONCE, self.dtype, self.device)
        # Rows with masks keep their logits while other groups run.
        needed[self.device] += rows * 2 * shape.vocab + slots * bytes_per_slot(shape.vocab)
        for device in (self.devices[0], self.device):
            needed[device] += TURNS * _parcel_bytes(rows)
        return max(count + reserve_bytes(device) for device, count in needed.items())

    def allocate(self, rows: int, idle_slots: int, prefill_tokens: int, late: bool = False) -> None:
        slots, tokens = rows + idle_slots, prefill_tokens + rows
        self.states = self.model.allocate(rows, slots, tokens, self._wkv_dtype, self._room, late)
        self._feeds = self.model.feeds
        architecture = self.model.models[-1].kernels.architecture
        self.sampler = CudaSampler(
            slots, self.model.checkpoint.vocab, self.device, self._sampler, architecture
        )
        self._back = Handover("draws", self.device, self.devices[0], _parcel_bytes(rows), TURNS)
        run_largest_step(self.model.forward, self.states, rows, prefill_tokens)
        launch_all_kernels(self, rows, few=late)

    def improve(self, idle: bool) -> bool:
        return self.model.improve(idle)

    @torch.inference_mode()
    def begin(self, slot: int, row: NewRow) -> None:
        for sent in self._drawn:
            sent.void.extend(place for place, other in enumerate(sent.slots) if other == slot)
        self.sampler.begin(slot, row.sampling, row.seed, row.stream, row.drawn, row.prompt)
        possible = [stop for stop in row.stop_ids if 0 <= stop < self.model.checkpoint.vocab]
        for feed in self._feeds:
            # A row that has more is never fed LAST.
            feed.begin(slot, possible if len(possible) <= STOPS else ())

    def load_adapter(self, slot: int, adapter: LowRankAdapter) -> None:
        self.model.load_adapter(slot, adapter)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Draws:
        return JoinedDraws([self._step(batch) for _ in range(batch.steps)], batch)

    @torch.inference_mode()
    def feed(self, batch: Batch) -> DrawUnder:
        parts = self._parts(batch)
        fed = [self._forward(part, keep=len(parts) > 1) for part in parts]

        @torch.inference_mode()
        def draw(masks: RowMasks) -> Draws:
            drawn = [self._draw(each, _masks_of(masks, each.part.places)) for each in fed]
            return JoinedDraws([drawn], batch)

        return draw

    @property
    def _room(self) -> tuple[int, int]:
        return self._adapters.slots, self._adapters.most_rank

    def _step(self, batch: Batch) -> list[PartDraws]:
        return [self._draw(self._forward(part), None) for part in self._parts(batch)]

    def _parts(self, batch: Batch) -> list[Part]:
        groups = self._groups.divide(batch)
        if len(groups) == 1:
            return [Part(batch, list(range(len(batch.draws))))]
        starts = _starts(batch.counts)
        places = {row: place for place, row in enumerate(batch.draws)}
        return [_part_of(batch, group, starts, places) for group in groups]

    def _forward(self, part: Part, keep: bool = False) -> Fed:
        """keep: the logits while other parts run."""
        batch = part.batch
        self._record_drawn(_fed_last(batch))
        scores = PromptScores(batch.scored, self.device, self._invariant)
        rows = StageRows(batch.tokens, batch.counts, batch.slots, batch.draws, batch.adapters, scores)
        logits, slots = self.model.run(rows)
        return Fed(part, logits.clone(), slots.clone(), scores) if keep else Fed(part, logits, slots, scores)

    def _draw(self, fed: Fed, masks: RowMasks | None) -> PartDraws:
        with torch.cuda.device(self.device):
            return PartDraws(fed.part, self._queue_draws(fed, masks))

    def _queue_draws(self, fed: Fed, masks: RowMasks | None) -> QueuedDraws:
        batch, logits = fed.part.batch, fed.logits
        scored = batch.scored.values()
        if not batch.draws:
            return QueuedDraws(fed.slots[:0], fed.scores, scored)
        mix_logits(logits, batch.mixtures)
        drawing = [batch.slots[row] for row in batch.draws]
        self.sampler.prepare(drawing)
        ids = self.sampler.sample_async(logits, fed.slots, masks=masks, feed=self._feeds[-1])
        if len(self._drawn) == TURNS:
            self._record_oldest(1)
        self._drawn.append(SentDraws(self._back.send([ids, fed.slots]), drawing))
        tops = batch.top_logprobs
        if not tops:
            return QueuedDraws(ids, fed.scores, scored)
        of = upload(list(tops), self.device)
        found = logprobs(logits[of], ids[of], max(tops.values()), self._invariant)
        return QueuedDraws(ids, fed.scores, scored, found, tops.values())

    def _record_drawn(self, slots: set[int]) -> None:
        """Have the first stage take what rows in these slots have drawn, and what was drawn before that.

        Its stream waits for the last stage to draw it, so this comes as late as can be.
        """
        if slots:
            sent = enumerate(self._drawn, 1)
            self._record_oldest(max((n for n, each in sent if not slots.isdisjoint(each.slots)), default=0))

    def _record_oldest(self, count: int) -> None:
        with torch.cuda.device(self.devices[0]) if count else nullcontext():
            for _ in range(count):
                sent = self._drawn.popleft()
                ids, slots = self._back.receive(sent.parcel)
                if sent.void:
                    slots.index_fill_(0, upload(sent.void, self.devices[0]), NO_SLOT)
                self._feeds[0].record_drawn(ids, slots)
                self._back.release(sent.parcel)


def _fed_last(batch: Batch) -> set[int]:
    """The slots of rows that are fed what they drew last."""
    if LAST not in batch.tokens:
        return set()
    ends = accumulate(batch.counts)
    return {slot for slot, end in zip(batch.slots, ends, strict=True) if batch.tokens[end - 1] == LAST}


def _part_of(batch: Batch, group: Sequence[Piece], starts: Sequence[int], places: dict[int, int]) -> Part:
    """places: of the rows that draw."""
    tokens: list[int] = []
    for piece in group:
        start = starts[piece.row] + piece.first
        tokens += batch.tokens[start : start + piece.count]
    rows = [piece.row for piece in group]
    draws = [
        i
        for i, piece in enumerate(group)
        if piece.row in places and piece.first + piece.count == batch.counts[piece.row]
    ]
    of = [places[rows[i]] for i in draws]
    part = Batch(
        tokens,
        [piece.count for piece in group],
        [batch.slots[row] for row in rows],
        draws,
        {i: batch.top_logprobs[place] for i, place in enumerate(of) if place in batch.top_logprobs},
        [batch.adapters[row] for row in rows] if batch.adapters else [],
    )
    return Part(part, of)


def _starts(counts: Sequence[int]) -> list[int]:
    starts, end = [], 0
    for count in counts:
        starts.append(end)
        end += count
    return starts


def _masks_of(masks: RowMasks, places: list[int]) -> RowMasks:
    """Those of the rows in these places, by their places there."""
    at = {place: i for i, place in enumerate(places)}
    kept = [line for line, place in enumerate(masks.places) if place in at]
    return RowMasks([at[masks.places[line]] for line in kept], masks.bits[kept])


def _parcel_bytes(rows: int) -> int:
    """Of what so many rows have drawn, and their slots."""
    return handover_bytes(4 * rows, 4 * rows)

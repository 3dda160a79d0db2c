"""The runner over the CUDA kernels: steps are queued on the GPU, and only `Draws.wait` waits for it."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.config import SamplerName
from rwkv_batch.model.checkpoint import Family
from rwkv_batch.model.cuda.cuda_model import SCORED_AT_ONCE, CudaModel
from rwkv_batch.model.cuda.rwkv6 import RWKV6Cuda
from rwkv_batch.model.cuda.rwkv7 import RWKV7Cuda
from rwkv_batch.model.cuda.steps.graphs import GraphLadder
from rwkv_batch.model.cuda.steps.verify import MOST_TOKENS, VerifySteps, spare_slots
from rwkv_batch.ops.cuda.abi import STOPS
from rwkv_batch.ops.cuda.inputs.staging import Download, upload
from rwkv_batch.ops.device import reserve_bytes
from rwkv_batch.ops.low_rank import LowRankAdapter
from rwkv_batch.runner.limits import GPU_LIMITS
from rwkv_batch.runner.one_row import OneRow
from rwkv_batch.runner.protocol import NO_ADAPTERS, AdapterRoom, Batch, Draws, DrawUnder, NewRow
from rwkv_batch.runner.warmup import LOGITS_COPIES, launch_all_kernels, logits_bytes, run_largest_step
from rwkv_batch.sampling.logprobs import RowLogprobs, logprobs, row_logprobs
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.sampling.mixtures import mix_logits
from rwkv_batch.sampling.prompt_logprobs import PromptScores, ScoredRow, scored_rows
from rwkv_batch.sampling.sampler_cuda import CudaSampler, bytes_per_slot

MOST_STEPS = 4  # of a batch: a row that ends in it is idle for the others
CUDA_MODELS: dict[Family, type[CudaModel[Any, Any]]] = {
    "rwkv7": RWKV7Cuda,
    "rwkv7a": RWKV7Cuda,
    "rwkv6": RWKV6Cuda,
}


class QueuedDraws:
    """Draws on their way to the host."""

    def __init__(
        self,
        ids: Tensor,
        scores: PromptScores,
        scored: Collection[ScoredRow],
        found: tuple[Tensor, ...] = (),
        counts: Collection[int] = (),
    ) -> None:
        """`found`: logprobs, as from logprobs.logprobs, of rows that want `counts` of them.

        `scores`: what has been taken of the prompts of the rows `scored`.
        """
        self._ids, self._found, self._counts = Download(ids), [Download(t) for t in found], counts
        self._scores, self._scored = [Download(t) for t in scores.found()] if scores else [], scored

    def wait(self) -> list[int]:
        return self._ids.wait().tolist()

    def logprobs(self) -> list[RowLogprobs]:
        if not self._found:
            return []
        values, ids = (download.wait() for download in self._found)
        return row_logprobs(values, ids, self._counts)

    def prompt_logprobs(self) -> list[list[RowLogprobs]]:
        if not self._scores:
            return []
        values, ids = (download.wait() for download in self._scores)
        return scored_rows(values, ids, self._scored)


class CudaRunner:
    """The runner of a model in fp16 over the kernels for GPUs; see Runner."""

    run_ahead_stop_ids, limits = STOPS, GPU_LIMITS
    dtype = CudaModel.dtype
    one_row: OneRow | None = None
    verify: VerifySteps | None = None  # where rows may have drafts
    beside = 0  # bytes that are held for another model, one that guesses for this one

    def __init__(
        self,
        model: CudaModel[Any, Any],
        wkv_dtype: torch.dtype,
        sampler: SamplerName,
        adapters: AdapterRoom = NO_ADAPTERS,
        speculate: int = 0,
    ) -> None:
        """speculate: tokens of a draft, at most; 0: no row has one."""
        self.devices: tuple[torch.device, ...] = (model.device,)
        self.model, self.device, self._wkv_dtype, self._sampler = model, model.device, wkv_dtype, sampler
        self.invariant = model.kernels.invariant
        self.most_steps = 1 if self.invariant else MOST_STEPS
        self._adapters = adapters if model.takes_adapters else NO_ADAPTERS
        self._drafted = (
            model if speculate and isinstance(model, RWKV7Cuda) else None
        )  # whose rows have drafts
        self.spare = spare_slots(speculate) if self._drafted else 0  # slots for these

    def bytes_needed(self, rows: int, idle_slots: int, prefill_tokens: int) -> int:
        slots, shape = rows + idle_slots, self.model.checkpoint
        slot_bytes = self.model.slot_bytes(self._wkv_dtype) + bytes_per_slot(shape.vocab)
        room = self._adapters
        steps = self.model.step_bytes(rows, prefill_tokens, room.slots, room.most_rank)
        logits = logits_bytes(shape, rows, SCORED_AT_ONCE, self.dtype, self.device)
        one_row = OneRow.bytes_needed(self.model, self.most_steps)
        drafts = 0
        if self._drafted:
            drafts = self._drafted.verify_bytes(self._wkv_dtype, self.spare)
            drafts += MOST_TOKENS * LOGITS_COPIES * 4 * shape.vocab
        held = reserve_bytes(self.device) + self.beside
        return held + slots * slot_bytes + logits + steps + one_row + drafts

    def allocate(self, rows: int, idle_slots: int, prefill_tokens: int, late: bool = False) -> None:
        slots = rows + idle_slots
        self.states = self.model.new_states(slots, self._wkv_dtype, self.spare)
        self.sampler = CudaSampler(
            slots, self.model.checkpoint.vocab, self.device, self._sampler, self.model.kernels.architecture
        )
        if self._adapters.slots:
            room = self._adapters
            self.model.add_adapters(room.slots, room.most_rank, prefill_tokens + rows)
        self.one_row = OneRow.for_model(self.model, self.states, self.sampler, self.most_steps)
        more: list[GraphLadder[Any, Any]] = [*self.one_row.ladders] if self.one_row else []
        if self._drafted:
            self.verify = self._drafted.verify_steps(self.states)
            more.append(self.verify.ladder)
        self.model.capture(self.states, rows, late=late, most_tokens=prefill_tokens + rows, more=more)
        if self.verify and late:  # what drafts cost is measured before `improve` comes to these
            self.model.capture_one_row(self.states)
            self.verify.ladder.capture_all(progress=False)
        run_largest_step(self.model.forward, self.states, rows, prefill_tokens)
        launch_all_kernels(self, rows, few=late)

    def improve(self, idle: bool) -> bool:
        return self.model.improve(idle)

    @torch.inference_mode()
    def begin(self, slot: int, row: NewRow) -> None:
        self.sampler.begin(slot, row.sampling, row.seed, row.stream, row.drawn, row.prompt)
        possible = [stop for stop in row.stop_ids if 0 <= stop < self.model.checkpoint.vocab]
        # A row that has more is never fed LAST.
        self.states.feed.begin(slot, possible if len(possible) <= STOPS else ())

    @torch.inference_mode()
    def load_adapter(self, slot: int, adapter: LowRankAdapter) -> None:
        assert self.model.adapters is not None
        self.model.adapters.load(slot, adapter)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Draws:
        with torch.cuda.device(self.device):
            return self._several(batch) if batch.steps > 1 else self._draw(batch, *self._forward(batch), None)

    @torch.inference_mode()
    def feed(self, batch: Batch) -> DrawUnder:
        with torch.cuda.device(self.device):
            fed = self._forward(batch)

        @torch.inference_mode()
        def draw(masks: RowMasks) -> Draws:
            with torch.cuda.device(self.device):
                return self._draw(batch, *fed, masks)

        return draw

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor, PromptScores]:
        """Logits of the rows that draw, the slots of those that have not finished, and what prompts score."""
        wanted = None if len(batch.draws) == len(batch.slots) else batch.draws
        scores = PromptScores(batch.scored, self.device, self.invariant)
        logits, slots = self.model.run(
            batch.tokens, batch.counts, batch.slots, self.states, wanted, batch.adapters, scores
        )
        return logits, slots, scores

    def _several(self, batch: Batch) -> Draws:
        """Steps of which the host knows nothing but their rows."""
        self.sampler.prepare(batch.slots, batch.steps)
        if self.one_row and self.one_row.takes(batch):
            return QueuedDraws(self.one_row.run(batch.slots[0]), PromptScores(batch.scored, self.device), ())
        ids = torch.empty(batch.steps, len(batch.slots), dtype=torch.int32, device=self.device)
        logits, slots, scores = self._forward(batch)
        for step, drawn in enumerate(ids):
            if step:
                self.model.repeat(self.states, bool(batch.adapters))
            self.sampler.sample_async(logits, slots, drawn, feed=self.states.feed)
        return QueuedDraws(ids.view(-1), scores, ())

    def _draw(
        self, batch: Batch, logits: Tensor, slots: Tensor, scores: PromptScores, masks: RowMasks | None
    ) -> Draws:
        scored = batch.scored.values()
        if not batch.draws:
            # Waited for like any other, so that a long prompt is not queued whole at once.
            return QueuedDraws(slots[:0], scores, scored)
        mix_logits(logits, batch.mixtures)
        self.sampler.prepare([batch.slots[row] for row in batch.draws])
        ids = self.sampler.sample_async(logits, slots, masks=masks, feed=self.states.feed)
        tops = batch.top_logprobs
        if not tops:
            return QueuedDraws(ids, scores, scored)
        of = upload(list(tops), self.device)
        found = logprobs(logits[of], ids[of], max(tops.values()), self.invariant)
        return QueuedDraws(ids, scores, scored, found, tops.values())

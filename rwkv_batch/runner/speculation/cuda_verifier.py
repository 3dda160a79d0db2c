"""Steps with drafts over the CUDA kernels: the whole step is queued, then its draws are waited for."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.cuda.steps.verify import MOST_ROWS, Laid, VerifySteps
from rwkv_batch.ops.cuda.inputs.packing import NO_SLOT
from rwkv_batch.ops.cuda.inputs.staging import Download, upload
from rwkv_batch.runner.cuda_runner import CudaRunner
from rwkv_batch.runner.protocol import Batch
from rwkv_batch.runner.speculation.protocol import KnownVerified, MasksBehind, MoreDraws, VerifyUnder
from rwkv_batch.sampling.logprobs import RowLogprobs, logprobs, row_logprobs
from rwkv_batch.sampling.masks import RowMasks

NOTHING = -2  # in place of a token, and none that is drawn: the row draws no more


@dataclass(frozen=True)
class CudaVerifier:
    """The verifier of a runner of one GPU whose states have spare slots; see Verifier."""

    runner: CudaRunner
    steps: VerifySteps

    @property
    def most_rows(self) -> int:
        return MOST_ROWS

    @property
    def most_drafted(self) -> int:
        return self.runner.spare

    def takes(self, batch: Batch) -> bool:
        plain = not (batch.adapters or batch.mixtures or batch.scored)
        known = min(batch.tokens, default=NOTHING) >= 0  # what a row drew last is on the host
        return plain and known and batch.steps == 1 and len(batch.tokens) == len(batch.slots) <= MOST_ROWS

    @torch.inference_mode()
    def feed(self, batch: Batch, drafts: Mapping[int, int]) -> VerifyUnder:
        with torch.cuda.device(self.runner.device):
            logits, laid = self.steps.run(batch.tokens, batch.counts, batch.slots)
        logits = logits[:, : self.runner.model.checkpoint.vocab]
        return partial(self._draw, batch, drafts, logits, laid)

    @torch.inference_mode()
    def _draw(
        self,
        batch: Batch,
        drafts: Mapping[int, int],
        logits: Tensor,
        laid: Laid,
        masks: RowMasks | None,
        after: MasksBehind,
    ) -> KnownVerified:
        with torch.cuda.device(self.runner.device):
            plan = DrawPlan.of(batch, drafts, laid, after)
            ids = Download(self._queue(plan, logits, masks)).wait().numpy()
            accepted = plan.accepted(ids)
            self.steps.accept(
                laid, {row: count for row, count in zip(batch.draws, accepted, strict=True) if count}
            )
            entries = self._logprobs(batch, logits, plan, ids, accepted)
        behind: dict[int, MoreDraws] = {}
        for place in drafts:
            found = entries.get(place, [None] * (1 + accepted[place]))
            drawn = ids[1 : 1 + accepted[place], place].tolist()
            behind[place] = list(zip(drawn, found[1:], strict=True))
        return KnownVerified(ids[0].tolist(), [entries[place][0] for place in batch.top_logprobs], [], behind)

    def _queue(self, plan: "DrawPlan", logits: Tensor, masks: RowMasks | None) -> Tensor:
        """Queue the draws behind each token: ids `[deepest + 1, draws]`.

        A row draws on while what it has drawn is what its draft has there, which the device finds out.
        """
        runner = self.runner
        runner.sampler.prepare(plan.slots, len(plan.at))
        numbers = upload([*plan.slots, *plan.at.ravel(), *plan.wanted.ravel()], runner.device, torch.int32)
        slots, at, wanted = numbers.split([len(plan.slots), plan.at.size, plan.wanted.size])
        at, wanted = at.view(plan.at.shape), wanted.view(plan.wanted.shape)
        ids = torch.empty_like(at)
        for depth, drawn in enumerate(ids):
            under = plan.masks[depth - 1] if depth else masks
            if depth:
                slots = torch.where(ids[depth - 1] == wanted[depth - 1], slots, NO_SLOT)
            runner.sampler.sample_async(logits[at[depth]], slots, drawn, under, runner.states.feed)
        return ids

    def _logprobs(
        self, batch: Batch, logits: Tensor, plan: "DrawPlan", ids: np.ndarray, accepted: list[int]
    ) -> dict[int, list[RowLogprobs]]:
        """Of what rows have drawn that want them, by place in the draws."""
        tops = batch.top_logprobs
        if not tops:
            return {}
        each = [(place, depth) for place in tops for depth in range(1 + accepted[place])]
        at = upload([int(plan.at[depth, place]) for place, depth in each], self.runner.device)
        drawn = upload([int(ids[depth, place]) for place, depth in each], self.runner.device)
        found = logprobs(logits[at], drawn, max(tops.values()), self.runner.invariant)
        values, likeliest = (Download(tensor).wait() for tensor in found)
        entries = row_logprobs(values, likeliest, [tops[place] for place, _ in each])
        by_place: dict[int, list[RowLogprobs]] = {place: [] for place in tops}
        for (place, _), entry in zip(each, entries, strict=True):
            by_place[place].append(entry)
        return by_place


@dataclass(frozen=True)
class DrawPlan:
    """What a step draws behind each token, for each of its draws."""

    slots: list[int]
    at: np.ndarray  # [deepest + 1, draws], the token behind which a row draws
    wanted: np.ndarray  # [deepest, draws], what it must have drawn to draw on; NOTHING: it does not
    masks: list[RowMasks | None]  # [deepest], of what it draws then

    @classmethod
    def of(cls, batch: Batch, drafts: Mapping[int, int], laid: Laid, after: MasksBehind) -> "DrawPlan":
        first, deepest = np.array([laid.first[row] for row in batch.draws]), max(drafts.values())
        at = np.repeat(first[None], deepest + 1, axis=0)
        wanted = np.full((deepest, len(first)), NOTHING)
        bound: list[dict[int, np.ndarray]] = [{} for _ in range(deepest)]
        for place, count in drafts.items():
            begin = int(first[place])
            for depth in range(count):
                if place in after:
                    if (mask := after[place](depth + 1)) is None:
                        break
                    bound[depth][place] = mask
                wanted[depth, place] = batch.tokens[begin + depth + 1]
                at[depth + 1 :, place] = begin + depth + 1
        masks = [RowMasks(list(each), np.stack([*each.values()])) if each else None for each in bound]
        return cls([batch.slots[row] for row in batch.draws], at, wanted, masks)

    def accepted(self, ids: np.ndarray) -> list[int]:
        """How many tokens of the draft of each draw were drawn. ids: `[deepest + 1, draws]`."""
        same = ids[:-1] == self.wanted
        return [int(count) for count in np.where(same.all(0), len(same), same.argmin(0))]

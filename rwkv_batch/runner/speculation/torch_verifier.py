"""Steps with drafts over torch's operations and the kernels for CPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.torch_model import Accept, PackedBatch, TorchModel
from rwkv_batch.runner.protocol import Batch, Runner
from rwkv_batch.runner.speculation.protocol import KnownVerified, MasksBehind, MoreDraws, VerifyUnder
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.sampling.logprobs import RowLogprobs, logprobs, row_logprobs
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.sampling.mixtures import mix_logits
from rwkv_batch.sampling.prompt_logprobs import PromptScores, scored_rows

MOST_TOGETHER = 64  # tokens of all drafts: their logits are in memory at once


def torch_model_of(runner: Runner) -> TorchModel | None:
    """The model of a runner over torch's operations that is no chain of stages; None: it has none."""
    if isinstance(runner, TorchRunner) and isinstance(runner.model, TorchModel):
        return runner.model
    return None


@dataclass(frozen=True)
class TorchVerifier:
    """The verifier of a runner whose model is no chain of stages; see Verifier.

    States move on by the tokens that are known. What the recurrence reads of a draft is kept until it is
    known how much of that counts; then the recurrence alone runs again, over this much.
    """

    runner: TorchRunner
    model: TorchModel

    @property
    def most_rows(self) -> int:
        return MOST_TOGETHER

    @property
    def most_drafted(self) -> int:
        return MOST_TOGETHER

    def takes(self, batch: Batch) -> bool:
        return True

    def feed(self, batch: Batch, drafts: Mapping[int, int]) -> VerifyUnder:
        self.runner.take_threads()
        drafted = [0] * len(batch.counts)
        for place, count in drafts.items():
            drafted[batch.draws[place]] = count
        scores = PromptScores(batch.scored, self.model.device, self.runner.invariant)
        rows = PackedBatch(batch.counts, batch.slots, batch.adapters, drafted)
        logits, accept = self.model.verify(
            torch.tensor(batch.tokens), rows, self.runner.states, batch.draws, scores
        )
        return partial(self._draw, batch, Verified(logits, accept, scores, drafted))

    @torch.inference_mode()
    def _draw(
        self, batch: Batch, fed: "Verified", masks: RowMasks | None, after: MasksBehind
    ) -> KnownVerified:
        tops = batch.top_logprobs
        slots, drafted = [batch.slots[row] for row in batch.draws], [fed.drafted[row] for row in batch.draws]
        starts = [0, *accumulate(count + 1 for count in drafted)]  # of the rows, among the logits
        ends = list(accumulate(batch.counts))
        first = fed.logits[starts[:-1]]  # a copy, as are those below: the sampler writes into its own
        mix_logits(first, batch.mixtures)
        kept = first[list(tops)] if tops else None
        ids = self.runner.sampler.sample(first, slots, masks)
        drawn = {place: [ids[place]] for place, count in enumerate(drafted) if count}
        drawing = list(drawn)
        for depth in range(max(drafted)):
            drawing = [
                place
                for place in drawing
                if depth < drafted[place]
                and drawn[place][-1] == batch.tokens[ends[batch.draws[place]] - drafted[place] + depth]
            ]
            bits = {place: after[place](depth + 1) for place in drawing if place in after}
            drawing = [place for place in drawing if bits.get(place, ()) is not None]
            if not drawing:
                break
            logits = fed.logits[[starts[place] + depth + 1 for place in drawing]]
            bound = [
                (row, mask) for row, place in enumerate(drawing) if (mask := bits.get(place)) is not None
            ]
            under = (
                RowMasks([row for row, _ in bound], np.stack([mask for _, mask in bound])) if bound else None
            )
            found = self.runner.sampler.sample(logits, [slots[place] for place in drawing], under)
            for place, token in zip(drawing, found, strict=True):
                drawn[place].append(token)
        counts = [0] * len(batch.counts)
        for place, tokens in drawn.items():
            counts[batch.draws[place]] = len(tokens) - 1
        fed.accept(counts)
        entries = self._logprobs(kept, [ids[place] for place in tops], list(tops.values()))
        behind: dict[int, MoreDraws] = {}
        for place, (_, *tokens) in drawn.items():
            if place in tops:
                at = slice(starts[place] + 1, starts[place] + 1 + len(tokens))
                found_entries = self._logprobs(fed.logits[at], tokens, [tops[place]] * len(tokens))
                behind[place] = list(zip(tokens, found_entries, strict=True))
            else:
                behind[place] = [(token, None) for token in tokens]
        scored = scored_rows(*fed.scores.found(), batch.scored.values()) if fed.scores else []
        return KnownVerified(ids, entries, scored, behind)

    def _logprobs(self, logits: Tensor | None, drawn: list[int], tops: list[int]) -> list[RowLogprobs]:
        """Of these ids, with so many of the likeliest."""
        if logits is None or not drawn:
            return []
        ids = torch.tensor(drawn, device=logits.device)
        return row_logprobs(*logprobs(logits, ids, max(tops), self.runner.invariant), tops)


@dataclass(frozen=True)
class Verified:
    """A step that the model has run."""

    logits: Tensor  # as TorchModel.verify gives them
    accept: Accept
    scores: PromptScores
    drafted: list[int]  # of each row

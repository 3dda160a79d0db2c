"""A model whose layers lie on several GPUs, by the kernels: `stage.Stage`s, one after the other.

The first one has the embedding, the last one the head. Each runs on the current stream of its GPU, so that
one works on some rows while the next works on those before them.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.cuda.cuda_model import CudaModel
from rwkv_batch.model.cuda.stage import HandedOn, Logits, Stage, StageRows
from rwkv_batch.model.cuda.steps.graphs import prefill_sizes
from rwkv_batch.ops.cuda.inputs.feed import Feed
from rwkv_batch.ops.cuda.inputs.handover import Handover, handover_bytes
from rwkv_batch.ops.low_rank import LowRankAdapter
from rwkv_batch.sampling.prompt_logprobs import PromptScores
from rwkv_batch.state.staged import StagedStates

TURNS = 2  # parcels under way from one stage to the next


class StagedCuda:
    """The stages of a model. All calls belong on one thread; states are those of `allocate`."""

    def __init__(self, models: Sequence[CudaModel[Any, Any]]) -> None:
        """models: each a part of one, in the order of their layers."""
        self.models = models
        self.checkpoint, self.device = models[-1].checkpoint, models[-1].device
        for model in models[:-1]:
            model.tune_as(models[-1])
        self._stages: list[Stage] = []
        self._turns: deque[Stage] = deque()  # of `improve`
        self._handovers: list[Handover] = []

    @property
    def feeds(self) -> list[Feed]:
        """What each GPU knows of the slots."""
        return [stage.states.feed for stage in self._stages]

    def bytes_needed(
        self, rows: int, slots: int, prefill_tokens: int, wkv_dtype: torch.dtype, adapters: tuple[int, int]
    ) -> Counter[torch.device]:
        """What each GPU holds of states and steps. adapters: how many slots, and the largest rank."""
        needed = Counter[torch.device]()
        parcels = TURNS * self._parcel_bytes(rows, prefill_tokens + rows)
        for model in self.models:
            hops = (model.part.start > 0) + (model.part.stop < self.checkpoint.layers)
            steps = model.step_bytes(rows, prefill_tokens, *adapters)
            needed[model.device] += slots * model.slot_bytes(wkv_dtype) + steps + hops * parcels
        return needed

    def allocate(
        self,
        rows: int,
        slots: int,
        most_tokens: int,
        wkv_dtype: torch.dtype,
        adapters: tuple[int, int],
        late: bool = False,
    ) -> StagedStates:
        """The states of so many slots, and all that steps over them need. most_tokens: of a step."""
        parts = [model.new_states(slots, wkv_dtype) for model in self.models]
        nbytes = self._parcel_bytes(rows, most_tokens)
        for number, (source, target) in enumerate(pairwise(self.models), 1):
            way = f"to stage {number}"
            self._handovers.append(Handover(way, source.device, target.device, nbytes, TURNS))
        for model, states in zip(self.models, parts, strict=True):
            with torch.cuda.device(model.device):
                if adapters[0]:
                    model.add_adapters(*adapters, most_tokens)
                self._stages.append(Stage(model, states, rows, most_tokens))
        # The last one first, as it measures for all.
        for stage in reversed(self._stages):
            with torch.cuda.device(stage.model.device), torch.inference_mode():
                stage.capture(late, self._forget_others)
        self._turns.extend(self._stages)
        return StagedStates(parts)

    @torch.inference_mode()
    def improve(self, idle: bool) -> bool:
        """Do a piece of what `allocate` has left for later, of the stages in turn."""
        for _ in self._stages:
            self._turns.rotate(1)
            with torch.cuda.device(self._turns[0].model.device):
                if self._turns[0].improve(idle):
                    return True
        return False

    @torch.inference_mode()
    def load_adapter(self, slot: int, adapter: LowRankAdapter) -> None:
        """Queue the copies of its layers to their stages."""
        for model in self.models:
            assert model.adapters is not None
            width = self.checkpoint.width
            model.adapters.load(slot, adapter.of_layers(model.part, width, 4 * width))

    @torch.inference_mode()
    def run(self, rows: StageRows) -> Logits:
        """Queue packed rows on all stages; see CudaModel.run."""
        first, *between, last = self._stages
        with torch.cuda.device(first.model.device):
            parcel = self._handovers[0].send(first.pass_on(rows, None).tensors)
        for stage, (before, following) in zip(between, pairwise(self._handovers), strict=True):
            with torch.cuda.device(stage.model.device):
                left = stage.pass_on(rows, HandedOn.of(before.receive(parcel)))
                before.release(parcel)
                parcel = following.send(left.tensors)
        with torch.cuda.device(last.model.device):
            found = last.finish(rows, HandedOn.of(self._handovers[-1].receive(parcel)))
            self._handovers[-1].release(parcel)
        return found

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        states: StagedStates,
        scores: PromptScores | None = None,
    ) -> Tensor:
        """Run packed rows; logits in fp32 of all of them. See CudaModel.forward."""
        rows = StageRows(tokens.tolist(), lengths, slots, range(len(lengths)), scores=scores)
        logits = self.run(rows)[0].float()
        states.flush(slots)
        return logits

    def _forget_others(self, tokens: int) -> None:
        """The last stage has found other methods for so many tokens, which all run by."""
        for stage in self._stages[:-1]:
            with torch.cuda.device(stage.model.device):
                stage.forget(tokens)

    def _parcel_bytes(self, rows: int, most_tokens: int) -> int:
        width, tokens = self.checkpoint.width, max(rows, most_tokens, prefill_sizes(most_tokens)[-1])
        return handover_bytes(4 * tokens * width, 2 * tokens * width, 4 * tokens, 4 * tokens)

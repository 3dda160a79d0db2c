"""The runner for any device that torch has: steps are done when they return."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint, Family
from rwkv_batch.model.rwkv6 import RWKV6
from rwkv_batch.model.rwkv7 import RWKV7
from rwkv_batch.model.rwkv7_cpu import CpuRWKV7
from rwkv_batch.model.stages import StagedModel, layers_of_stages
from rwkv_batch.model.torch_model import SCORED_AT_ONCE, PackedForward, TorchModel
from rwkv_batch.ops.cpu.binding import CpuKernels
from rwkv_batch.ops.device import give_freed_memory_back, keep_freed_memory, reserve_bytes
from rwkv_batch.ops.low_rank import LowRankAdapter, slot_numbers
from rwkv_batch.runner.limits import GPU_LIMITS, cpu_limits
from rwkv_batch.runner.protocol import NO_ADAPTERS, AdapterRoom, Batch, Draws, DrawUnder, KnownDraws, NewRow
from rwkv_batch.runner.warmup import logits_bytes, run_largest_step
from rwkv_batch.sampling.logprobs import logprobs, row_logprobs
from rwkv_batch.sampling.masks import RowMasks
from rwkv_batch.sampling.mixtures import mix_logits
from rwkv_batch.sampling.prompt_logprobs import PromptScores, scored_rows
from rwkv_batch.sampling.sampler import Sampler
from rwkv_batch.state.slots import slot_bytes

TOKEN_VECTORS = 64  # fp32 vectors of a token that torch's operations hold at once
MODELS: dict[Family, type[TorchModel]] = {"rwkv7": RWKV7, "rwkv7a": RWKV7, "rwkv6": RWKV6}
CPU_MODELS: dict[Family, type[TorchModel]] = MODELS | {"rwkv7": CpuRWKV7, "rwkv7a": CpuRWKV7}
THREADS = torch.get_num_threads()  # that torch begins with
SMALL = 64_000_000  # parameters below which two threads wait for each other longer than they work


class TorchRunner:
    """The runner over torch's operations: fp32 on a CPU, fp16 on a GPU; see Runner.

    On several devices each has a stage of the model.
    """

    run_ahead_stop_ids, most_steps = 0, 1
    beside_slot = 0  # bytes that go with each slot, such as its states of a draft model

    def __init__(
        self,
        checkpoint: Checkpoint,
        devices: Sequence[torch.device],
        wkv_dtype: torch.dtype,
        adapters: AdapterRoom = NO_ADAPTERS,
        invariant: bool = False,
        kernels: CpuKernels | None = None,
        threads: int | None = None,
    ) -> None:
        """devices: of the stages, all of one type; the same one may have several. invariant: as in
        TorchModel. kernels: for a model on a CPU; None: torch's operations. threads: on a CPU; None: as suits
        the model. Raises DeviceError if there are more devices than layers.
        """
        self.devices, self._wkv_dtype, self._adapters = tuple(devices), wkv_dtype, adapters
        self.device = device = devices[-1]  # where rows are drawn
        self.invariant = invariant
        self.dtype = torch.float32 if device.type == "cpu" else torch.float16
        self.limits = cpu_limits(checkpoint.parameters) if device.type == "cpu" else GPU_LIMITS
        model = (CPU_MODELS if kernels else MODELS)[checkpoint.family]
        if device.type == "cpu":
            give_freed_memory_back()
        stages = [
            model(checkpoint, place, self.dtype, invariant, kernels, part)
            for place, part in zip(devices, layers_of_stages(checkpoint, len(devices)), strict=True)
        ]
        self.model: PackedForward = StagedModel(stages) if len(stages) > 1 else stages[0]
        self.model.make_room(adapters.slots)
        if device.type == "cpu":
            keep_freed_memory()
        # Which also keeps its pace beside other busy processes.
        self._threads = threads or (1 if checkpoint.parameters < SMALL else THREADS)
        self.take_threads()

    def bytes_needed(self, rows: int, idle_slots: int, prefill_tokens: int) -> int:
        shape, of_devices = self.model.checkpoint, Counter[torch.device]()
        parts = layers_of_stages(shape, len(self.devices))
        for device, part in zip(self.devices, parts, strict=True):
            of_devices[device] += self._stage_bytes(len(part), rows + idle_slots, prefill_tokens + rows)
        of_devices[self.device] += logits_bytes(shape, rows, SCORED_AT_ONCE, torch.float32, self.device)
        return max(of_devices.values()) + reserve_bytes(self.device)

    def _stage_bytes(self, layers: int, slots: int, tokens: int) -> int:
        """What a stage of so many layers holds, with so many tokens a step."""
        width, room = self.model.checkpoint.width, self._adapters
        activations = tokens * TOKEN_VECTORS * 4 * width
        numbers = room.slots * slot_numbers(layers, width, 4 * width, room.most_rank)
        slot = slot_bytes(layers, width, self.dtype, self._wkv_dtype)
        return slots * (slot + self.beside_slot) + activations + numbers * self.dtype.itemsize

    def allocate(self, rows: int, idle_slots: int, prefill_tokens: int, late: bool = False) -> None:
        self.states = self.model.new_states(rows + idle_slots, self._wkv_dtype)
        self.sampler = Sampler(rows + idle_slots, self.model.checkpoint.vocab, self.device)
        if self.device.type != "cpu":
            run_largest_step(self.model.forward, self.states, rows, prefill_tokens)

    def improve(self, idle: bool) -> bool:
        return False

    def begin(self, slot: int, row: NewRow) -> None:
        self.sampler.begin(slot, row.sampling, row.seed, row.stream, row.drawn, row.prompt)

    def load_adapter(self, slot: int, adapter: LowRankAdapter) -> None:
        self.model.load_adapter(slot, adapter)

    def take_threads(self) -> None:
        """Set the number of threads again, as another model may have run its step with others."""
        if self.device.type == "cpu" and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def run(self, batch: Batch) -> Draws:
        return self._draw(batch, *self._forward(batch), None)

    def feed(self, batch: Batch) -> DrawUnder:
        return partial(self._draw, batch, *self._forward(batch))

    def _forward(self, batch: Batch) -> tuple[Tensor, PromptScores]:
        """Logits of the rows that draw, and what prompts score."""
        self.take_threads()
        scores = PromptScores(batch.scored, self.device, self.invariant)
        logits = self.model.forward(
            torch.tensor(batch.tokens),
            batch.counts,
            batch.slots,
            self.states,
            batch.draws,
            batch.adapters,
            scores,
        )
        mix_logits(logits, batch.mixtures)
        return logits, scores

    def _draw(self, batch: Batch, logits: Tensor, scores: PromptScores, masks: RowMasks | None) -> Draws:
        tops = batch.top_logprobs
        kept = logits[list(tops)] if tops else None  # a copy: the sampler writes into its own
        slots = [batch.slots[row] for row in batch.draws]
        ids = self.sampler.sample(logits, slots, masks) if batch.draws else []
        scored = scored_rows(*scores.found(), batch.scored.values()) if scores else []
        if kept is None:
            return KnownDraws(ids, scored=scored)
        drawn = torch.tensor([ids[place] for place in tops], device=kept.device)
        found = logprobs(kept, drawn, max(tops.values()), self.invariant)
        entries = row_logprobs(*found, tops.values())
        return KnownDraws(ids, entries, scored)

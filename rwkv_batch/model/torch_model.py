"""What the forward passes in torch of all families have in common: rows, states, embedding and head.

Rows of any length are packed without padding, and their states stay in their slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.tensors.description import Norm, matrix, norm_tensors
from rwkv_batch.ops import torch_ops as ops
from rwkv_batch.ops.cpu.binding import CpuKernels
from rwkv_batch.ops.cpu.memory import WeightMemory
from rwkv_batch.ops.cpu.products import PackedLinear
from rwkv_batch.ops.linear import Linear, prepare
from rwkv_batch.ops.low_rank import Changes, LowRankAdapter, PreparedAdapter, changes_of
from rwkv_batch.ops.mapped import let_go
from rwkv_batch.ops.weights.products import product_with
from rwkv_batch.ops.weights.weight import Matrix, Weight
from rwkv_batch.sampling.prompt_logprobs import PromptScores
from rwkv_batch.state.slots import DeviceStates, States

SCORED_AT_ONCE = 32  # places of prompts whose logits are in memory at once
# Moves states on by so many tokens of each row's draft, the first ones. To be called once, before the next
# forward pass.
Accept = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Embedding:
    """The embedding with layer norm ln0, row by row: the table stays as small as in the file."""

    table: Tensor  # [vocab, width] in any floating dtype
    norm: Norm | None  # fp32; None: it has been applied
    dtype: torch.dtype

    def __call__(self, tokens: Tensor) -> Tensor:
        """Ids `[T]` -> `[T, width]`."""
        rows = self.table[tokens]
        return (rows if self.norm is None else self.norm(rows.float())).to(self.dtype)


@dataclass(frozen=True)
class Activations:
    """What goes through the layers. Each stage of a model gets it from the one before."""

    tokens: Tensor  # [T] ids
    x: Tensor  # [T, width], the residual stream
    embedded: Tensor  # [T, width], the normed embedding: a DeepEmbed reads it
    v_first: Tensor | None = None  # [T, width], the values of layer 0 of RWKV-7; None: before that layer

    def to(self, device: torch.device) -> "Activations":
        v_first = None if self.v_first is None else self.v_first.to(device)
        return Activations(self.tokens.to(device), self.x.to(device), self.embedded.to(device), v_first)


@dataclass(frozen=True)
class PackedBatch:
    """Rows of a forward pass. In the order of its kernels decode rows come first, then those with drafts,
    and slots ascend.
    """

    lengths: Sequence[int]
    slots: Sequence[int]
    adapters: Sequence[int] = ()  # of each row, a place in `TorchModel.adapters`; empty: none has one
    # Of each row, how many of its tokens, the last ones, are a draft behind one that is known; empty: none.
    drafted: Sequence[int] = ()

    def ordered(self, tokens: Tensor) -> tuple[Tensor, "PackedBatch", list[int]]:
        """In the order of the kernels: the tokens, the rows, and which of the present ones these are."""
        lengths, slots, adapters, drafted = self.lengths, self.slots, self.adapters, self.drafted
        if drafted:
            order = sorted(
                range(len(lengths)), key=lambda row: (lengths[row] > 1, not drafted[row], slots[row])
            )
        else:
            order = sorted(range(len(lengths)), key=lambda row: (lengths[row] > 1, slots[row]))
        if order == list(range(len(lengths))):
            return tokens, self, order
        pieces = tokens.split(list(lengths))
        batch = PackedBatch(
            [lengths[row] for row in order],
            [slots[row] for row in order],
            [adapters[row] for row in order] if adapters else (),
            [drafted[row] for row in order] if drafted else (),
        )
        return torch.cat([pieces[row] for row in order]), batch, order


class PackedForward(ABC):
    """The forward pass over packed rows, wherever the layers lie."""

    checkpoint: Checkpoint

    @abstractmethod
    def new_states(self, slots: int, wkv_dtype: torch.dtype = torch.float32) -> States:
        """The states of that many slots, all before the first token."""

    @abstractmethod
    def make_room(self, slots: int) -> None:
        """For so many adapters of rows."""

    @abstractmethod
    def load_adapter(self, slot: int, adapter: LowRankAdapter) -> None:
        """Into one of these slots."""

    @abstractmethod
    def _hidden(self, tokens: Tensor, states: Any, batch: PackedBatch) -> tuple[Tensor, ops.PackedRows]:
        """Ids `[T]` through the embedding and all layers: `[T, width]`, and the rows, on its device."""

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """x `[n, width]` behind the last layer: fp32 `[n, vocab]`."""

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        states: States,
        logits_of: Sequence[int] | None = None,
        adapters: Sequence[int] = (),
        scores: PromptScores | None = None,
    ) -> Tensor:
        """Run packed rows, and move their states on in place.

        tokens: `[T]` ids of all rows, one row after the other. lengths: tokens of each row, at least 1.
        slots: of each row, all different. adapters: of each row, a place in `self.adapters`, negative for
        none; empty where no row has one. Returns fp32 logits `[len(logits_of), vocab]` after the last token
        of the rows named (None: of all rows, in order). scores: takes those of other places too. Raises
        ValueError for rows that do not fit together.
        """
        wanted = range(len(lengths)) if logits_of is None else logits_of
        x, rows, order = self._through(tokens, states, PackedBatch(lengths, slots, adapters), scores)
        place = {row: place for place, row in enumerate(order)}
        if not len(wanted):
            return x.new_empty(0, self.checkpoint.vocab, dtype=torch.float32)
        at = torch.tensor([place[row] for row in wanted], device=x.device)
        return self.logits(x[at if rows.last is None else rows.last[at]])

    @torch.inference_mode()
    def verify(
        self,
        tokens: Tensor,
        batch: PackedBatch,
        states: States,
        logits_of: Sequence[int],
        scores: PromptScores | None = None,
    ) -> tuple[Tensor, Accept]:
        """Run packed rows of which some have drafts, whose states do not move on by these yet.

        Returns fp32 logits `[n, vocab]` after the last token of each of the rows named that is no draft, and
        after each token of its draft, row after row; and what moves the states on by those that count.
        """
        x, rows, order = self._through(tokens, states, batch, scores)
        place = {row: place for place, row in enumerate(order)}
        last = [(rows.ends[place[row]], batch.drafted[row]) for row in logits_of]
        at = [token for end, drafted in last for token in range(end - 1 - drafted, end)]

        @torch.inference_mode()
        def accept(counts: Sequence[int]) -> None:
            rows.accept([counts[row] for row in order])

        return self.logits(x[torch.tensor(at, device=x.device)]), accept

    def _through(
        self, tokens: Tensor, states: States, batch: PackedBatch, scores: PromptScores | None
    ) -> tuple[Tensor, ops.PackedRows, list[int]]:
        """Packed rows through all layers: `[T, width]`, with the rows, in the order that is returned too.

        Inside, neighbours in memory are one view, as slots ascend.
        """
        check_rows(tokens, batch.lengths, batch.slots, len(states))
        tokens, batch, order = batch.ordered(tokens)
        x, rows = self._hidden(tokens, states, batch)
        if scores:
            ends, place = list(accumulate(batch.lengths)), {row: place for place, row in enumerate(order)}
            starts = [ends[place[row]] - batch.lengths[place[row]] for row in range(len(order))]
            for piece in torch.tensor(scores.places(starts), device=x.device).split(SCORED_AT_ONCE):
                scores.take(self.logits(x[piece]))
        return x, rows, order


class TorchModel(PackedForward):
    """A model on a device, or some of its layers. `dtype`: of weights and activations; the recurrence is
    always fp32.
    """

    @torch.inference_mode()
    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        invariant: bool = False,
        kernels: CpuKernels | None = None,
        part: range | None = None,
    ) -> None:
        """invariant: whether a row's logits and state are to be the same, bit for bit, beside any others
        and wherever its tokens are cut into steps. On a CPU, with states in fp32. kernels: what multiplies
        on a CPU in fp32; None: torch. part: which layers, where this is a stage of a model; None: all. The
        first stage has the embedding, the last one the head.
        """
        self.checkpoint, self.device, self.dtype = checkpoint, torch.device(device), dtype
        self.part = part or range(checkpoint.layers)
        self._invariant, self._kernels, self._memory = invariant, kernels, WeightMemory()
        if self.part.start == 0:
            self.embedding = self._embedding()
        if self.part.stop == checkpoint.layers:
            self.ln_out = norm_tensors(checkpoint.tensors, "ln_out").to(self.device, torch.float32)
            self.head = self._linear(matrix(checkpoint.tensors, checkpoint.packed, "head"))
        self.adapters: list[PreparedAdapter | None] = []  # by slot
        self._load_layers()
        self.checkpoint = checkpoint.without_numbers()  # what has been packed is not kept twice

    def new_states(self, slots: int, wkv_dtype: torch.dtype = torch.float32) -> DeviceStates:
        start = self.checkpoint.start_state()
        start = None if start is None else start[self.part.start : self.part.stop]
        width = self.checkpoint.width
        return DeviceStates(slots, len(self.part), width, self.dtype, wkv_dtype, self.device, start)

    def make_room(self, slots: int) -> None:
        self.adapters = [None] * slots

    def load_adapter(self, slot: int, adapter: LowRankAdapter) -> None:
        self.adapters[slot] = None  # its memory is free for the new one
        width = self.checkpoint.width
        self.adapters[slot] = PreparedAdapter.on(
            adapter, width, 4 * width, self.device, self.dtype, self.part
        )

    def embed(self, tokens: Tensor) -> Activations:
        """Ids `[T]`, as the first stage gets them."""
        x = self.embedding(tokens.to(self.device))
        return Activations(tokens.to(self.device), x, x)

    def run(
        self, activations: Activations, states: DeviceStates, batch: PackedBatch
    ) -> tuple[Activations, ops.PackedRows]:
        """Through the layers that are here."""
        rows = ops.PackedRows(batch.lengths, batch.slots, self.device, self._invariant, batch.drafted)
        changes = changes_of(self.adapters, batch.adapters, batch.lengths, self.device)
        return self._run_layers(activations, states, rows, changes), rows

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.ln_out(x.float()).to(self.dtype)).float()

    @abstractmethod
    def _load_layers(self) -> None:
        """Pack the weights of the layers."""

    @abstractmethod
    def _run_layers(
        self, activations: Activations, states: DeviceStates, rows: ops.PackedRows, changes: Changes
    ) -> Activations:
        """What comes out of the layers that are here."""

    def _hidden(
        self, tokens: Tensor, states: DeviceStates, batch: PackedBatch
    ) -> tuple[Tensor, ops.PackedRows]:
        activations, rows = self.run(self.embed(tokens), states, batch)
        return activations.x, rows

    def _embedding(self) -> Embedding:
        tensors, norm = self.checkpoint.tensors, None
        if "blocks.0.ln0.weight" in tensors:
            norm = norm_tensors(tensors, "blocks.0.ln0").to(self.device, torch.float32)
        # Where memory is short it is read from the mapped file. Otherwise a copy: so whoever writes into the
        # file of a model that runs does no harm.
        copy = self.device.type == "cpu" and not self.checkpoint.packed
        table = tensors["emb.weight"]
        embedding = Embedding(table.to(self.device, copy=copy), norm, self.dtype)
        let_go(table)
        return embedding

    def _vector(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).flatten()

    def _linear(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        if isinstance(weight, Weight):
            linear = product_with(weight, bias, invariant=self._invariant, kernels=self._kernels)
        else:
            linear = prepare(
                weight,
                bias,
                device=self.device,
                dtype=self.dtype,
                invariant=self._invariant,
                kernels=self._kernels,
            )
        if isinstance(linear, PackedLinear):
            linear = linear.kept_in(self._memory)
        for part in weight.parts.values() if isinstance(weight, Weight) else [weight]:
            let_go(part)
        return linear


def check_rows(tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], total_slots: int) -> None:
    """Wrong rows would mix up states in silence. Raises ValueError."""
    if not lengths or len(lengths) != len(slots) or min(lengths) < 1 or sum(lengths) != len(tokens):
        raise ValueError(
            f"{len(lengths)} lengths with sum {sum(lengths)} do not fit {len(slots)} slots and "
            f"{len(tokens)} tokens; give one length of at least 1 and one slot for every row."
        )
    if len(set(slots)) != len(slots) or min(slots) < 0 or max(slots) >= total_slots:
        raise ValueError(
            f"Slots {list(slots)} are not distinct numbers below {total_slots}; give every row a slot of "
            "its own."
        )

"""What the forward passes on a CUDA GPU have in common in all families: steps, graphs and states."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.packed.protocol import PackedWeights
from rwkv_batch.model.cuda.steps.adapters import LAYER_LAUNCHES, AdapterSlots, adapter_bytes
from rwkv_batch.model.cuda.steps.graphs import (
    PREFILL_SIZES,
    Decoded,
    DecodeGraphs,
    GraphLadder,
    Prefilled,
    PrefillGraphs,
    decode_sizes,
    graph_bytes,
    prefill_sizes,
    prefills_held,
)
from rwkv_batch.model.cuda.steps.late import LateWork, Tuner
from rwkv_batch.model.cuda.steps.row import RowStep
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.model.torch_model import check_rows
from rwkv_batch.ops.cuda.binding import Addend, Kernels
from rwkv_batch.ops.cuda.buffers import StepBuffers, buffer_bytes
from rwkv_batch.ops.cuda.inputs.packing import DeviceRows, PrefillPlan, StagedPlan, upload_plan
from rwkv_batch.ops.cuda.inputs.staging import upload
from rwkv_batch.ops.host_memory import pinned
from rwkv_batch.sampling.prompt_logprobs import PromptScores
from rwkv_batch.state.slots import States

MANY = 1 << 30  # tokens, for which no GEMM is timed
MEASURED_TOKENS = 1024  # of a prefill for which GEMMs are timed, at most: of more, cuBLAS's are the fastest
SCORED_AT_ONCE = 256  # places of prompts whose logits are in memory at once; one of PREFILL_SIZES

Ladders = tuple[DecodeGraphs, PrefillGraphs]
Weights = TypeVar("Weights", bound=PackedWeights)
StepBuffersT = TypeVar("StepBuffersT", bound=StepBuffers)


def in_order(tokens: Sequence[int], lengths: Sequence[int], plan: PrefillPlan) -> Tensor:
    """The ids of rows of these lengths in the order of their plan: int32 on the host."""
    ids = torch.from_numpy(np.array(tokens, np.int32))  # several times faster than torch.tensor
    if plan.order == list(range(len(lengths))):
        return ids
    pieces = ids.split(list(lengths))
    return torch.cat([pieces[row] for row in plan.order])


class CudaModel(ABC, Generic[Weights, StepBuffersT]):
    """A model on one GPU, or some of its layers. Raises build.BuildError if there are no kernels for it."""

    dtype = torch.float16
    defers: ClassVar[bool]  # whether decode steps defer writes to fp16 states
    buffers: type[StepBuffersT]  # of a step
    takes_adapters: ClassVar[bool] = False  # whether rows can have adapters of their own
    row: RowStep | None = None  # runs all layers of a step of one row by one launch
    tuner: Tuner | None = None  # measures how GEMMs run the fastest; None if nothing is measured

    @torch.inference_mode()
    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str = "cuda",
        architecture: str | None = None,
        invariant: bool = False,
        few_rows: bool = False,
        part: range | None = None,
        fp8_copies: bool = False,
    ) -> None:
        """architecture: as in build.build; None: that of the GPU. few_rows, fp8_copies: of `pack_weights`.

        invariant: whether a row's logits and state are to be the same, bit for bit, beside any others
        and wherever its tokens are cut into steps. Then every step is a prefill, and states are fp32, or
        fp16 that each token rounds, which RWKV-6 does not have.
        part: which layers, where this is a stage of a model (steps/stage.py); None: all. The first stage has
        the embedding, the last one the head.
        """
        self.checkpoint, self.device = checkpoint, torch.device(device)
        self.part = part or range(checkpoint.layers)
        with torch.cuda.device(self.device):
            self.kernels = Kernels(self.device, architecture, invariant)
            self.weights = self._pack_weights(few_rows, fp8_copies)
            self._buffer_shape = self.weights.buffer_shape
        self._graphs: tuple[States, dict[bool, Ladders]] | None = None  # by whether some rows have adapters
        # Rows of a decode graph, and tokens of a prefill graph.
        self._most: tuple[int | None, int | None] = None, None
        self._late: LateWork | None = None
        self.adapters: AdapterSlots | None = None

    def new_states(self, slots: int, wkv_dtype: torch.dtype = torch.float16, spare: int = 0) -> CudaStates:
        """The states of that many slots, all before the first token. spare: slots besides, for drafts."""
        width, start = self.checkpoint.width, self.checkpoint.start_state()
        start = None if start is None else start[self.part.start : self.part.stop]
        size = len(self.part), width
        return CudaStates(self.kernels, slots, size, wkv_dtype, start, self._defers, spare)

    def slot_bytes(self, wkv_dtype: torch.dtype) -> int:
        """Of a slot of `new_states`, deferred writes included."""
        return CudaStates.bytes_of_slot(len(self.part), self.checkpoint.width, wkv_dtype, self._defers)

    @property
    def _defers(self) -> bool:
        """Whether writes to its states may be deferred."""
        return self.defers and not self.kernels.invariant

    def add_adapters(self, slots: int, most_rank: int, most_tokens: int) -> None:
        """Make room for the adapters of rows, before graphs are captured. most_tokens: of a step."""
        tokens = max(most_tokens, PREFILL_SIZES[-1])
        with torch.cuda.device(self.device):
            self.adapters = AdapterSlots(self.kernels, self._sizes, slots, most_rank, tokens, self.device)

    def step_bytes(self, rows: int, prefill_tokens: int, adapters: int = 0, most_rank: int = 0) -> int:
        """The most that steps and their graphs hold besides weights, states and logits.

        adapters: slots for adapters of that rank; the slots are counted too.
        """
        most = prefill_tokens + rows
        prefills = prefills_held(most)
        shape, kind = self._buffer_shape, self.buffers
        buffers = sum(buffer_bytes(shape, tokens, packed=True, kind=kind) for tokens in prefills)
        buffers += buffer_bytes(shape, rows, kind=kind)
        graphs = graph_bytes(len(self.part), rows, most)
        if adapters:
            graphs += graph_bytes(len(self.part), rows, most, LAYER_LAUNCHES)
        return graphs + buffers + adapter_bytes(self._sizes, adapters, most_rank, (rows, *prefills))

    @torch.inference_mode()
    def capture(
        self,
        states: CudaStates,
        rows: int | None = None,
        progress: bool = True,
        late: bool = False,
        most_tokens: int | None = None,
        more: Sequence[GraphLadder[Any, Any]] = (),
    ) -> None:
        """Capture the graphs of decode batches of up to `rows` (None: all slots) and of small prefills.

        They are over these states, and steps over them have no more rows from then on. late: `improve`
        captures them, and steps do without until then. most_tokens: of a step, if that is known; others have
        no graph. more: what is captured with them.
        """
        self._graphs, self._late, self._most = None, None, (rows, most_tokens)
        most = max(rows or len(states), *(ladder.sizes[-1] for ladder in more), 0)
        timed = (*decode_sizes(most), *(s for s in prefill_sizes(most_tokens) if s <= MEASURED_TOKENS))
        ladders: list[GraphLadder[Any, Any]] = []
        with torch.cuda.device(self.device):
            if self.tuner and not late:
                self.tuner.measure(timed, progress)
            for adapted in (False, True) if self.adapters else (False,):
                decodes, prefills = self._graphs_over(states, adapted)
                ladders += [prefills] if self.kernels.invariant else [decodes, prefills]
            ladders += more
            for ladder in ladders:
                ladder.capture_later() if late else ladder.capture_all(progress)
        self._late = LateWork(ladders, self.tuner, timed) if late else None

    @torch.inference_mode()
    def capture_one_row(self, states: CudaStates) -> None:
        """Capture the graph of a step of one row now, after `capture`."""
        with torch.cuda.device(self.device):
            ladder = self._graphs_over(states)[self.kernels.invariant]
            if ladder.sizes[0] in ladder.missing:
                ladder.capture(ladder.sizes[0])

    @torch.inference_mode()
    def improve(self, idle: bool) -> bool:
        """Do a piece of what `capture` has left for later; see LateWork.piece."""
        with torch.cuda.device(self.device):
            return self._late is not None and self._late.piece(idle)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        states: CudaStates,
        logits_of: Sequence[int] | None = None,
        adapters: Sequence[int] = (),
        scores: PromptScores | None = None,
    ) -> Tensor:
        """Run packed rows; see `TorchModel.forward`. No writes to states stay deferred.

        Raises ValueError for rows that do not fit together, IndexError for ids that the model does not have.
        """
        check_rows(tokens, lengths, slots, len(states))
        vocab = self.checkpoint.vocab
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            raise IndexError(
                f"Tokens {int(tokens.min())} to {int(tokens.max())} do not fit a vocabulary of {vocab}; give "
                "ids below it."
            )
        logits = self.run(tokens.tolist(), lengths, slots, states, logits_of, adapters, scores)[0].float()
        states.flush(slots)
        return logits

    @torch.inference_mode()
    def run(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        states: CudaStates,
        logits_of: Sequence[int] | None = None,
        adapters: Sequence[int] = (),
        scores: PromptScores | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Queue packed rows, by a CUDA graph where there is one.

        That is a decode step if every row has one token, otherwise a prefill, as is every step of an
        invariant model. adapters: the slot of each row's adapter, negative for none; empty where no row has
        one.
        A row of one token may be fed a negative one: what its sequence drew last. Returns logits
        `[len(logits_of), vocab]` fp16 after the last token of the rows named (None: of all rows), and the
        slots `[len(logits_of)]` int32 of these rows, negative for those that had finished. The next run may
        overwrite both. scores: takes those of other places too.
        """
        if self._late:
            self._late.give_up()
        with torch.cuda.device(self.device):
            states.feed.prepare()
            if self.kernels.invariant or max(lengths) > 1:
                wanted = range(len(lengths)) if logits_of is None else logits_of
                logits, fed = self._prefill(tokens, lengths, slots, states, wanted, adapters, scores)
            else:
                graphs = self._graphs_over(states, bool(adapters))[0]
                self.place(adapters, graphs.size(len(slots)))
                logits, fed = graphs.run(tokens, slots)
                if scores:
                    of = upload(scores.places(range(len(slots))), self.device)
                    scores.take(logits[of, : self.checkpoint.vocab])
                if logits_of is not None:
                    index = upload(logits_of, self.device)
                    logits, fed = logits[index], fed[index]
            return logits[:, : self.checkpoint.vocab], fed

    def repeat(self, states: CudaStates, adapted: bool) -> None:
        """Queue the decode step that `run` queued last once more; what `run` returned is its output too."""
        self._graphs_over(states, adapted)[0].repeat()

    def decode(
        self,
        tokens: Tensor,
        slots: Tensor,
        states: CudaStates,
        logits: Tensor,
        arena: dict[str, Tensor],
        adapters: AdapterSlots | None = None,
    ) -> Tensor:
        """Launch one token of every row. Returns the slots `[T]` of the rows that run; see Feed.resolve.

        tokens and slots: `[T]` int32 on the device, negative for what a sequence drew last and for padding.
        logits: `[T, head's rows]`. Only launches, which can be captured; they write to these and the arena.
        """
        b = self.new_buffers(len(tokens), arena)
        states.feed.resolve(tokens, slots, b.lag, len(tokens), fed=b.fed)
        self.decode_resolved(b, states, logits, adapters)
        return b.fed[1]

    def decode_resolved(
        self, b: StepBuffersT, states: CudaStates, logits: Tensor | None, adapters: AdapterSlots | None = None
    ) -> None:
        """Launch the layers over the tokens of `b.fed`, and the head if there are logits; see `decode`.

        Without, b.x is the stream behind the last layer that is here. A stage that is not the first begins
        with b.x and b.v_first. They are written after `b.fed`: the first kernel reads all of them before it
        waits for the one before it.
        """
        methods = self.methods(len(b.x))
        self._norm_out(b, self._decode_layers(*b.fed, states, b, methods, adapters))
        if logits is not None:
            self._head(b.normed, logits, methods)

    def new_buffers(self, tokens: int, arena: dict[str, Tensor], packed: bool = False) -> StepBuffersT:
        """Those of a step of so many tokens, in the arena. packed: of a prefill."""
        return self.buffers(self._buffer_shape, tokens, arena, packed)

    def _embedded(self, tokens: Tensor) -> Addend:
        """What the first norm adds to the stream: the embedding, or nothing in a later stage."""
        return Addend() if self.part.start else Addend(tokens=tokens, table=self.weights.embedding)

    def _norm_out(self, b: StepBuffersT, added: Addend | None) -> None:
        """Launch the norm behind the last layer, given what `_decode_layers` returned; b.x is whole then."""
        if added is not None:
            self.kernels.norm(b.x, added, *self.weights.norm_out, b.normed)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Layers, width and hidden units."""
        return len(self.part), self._buffer_shape.width, self._buffer_shape.hidden

    def place(self, adapters: Sequence[int], size: int) -> None:
        """Of `size` tokens of the next step the first have their adapters in these slots, the others none."""
        if adapters:
            assert self.adapters is not None
            self.adapters.place(adapters, size)

    def _graphs_over(self, states: CudaStates, adapted: bool = False) -> Ladders:
        """The graphs over these states, of steps in which rows have adapters or not.

        Those over other states are given up.
        """
        if self._graphs is None or self._graphs[0] is not states:
            self._graphs = states, self._new_graphs(states)
        return self._graphs[1][adapted]

    def _new_graphs(self, states: CudaStates) -> dict[bool, Ladders]:
        most = self._most[0] or len(states)
        logits = torch.empty(most, len(self.weights.head), device=self.device, dtype=torch.float16)
        arenas: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}

        def ladders(adapters: AdapterSlots | None) -> Ladders:
            def decode(inputs: Tensor, arena: dict[str, Tensor]) -> Decoded:
                rows = logits[: inputs.shape[1]]
                return rows, self.decode(inputs[0], inputs[1], states, rows, arena, adapters)

            def prefill(inputs: StagedPlan, arena: dict[str, Tensor]) -> Prefilled:
                methods = self.methods(len(inputs.tokens))
                return self.prefill_rows(inputs.tokens, inputs.rows, states, arena, methods, adapters)

            return (
                DecodeGraphs(most, self.device, decode, arenas[0]),
                PrefillGraphs(self.device, prefill, arenas[1], self._most[1]),
            )

        return {adapted: ladders(self.adapters if adapted else None) for adapted in (False, True)}

    def _prefill(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        states: CudaStates,
        wanted: Sequence[int],
        adapters: Sequence[int],
        scores: PromptScores | None,
    ) -> tuple[Tensor, Tensor]:
        """Run a prefill; logits `[len(wanted), rows of the head]`, and their slots. See `run`."""
        plan = PrefillPlan.from_lengths(lengths, slots)
        ids = in_order(tokens, lengths, plan)
        graphs, of_tokens = self._graphs_over(states, bool(adapters)), plan.of_tokens(adapters)
        if graphs[1].covers(plan):
            self.place(of_tokens, graphs[1].size(plan.tokens))
            after, rows = graphs[1].run(ids, plan)
        else:
            self.place(of_tokens, plan.tokens)
            rows = upload_plan(plan, self.device)
            ids = ids.to(self.device, non_blocking=True)
            slots_of = self.adapters if adapters else None
            arena = graphs[1].arena(plan.tokens)
            after = self.prefill_rows(ids, rows, states, arena, self.methods(MANY), slots_of)
        return self.logits_of(after, rows.rows.slots, plan, wanted, scores, graphs[0].size)

    def logits_of(
        self,
        after: Prefilled,
        slots: Tensor,
        plan: PrefillPlan,
        wanted: Sequence[int],
        scores: PromptScores | None,
        size: Callable[[int], int],
    ) -> tuple[Tensor, Tensor]:
        """Those of a prefill's rows, and their slots; see `_prefill`.

        slots: of its rows, in the order of the plan. size: for how many rows the head's GEMM is timed.
        """
        place_of = {row: place for place, row in enumerate(plan.order)}
        if scores:
            first = plan.numbers["first"]
            starts = [first[place_of[row]] for row in range(len(plan.order))]
            for piece in upload(scores.places(starts), self.device, torch.int32).split(SCORED_AT_ONCE):
                # Of sizes for which the GEMM is timed too.
                logits = self._logits_at(after, piece, prefill_sizes(len(piece))[-1])
                scores.take(logits[:, : self.checkpoint.vocab])
        if not len(wanted):
            none = torch.empty(0, len(self.weights.head), dtype=torch.float16, device=self.device)
            return none, slots[:0]
        places = [place_of[row] for row in wanted]
        lasts = [plan.numbers["last"][place] for place in places]
        at = pinned(torch.tensor, [lasts, places], dtype=torch.int32)
        last, place = at.to(self.device, non_blocking=True)
        # As many rows as a decode graph has, for which the GEMM is timed and its kernel loaded.
        logits = self._logits_at(after, last, size(len(wanted)))
        return logits, slots[place]

    def _logits_at(self, after: Prefilled, at: Tensor, size: int) -> Tensor:
        """Logits `[len(at), rows of the head]` of tokens of a prefill, computed as those of `size` tokens."""
        x, added = after
        normed = x.new_empty(size, x.shape[1], dtype=torch.float16)
        logits = normed.new_empty(size, len(self.weights.head))
        self.kernels.norm(x, added, *self.weights.norm_out, normed[: len(at)], at)
        self._head(normed, logits, self.methods(size))
        return logits[: len(at)]

    def prefill_rows(
        self,
        tokens: Tensor,
        rows: DeviceRows,
        states: CudaStates,
        arena: dict[str, Tensor],
        methods: dict[str, str],
        adapters: AdapterSlots | None,
    ) -> Prefilled:
        """Launch all layers over packed rows: tokens `[T]` int32 on the device.

        A stage that is not the first begins with b.x and b.v_first.
        """
        b = self.new_buffers(len(tokens), arena, packed=True)
        for pieces in rows.pieces:
            states.feed.flush_rows(pieces)
        states.feed.resolve(tokens, rows.rows.slots, b.lag, rows.single, rows.counted)
        return b.x, self._prefill_layers(tokens, rows, states, b, methods, adapters)

    def fold(self, b: StepBuffersT, after: Prefilled) -> None:
        """Add to b.x what a prefill has left to be added."""
        self._norm_out(b, after[1])

    def tune_as(self, other: "CudaModel[Any, Any]") -> None:
        """Leave it to another stage of the model, which has the head, to measure GEMMs."""

    @abstractmethod
    def methods(self, tokens: int) -> dict[str, str]:
        """How each kind of GEMM runs for so many tokens, as far as that is known."""

    @abstractmethod
    def _pack_weights(self, few_rows: bool, fp8_copies: bool) -> Weights:
        """Copy the checkpoint to the GPU. few_rows, fp8_copies: as of the constructor."""

    @abstractmethod
    def _decode_layers(
        self,
        tokens: Tensor,
        slots: Tensor,
        states: CudaStates,
        b: StepBuffersT,
        methods: dict[str, str],
        adapters: AdapterSlots | None,
    ) -> Addend | None:
        """Launch all layers, from the embedding on, over one token of every row.

        adapters: of the rows, where some have one. Returns what is still to be added to b.x, or None if
        b.normed is there already.
        """

    @abstractmethod
    def _prefill_layers(
        self,
        tokens: Tensor,
        rows: DeviceRows,
        states: CudaStates,
        b: StepBuffersT,
        methods: dict[str, str],
        adapters: AdapterSlots | None,
    ) -> Addend:
        """Launch all layers over packed rows. Returns what is still to be added to b.x."""

    @abstractmethod
    def _head(self, x: Tensor, logits: Tensor, methods: dict[str, str]) -> None:
        """Launch the head: logits `[T, rows of the head]` of normed x `[T, C]`."""

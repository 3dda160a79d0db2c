"""RWKV-7 on a CUDA GPU: the function of `rwkv7.RWKV7` over the kernels in `cuda/`, in fp16."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.autotune import Autotuner
from rwkv_batch.model.cuda.gemm import WHOLE, Gemms, output_method
from rwkv_batch.model.cuda.graphs import (
    PREFILL_SIZES,
    DecodeGraphs,
    Prefilled,
    PrefillGraphs,
    decode_sizes,
    graph_bytes,
)
from rwkv_batch.model.cuda.weights import CudaLayer, pack_weights
from rwkv_batch.model.description import Norm
from rwkv_batch.model.torch_model import check_rows
from rwkv_batch.ops.cuda import blaslt
from rwkv_batch.ops.cuda.abi import CHUNK, MAX_LAG, TimeMixInput
from rwkv_batch.ops.cuda.binding import SPARSE_ROWS, Addend, Kernels, pointer
from rwkv_batch.ops.cuda.buffers import Buffers, buffer_bytes
from rwkv_batch.ops.cuda.feed import Feed, pending_writes
from rwkv_batch.ops.cuda.packing import (
    SCRATCH_CHUNKS,
    DeviceRows,
    PrefillPlan,
    StagedPlan,
    most_chunks,
    upload_plan,
)
from rwkv_batch.ops.cuda.staging import upload
from rwkv_batch.ops.torch_ops import HEAD_SIZE
from rwkv_batch.state.slots import States, slot_bytes

MANY = 1 << 30  # tokens, for which no GEMM is timed
TIMED_LAYERS = 8  # in which GEMMs are timed between their neighbours


class CudaStates(States):
    """States that may lag some tokens, and what the device knows of their slots."""

    def __init__(
        self,
        kernels: Kernels,
        slots: int,
        layers: int,
        width: int,
        wkv: torch.dtype,
        device: torch.device,
        start: Tensor | None = None,
    ) -> None:
        super().__init__(slots, layers, width, torch.float16, wkv, device, start)
        self.feed = Feed(kernels, self.wkv)

    def flush(self, slots: Collection[int]) -> None:
        self.feed.flush(slots)


@dataclass(frozen=True)
class Mixers:
    """The two kernels that touch states, in the form for decode steps or for packed rows."""

    # added, norm, shift, mixes, out
    norm_mix: Callable[[Addend, Norm, Tensor, Tensor, Tensor], None]
    wkv: Callable[[TimeMixInput], None]


class RWKV7Cuda:
    """A model on one GPU. Raises build.BuildError if there are no kernels for it."""

    dtype = torch.float16

    @torch.inference_mode()
    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str = "cuda",
        architecture: str | None = None,
    ) -> None:
        """architecture: of the kernels, as in build.build; None: that of the GPU."""
        self.checkpoint, self.device = checkpoint, torch.device(device)
        with torch.cuda.device(self.device):
            self.kernels = Kernels(self.device, architecture)
            self.weights = pack_weights(checkpoint, self.device)
            self._buffer_shape = self.weights.buffer_shape
            self.gemms = Gemms(self.kernels, self.weights, blaslt.for_device(self.device))
            # Which blocks of the WKV step divide among themselves.
            self._work = torch.zeros(1, device=self.device, dtype=torch.int32)
            self.autotuner = Autotuner.from_cache(self.gemms, self.device, self._timed_layers)
        self._graphs: tuple[States, DecodeGraphs, PrefillGraphs] | None = None
        self._most_rows: int | None = None  # of a decode graph

    def new_states(self, slots: int, wkv_dtype: torch.dtype = torch.float16) -> CudaStates:
        """The states of that many slots, all before the first token."""
        c = self.checkpoint
        return CudaStates(self.kernels, slots, c.layers, c.width, wkv_dtype, self.device, c.start_state())

    def slot_bytes(self, wkv_dtype: torch.dtype) -> int:
        """Of a slot of `new_states`, deferred writes included."""
        c = self.checkpoint
        wkv = torch.empty(1, c.layers, c.heads, HEAD_SIZE, HEAD_SIZE, dtype=wkv_dtype, device="meta")
        pending = pending_writes(wkv)
        return slot_bytes(c.layers, c.width, self.dtype, wkv_dtype) + (
            0 if pending is None else pending.nbytes
        )

    def step_bytes(self, rows: int, prefill_tokens: int) -> int:
        """The most that steps and their graphs hold besides weights, states and logits."""
        prefills = (PREFILL_SIZES[-1], prefill_tokens + rows)  # by graphs, and without one
        buffers = sum(buffer_bytes(self._buffer_shape, tokens, packed=True) for tokens in prefills)
        buffers += buffer_bytes(self._buffer_shape, rows)
        longest = -(-(prefill_tokens + 1) // CHUNK)
        chunks = most_chunks(PREFILL_SIZES[-1]) + max(longest, SCRATCH_CHUNKS)
        scratch = chunks * self.checkpoint.heads * self.kernels.chunk_bytes
        return graph_bytes(self.checkpoint.layers, rows) + buffers + scratch

    @torch.inference_mode()
    def capture(self, states: CudaStates, rows: int | None = None, progress: bool = True) -> None:
        """Capture the graphs of decode batches of up to `rows` (None: all slots) and of small prefills.

        They are over these states, and steps over them have no more rows from then on.
        """
        self._graphs, self._most_rows = None, rows
        with torch.cuda.device(self.device):
            self.autotuner.measure((*decode_sizes(rows or len(states)), *PREFILL_SIZES), progress)
            for graphs in self._graphs_over(states):
                graphs.capture_all(progress)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        states: CudaStates,
        logits_of: Sequence[int] | None = None,
        flush: bool = True,
    ) -> Tensor:
        """The same as `RWKV7.forward`. flush=False leaves writes to states deferred, as `run` does.

        Raises ValueError for rows that do not fit together, IndexError for ids that the model does not have.
        """
        check_rows(tokens, lengths, slots, len(states))
        vocab = self.checkpoint.vocab
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            raise IndexError(
                f"Tokens {int(tokens.min())} to {int(tokens.max())} do not fit a vocabulary of {vocab}; give "
                "ids below it."
            )
        logits = self.run(tokens.tolist(), lengths, slots, states, logits_of)[0].float()
        if flush:
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
    ) -> tuple[Tensor, Tensor]:
        """Queue packed rows, by a CUDA graph where there is one.

        That is a decode step if every row has one token, otherwise a prefill.
        A row of one token may be fed a negative one: what its sequence drew last. Returns logits
        `[len(logits_of), vocab]` fp16 after the last token of the rows named (None: of all rows), and the
        slots `[len(logits_of)]` int32 of these rows, negative for those that had finished. The next run may
        overwrite both.
        """
        with torch.cuda.device(self.device):
            states.feed.prepare()
            if max(lengths) > 1:
                wanted = range(len(lengths)) if logits_of is None else logits_of
                logits, fed = self._prefill(tokens, lengths, slots, states, wanted)
            else:
                logits, fed = self._graphs_over(states)[0].run(tokens, slots)
                if logits_of is not None:
                    index = upload(logits_of, self.device)
                    logits, fed = logits[index], fed[index]
            return logits[:, : self.checkpoint.vocab], fed

    def decode(
        self, tokens: Tensor, slots: Tensor, states: CudaStates, logits: Tensor, arena: dict[str, Tensor]
    ) -> None:
        """Launch one token of every row.

        tokens and slots: `[T]` int32 on the device, a negative slot for padding. logits: `[T, rows of the
        head]`.
        A negative token is what its sequence drew last; see Feed.resolve, which changes tokens and slots.
        Launches only, so that it can be captured; all it writes lies in `arena`, `logits` and the states.
        """
        b, methods = Buffers(self._buffer_shape, len(tokens), arena), self.autotuner.methods(len(tokens))
        states.feed.resolve(tokens, slots, b.lag, len(tokens))
        mixers = self._decode_mixers(b, slots, states)
        added = self._run_layers(self.weights.layers, tokens, states, b, mixers, methods)
        self.kernels.norm(b.x, added, *self.weights.norm_out, b.normed)
        self.gemms.head(b.normed, logits, methods["head"])

    def _graphs_over(self, states: CudaStates) -> tuple[DecodeGraphs, PrefillGraphs]:
        """The graphs over these states; those over others are given up."""
        if self._graphs is None or self._graphs[0] is not states:
            most, tune = self._most_rows or len(states), self.autotuner.methods
            logits = torch.empty(most, len(self.weights.head), device=self.device, dtype=torch.float16)

            def decode(inputs: Tensor, arena: dict[str, Tensor]) -> Tensor:
                rows = logits[: inputs.shape[1]]
                self.decode(inputs[0], inputs[1], states, rows, arena)
                return rows

            def prefill(inputs: StagedPlan, arena: dict[str, Tensor]) -> Prefilled:
                methods = tune(len(inputs.tokens))
                return self._prefill_layers(inputs.tokens, inputs.rows, states, arena, methods)

            decode_graphs = DecodeGraphs(most, self.device, tune, decode)
            self._graphs = states, decode_graphs, PrefillGraphs(self.device, tune, prefill)
        return self._graphs[1:]

    def _prefill(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        states: CudaStates,
        wanted: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """As `run`; logits `[len(wanted), rows of the head]`."""
        plan = PrefillPlan.from_lengths(lengths, slots)
        ids = torch.from_numpy(np.array(tokens, np.int32))  # several times faster than torch.tensor
        if plan.order != list(range(len(lengths))):
            pieces = ids.split(list(lengths))
            ids = torch.cat([pieces[row] for row in plan.order])
        if PrefillGraphs.covers(plan):
            (b, added), rows = self._graphs_over(states)[1].run(ids, plan)
        else:
            rows = upload_plan(plan, self.device)
            ids = ids.to(self.device, non_blocking=True)
            b, added = self._prefill_layers(ids, rows, states, {}, self.autotuner.methods(MANY))
        if not len(wanted):
            return b.x.new_empty(0, len(self.weights.head), dtype=torch.float16), rows.rows.slots[:0]
        place_of = {row: place for place, row in enumerate(plan.order)}
        places = [place_of[row] for row in wanted]
        lasts = [plan.numbers["last"][place] for place in places]
        at = torch.tensor([lasts, places], dtype=torch.int32, pin_memory=True)
        last, place = at.to(self.device, non_blocking=True)
        # As many rows as a decode graph has, for which the GEMM is timed and its kernel loaded.
        size = self._graphs_over(states)[0].size(len(wanted))
        normed = b.x.new_empty(size, b.x.shape[1], dtype=torch.float16)
        logits = normed.new_empty(size, len(self.weights.head))
        self.kernels.norm(b.x, added, *self.weights.norm_out, normed[: len(wanted)], last)
        self.gemms.head(normed, logits, self.autotuner.methods(size)["head"])
        return logits[: len(wanted)], rows.rows.slots[place]

    def _prefill_layers(
        self,
        tokens: Tensor,
        rows: DeviceRows,
        states: CudaStates,
        arena: dict[str, Tensor],
        methods: dict[str, str],
    ) -> Prefilled:
        """Launch all layers over packed rows: tokens `[T]` int32 on the device."""
        b = Buffers(self._buffer_shape, len(tokens), arena, packed=True)
        for pieces in rows.pieces:
            states.feed.flush_rows(pieces)
        states.feed.resolve(tokens, rows.rows.slots, b.lag, rows.single, rows.counted)
        heads, fp32 = b.x.shape[1] // HEAD_SIZE, states.wkv.dtype == torch.float32
        most_chunks = max((pieces.chunks for pieces in rows.pieces), default=0)
        items = b.scratch("items", most_chunks * heads * self.kernels.chunk_bytes)

        def norm_mix(added: Addend, norm: Norm, shift: Tensor, mixes: Tensor, out: Tensor) -> None:
            # The first norm of a layer has more than one mix.
            x, to = (b.x, b.x_between) if len(mixes) > 1 else (b.x_between, b.x)
            self.kernels.norm_mix_prefill(x, to, added, *norm, rows.rows, shift, mixes, out)

        def wkv(inputs: TimeMixInput) -> None:
            if rows.single:
                self.kernels.wkv_decode(inputs, rows.rows.slots[: rows.single], fp32, rows.counted)
            for pieces in rows.pieces:
                self.kernels.wkv_prefill(inputs, pieces, items, fp32)

        whole = methods | dict.fromkeys(("out_split", "value_split"), WHOLE)  # `b` has no room for more
        return b, self._run_layers(self.weights.layers, tokens, states, b, Mixers(norm_mix, wkv), whole)

    def _decode_mixers(self, b: Buffers, slots: Tensor, states: CudaStates) -> Mixers:
        def norm_mix(added: Addend, norm: Norm, shift: Tensor, mixes: Tensor, out: Tensor) -> None:
            self.kernels.norm_mix_decode(b.x, added, *norm, slots, shift, mixes, out)

        def wkv(inputs: TimeMixInput) -> None:
            self.kernels.wkv_decode(inputs, slots, states.wkv.dtype == torch.float32)

        return Mixers(norm_mix, wkv)

    def _timed_layers(self, rows: int) -> Callable[[dict[str, str]], object]:
        """Launches the first layers of a decode step over random tokens, to be timed with given methods.

        A few rows have states of their own, since the hidden units that are inactive in all of them decide
        how fast the sparse GEMM is. Of many rows some share a state, whose contents do not matter.
        """
        layers, width = self.weights.layers[:TIMED_LAYERS], self.weights.embedding.shape[1]
        slots = min(rows, SPARSE_ROWS[-1])
        states = CudaStates(self.kernels, slots, len(layers), width, torch.float16, self.device)
        tokens = torch.randint(self.weights.vocab, (rows,), device=self.device, dtype=torch.int32)
        numbers = torch.arange(rows, device=self.device, dtype=torch.int32)
        b = Buffers(self._buffer_shape, rows, {})
        mixers = self._decode_mixers(b, numbers % slots, states)
        b.lag.copy_(numbers % (MAX_LAG + 1))

        def run(methods: dict[str, str]) -> None:
            added = self._run_layers(layers, tokens, states, b, mixers, methods)
            self.kernels.norm(b.x, added, *self.weights.norm_out, b.normed)

        return run

    def _run_layers(
        self,
        layers: list[CudaLayer],
        tokens: Tensor,
        states: CudaStates,
        b: Buffers,
        mixers: Mixers,
        methods: dict[str, str],
    ) -> Addend:
        """Launch these layers, from the embedding on. Returns what is still to be added to b.x."""
        added = Addend(tokens=tokens, table=self.weights.embedding)
        for index, layer in enumerate(layers):
            mixers.norm_mix(added, layer.norm1, states.shift[:, index, 0], layer.mixes, b.mixed)
            rkv = b.rkv if index else b.rkv0
            self.gemms.time_mix_in(layer, b, rkv, methods["in"])
            self.gemms.low_out(layer, b, methods["low_out"])
            pending = None if states.feed.pending is None else states.feed.pending[:, index]
            mixers.wkv(_time_mix_input(layer, b, rkv, states.wkv[:, index], pending, self._work))
            added = self.gemms.out(layer, b, output_method(methods, "out"))
            mixers.norm_mix(added, layer.norm2, states.shift[:, index, 1], layer.x_k, b.mixed)
            self.gemms.key(layer, b, methods["key"])
            ahead = layers[index + 1].rkv if index + 1 < len(layers) else self.weights.head
            added = self.gemms.value(layer, b, output_method(methods, "value"), ahead)
        return added


def _time_mix_input(
    layer: CudaLayer, b: Buffers, rkv: Tensor, state: Tensor, pending: Tensor | None, work: Tensor
) -> TimeMixInput:
    """The input of a layer's WKV kernel.

    state `[slots, heads, 64, 64]` and pending `[slots, heads, MAX_LAG, DEFERRED_VECTORS, 64]` may have any
    distance between slots; work is zero, and one for all launches of a stream.
    """
    low = {name: b.low_out[name].data_ptr() for name in layer.low_out}
    return TimeMixInput(
        r=rkv[0].data_ptr(),
        k=rkv[1].data_ptr(),
        v=rkv[2].data_ptr(),
        w=low["w"],
        a=low["a"],
        g=low["g"],
        mix=low.get("v"),
        v_first=b.rkv0[2].data_ptr(),
        w0=layer.offsets["w"].data_ptr(),
        a0=layer.offsets["a"].data_ptr(),
        v0=pointer(layer.offsets.get("v")),
        k_k=layer.k_k.data_ptr(),
        k_a=layer.k_a.data_ptr(),
        r_k=layer.r_k.data_ptr(),
        norm_weight=layer.group_norm[0].data_ptr(),
        norm_bias=layer.group_norm[1].data_ptr(),
        out=b.y.data_ptr(),
        state=state.data_ptr(),
        slot_stride=state.stride(0),
        width=b.x.shape[1],
        tile_counter=work.data_ptr(),
        deferred=pointer(pending),
        deferred_stride=0 if pending is None else pending.stride(0),
        lag=b.lag.data_ptr(),
    )

"""RWKV-7 on a CUDA GPU: the forward pass over the kernels in `cuda/`. States, names and results are those of
`rwkv7.RWKV7`.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.model import weights_cuda
from rwkv_batch.model.autotune import Tuning
from rwkv_batch.model.checkpoint import HEAD_SIZE, Checkpoint
from rwkv_batch.model.gemm import LT, WHOLE, Buffers, Products, added_by
from rwkv_batch.model.prefill_graphs import SIZES, PrefillGraphs
from rwkv_batch.model.weights_cuda import Layer
from rwkv_batch.ops.cuda import cublaslt
from rwkv_batch.ops.cuda.binding import LATE, SPARSE_ROWS, Added, Kernels, TimeMixInput, pointer
from rwkv_batch.ops.cuda.feed import Feed, pending_of
from rwkv_batch.ops.cuda.packing import DeviceRows, Plan, upload
from rwkv_batch.ops.cuda.slots import Slots

MANY = 1 << 30  # tokens, for which nothing is measured
CHAIN = 8  # layers in which products are timed between their neighbours


@dataclass(frozen=True)
class Mixers:
    """The two kernels that touch states, in the form for decode steps or for packed rows."""

    norm_mix: Callable[
        [Added, tuple[Tensor, Tensor], Tensor, Tensor, Tensor], None
    ]  # added, norm, shift, mixes, out
    wkv: Callable[[TimeMixInput], None]


@dataclass
class SomeSlots:
    """States to time kernels with; see Slots."""

    shift: Tensor
    wkv: Tensor


class CudaModel:
    """Weights on one GPU and the way through them. Raises build.BuildError if there are no kernels for it."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.kernels = Kernels(device)
            self.weights = weights_cuda.prepare(checkpoint, device)
            self.products = Products(self.kernels, self.weights, cublaslt.of(device))
            self.work = torch.zeros(
                1, device=device, dtype=torch.int32
            )  # which blocks of the WKV step divide among themselves
            self.tuning = Tuning.of(self.products, device, self._chain)
        self._feed: Feed | None = None
        self._graphs: PrefillGraphs | None = None

    def decode(
        self, tokens: Tensor, slots: Tensor, states: Slots, logits: Tensor, arena: dict[str, Tensor]
    ) -> None:
        """One token of every row: tokens and slots `[T]` int32 on the device, a negative slot for padding;
        logits `[T, rows of head]`.

        A negative token is what its row drew last; see Feed.resolve, which changes tokens and slots.
        Launches only, so that it can be captured; all it writes lies in `arena`, `logits` and the states.
        """
        b, methods, feed = (
            Buffers(self.weights, len(tokens), arena),
            self.tuning.methods(len(tokens)),
            self.feed(states),
        )
        feed.resolve(tokens, slots, b.behind, len(tokens))
        added = self._layers(
            self.weights.layers, tokens, states, feed.pending, b, self._step_mixers(b, slots, states), methods
        )
        self.kernels.norm(b.x, added, *self.weights.norm_out, b.normed)
        self.products.head(b.normed, logits, methods["head"])

    def prefill(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        states: Slots,
        wanted: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Packed rows of any length; for a row of one token that may be negative, as in `decode`.

        Returns logits `[len(wanted), rows of head]` after the last token of the rows named, and their slots
        `[len(wanted)]` int32, negative for rows that had ended.
        """
        plan = Plan.of(lengths, slots)
        if plan.order != list(range(len(lengths))):
            pieces = tokens.split(list(lengths))
            tokens = torch.cat([pieces[row] for row in plan.order])
        if PrefillGraphs.take(plan):
            b, added, rows = self.prefill_graphs(states).run(tokens, plan)
        else:
            b, tokens = (
                Buffers(self.weights, plan.tokens, {}, packed=True),
                tokens.to(self.device, torch.int32, non_blocking=True),
            )
            rows = upload(plan, self.device)
            added = self.run_rows(tokens, rows, states, b, self.tuning.methods(MANY))
        normed = b.x.new_empty(len(wanted), b.x.shape[1], dtype=torch.float16)
        logits = normed.new_empty(len(wanted), len(self.weights.head))
        if not len(wanted):
            return logits, rows.rows.slots[:0]
        places = {row: place for place, row in enumerate(plan.order)}
        at = torch.tensor(
            [[plan.last[row] for row in wanted], [places[row] for row in wanted]],
            dtype=torch.int32,
            pin_memory=True,
        )
        last, place = at.to(self.device, non_blocking=True)
        self.kernels.norm(b.x, added, *self.weights.norm_out, normed, last)
        self.products.head(normed, logits, self._head_method(len(wanted)))
        return logits, rows.rows.slots[place]

    def feed(self, states: Slots) -> Feed:
        """What the rows in these states' slots drew last; of other states nothing is known any more."""
        if self._feed is None or self._feed.states is not states:
            self._feed = Feed(self.kernels, states)
        return self._feed

    def prefill_graphs(self, states: Slots) -> PrefillGraphs:
        """The graphs over these states; those over others are given up."""
        if self._graphs is None or self._graphs.feed is not self.feed(states):
            self._graphs = PrefillGraphs(self, states)
        return self._graphs

    def run_rows(
        self, tokens: Tensor, rows: DeviceRows, states: Slots, b: Buffers, methods: dict[str, str]
    ) -> Added:
        """All layers over packed rows: tokens `[T]` int32 on the device. Launches only; returns what is still
        to be added to b.x.
        """
        feed = self.feed(states)
        for pieces in rows.pieces:
            feed.settle_rows(pieces)
        feed.resolve(tokens, rows.rows.slots, b.behind, rows.single, rows.counted)
        heads, fp32 = b.x.shape[1] // HEAD_SIZE, states.wkv.dtype == torch.float32
        items = b.take_bytes(
            "items",
            max((pieces.chunks for pieces in rows.pieces), default=0) * heads * self.kernels.item_bytes,
        )

        def norm_mix(
            added: Added, norm: tuple[Tensor, Tensor], shift: Tensor, mixes: Tensor, out: Tensor
        ) -> None:
            x, to = (
                (b.x, b.x_between) if len(mixes) > 1 else (b.x_between, b.x)
            )  # a layer's first norm has more than one mix
            self.kernels.norm_mix_run(x, to, added, *norm, rows.rows, shift, mixes, out)

        def wkv(inputs: TimeMixInput) -> None:
            if rows.single:
                self.kernels.wkv_step(inputs, rows.rows.slots[: rows.single], fp32, rows.counted)
            for pieces in rows.pieces:
                self.kernels.wkv_prefill(inputs, pieces, items, fp32)

        whole = methods | dict.fromkeys(("out_parts", "value_parts"), WHOLE)  # this norm adds no partial sums
        return self._layers(
            self.weights.layers, tokens, states, feed.pending, b, Mixers(norm_mix, wkv), whole
        )

    def _head_method(self, rows: int) -> str:
        sizes = (1, 2, 4, 8, 16, *SIZES)
        method = self.tuning.methods(sizes[bisect_left(sizes, rows)] if rows <= sizes[-1] else MANY)["head"]
        return "blas" if method in LT else method  # whose algorithms are another shape's

    def _step_mixers(self, b: Buffers, slots: Tensor, states: Slots) -> Mixers:
        def norm_mix(
            added: Added, norm: tuple[Tensor, Tensor], shift: Tensor, mixes: Tensor, out: Tensor
        ) -> None:
            self.kernels.norm_mix(b.x, added, *norm, slots, shift, mixes, out)

        def wkv(inputs: TimeMixInput) -> None:
            self.kernels.wkv_step(inputs, slots, states.wkv.dtype == torch.float32)

        return Mixers(norm_mix, wkv)

    def _chain(self, rows: int) -> Callable[[dict[str, str]], object]:
        """The first layers of a decode step over random tokens, to be timed with some methods or others.

        A few rows have states of their own, as the hidden units that are idle in all of them decide how fast
        the sparse product is. Of many rows some move the same state, whatever becomes of it.
        """
        layers, width, slots = (
            self.weights.layers[:CHAIN],
            self.weights.embedding.shape[1],
            min(rows, SPARSE_ROWS[-1]),
        )
        wkv = torch.zeros(
            slots,
            len(layers),
            width // HEAD_SIZE,
            HEAD_SIZE,
            HEAD_SIZE,
            device=self.device,
            dtype=torch.float16,
        )
        states = SomeSlots(
            torch.zeros(slots, len(layers), 2, width, device=self.device, dtype=torch.float16), wkv
        )
        tokens = torch.randint(self.weights.vocab, (rows,), device=self.device, dtype=torch.int32)
        b, numbers, pending = (
            Buffers(self.weights, rows, {}),
            torch.arange(rows, device=self.device, dtype=torch.int32),
            pending_of(wkv),
        )
        mixers = self._step_mixers(b, numbers % slots, states)
        b.behind.copy_(numbers % (LATE + 1))

        def run(methods: dict[str, str]) -> None:
            added = self._layers(layers, tokens, states, pending, b, mixers, methods)
            self.kernels.norm(b.x, added, *self.weights.norm_out, b.normed)

        return run

    def _layers(
        self,
        layers: list[Layer],
        tokens: Tensor,
        states: Slots,
        pending: Tensor | None,
        b: Buffers,
        mixers: Mixers,
        methods: dict[str, str],
    ) -> Added:
        """These layers, from the embedding on; returns what is still to be added to the residual stream b.x.
        pending: see Feed.
        """
        added = Added(tokens=tokens, table=self.weights.embedding)
        for index, layer in enumerate(layers):
            mixers.norm_mix(added, layer.norm1, states.shift[:, index, 0], layer.mixes, b.mixed)
            rkv = b.rkv if index else b.rkv0
            self.products.into_time_mix(layer, b, rkv, methods["in"])
            self.products.low_out(layer, b, methods["low_out"])
            mixers.wkv(
                _time_mix_input(
                    layer,
                    b,
                    rkv,
                    states.wkv[:, index],
                    None if pending is None else pending[:, index],
                    self.work,
                )
            )
            added = self.products.out(layer, b, added_by(methods, "out"))
            mixers.norm_mix(added, layer.norm2, states.shift[:, index, 1], layer.x_k, b.mixed)
            self.products.key(layer, b, methods["key"])
            ahead = layers[index + 1].rkv if index + 1 < len(layers) else self.weights.head
            added = self.products.value(layer, b, added_by(methods, "value"), ahead)
        return added


def _time_mix_input(
    layer: Layer, b: Buffers, rkv: Tensor, state: Tensor, pending: Tensor | None, work: Tensor
) -> TimeMixInput:
    """state: `[slots, heads, 64, 64]`, pending: `[slots, heads, LATE, PENDING, 64]`, the slots any distance
    apart; work: zero, for all of one stream.
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
        w0=layer.w0.data_ptr(),
        a0=layer.a0.data_ptr(),
        v0=pointer(layer.v0),
        k_k=layer.k_k.data_ptr(),
        k_a=layer.k_a.data_ptr(),
        r_k=layer.r_k.data_ptr(),
        norm_weight=layer.group_norm[0].data_ptr(),
        norm_bias=layer.group_norm[1].data_ptr(),
        out=b.y.data_ptr(),
        state=state.data_ptr(),
        slot_stride=state.stride(0),
        width=b.x.shape[1],
        work=work.data_ptr(),
        pending=pointer(pending),
        pending_stride=0 if pending is None else pending.stride(0),
        behind=b.behind.data_ptr(),
    )

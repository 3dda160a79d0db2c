"""The RWKV-7 forward pass, written once over `ops`: packed rows of any length over states that stay in their
slots.

The formulas and the names of the weights are those of the RWKV-7 paper ("Goose", arXiv 2503.14456) and of the
official checkpoints.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.graphs import DecodeGraphs
from rwkv_batch.model.rwkv7_cuda import CudaModel
from rwkv_batch.ops import torch_ops as ops
from rwkv_batch.ops.cuda.build import BuildError
from rwkv_batch.ops.cuda.staging import upload
from rwkv_batch.ops.linear import Linear, prepare

log = logging.getLogger(__name__)

EMBEDDING_ROWS = 4096  # normalised at a time at load, so that no second fp32 copy of the whole table is made
MIXES = "rwkvag"


@dataclass
class States:
    """The states of all slots. Slot-major, and both parts of a slot lie in one run of bytes: one session is
    one contiguous copy.
    """

    memory: Tensor  # [slots, bytes of a slot], uint8; the other two are views into it
    # [slots, layers, 2, width]: the last normed input of the time mix (0) and of the channel mix (1)
    shift: Tensor
    wkv: Tensor  # [slots, layers, heads, 64 (value), 64 (key)]

    @classmethod
    def zeros(
        cls,
        slots: int,
        layers: int,
        width: int,
        shift_dtype: torch.dtype,
        wkv_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> "States":
        """The states before the first token."""
        split = layers * 2 * width * shift_dtype.itemsize
        end = split + layers * width * ops.HEAD_SIZE * wkv_dtype.itemsize
        memory = torch.zeros(slots, end, device=device, dtype=torch.uint8)
        return cls(
            memory,
            memory[:, :split].view(shift_dtype).view(slots, layers, 2, width),
            memory[:, split:]
            .view(wkv_dtype)
            .view(slots, layers, width // ops.HEAD_SIZE, ops.HEAD_SIZE, ops.HEAD_SIZE),
        )

    def clear(self, slots: Collection[int]) -> None:
        """Put the slots back to the state before the first token, all in one operation."""
        index, words = sorted(set(slots)), self.memory.view(torch.int64)
        if not index:
            return
        if (
            index[-1] - index[0] == len(index) - 1
        ):  # one slot, or neighbours, as those of a large request mostly are
            words[index[0] : index[-1] + 1].zero_()
        else:
            words.index_fill_(0, upload(index, words.device), 0)


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias)


@dataclass(frozen=True)
class TimeMix:
    norm: Norm
    mixes: Tensor  # [6, 1, width]: how much of the token before goes into r, w, k, v, a, g
    receptance: Linear
    key: Linear
    value: Linear
    output: Linear
    decay: tuple[Linear, Linear]  # w1, w2 (with w0)
    rate: tuple[Linear, Linear]  # a1, a2 (with a0)
    gate: tuple[Linear, Linear]  # g1, g2
    residual: (
        tuple[Linear, Linear] | None
    )  # v1, v2 (with v0); none in layer 0, whose values the others mix in
    k_k: Tensor  # [width]
    k_a: Tensor
    k_rest: Tensor  # 1 - k_a
    r_k: Tensor
    group_norm: Norm

    def __call__(
        self, x: Tensor, v_first: Tensor | None, states: States, layer: int, packing: ops.Packing
    ) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        delta = ops.token_shift(x, states.shift[:, layer, 0], packing)
        xr, xw, xk, xv, xa, xg = ops.mix(x, delta, self.mixes).unbind(0)
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        w_log = ops.log_decay(self.decay[1](self.decay[0](xw).tanh_()))
        a = self.rate[1](self.rate[0](xa)).sigmoid_()
        g = self.gate[1](self.gate[0](xg).sigmoid_())
        kk = ops.removal_key(k, self.k_k)
        k = k.mul_(torch.addcmul(self.k_rest, a, self.k_a))  # k (1 + (a - 1) k_a)
        if self.residual is None or v_first is None:
            v_first = v
        else:
            v = v.lerp(v_first, self.residual[1](self.residual[0](xv)).sigmoid_())
        heads = (len(x), -1, ops.HEAD_SIZE)
        y = ops.wkv(
            r.view(heads),
            w_log.view(heads),
            k.view(heads),
            v.view(heads),
            kk,
            a.view(heads),
            states.wkv[:, layer],
            packing,
        )
        y = ops.readout(y, r, k, v, self.r_k, self.group_norm.weight, self.group_norm.bias)
        return self.output(y.mul_(g)), v_first


@dataclass(frozen=True)
class ChannelMix:
    norm: Norm
    x_k: Tensor  # [width]
    key: Linear
    value: Linear

    def __call__(self, x: Tensor, states: States, layer: int, packing: ops.Packing) -> Tensor:
        x = self.norm(x)
        delta = ops.token_shift(x, states.shift[:, layer, 1], packing)
        return self.value(self.key(ops.mix(x, delta, self.x_k)).relu_().square_())


class RWKV7:
    """A model on a device. `dtype` is that of activations (and of weights on a GPU); the recurrence is fp32
    in every case.

    In fp16 on a CUDA GPU the kernels in `cuda/` run; everywhere else, and without a compiler for them, the
    torch operations.
    """

    @torch.inference_mode()
    def __init__(
        self, checkpoint: Checkpoint, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, torch.device(device), dtype
        self.cuda = (
            _cuda_model(checkpoint, self.device)
            if self.device.type == "cuda" and dtype == torch.float16
            else None
        )
        self._graphs: DecodeGraphs | None = None
        if self.cuda is not None:
            return
        self.embedding = self._embedding()
        self.layers = [
            (self._time_mix(layer), self._channel_mix(layer)) for layer in range(checkpoint.layers)
        ]
        self.ln_out = self._norm("ln_out")
        self.head = self._linear("head.weight")

    def new_states(self, slots: int, wkv_dtype: torch.dtype = torch.float32) -> States:
        """Zero states for that many rows."""
        c = self.checkpoint
        return States.zeros(slots, c.layers, c.width, self.dtype, wkv_dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        states: States,
        logits_of: Sequence[int] | None = None,
        settled: bool = True,
    ) -> Tensor:
        """Run packed rows and move their states on, in place.

        tokens: `[T]` ids of all rows, one row after the other. lengths: tokens of each row, at least 1.
        slots: of each row, all different. settled: False leaves states on a GPU as its steps do; see
        `settle`. Returns fp32 logits `[len(logits_of), vocab]` after the last token of the rows named (None:
        of all rows, in order).
        """
        _check_rows(tokens, lengths, slots, len(states.wkv))
        wanted = range(len(lengths)) if logits_of is None else logits_of
        if self.cuda is not None:
            logits = self._forward_cuda(self.cuda, tokens, lengths, slots, states, wanted)
            if settled:
                self.settle(states, slots)
            return logits
        order = sorted(range(len(lengths)), key=lambda row: (lengths[row] > 1, slots[row]))
        if order != list(
            range(len(lengths))
        ):  # inside, decode rows come first and slots ascend: neighbours in memory are one view
            pieces = tokens.split(list(lengths))
            tokens = torch.cat([pieces[row] for row in order])
            lengths, slots = [lengths[row] for row in order], [slots[row] for row in order]
        packing = ops.pack(lengths, slots, self.device)
        x = self._run(self.embedding[tokens.to(self.device)], states, packing)
        if not len(wanted):
            return x.new_empty(0, self.checkpoint.vocab, dtype=torch.float32)
        place = {row: place for place, row in enumerate(order)}
        at = torch.tensor([place[row] for row in wanted], device=self.device)
        x = x[at if packing.last is None else packing.last[at]]
        return self.head(self.ln_out(x)).float()

    @torch.inference_mode()
    def settle(self, states: States, slots: Collection[int]) -> None:
        """What steps have put off of these slots' states on a GPU is done: before anyone else reads or
        replaces them.
        """
        if self.cuda is not None:
            with torch.cuda.device(self.device):
                self.cuda.feed(states).settle(slots)

    @torch.inference_mode()
    def capture(self, states: States, progress: bool = True) -> None:
        """Make the CUDA graphs of all decode batches and small prefills over these states now rather than
        when they are first needed.
        """
        if self.cuda is not None:
            with torch.cuda.device(self.device):
                self.graphs(states).capture(progress)
                self.cuda.prefill_graphs(states).capture(progress)

    def _forward_cuda(
        self,
        cuda: CudaModel,
        tokens: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        states: States,
        wanted: Sequence[int],
    ) -> Tensor:
        vocab = self.checkpoint.vocab
        if not tokens.is_cuda and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            raise IndexError(
                f"Tokens {int(tokens.min())} to {int(tokens.max())} do not fit a vocabulary of {vocab}; "
                "give ids below it."
            )
        with torch.cuda.device(self.device):
            cuda.feed(states).prepare()
            if max(lengths) > 1:
                return cuda.prefill(tokens, lengths, slots, states, wanted)[0][:, :vocab].float()
            logits = self.graphs(states).run(tokens, slots)[0][:, :vocab]
            return (
                logits.float()
                if len(wanted) == len(lengths) and list(wanted) == list(range(len(lengths)))
                else logits[list(wanted)].float()
            )

    def graphs(self, states: States) -> DecodeGraphs:
        """The decode steps over these states. Only where `cuda` is not None."""
        assert self.cuda is not None
        if self._graphs is None or self._graphs.feed is not self.cuda.feed(states):
            self._graphs = DecodeGraphs(self.cuda, states)
        return self._graphs

    def _run(self, x: Tensor, states: States, packing: ops.Packing) -> Tensor:
        """All layers: x `[T, width]` in, x out."""
        v_first = None
        for layer, (time_mix, channel_mix) in enumerate(self.layers):
            y, v_first = time_mix(x, v_first, states, layer, packing)
            x = x + y
            x = x + channel_mix(x, states, layer, packing)
        return x

    def _embedding(self) -> Tensor:
        """The table with its layer norm already applied: `[vocab, width]`."""
        tensors = self.checkpoint.tensors
        norm = Norm(tensors["blocks.0.ln0.weight"].float(), tensors["blocks.0.ln0.bias"].float())
        table = torch.empty(tensors["emb.weight"].shape, device=self.device, dtype=self.dtype)
        for start in range(0, len(table), EMBEDDING_ROWS):
            rows = slice(start, start + EMBEDDING_ROWS)
            table[rows] = norm(tensors["emb.weight"][rows].float())
        return table

    def _time_mix(self, layer: int) -> TimeMix:
        att = f"blocks.{layer}.att."
        k_a = self._vector(att + "k_a")
        return TimeMix(
            norm=self._norm(f"blocks.{layer}.ln1"),
            mixes=torch.stack([self._vector(f"{att}x_{name}") for name in MIXES]).unsqueeze(1),
            receptance=self._linear(att + "receptance.weight"),
            key=self._linear(att + "key.weight"),
            value=self._linear(att + "value.weight"),
            output=self._linear(att + "output.weight"),
            decay=self._low_rank(att, "w"),
            rate=self._low_rank(att, "a"),
            gate=self._low_rank(att, "g"),
            residual=self._low_rank(att, "v") if layer > 0 else None,
            k_k=self._vector(att + "k_k"),
            k_a=k_a,
            k_rest=1 - k_a,
            r_k=self._vector(att + "r_k"),
            group_norm=self._norm(att + "ln_x"),
        )

    def _channel_mix(self, layer: int) -> ChannelMix:
        ffn = f"blocks.{layer}.ffn."
        return ChannelMix(
            self._norm(f"blocks.{layer}.ln2"),
            self._vector(ffn + "x_k"),
            self._linear(ffn + "key.weight"),
            self._linear(ffn + "value.weight"),
        )

    def _vector(self, name: str) -> Tensor:
        return self.checkpoint.tensors[name].to(self.device, self.dtype).flatten()

    def _norm(self, name: str) -> Norm:
        return Norm(self._vector(name + ".weight"), self._vector(name + ".bias"))

    def _linear(self, name: str) -> Linear:
        return prepare(self.checkpoint.tensors[name], device=self.device, dtype=self.dtype)

    def _low_rank(self, att: str, name: str) -> tuple[Linear, Linear]:
        """The pair of matrices of one low-rank function, stored `[in, rank]` and `[rank, out]`, with the
        offset it may have.
        """
        tensors = self.checkpoint.tensors
        return (
            prepare(tensors[f"{att}{name}1"].T, device=self.device, dtype=self.dtype),
            prepare(
                tensors[f"{att}{name}2"].T, tensors.get(f"{att}{name}0"), device=self.device, dtype=self.dtype
            ),
        )


def _cuda_model(checkpoint: Checkpoint, device: torch.device) -> CudaModel | None:
    try:
        return CudaModel(checkpoint, device)
    except BuildError as error:
        log.warning("%s Until then the slower torch operations run.", error)
        return None


def _check_rows(tokens: Tensor, lengths: Sequence[int], slots: Sequence[int], total_slots: int) -> None:
    """Wrong rows would mix up states in silence."""
    if not lengths or len(lengths) != len(slots) or min(lengths) < 1 or sum(lengths) != len(tokens):
        raise ValueError(
            f"{len(lengths)} lengths with sum {sum(lengths)} do not fit {len(slots)} slots and "
            f"{len(tokens)} tokens; "
            "give one length of at least 1 and one slot for every row."
        )
    if len(set(slots)) != len(slots) or min(slots) < 0 or max(slots) >= total_slots:
        raise ValueError(
            f"Slots {list(slots)} are not distinct numbers below {total_slots}; give every row a slot of "
            "its own."
        )

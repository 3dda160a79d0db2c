"""The RWKV-7 forward pass in torch, on any device: the readable reference for every faster one.

Rows of any length are packed without padding, and their states stay in their slots. The formulas are those of
the RWKV-7 paper ("Goose", arXiv 2503.14456).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.description import (
    LayerTensors,
    LowRankTensors,
    Norm,
    layer_tensors,
    norm_tensors,
    normed_embedding,
)
from rwkv_batch.ops import torch_ops as ops
from rwkv_batch.ops.linear import Linear, prepare
from rwkv_batch.state.slots import States

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": Tensor.tanh_,
    "sigmoid": Tensor.sigmoid_,
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class TimeMix:
    norm: Norm
    mixes: Tensor  # [6, 1, width]: how much of the token before goes into r, k, v, w, a, g
    receptance: Linear
    key: Linear
    value: Linear
    output: Linear
    low_rank: dict[
        str, Linear
    ]  # by the names of LOW_RANKS; no "v" in layer 0, whose values the others mix in
    k_k: Tensor  # [width]
    k_a: Tensor
    k_rest: Tensor  # 1 - k_a
    r_k: Tensor
    group_norm: Norm

    def __call__(
        self, x: Tensor, v_first: Tensor | None, states: States, layer: int, rows: ops.PackedRows
    ) -> tuple[Tensor, Tensor]:
        """x `[T, width]`, v_first: the values of layer 0 (there None); returns what is added, and v_first."""
        x = self.norm(x)
        delta = ops.token_shift(x, states.shift[:, layer, 0], rows)
        xr, xk, xv, xw, xa, xg = ops.mix(x, delta, self.mixes).unbind(0)
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        w_log = ops.log_decay(self.low_rank["w"](xw))
        a = self.low_rank["a"](xa).sigmoid_()
        g = self.low_rank["g"](xg)
        kk = ops.removal_key(k, self.k_k)
        k = k.mul_(torch.addcmul(self.k_rest, a, self.k_a))  # k (1 + (a - 1) k_a)
        if v_first is None:
            v_first = v
        else:
            v = v.lerp(v_first, self.low_rank["v"](xv).sigmoid_())
        r_, w_, k_, v_, a_ = (x.view(len(x), -1, ops.HEAD_SIZE) for x in (r, w_log, k, v, a))
        y = ops.wkv(r_, w_, k_, v_, kk, a_, states.wkv[:, layer], rows)
        y = ops.readout(y, r, k, v, self.r_k, *self.group_norm)
        return self.output(y.mul_(g)), v_first


@dataclass(frozen=True)
class ChannelMix:
    norm: Norm
    x_k: Tensor  # [width]
    key: Linear
    value: Linear

    def __call__(self, x: Tensor, states: States, layer: int, rows: ops.PackedRows) -> Tensor:
        """x `[T, width]`; returns what is added to it."""
        x = self.norm(x)
        delta = ops.token_shift(x, states.shift[:, layer, 1], rows)
        return self.value(self.key(ops.mix(x, delta, self.x_k)).relu_().square_())


class RWKV7:
    """A model on a device. `dtype`: of weights and activations; the recurrence is always fp32."""

    @torch.inference_mode()
    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, torch.device(device), dtype
        self.embedding = normed_embedding(checkpoint.tensors, self.device, dtype)
        layers = (layer_tensors(checkpoint.tensors, index) for index in range(checkpoint.layers))
        self.layers = [(self._time_mix(layer), self._channel_mix(layer)) for layer in layers]
        self.ln_out = norm_tensors(checkpoint.tensors, "ln_out").to(self.device, dtype)
        self.head = self._linear(checkpoint.tensors["head.weight"])

    def new_states(self, slots: int, wkv_dtype: torch.dtype = torch.float32) -> States:
        """The states of that many slots, all before the first token."""
        c = self.checkpoint
        return States(slots, c.layers, c.width, self.dtype, wkv_dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        states: States,
        logits_of: Sequence[int] | None = None,
    ) -> Tensor:
        """Run packed rows, and move their states on in place.

        tokens: `[T]` ids of all rows, one row after the other. lengths: tokens of each row, at least 1.
        slots: of each row, all different. Returns fp32 logits `[len(logits_of), vocab]` after the last token
        of the rows named (None: of all rows, in order). Raises ValueError for rows that do not fit together.
        """
        check_rows(tokens, lengths, slots, len(states))
        wanted = range(len(lengths)) if logits_of is None else logits_of
        # Inside, decode rows come first and slots ascend: neighbours in memory are one view.
        order = sorted(range(len(lengths)), key=lambda row: (lengths[row] > 1, slots[row]))
        if order != list(range(len(lengths))):
            pieces = tokens.split(list(lengths))
            tokens = torch.cat([pieces[row] for row in order])
            lengths, slots = [lengths[row] for row in order], [slots[row] for row in order]
        rows = ops.pack(lengths, slots, self.device)
        x = self._run(self.embedding[tokens.to(self.device)], states, rows)
        if not len(wanted):
            return x.new_empty(0, self.checkpoint.vocab, dtype=torch.float32)
        place = {row: place for place, row in enumerate(order)}
        at = torch.tensor([place[row] for row in wanted], device=self.device)
        x = x[at if rows.last is None else rows.last[at]]
        return self.head(self.ln_out(x)).float()

    def _run(self, x: Tensor, states: States, rows: ops.PackedRows) -> Tensor:
        """All layers: x `[T, width]` in, x out."""
        v_first = None
        for layer, (time_mix, channel_mix) in enumerate(self.layers):
            y, v_first = time_mix(x, v_first, states, layer, rows)
            x = x + y
            x = x + channel_mix(x, states, layer, rows)
        return x

    def _time_mix(self, layer: LayerTensors) -> TimeMix:
        k_a = self._vector(layer.k_a)
        return TimeMix(
            norm=layer.ln1.to(self.device, self.dtype),
            mixes=torch.stack([self._vector(mix) for mix in layer.mixes.values()]).unsqueeze(1),
            receptance=self._linear(layer.receptance),
            key=self._linear(layer.key),
            value=self._linear(layer.value),
            output=self._linear(layer.output),
            low_rank={name: self._low_rank(tensors) for name, tensors in layer.low_rank.items()},
            k_k=self._vector(layer.k_k),
            k_a=k_a,
            k_rest=1 - k_a,
            r_k=self._vector(layer.r_k),
            group_norm=layer.ln_x.to(self.device, self.dtype),
        )

    def _channel_mix(self, layer: LayerTensors) -> ChannelMix:
        return ChannelMix(
            norm=layer.ln2.to(self.device, self.dtype),
            x_k=self._vector(layer.ffn_mix),
            key=self._linear(layer.ffn_key),
            value=self._linear(layer.ffn_value),
        )

    def _vector(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).flatten()

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return prepare(weight, bias, device=self.device, dtype=self.dtype)

    def _low_rank(self, tensors: LowRankTensors) -> Linear:
        inner, outer = self._linear(tensors.inner.T), self._linear(tensors.outer.T, tensors.offset)
        activation = ACTIVATIONS[tensors.activation]
        return lambda x: outer(activation(inner(x)))


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

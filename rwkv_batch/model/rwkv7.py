"""The RWKV-7 forward pass in torch, on any device: the readable reference for every faster one.

The formulas are those of the RWKV-7 paper ("Goose", arXiv 2503.14456).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.model.tensors.description import (
    DEEP_RANK,
    DeepEmbedTensors,
    LayerTensors,
    LowRankTensors,
    Norm,
    layer_tensors,
)
from rwkv_batch.model.torch_model import Activations, TorchModel
from rwkv_batch.ops import torch_ops as ops
from rwkv_batch.ops.linear import Linear
from rwkv_batch.ops.low_rank import Changes
from rwkv_batch.ops.mole import BoneExpert, Change, ExpertMix, LoraExpert, bone_change, lora_change
from rwkv_batch.state.slots import DeviceStates

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": Tensor.tanh_,
    "sigmoid": Tensor.sigmoid_,
    "identity": lambda x: x,
}


class TimeMixProducts(NamedTuple):
    """What a time mix computes of its inputs before the recurrence: all `[T, width]`."""

    r: Tensor
    w: Tensor  # as the low-rank function gives it, like a and v_mix
    k: Tensor
    v: Tensor
    a: Tensor
    g: Tensor
    v_mix: Tensor | None  # in the layers after the first


@dataclass(frozen=True)
class TimeMix:
    norm: Norm
    mixes: Tensor  # [6, 1, width]: how much of the token before goes into r, k, v, w, a, g
    receptance: Linear
    key: Linear
    value: Linear
    output: Linear
    low_rank: dict[str, Linear]  # by LOW_RANKS; layer 0, whose values the others mix in, has no "v"
    k_k: Tensor  # [width]
    k_a: Tensor
    k_rest: Tensor  # 1 - k_a
    r_k: Tensor
    group_norm: Norm

    def __call__(
        self,
        x: Tensor,
        v_first: Tensor | None,
        states: DeviceStates,
        layer: int,
        rows: ops.PackedRows,
        changes: Changes,
    ) -> tuple[Tensor, Tensor]:
        """x `[T, width]`, v_first: the values of layer 0 (there None); returns what is added, and v_first."""
        x = self.norm(x)
        delta = ops.token_shift(x, states.shift[:, layer, 0], rows)
        made = self.products(ops.mix(x, delta, self.mixes), v_first is not None, changes)
        r, k, v = made.r, made.k, made.v
        w_log, a = ops.log_decay(made.w), made.a.sigmoid_()
        kk = ops.removal_key(k, self.k_k)
        k = k.mul_(torch.addcmul(self.k_rest, a, self.k_a))  # k (1 + (a - 1) k_a)
        if v_first is None:
            v_first = v
        else:
            assert made.v_mix is not None
            v = v.lerp(v_first, made.v_mix.sigmoid_())
        r_, w_, k_, v_, a_ = (x.view(len(x), -1, ops.HEAD_SIZE) for x in (r, w_log, k, v, a))
        y = changes.scale(ops.wkv((r_, w_, k_, v_, kk, a_), states.wkv[:, layer], rows))
        y = ops.readout(y, r, k, v, self.r_k, *self.group_norm).mul_(made.g)
        return changes.add("att.output", y, self.output(y)), v_first

    def products(self, mixed: Tensor, mixes_values: bool, changes: Changes) -> TimeMixProducts:
        """All that is computed of the mixes `[6, T, width]`. mixes_values: v_mix too."""
        xr, xk, xv, xw, xa, xg = mixed.unbind(0)
        return TimeMixProducts(
            r=changes.add("att.receptance", xr, self.receptance(xr)),
            w=self.low_rank["w"](xw),
            k=changes.add("att.key", xk, self.key(xk)),
            v=changes.add("att.value", xv, self.value(xv)),
            a=self.low_rank["a"](xa),
            g=self.low_rank["g"](xg),
            v_mix=self.low_rank["v"](xv) if mixes_values else None,
        )


@dataclass(frozen=True)
class DeepEmbed:
    """What RWKV-7a multiplies hidden units with: `((x inner) E) outer + offset`.

    E `[32, 32]` is the token's own: its row of the table, and a linear map of its normed embedding. The
    formula is that of RWKV-LM's RWKV-7a.
    """

    table: Tensor  # [vocab, 1024]
    from_embedding: Linear
    inner: Linear
    outer: Linear

    def __call__(self, x: Tensor, tokens: Tensor, embedded: Tensor) -> Tensor:
        """x `[T, width]`, before the token shift; returns `[T, hidden units]`."""
        own = self.from_embedding(embedded).add_(self.table[tokens]).view(-1, DEEP_RANK, DEEP_RANK)
        return self.outer(torch.bmm(self.inner(x).unsqueeze(1), own).squeeze(1))


@dataclass(frozen=True)
class ChannelMix:
    norm: Norm
    x_k: Tensor  # [width]
    key: Linear
    value: Linear
    deep_embed: DeepEmbed | None
    experts: ExpertMix | None

    def __call__(
        self,
        x: Tensor,
        tokens: Tensor,
        embedded: Tensor,
        states: DeviceStates,
        layer: int,
        rows: ops.PackedRows,
        changes: Changes,
    ) -> Tensor:
        """x `[T, width]`, tokens `[T]` and their normed embedding; returns what is added to x."""
        x = self.norm(x)
        delta = ops.token_shift(x, states.shift[:, layer, 1], rows)
        return self.products(ops.mix(x, delta, self.x_k), x, tokens, embedded, changes)

    def products(
        self, shifted: Tensor, x: Tensor, tokens: Tensor, embedded: Tensor, changes: Changes
    ) -> Tensor:
        """The channel mix of `shifted` and x, both normed `[T, width]`; x counts with a DeepEmbed only."""
        if self.experts:
            return self.experts(shifted, self.key, self.value)
        hidden = self.hidden(shifted, changes)
        if self.deep_embed:
            hidden = hidden.mul_(self.deep_embed(x, tokens, embedded))
        return changes.add("ffn.value", hidden, self.value(hidden))

    def hidden(self, shifted: Tensor, changes: Changes) -> Tensor:
        return changes.add("ffn.key", shifted, self.key(shifted)).relu_().square_()


class RWKV7(TorchModel):
    """RWKV-7, and 7a, whose channel mixes have a DeepEmbed."""

    channel_mix = ChannelMix

    def _load_layers(self) -> None:
        c = self.checkpoint
        self.layers = []
        for index in self.part:
            layer = layer_tensors(c.tensors, c.packed, index)
            self.layers.append((self._time_mix(layer), self._channel_mix(layer, self._experts(index))))

    def _run_layers(
        self, activations: Activations, states: DeviceStates, rows: ops.PackedRows, changes: Changes
    ) -> Activations:
        tokens, x, embedded, v_first = (
            activations.tokens,
            activations.x,
            activations.embedded,
            activations.v_first,
        )
        for place, (time_mix, channel_mix) in enumerate(self.layers):
            of_layer = changes.of(self.part[place])
            y, v_first = time_mix(x, v_first, states, place, rows, of_layer)
            x = x + y
            x = x + channel_mix(x, tokens, embedded, states, place, rows, of_layer)
        return replace(activations, x=x, v_first=v_first)

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

    def _channel_mix(self, layer: LayerTensors, experts: ExpertMix | None) -> ChannelMix:
        return self.channel_mix(
            norm=layer.ln2.to(self.device, self.dtype),
            x_k=self._vector(layer.ffn_mix),
            key=self._linear(layer.ffn_key),
            value=self._linear(layer.ffn_value),
            deep_embed=None if layer.deep_embed is None else self._deep_embed(layer.deep_embed),
            experts=experts,
        )

    def _experts(self, index: int) -> ExpertMix | None:
        mole = self.checkpoint.mole
        if mole is None:
            return None
        layer, width = mole.layers[index], self.checkpoint.width
        changes = [(self._change(key, 4 * width), self._change(value, width)) for key, value in layer.experts]
        return ExpertMix(mole.rule, layer.active, self._linear(layer.router, layer.bias), changes)

    def _change(self, expert: LoraExpert | BoneExpert, outputs: int) -> Change:
        if isinstance(expert, BoneExpert):
            return bone_change(expert.blocks.to(self.device, self.dtype), outputs)
        return lora_change(self._linear(expert.inner), self._linear(expert.outer))

    def _deep_embed(self, tensors: DeepEmbedTensors) -> DeepEmbed:
        return DeepEmbed(
            table=tensors.table.to(self.device),  # a row a token: it stays as small as in the file
            from_embedding=self._linear(tensors.from_embedding),
            inner=self._linear(tensors.inner.T),
            outer=self._linear(tensors.outer.T, tensors.offset),
        )

    def _low_rank(self, tensors: LowRankTensors) -> Linear:
        inner, outer = self._linear(tensors.inner.T), self._linear(tensors.outer.T, tensors.offset)
        activation = ACTIVATIONS[tensors.activation]
        return lambda x: outer(activation(inner(x)))

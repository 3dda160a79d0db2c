"""The RWKV-6 (x060) forward pass in torch, on any device: the readable reference for every faster one.

The formulas are those of the paper ("Eagle and Finch", arXiv 2404.05892). The residual stream is fp32, as it
outgrows fp16 in published models.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import group_norm, silu

from rwkv_batch.model.tensors.description import Norm
from rwkv_batch.model.tensors.rwkv6_description import RWKV6_MIXES, Rwkv6LayerTensors, rwkv6_layer_tensors
from rwkv_batch.model.torch_model import Activations, TorchModel
from rwkv_batch.ops import torch_ops as ops
from rwkv_batch.ops.linear import Linear
from rwkv_batch.ops.low_rank import Changes
from rwkv_batch.ops.wkv6 import wkv6_prefill, wkv6_step
from rwkv_batch.state.slots import DeviceStates


@dataclass(frozen=True)
class Rwkv6TimeMix:
    norm: Norm
    mix_x: Tensor  # [width]
    mix_inner: Linear  # to [5 * rank]
    mix_outer: list[Linear]  # [rank] -> [width] each, in the order of RWKV6_MIXES
    decay_inner: Linear
    decay_outer: Linear
    bonus: Tensor  # [heads, 64]
    receptance: Linear
    key: Linear
    value: Linear
    gate: Linear
    output: Linear
    group_norm: Norm

    def __call__(self, x: Tensor, states: DeviceStates, layer: int, rows: ops.PackedRows) -> Tensor:
        """x `[T, width]`, normed; returns what is added to the residual stream."""
        delta = ops.token_shift(x, states.shift[:, layer, 0], rows)
        inner = self.mix_inner(ops.mix(x, delta, self.mix_x)).tanh_().chunk(len(RWKV6_MIXES), -1)
        xw, xk, xv, xr, xg = (
            ops.mix(x, delta, outer(part.contiguous()))
            for outer, part in zip(self.mix_outer, inner, strict=True)
        )
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        w_log = self.decay_outer(self.decay_inner(xw).tanh_()).float().exp_().neg_()
        step, prefill = partial(wkv6_step, u=self.bonus), partial(wkv6_prefill, u=self.bonus)
        inputs = [part.view(len(x), -1, ops.HEAD_SIZE) for part in (r, w_log, k, v)]
        y = ops.run_recurrence(inputs, states.wkv[:, layer], rows, step, prefill)
        y = group_norm(y.reshape(len(x), -1), len(self.bonus), *self.group_norm, ops.GROUP_NORM_EPS)
        return self.output(y.to(x.dtype).mul_(silu(self.gate(xg))))


@dataclass(frozen=True)
class Rwkv6ChannelMix:
    norm: Norm
    mix_k: Tensor  # [width]
    mix_r: Tensor
    key: Linear
    value: Linear
    receptance: Linear

    def __call__(self, x: Tensor, states: DeviceStates, layer: int, rows: ops.PackedRows) -> Tensor:
        """x `[T, width]`, normed; returns what is added to the residual stream."""
        delta = ops.token_shift(x, states.shift[:, layer, 1], rows)
        hidden = self.key(ops.mix(x, delta, self.mix_k)).relu_().square_()
        gate = self.receptance(ops.mix(x, delta, self.mix_r)).sigmoid_()
        return self.value(hidden).mul_(gate)


class RWKV6(TorchModel):
    """RWKV-6."""

    def _load_layers(self) -> None:
        c = self.checkpoint
        layers = (rwkv6_layer_tensors(c.tensors, c.packed, index) for index in self.part)
        self.layers = [(self._time_mix(layer), self._channel_mix(layer)) for layer in layers]

    def _run_layers(
        self, activations: Activations, states: DeviceStates, rows: ops.PackedRows, changes: Changes
    ) -> Activations:
        x = activations.x.float()
        for place, (time_mix, channel_mix) in enumerate(self.layers):
            x = x + time_mix(time_mix.norm(x).to(self.dtype), states, place, rows)
            x = x + channel_mix(channel_mix.norm(x).to(self.dtype), states, place, rows)
        return replace(activations, x=x)

    def _time_mix(self, layer: Rwkv6LayerTensors) -> Rwkv6TimeMix:
        return Rwkv6TimeMix(
            norm=layer.ln1.to(self.device, torch.float32),
            mix_x=self._vector(layer.mix_x),
            mix_inner=self._linear(layer.mix_inner.T),
            mix_outer=[
                self._linear(outer.T, mix.flatten())
                for outer, mix in zip(layer.mix_outer, layer.mixes, strict=True)
            ],
            decay_inner=self._linear(layer.decay_inner.T),
            decay_outer=self._linear(layer.decay_outer.T, layer.decay),
            bonus=layer.bonus.to(self.device, torch.float32),
            receptance=self._linear(layer.receptance),
            key=self._linear(layer.key),
            value=self._linear(layer.value),
            gate=self._linear(layer.gate),
            output=self._linear(layer.output),
            group_norm=layer.ln_x.to(self.device, torch.float32),
        )

    def _channel_mix(self, layer: Rwkv6LayerTensors) -> Rwkv6ChannelMix:
        return Rwkv6ChannelMix(
            norm=layer.ln2.to(self.device, torch.float32),
            mix_k=self._vector(layer.ffn_mix_k),
            mix_r=self._vector(layer.ffn_mix_r),
            key=self._linear(layer.ffn_key),
            value=self._linear(layer.ffn_value),
            receptance=self._linear(layer.ffn_receptance),
        )

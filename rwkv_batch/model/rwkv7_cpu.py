"""RWKV-7 on a CPU in fp32 over compiled kernels.

The same forward pass as in model/rwkv7.py, with what lies between products in two kernels a layer. Steps of a
few tokens are one call for all layers, unless adapters, drafts, a DeepEmbed or experts come between. The
recurrence runs token after token, for prompts too: on a CPU that is faster than in chunks, and a row's
numbers are the same wherever its tokens are cut into steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rwkv_batch.model.rwkv7 import RWKV7, ChannelMix, TimeMix
from rwkv_batch.model.tensors.description import LOW_RANKS, Activation, LowRankTensors, Norm
from rwkv_batch.model.torch_model import Activations
from rwkv_batch.ops.cpu.binding import CpuRows
from rwkv_batch.ops.cpu.products import PackedLinear
from rwkv_batch.ops.cpu.records import ACTIVATIONS, LayerRecord, PairRecord, VectorsRecord
from rwkv_batch.ops.linear import Linear
from rwkv_batch.ops.low_rank import Changes
from rwkv_batch.ops.torch_ops import AcceptedTokens, PackedRows, move_shift
from rwkv_batch.state.slots import DeviceStates

FEW = 128  # tokens of a step that is one call; longer ones would take more memory, and gain nothing


class CpuChannelMix(ChannelMix):
    """A channel mix whose hidden units leave the product squared."""

    def hidden(self, shifted: Tensor, changes: Changes) -> Tensor:
        if isinstance(self.key, PackedLinear) and not changes.groups:
            return self.key.activated(shifted, "squared")
        return super().hidden(shifted, changes)


@dataclass(frozen=True)
class CpuLowRank:
    """A low-rank function whose activation is that of its first product."""

    inner: PackedLinear
    outer: PackedLinear
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.outer(self.inner.activated(x, self.activation))


class CpuRWKV7(RWKV7):
    """RWKV-7, and 7a, on a CPU. It is made with kernels. DeviceStates in fp16 run as in RWKV7."""

    channel_mix = CpuChannelMix

    def _load_layers(self) -> None:
        super()._load_layers()
        records = [_record(*layer) for layer in self.layers]
        known = [record for record in records if record is not None]
        # For one call; None: some layer has what that leaves out.
        self._records = (LayerRecord * len(known))(*known) if len(known) == len(records) else None

    def _low_rank(self, tensors: LowRankTensors) -> Linear:
        inner, outer = self._linear(tensors.inner.T), self._linear(tensors.outer.T, tensors.offset)
        if isinstance(inner, PackedLinear) and isinstance(outer, PackedLinear):
            return CpuLowRank(inner, outer, tensors.activation)
        return super()._low_rank(tensors)

    def _run_layers(
        self, activations: Activations, states: DeviceStates, rows: PackedRows, changes: Changes
    ) -> Activations:
        kernels = self._kernels
        if kernels is None or states.wkv.dtype != torch.float32:
            return super()._run_layers(activations, states, rows, changes)
        places, drafting = CpuRows.of(rows.lengths, rows.slot_numbers, rows.drafted), rows.drafting > 0
        if (
            self._records is not None
            and len(activations.tokens) <= FEW
            and not drafting
            and not changes.groups
        ):
            out, values = kernels.rwkv7_layers(
                self._records, activations.x, activations.v_first, states.shift, states.wkv, places
            )
            return replace(activations, x=out, v_first=values)
        tokens, x, embedded, v_first = (
            activations.tokens,
            activations.x,
            activations.embedded,
            activations.v_first,
        )
        y: Tensor | None = None
        for place, (time_mix, channel_mix) in enumerate(self.layers):
            of_layer = changes.of(self.part[place])
            shift = states.shift[:, place, 0]
            x, mixed, normed = kernels.mix(x, y, time_mix.norm, time_mix.mixes, shift, places, drafting)
            made = time_mix.products(mixed, v_first is not None, of_layer)
            recurrence = partial(
                kernels.wkv7,
                (made.r, made.w, made.k, made.v, made.a, made.g),
                None if v_first is None or made.v_mix is None else (made.v_mix, v_first),
                (time_mix.k_k, time_mix.k_a, time_mix.k_rest, time_mix.r_k, *time_mix.group_norm),
                states.wkv[:, place],
            )
            y = recurrence(places, of_layer.scales(len(tokens)))
            if normed is not None:
                rows.moves.append(partial(move_shift, normed, shift))
                rows.moves.append(partial(_move_states, recurrence))
            v_first = made.v if v_first is None else v_first
            y = of_layer.add("att.output", y, time_mix.output(y))
            shift = states.shift[:, place, 1]
            keep = channel_mix.deep_embed is not None or drafting
            x, mixed, normed = kernels.mix(x, y, channel_mix.norm, channel_mix.x_k, shift, places, keep)
            if drafting and normed is not None:
                rows.moves.append(partial(move_shift, normed, shift))
            y = channel_mix.products(mixed[0], x if normed is None else normed, tokens, embedded, of_layer)
        assert y is not None
        return replace(activations, x=x + y, v_first=v_first)


def _record(time_mix: TimeMix, channel_mix: ChannelMix) -> LayerRecord | None:
    """The record of a layer, whose tensors must outlive it; None if it is more than its products."""
    large = ("receptance", "key", "value", "output")
    linears = {name: getattr(time_mix, name) for name in large}
    linears |= {"ffn_key": channel_mix.key, "ffn_value": channel_mix.value}
    packed = {
        name: linear.matrix.record for name, linear in linears.items() if isinstance(linear, PackedLinear)
    }
    pairs = {name: pair for name, pair in time_mix.low_rank.items() if isinstance(pair, CpuLowRank)}
    if channel_mix.deep_embed or channel_mix.experts or len(packed) < len(linears):
        return None
    if len(pairs) < len(time_mix.low_rank):
        return None
    record = LayerRecord(
        norm=_vectors(time_mix.norm),
        group_norm=_vectors(time_mix.group_norm),
        ffn_norm=_vectors(channel_mix.norm),
        ffn_mix=channel_mix.x_k.data_ptr(),
        **{name: getattr(time_mix, name).data_ptr() for name in ("mixes", "k_k", "k_a", "k_rest", "r_k")},
        **packed,
    )
    for place, name in enumerate(LOW_RANKS):
        if pair := pairs.get(name):
            activation = ACTIVATIONS.index(pair.activation)
            record.low_rank[place] = PairRecord(
                pair.inner.matrix.record, pair.outer.matrix.record, activation
            )
    return record


def _vectors(norm: Norm) -> VectorsRecord:
    return VectorsRecord(norm.weight.data_ptr(), norm.bias.data_ptr())


def _move_states(recurrence: Callable[..., Tensor], accepted: AcceptedTokens) -> None:
    """Run a layer's recurrence again, over accepted tokens of drafts."""
    rows = CpuRows(accepted.ends, accepted.slots, accepted.ends, accepted.begins)
    recurrence(rows, reads=False)

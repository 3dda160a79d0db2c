"""RWKV-7 on a CPU in fp32 over compiled kernels.

The same forward pass as in model/rwkv7.py, with what lies between products in two kernels a layer. Its
recurrence runs token after token, for prompts too: on a CPU that is faster than in chunks, and a row's
numbers are the same wherever its tokens are cut into steps.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rwkv_batch.model.rwkv7 import RWKV7, ChannelMix
from rwkv_batch.model.torch_model import Activations
from rwkv_batch.ops.cpu.binding import CpuRows
from rwkv_batch.ops.cpu.products import PackedLinear
from rwkv_batch.ops.low_rank import Changes
from rwkv_batch.ops.torch_ops import AcceptedTokens, PackedRows, move_shift
from rwkv_batch.state.slots import DeviceStates


class CpuChannelMix(ChannelMix):
    """A channel mix whose hidden units leave the product squared."""

    def hidden(self, shifted: Tensor, changes: Changes) -> Tensor:
        if isinstance(self.key, PackedLinear) and not changes.groups:
            return self.key.squared(shifted)
        return super().hidden(shifted, changes)


class CpuRWKV7(RWKV7):
    """RWKV-7, and 7a, on a CPU. It is made with kernels. DeviceStates in fp16 run as in RWKV7."""

    channel_mix = CpuChannelMix

    def _run_layers(
        self, activations: Activations, states: DeviceStates, rows: PackedRows, changes: Changes
    ) -> Activations:
        kernels = self._kernels
        if kernels is None or states.wkv.dtype != torch.float32:
            return super()._run_layers(activations, states, rows, changes)
        places, drafting = CpuRows.of(rows.lengths, rows.slot_numbers, rows.drafted), rows.drafting > 0
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


def _move_states(recurrence: Callable[..., Tensor], accepted: AcceptedTokens) -> None:
    """Run a layer's recurrence again, over accepted tokens of drafts."""
    rows = CpuRows(accepted.ends, accepted.slots, accepted.ends, accepted.begins)
    recurrence(rows, reads=False)

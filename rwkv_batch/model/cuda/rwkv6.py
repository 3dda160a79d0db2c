"""RWKV-6 (x060) on a CUDA GPU: the function of `rwkv6.RWKV6` over the kernels in `cuda/`, in fp16.

No GEMM is timed: the number of tokens decides by which of three methods the large ones run.

- "stream": `gemm_stream`, for few tokens
- "tile": `gemm_tile`, for dozens of them, on a Hopper GPU and where it takes the shapes
- "blas": cuBLAS through torch
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from rwkv_batch.model.cuda.cuda_model import CudaModel
from rwkv_batch.model.cuda.gemms.halves import TILE_TOKENS, Blas, Stream, Tile, in_blocks
from rwkv_batch.model.cuda.gemms.low_rank import STREAM_TOKENS, small_gemm
from rwkv_batch.model.cuda.gemms.method import GemmCall, Method
from rwkv_batch.model.cuda.packed.rwkv6_weights import Rwkv6CudaLayer, Rwkv6CudaWeights, pack_rwkv6
from rwkv_batch.model.cuda.steps.adapters import AdapterSlots
from rwkv_batch.model.cuda.steps.mixers import NormMixer, decode_norms, prefill_norms
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.ops.cuda import tile
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, TANH, Wkv6Input
from rwkv_batch.ops.cuda.binding import Addend, NormMix
from rwkv_batch.ops.cuda.buffers import Rwkv6Buffers
from rwkv_batch.ops.cuda.gemms import Part
from rwkv_batch.ops.cuda.inputs.packing import DeviceRows


class RWKV6Cuda(CudaModel[Rwkv6CudaWeights, Rwkv6Buffers]):
    """RWKV-6. Its states never lag."""

    defers, buffers = False, Rwkv6Buffers

    def methods(self, tokens: int) -> dict[str, str]:
        layer = self.weights.layers[0]
        large = {"layer": (layer.output, layer.key, layer.value), "head": (self.weights.head,)}
        tiles = self.kernels.has_tile and (tokens <= TILE_TOKENS or self.kernels.invariant)
        fit = {kind: tiles and all(tile.fits(*w.shape) for w in matrices) for kind, matrices in large.items()}
        if self.kernels.invariant:  # sums for a row that are the same for any number of rows
            return {kind: "tile" if fit[kind] else "stream" for kind in large}
        few = tokens <= STREAM_TOKENS
        return {kind: "stream" if few else "tile" if fit[kind] else "blas" for kind in large}

    @cached_property
    def _methods(self) -> dict[str, Method]:
        large = {"stream": Stream(self.kernels, "stream", 16), "tile": Tile(self.kernels, "tile")}
        return large | {"blas": Blas(self.kernels, "blas")}

    def _pack_weights(self, few_rows: bool, fp8_copies: bool) -> Rwkv6CudaWeights:
        return pack_rwkv6(self.checkpoint, self.device, self.part)

    def _decode_layers(
        self,
        tokens: Tensor,
        slots: Tensor,
        states: CudaStates,
        b: Rwkv6Buffers,
        methods: dict[str, str],
        adapters: AdapterSlots | None,
    ) -> Addend:
        fp32 = states.wkv.dtype == torch.float32
        wkv = partial(self.kernels.wkv6, tokens=len(tokens), slots=slots, fp32=fp32)
        norm_mix = decode_norms(self.kernels, b, slots)
        return self._run_layers(tokens, states, b, norm_mix, wkv, methods["layer"])

    def _prefill_layers(
        self,
        tokens: Tensor,
        rows: DeviceRows,
        states: CudaStates,
        b: Rwkv6Buffers,
        methods: dict[str, str],
        adapters: AdapterSlots | None,
    ) -> Addend:
        fp32 = states.wkv.dtype == torch.float32
        wkv = partial(self.kernels.wkv6_packed, tokens=len(tokens), rows=rows.rows, fp32=fp32)
        norm_mix = prefill_norms(self.kernels, b, rows.rows)
        return self._run_layers(tokens, states, b, norm_mix, wkv, methods["layer"])

    def _head(self, x: Tensor, logits: Tensor, methods: dict[str, str]) -> None:
        self._run(methods["head"], self.weights.head, x, logits)

    def _run_layers(
        self,
        tokens: Tensor,
        states: CudaStates,
        b: Rwkv6Buffers,
        norm_mix: NormMixer,
        wkv: Callable[[Wkv6Input], None],
        method: str,
    ) -> Addend:
        """Launch all layers, from the embedding on. Returns what is still to be added to b.x."""
        added = self._embedded(tokens)
        for index, layer in enumerate(self.weights.layers):
            shift = states.shift[:, index]
            norm_mix(NormMix(added, layer.norm1, shift[:, 0], layer.mixes, b.mixed))
            self._time_mix_in(layer, b, method)
            wkv(_wkv_input(layer, b, states.wkv[:, index]))
            self._run(method, layer.output, b.y, b.out)
            added = Addend(y=b.out)
            norm_mix(NormMix(added, layer.norm2, shift[:, 1], layer.channel_mixes, b.mixed))
            self._channel_mix(layer, b, method)
        return added

    def _time_mix_in(self, layer: Rwkv6CudaLayer, b: Rwkv6Buffers, method: str) -> None:
        """The shifted inputs, k, v, r and g, and what the decay follows from."""
        mixed, token, before = b.mixed
        small_gemm(self.kernels, (layer.mix_inner, mixed, b.inner.flatten(1), TANH))
        if self.kernels.invariant:
            in_blocks(b.inner.transpose(0, 1), layer.mix_outer, b.shifted)
        else:
            torch.bmm(b.inner.transpose(0, 1), layer.mix_outer, out=b.shifted)
        self.kernels.shift_mix(b.shifted, token, before, layer.mix_offsets)
        decay_inner = (layer.decay_inner, b.shifted[0], b.decay_inner, TANH)
        if method == "stream":
            self._run(method, layer.kvrg, b.shifted[1:], b.kvrg, small=[decay_inner])
        else:
            pieces = (layer.kvrg, b.shifted[1:], b.kvrg)
            for w, x, y in zip(*(one.split(2 if method == "tile" else 4) for one in pieces), strict=True):
                self._run(method, w, x, y)  # gemm_tile takes three at most
            small_gemm(self.kernels, decay_inner)
        small_gemm(self.kernels, (layer.decay_outer, b.decay_inner, b.decay, IDENTITY))

    def _channel_mix(self, layer: Rwkv6CudaLayer, b: Rwkv6Buffers, method: str) -> None:
        for_key, for_receptance, _ = b.mixed
        gate = b.kvrg[0]  # which the time mix needs no more
        if method == "stream":
            receptance = (layer.receptance, for_receptance, gate, IDENTITY)
            self._run(method, layer.key, for_key, b.hidden, RELU_SQUARE, [receptance])
        else:
            self._run(method, layer.key, for_key, b.hidden, RELU_SQUARE)
            self._run(method, layer.receptance, for_receptance, gate)
        self._run(method, layer.value, b.hidden, b.out)
        self.kernels.gate(b.out, gate)

    def _run(
        self,
        method: str,
        w: Tensor,
        x: Tensor,
        y: Tensor,
        activation: int = IDENTITY,
        small: Sequence[Part] = (),
    ) -> None:
        """One GEMM or several of one shape; small: with "stream" those that its launch runs too."""
        self._methods[method].run(GemmCall(w, x, y, None, activation, small=small))


def _wkv_input(layer: Rwkv6CudaLayer, b: Rwkv6Buffers, state: Tensor) -> Wkv6Input:
    """state `[slots, heads, 64, 64]`, with any distance between slots."""
    k, v, r, g = b.kvrg
    return Wkv6Input(
        r=r.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        w=b.decay.data_ptr(),
        g=g.data_ptr(),
        decay=layer.decay.data_ptr(),
        bonus=layer.bonus.data_ptr(),
        norm_weight=layer.group_norm.weight.data_ptr(),
        norm_bias=layer.group_norm.bias.data_ptr(),
        out=b.y.data_ptr(),
        state=state.data_ptr(),
        slot_stride=state.stride(0),
        width=b.x.shape[1],
    )

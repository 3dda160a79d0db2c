"""RWKV-6 (x060) on a CUDA GPU: the function of `rwkv6.RWKV6` over the kernels in `cuda/`, in fp16.

No GEMM is timed: the number of tokens decides by which of three methods the large ones run.

- "stream": `gemm_stream`, for few tokens
- "tile": `gemm_tile`, for dozens of them, on a Hopper GPU and where it takes the shapes
- "blas": cuBLAS through torch
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rwkv_batch.model.cuda.cuda_model import CudaModel
from rwkv_batch.model.cuda.gemms.halves import TILE_TOKENS, in_blocks
from rwkv_batch.model.cuda.gemms.low_rank import STREAM_TOKENS, small_gemm
from rwkv_batch.model.cuda.packed.rwkv6_weights import Rwkv6CudaLayer, Rwkv6CudaWeights, pack_rwkv6
from rwkv_batch.model.cuda.steps.adapters import AdapterSlots
from rwkv_batch.model.cuda.steps.states import CudaStates
from rwkv_batch.model.description import Norm
from rwkv_batch.ops.cuda import tile
from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, TANH, Wkv6Input
from rwkv_batch.ops.cuda.binding import Addend
from rwkv_batch.ops.cuda.buffers import Rwkv6Buffers
from rwkv_batch.ops.cuda.gemms import Part
from rwkv_batch.ops.cuda.inputs.packing import DeviceRows

# added, norm, shift, mixes [3, C], whether it is a layer's first: leaves the results in b.mixed
NormMix = Callable[[Addend, Norm, Tensor, Tensor, bool], None]


class RWKV6Cuda(CudaModel[Rwkv6CudaWeights, Rwkv6Buffers]):
    """RWKV-6. Its states never lag."""

    defers, buffers = False, Rwkv6Buffers

    def methods(self, tokens: int) -> dict[str, str]:
        layer = self.weights.layers[0]
        large = {"layer": (layer.output, layer.key, layer.value), "head": (self.weights.head,)}
        if self.kernels.invariant:
            return {kind: self._invariant_method(matrices) for kind, matrices in large.items()}
        if tokens <= STREAM_TOKENS:
            return dict.fromkeys(large, "stream")
        tiles = self.kernels.has_tile and tokens <= TILE_TOKENS
        fit = {kind: all(tile.fits(*w.shape) for w in matrices) for kind, matrices in large.items()}
        return {kind: "tile" if tiles and fit[kind] else "blas" for kind in large}

    def _invariant_method(self, matrices: Iterable[Tensor]) -> str:
        """One whose sums for a row are the same for any number of rows."""
        tiles = self.kernels.has_tile and all(tile.fits(*w.shape) for w in matrices)
        return "tile" if tiles else "stream"

    def _pack_weights(self) -> Rwkv6CudaWeights:
        return pack_rwkv6(self.checkpoint, self.device)

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

        def norm_mix(added: Addend, norm: Norm, shift: Tensor, mixes: Tensor, first: bool) -> None:
            self.kernels.norm_mix_decode(b.x, added, *norm, slots, shift, mixes, b.mixed)

        def wkv(inputs: Wkv6Input) -> None:
            self.kernels.wkv6(inputs, len(tokens), slots, fp32)

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

        def norm_mix(added: Addend, norm: Norm, shift: Tensor, mixes: Tensor, first: bool) -> None:
            x, to = (b.x, b.x_between) if first else (b.x_between, b.x)
            self.kernels.norm_mix_prefill(x, to, added, *norm, rows.rows, shift, mixes, b.mixed)

        def wkv(inputs: Wkv6Input) -> None:
            self.kernels.wkv6_packed(inputs, len(tokens), rows.rows, fp32)

        return self._run_layers(tokens, states, b, norm_mix, wkv, methods["layer"])

    def _head(self, x: Tensor, logits: Tensor, methods: dict[str, str]) -> None:
        self._gemm((self.weights.head, x, logits, IDENTITY), methods["head"])

    def _run_layers(
        self,
        tokens: Tensor,
        states: CudaStates,
        b: Rwkv6Buffers,
        norm_mix: NormMix,
        wkv: Callable[[Wkv6Input], None],
        method: str,
    ) -> Addend:
        """Launch all layers, from the embedding on. Returns what is still to be added to b.x."""
        added = Addend(tokens=tokens, table=self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            norm_mix(added, layer.norm1, states.shift[:, index, 0], layer.mixes, True)
            self._time_mix_in(layer, b, method)
            wkv(_wkv_input(layer, b, states.wkv[:, index]))
            self._gemm((layer.output, b.y, b.out, IDENTITY), method)
            added = Addend(y=b.out)
            norm_mix(added, layer.norm2, states.shift[:, index, 1], layer.channel_mixes, False)
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
        parts: list[Part] = [
            (w, x, y, IDENTITY) for w, x, y in zip(layer.kvrg, b.shifted[1:], b.kvrg, strict=True)
        ]
        decay_inner = (layer.decay_inner, b.shifted[0], b.decay_inner, TANH)
        if method == "stream":
            self.kernels.gemm_stream([*parts, decay_inner])
        else:
            if method == "tile":
                for two in (slice(0, 2), slice(2, 4)):  # gemm_tile takes three at most
                    ws, xs, ys = (list(group[two]) for group in (layer.kvrg, b.shifted[1:], b.kvrg))
                    self.kernels.gemm_tile(ws, xs, ys)
            else:
                torch.bmm(b.shifted[1:], layer.kvrg.mT, out=b.kvrg)
            small_gemm(self.kernels, decay_inner)
        small_gemm(self.kernels, (layer.decay_outer, b.decay_inner, b.decay, IDENTITY))

    def _channel_mix(self, layer: Rwkv6CudaLayer, b: Rwkv6Buffers, method: str) -> None:
        for_key, for_receptance, _ = b.mixed
        gate = b.kvrg[0]  # which the time mix needs no more
        key = (layer.key, for_key, b.hidden, RELU_SQUARE)
        receptance = (layer.receptance, for_receptance, gate, IDENTITY)
        if method == "stream":
            self.kernels.gemm_stream([key, receptance])
        else:
            self._gemm(key, method)
            self._gemm(receptance, method)
        self._gemm((layer.value, b.hidden, b.out, IDENTITY), method)
        self.kernels.gate(b.out, gate)

    def _gemm(self, part: Part, method: str) -> None:
        """A large GEMM. No more than RELU_SQUARE."""
        w, x, y, activation = part
        if method == "stream":
            self.kernels.gemm_stream([part])
        elif method == "tile":
            self.kernels.gemm_tile([w], [x], [y], activation)
        else:
            torch.mm(x, w.T, out=y)
            if activation == RELU_SQUARE:
                self.kernels.relu_square(y)


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

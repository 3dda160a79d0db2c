"""A checkpoint of RWKV-6 packed for the CUDA kernels, in fp16, as `weights` does for RWKV-7."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.packed.protocol import PackedWeights
from rwkv_batch.model.cuda.packed.weights import RANK_MULTIPLE, no_rows, pack_head, padded, round_up
from rwkv_batch.model.tensors.description import Norm, norm_tensors, normed_embedding
from rwkv_batch.model.tensors.rwkv6_description import Rwkv6LayerTensors, rwkv6_layer_tensors
from rwkv_batch.ops.cuda.buffers import BufferShape
from rwkv_batch.ops.weights.weight import Matrix

HIDDEN_MULTIPLE = 64  # of which gemm_tile takes rows; the weights added are zero


@dataclass(frozen=True)
class Rwkv6CudaLayer:
    """C: width, F: hidden units, D: a rank, the same in all layers. Vectors are `[C]`."""

    norm1: Norm
    mixes: Tensor  # [3, C]: of the low-rank mixes, and 0 and 1: the token itself, and the one before
    mix_inner: Tensor  # [5 D, C]
    mix_outer: Tensor  # [5, D, C], in the order of RWKV6_MIXES
    mix_offsets: Tensor  # [5, C]
    decay_inner: Tensor  # [D, C]
    decay_outer: Tensor  # [C, D]
    decay: Tensor
    bonus: Tensor
    kvrg: Tensor  # [4, C, C]
    group_norm: Norm
    output: Tensor  # [C, C]
    norm2: Norm
    channel_mixes: Tensor  # [3, C]: of key and receptance, and 0, which nothing reads
    key: Tensor  # [F, C]
    value: Tensor  # [C, F]
    receptance: Tensor  # [C, C]


@dataclass(frozen=True)
class Rwkv6CudaWeights(PackedWeights):
    """Those of RWKV-6."""

    head: Tensor
    layers: list[Rwkv6CudaLayer]

    @property
    def buffer_shape(self) -> BufferShape:
        layer = self.layers[0]
        ranks = {"mix": layer.mix_outer.shape[1], "decay": len(layer.decay_inner)}
        return BufferShape(len(layer.output), len(layer.key), ranks, self.head.device)


def pack_rwkv6(checkpoint: Checkpoint, device: torch.device, part: range | None = None) -> Rwkv6CudaWeights:
    """Copy the weights to the GPU, layer by layer. part: which ones; None: all. See PackedWeights."""
    tensors, layers = checkpoint.tensors, range(checkpoint.layers)
    part = part or layers

    def largest(name: str, dimension: int, multiple: int) -> int:
        sizes = [tensors[f"blocks.{layer}.{name}"].shape[dimension] for layer in layers]
        return round_up(max(sizes), multiple)

    mix, decay = (largest(f"att.time_{name}", 1, RANK_MULTIPLE) for name in ("maa_w2", "decay_w1"))
    hidden = largest("ffn.key.weight", 0, HIDDEN_MULTIPLE)
    packed = [
        _pack_layer(rwkv6_layer_tensors(tensors, checkpoint.packed, layer), mix, decay, hidden, device)
        for layer in part
    ]
    width, last = checkpoint.width, part.stop == checkpoint.layers
    return Rwkv6CudaWeights(
        no_rows(width, device) if part.start else normed_embedding(tensors, device, torch.float16),
        norm_tensors(tensors, "ln_out").to(device, torch.float16),
        pack_head(tensors["head.weight"] if last else no_rows(width, device), device),
        packed,
    )


def _pack_layer(
    layer: Rwkv6LayerTensors, mix: int, decay: int, hidden: int, device: torch.device
) -> Rwkv6CudaLayer:
    """mix, decay, hidden: ranks and hidden units, to which matrices are filled up."""

    def half(tensor: Matrix) -> Tensor:
        return tensor.to(device, torch.float16)

    mix_x, nothing = half(layer.mix_x), torch.zeros(len(layer.mix_x), device=device, dtype=torch.float16)
    inner = half(layer.mix_inner).T.unflatten(0, (len(layer.mixes), -1))  # [5, rank, C]
    return Rwkv6CudaLayer(
        norm1=layer.ln1.to(device, torch.float16),
        mixes=torch.stack([mix_x, nothing, nothing + 1]),
        mix_inner=torch.cat([padded(part, 0, mix) for part in inner]),
        mix_outer=torch.stack([padded(part, 0, mix) for part in half(layer.mix_outer)]),
        mix_offsets=torch.stack([half(offset) for offset in layer.mixes]),
        decay_inner=padded(half(layer.decay_inner).T, 0, decay),
        decay_outer=padded(half(layer.decay_outer).T, 1, decay),
        decay=half(layer.decay),
        bonus=half(layer.bonus).flatten(),
        kvrg=torch.stack([half(w) for w in (layer.key, layer.value, layer.receptance, layer.gate)]),
        group_norm=layer.ln_x.to(device, torch.float16),
        output=half(layer.output),
        norm2=layer.ln2.to(device, torch.float16),
        channel_mixes=torch.stack([half(layer.ffn_mix_k), half(layer.ffn_mix_r), nothing]),
        key=padded(half(layer.ffn_key), 0, hidden),
        value=padded(half(layer.ffn_value), 1, hidden),
        receptance=half(layer.ffn_receptance),
    )

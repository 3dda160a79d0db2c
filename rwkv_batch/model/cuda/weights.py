"""A checkpoint packed for the CUDA kernels, in fp16.

What is multiplied together lies side by side, and a low-rank function has one rank in all layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.description import (
    LayerTensors,
    Norm,
    layer_tensors,
    low_rank_names,
    norm_tensors,
    normed_embedding,
)
from rwkv_batch.ops.cuda.buffers import BufferShape

RANK_MULTIPLE = 32  # the step of the GEMM kernels over K; the weights added are zero
HEAD_MULTIPLE = 16  # rows of w that a warp of the GEMM kernel takes


@dataclass(frozen=True)
class CudaLayer:
    """C: width. Vectors are `[C]`."""

    norm1: Norm
    mixes: Tensor  # [6, C], in the order of MIXES
    rkv: Tensor  # [3, C, C]
    low_in: dict[str, Tensor]  # [rank, C] each, by the names of LOW_RANKS; ranks are filled up with zeros
    low_out: dict[str, Tensor]  # [C, rank]
    offsets: dict[str, Tensor]  # of the low-rank functions; the gate has none
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    group_norm: Norm
    output: Tensor  # [C, C]
    norm2: Norm
    x_k: Tensor  # [1, C]
    key: Tensor  # [4 C, C]
    value: Tensor  # [4 C, C]: one run of C weights for each hidden unit, so inactive units can be skipped


@dataclass(frozen=True)
class CudaWeights:
    """A model's weights on one GPU."""

    embedding: Tensor  # [vocab, C], its layer norm applied
    layers: list[CudaLayer]
    norm_out: Norm
    head: Tensor  # [vocab, C]; rows of zeros are added up to a multiple of HEAD_MULTIPLE
    vocab: int

    @property
    def buffer_shape(self) -> BufferShape:
        """The sizes of a step's buffers."""
        layer = self.layers[-1]  # layer 0 has no "v"
        ranks = {name: len(w) for name, w in layer.low_in.items()}
        return BufferShape(len(layer.output), len(layer.key), ranks, self.head.device)


def pack_weights(checkpoint: Checkpoint, device: torch.device) -> CudaWeights:
    """Copy the weights to the GPU, layer by layer."""
    tensors = checkpoint.tensors
    # The largest rank of any layer, as layers share their buffers: a checkpoint may have other ranks in each.
    found: dict[str, list[int]] = {}
    for layer in range(checkpoint.layers):
        for name in low_rank_names(layer):
            found.setdefault(name, []).append(tensors[f"blocks.{layer}.att.{name}1"].shape[1])
    ranks = {name: _round_up(max(sizes), RANK_MULTIPLE) for name, sizes in found.items()}
    # One layer at a time: an adapter is merged as a tensor is read.
    layers = (layer_tensors(tensors, index) for index in range(checkpoint.layers))
    head = tensors["head.weight"].to(device, torch.float16)
    return CudaWeights(
        normed_embedding(tensors, device, torch.float16),
        [_pack_layer(layer, ranks, device) for layer in layers],
        norm_tensors(tensors, "ln_out").to(device, torch.float16),
        _padded(head, 0, _round_up(len(head), HEAD_MULTIPLE)),
        len(head),
    )


def _pack_layer(layer: LayerTensors, ranks: dict[str, int], device: torch.device) -> CudaLayer:
    """ranks: to which the low-rank functions are filled up."""

    def half(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float16)

    return CudaLayer(
        norm1=layer.ln1.to(device, torch.float16),
        mixes=torch.stack([half(mix) for mix in layer.mixes.values()]),
        rkv=torch.stack([half(matrix) for matrix in (layer.receptance, layer.key, layer.value)]),
        low_in={n: _padded(half(low.inner).T, 0, ranks[n]) for n, low in layer.low_rank.items()},
        low_out={n: _padded(half(low.outer).T, 1, ranks[n]) for n, low in layer.low_rank.items()},
        offsets={n: half(low.offset) for n, low in layer.low_rank.items() if low.offset is not None},
        k_k=half(layer.k_k),
        k_a=half(layer.k_a),
        r_k=half(layer.r_k).flatten(),
        group_norm=layer.ln_x.to(device, torch.float16),
        output=half(layer.output),
        norm2=layer.ln2.to(device, torch.float16),
        x_k=half(layer.ffn_mix).view(1, -1),
        key=half(layer.ffn_key),
        value=half(layer.ffn_value).T.contiguous(),
    )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(matrix: Tensor, dimension: int, size: int) -> Tensor:
    missing = size - matrix.shape[dimension]
    return pad(matrix, (0, 0, 0, missing) if dimension == 0 else (0, missing)).contiguous()

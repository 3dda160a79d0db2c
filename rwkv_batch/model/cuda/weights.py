"""A checkpoint packed for the CUDA kernels: fp16, what is multiplied together side by side, and a low-rank
function of one rank in all layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.description import LayerTensors, NormTensors, low_rank_names, normed_embedding
from rwkv_batch.ops.cuda.buffers import BufferShape

RANK_MULTIPLE = 32  # the step of the GEMM kernels over K; the weights added are zero
HEAD_MULTIPLE = 16  # rows of w that a warp of the GEMM kernel takes


@dataclass(frozen=True)
class CudaLayer:
    """C: width. Vectors are `[C]`."""

    norm1: tuple[Tensor, Tensor]
    mixes: Tensor  # [6, C], in the order of MIXES
    rkv: Tensor  # [3, C, C]
    low_in: dict[str, Tensor]  # [rank, C] each, by the names of LOW_RANKS; ranks are filled up with zeros
    low_out: dict[str, Tensor]  # [C, rank]
    w0: Tensor
    a0: Tensor
    v0: Tensor | None  # none in layer 0
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    group_norm: tuple[Tensor, Tensor]
    output: Tensor  # [C, C]
    norm2: tuple[Tensor, Tensor]
    x_k: Tensor  # [1, C]
    key: Tensor  # [4 C, C]
    value: (
        Tensor  # [4 C, C]: one run of C weights for each hidden unit, so that inactive units can be skipped
    )


@dataclass(frozen=True)
class CudaWeights:
    """A model's weights on one GPU."""

    embedding: Tensor  # [vocab, C], its layer norm applied
    layers: list[CudaLayer]
    norm_out: tuple[Tensor, Tensor]
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
    layers = [checkpoint.layer(index) for index in range(checkpoint.layers)]
    # The largest rank of any layer, as layers share their buffers: a checkpoint may have other ranks in each.
    ranks = {
        name: max(layer.low_rank[name].inner.shape[1] for layer in layers if name in layer.low_rank)
        for name in low_rank_names(checkpoint.layers - 1)
    }
    packer = _Packer(device, {name: _round_up(rank, RANK_MULTIPLE) for name, rank in ranks.items()})
    head = packer.half(checkpoint.head)
    return CudaWeights(
        normed_embedding(checkpoint.tensors, device, torch.float16),
        [packer.layer(layer) for layer in layers],
        packer.norm(checkpoint.ln_out),
        _padded(head, 0, _round_up(len(head), HEAD_MULTIPLE)),
        len(head),
    )


@dataclass(frozen=True)
class _Packer:
    device: torch.device
    ranks: dict[str, int]

    def half(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, torch.float16)

    def norm(self, norm: NormTensors) -> tuple[Tensor, Tensor]:
        return self.half(norm.weight), self.half(norm.bias)

    def layer(self, layer: LayerTensors) -> CudaLayer:
        offsets = {name: low.offset for name, low in layer.low_rank.items() if low.offset is not None}
        return CudaLayer(
            norm1=self.norm(layer.ln1),
            mixes=torch.stack([self.half(mix) for mix in layer.mixes.values()]),
            rkv=torch.stack([self.half(matrix) for matrix in (layer.receptance, layer.key, layer.value)]),
            low_in={
                n: _padded(self.half(low.inner).T, 0, self.ranks[n]) for n, low in layer.low_rank.items()
            },
            low_out={
                n: _padded(self.half(low.outer).T, 1, self.ranks[n]) for n, low in layer.low_rank.items()
            },
            w0=self.half(offsets["w"]),
            a0=self.half(offsets["a"]),
            v0=self.half(offsets["v"]) if "v" in offsets else None,
            k_k=self.half(layer.k_k),
            k_a=self.half(layer.k_a),
            r_k=self.half(layer.r_k).flatten(),
            group_norm=self.norm(layer.ln_x),
            output=self.half(layer.output),
            norm2=self.norm(layer.ln2),
            x_k=self.half(layer.ffn_mix).view(1, -1),
            key=self.half(layer.ffn_key),
            value=self.half(layer.ffn_value).T.contiguous(),
        )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(matrix: Tensor, dimension: int, size: int) -> Tensor:
    missing = size - matrix.shape[dimension]
    return pad(matrix, (0, 0, 0, missing) if dimension == 0 else (0, missing)).contiguous()

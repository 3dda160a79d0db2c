"""A checkpoint packed for the CUDA kernels, in fp16, or its large matrices in 8 or 4 bits.

What is multiplied together lies side by side, and a low-rank function has one rank in all layers.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.packed.blocks import BlockMatrix
from rwkv_batch.model.cuda.packed.coded import CodedMatrix, LargeMatrix
from rwkv_batch.model.cuda.packed.packing import HOPPER, Packer
from rwkv_batch.model.cuda.packed.protocol import PackedWeights
from rwkv_batch.model.tensors.description import (
    DeepEmbedTensors,
    LayerTensors,
    Norm,
    layer_tensors,
    low_rank_names,
    matrix,
    norm_tensors,
    normed_embedding,
)
from rwkv_batch.ops.cuda.buffers import BufferShape
from rwkv_batch.ops.host_memory import NoPinnedMemory, pinned
from rwkv_batch.ops.weights.weight import Matrix, Weight

log = logging.getLogger(__name__)

RANK_MULTIPLE = 32  # the step of the GEMM kernels over K; the weights added are zero
HEAD_MULTIPLE = 16  # rows of w that a warp of the GEMM kernel takes
# Formats whose models are to be as small as can be on the GPU: a step reads one row of the embedding for each
# token, from host memory as well.
ON_HOST = ("int4", "int4-128", "nf4")


@dataclass(frozen=True)
class CudaDeepEmbed:
    """What RWKV-7a multiplies hidden units with: `((x inner) E) outer + offset`, F of them."""

    table: Tensor  # [vocab, 1024]: E of every token, the map of its embedding included
    inner: Tensor  # [32, C]
    outer: Tensor  # [F, 32]
    offset: Tensor  # [F]


@dataclass(frozen=True)
class CudaLayer:
    """C: width. Vectors are `[C]`."""

    norm1: Norm
    mixes: Tensor  # [6, C], in the order of MIXES
    rkv: Tensor | tuple[CodedMatrix, ...]  # [3, C, C]
    low_in: dict[str, Tensor]  # [rank, C] each, by the names of LOW_RANKS; ranks are filled up with zeros
    low_out: dict[str, Tensor]  # [C, rank]
    offsets: dict[str, Tensor]  # of the low-rank functions; the gate has none
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    group_norm: Norm
    output: LargeMatrix  # [C, C]
    norm2: Norm
    x_k: Tensor  # [1, C]; with a DeepEmbed [3, C], as it reads the token itself too: 0 mixes nothing in
    key: LargeMatrix  # [4 C, C]
    # [4 C, C] in fp16, and in int8 for few rows: one run of C weights for each hidden unit, so inactive units
    # can be skipped. Others: [C, 4 C]
    value: LargeMatrix
    deep_embed: CudaDeepEmbed | None  # of RWKV-7a


@dataclass(frozen=True)
class CudaWeights(PackedWeights):
    """Those of RWKV-7; the embedding of formats of ON_HOST is in host memory."""

    layers: list[CudaLayer]
    vocab: int

    @property
    def decoding_launches(self) -> int:
        """The most by which a layer whose codes are decoded has more launches than one in fp16."""
        return sum(2 * len(one.decoded_parts()) for one in self._decoded if one is not self.head)

    @property
    def decoded_bytes(self) -> int:
        """What steps of many tokens take to decode matrices."""
        return max((one.decoded.nbytes for one in self._decoded), default=0)

    @property
    def _decoded(self) -> list[BlockMatrix]:
        """The head and the large matrices of a layer, those that are decoded for many tokens."""
        layer = self.layers[-1]
        large = (*layer.rkv, layer.output, layer.key, layer.value, self.head)
        return [one for one in large if isinstance(one, BlockMatrix)]

    @property
    def buffer_shape(self) -> BufferShape:
        layer = self.layers[-1]  # layer 0 has no "v"
        ranks = {name: len(w) for name, w in layer.low_in.items()}
        output = layer.output
        fp8 = type(output) is CodedMatrix and output.in_fp8 is not None  # blocks have no such products
        return BufferShape(len(layer.output), len(layer.key), ranks, self.head.device, fp8)


def pack_weights(
    checkpoint: Checkpoint,
    device: torch.device,
    architecture: str = HOPPER,
    few_rows: bool = False,
    part: range | None = None,
    fp8_copies: bool = False,
) -> CudaWeights:
    """Copy the weights to the GPU, layer by layer. architecture: of the kernels, which decides on codes.

    few_rows: whether so few rows run together that int8 is better laid out for skipping inactive hidden
    units, though more rows read it more slowly so. part: which layers; None: all. See PackedWeights.
    fp8_copies: whether matrices of codes but the head also lie there in fp8, for many rows.
    """
    tensors = checkpoint.tensors
    packer = Packer(checkpoint.packed.values(), device, architecture, fp8_copies)
    part = part or range(checkpoint.layers)
    # The largest rank of any layer, as layers share their buffers: a checkpoint may have other ranks in each.
    ranks = {
        name: round_up(
            max(
                tensors[f"blocks.{layer}.att.{name}1"].shape[1]
                for layer in range(checkpoint.layers)
                if name in low_rank_names(layer)
            ),
            RANK_MULTIPLE,
        )
        for name in low_rank_names(checkpoint.layers - 1)
    }
    # One layer at a time: an adapter is merged as a tensor is read.
    packed = checkpoint.packed
    # A DeepEmbed, which all layers of a model have or none, reads it once.
    reads_embedding = part.start == 0 or "blocks.0.ffn.s0" in tensors
    embedding = normed_embedding(tensors, device, torch.float16) if reads_embedding else None
    packed_layers = [
        _pack_layer(layer_tensors(tensors, packed, index), ranks, embedding, packer, few_rows, device)
        for index in part
    ]
    if embedding is None or part.start:
        embedding = no_rows(checkpoint.width, device)
    elif checkpoint.weights in ON_HOST and device.type == "cuda":
        embedding = _on_host(embedding)
    head = (
        matrix(tensors, packed, "head")
        if part.stop == checkpoint.layers
        else no_rows(checkpoint.width, device)
    )
    return CudaWeights(
        embedding,
        norm_tensors(tensors, "ln_out").to(device, torch.float16),
        packer.pack_head(head) if isinstance(head, Weight) else pack_head(head, device),
        packed_layers,
        checkpoint.vocab,
    )


def no_rows(width: int, device: torch.device) -> Tensor:
    """In place of an embedding or a head that a stage does not have."""
    return torch.zeros(1, width, dtype=torch.float16, device=device)


def pack_head(head: Tensor, device: torch.device) -> Tensor:
    """`[vocab, C]`, with rows of zeros up to a multiple of HEAD_MULTIPLE."""
    return padded(head.to(device, torch.float16), 0, round_up(len(head), HEAD_MULTIPLE))


def _on_host(embedding: Tensor) -> Tensor:
    """A copy that kernels can read; itself, on the GPU, where the system has no room for one."""
    try:
        copy = pinned(torch.empty, embedding.shape, dtype=embedding.dtype)
    except NoPinnedMemory as error:
        log.warning("%s The embedding takes %.2f GiB of the GPU.", error, embedding.nbytes / 2**30)
        return embedding
    return copy.copy_(embedding)


def _pack_layer(
    layer: LayerTensors,
    ranks: dict[str, int],
    embedding: Tensor | None,
    packer: Packer,
    few_rows: bool,
    device: torch.device,
) -> CudaLayer:
    """ranks: to which the low-rank functions are filled up. embedding: of the model, for a DeepEmbed."""

    def half(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float16)

    def large(found: Matrix) -> LargeMatrix:
        return packer.pack(found) if isinstance(found, Weight) else half(found)

    value, x_k = layer.ffn_value, half(layer.ffn_mix)
    nothing = torch.zeros_like(x_k)
    return CudaLayer(
        norm1=layer.ln1.to(device, torch.float16),
        mixes=torch.stack([half(mix) for mix in layer.mixes.values()]),
        rkv=_side_by_side([large(found) for found in (layer.receptance, layer.key, layer.value)]),
        low_in={n: padded(half(low.inner).T, 0, ranks[n]) for n, low in layer.low_rank.items()},
        low_out={n: padded(half(low.outer).T, 1, ranks[n]) for n, low in layer.low_rank.items()},
        offsets={n: half(low.offset) for n, low in layer.low_rank.items() if low.offset is not None},
        k_k=half(layer.k_k),
        k_a=half(layer.k_a),
        r_k=half(layer.r_k).flatten(),
        group_norm=layer.ln_x.to(device, torch.float16),
        output=large(layer.output),
        norm2=layer.ln2.to(device, torch.float16),
        x_k=torch.stack([x_k, nothing, nothing] if layer.deep_embed else [x_k]),
        key=large(layer.ffn_key),
        value=half(value).T.contiguous() if isinstance(value, Tensor) else packer.pack(value, few_rows),
        deep_embed=(
            None
            if layer.deep_embed is None or embedding is None
            else _pack_deep_embed(layer.deep_embed, embedding)
        ),
    )


def _side_by_side(matrices: list[LargeMatrix]) -> Tensor | tuple[CodedMatrix, ...]:
    """Of one format."""
    tensors = [one for one in matrices if isinstance(one, Tensor)]
    return torch.stack(tensors) if tensors else tuple(one for one in matrices if isinstance(one, CodedMatrix))


def _pack_deep_embed(tensors: DeepEmbedTensors, embedding: Tensor) -> CudaDeepEmbed:
    table, from_embedding, inner, outer, offset = (
        tensor.to(embedding.device, torch.float16)
        for tensor in (
            tensors.table,
            tensors.from_embedding,
            tensors.inner,
            tensors.outer,
            tensors.offset,
        )
    )
    # What a token adds by its embedding is always the same.
    table = torch.addmm(table, embedding, from_embedding.T)
    return CudaDeepEmbed(table, inner.T.contiguous(), outer.T.contiguous(), offset)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def padded(matrix: Tensor, dimension: int, size: int) -> Tensor:
    """A matrix with zeros up to `size` rows (dimension 0) or columns (1), contiguous."""
    missing = size - matrix.shape[dimension]
    return pad(matrix, (0, 0, 0, missing) if dimension == 0 else (0, missing)).contiguous()

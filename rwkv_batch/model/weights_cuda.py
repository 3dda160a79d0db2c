"""A checkpoint as the CUDA kernels read it: fp16, what is multiplied together side by side, a rank the same
in all layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, pad

from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.ops.cuda.binding import IDENTITY, SIGMOID, TANH

EMBEDDING_ROWS = 4096  # normalised at a time at load
RANK_MULTIPLE = 32  # the step of the product kernels; the weights added are zero
HEAD_MULTIPLE = 16  # rows of w that a warp of the product kernel takes
MIXES = "rkvwag"  # r, k, v first: their three products are one batched product
LOW_RANKS = {
    "w": TANH,
    "a": IDENTITY,
    "g": SIGMOID,
    "v": IDENTITY,
}  # with the function between the two matrices
LOW_RANK_INPUT = {"w": MIXES.index("w"), "a": MIXES.index("a"), "g": MIXES.index("g"), "v": MIXES.index("v")}


@dataclass(frozen=True)
class Layer:
    """C: width. Vectors are `[C]`."""

    norm1: tuple[Tensor, Tensor]
    mixes: Tensor  # [6, C], in the order of MIXES
    rkv: Tensor  # [3, C, C]
    low_in: dict[
        str, Tensor
    ]  # [rank, C] each, by the names of LOW_RANKS; no "v" in layer 0. Ranks are filled up with zeros
    low_out: dict[str, Tensor]  # [C, rank]
    w0: Tensor
    a0: Tensor
    v0: Tensor | None
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    group_norm: tuple[Tensor, Tensor]
    output: Tensor  # [C, C]
    norm2: tuple[Tensor, Tensor]
    x_k: Tensor  # [1, C]
    key: Tensor  # [4 C, C]
    # [4 C, C]: one run of C weights for each hidden unit, so that those of idle units can be skipped
    value: Tensor


@dataclass(frozen=True)
class Weights:
    embedding: Tensor  # [vocabulary, C], its layer norm applied
    layers: list[Layer]
    norm_out: tuple[Tensor, Tensor]
    head: Tensor  # [vocabulary, C]; rows are added up to a multiple of HEAD_MULTIPLE
    vocab: int


def prepare(checkpoint: Checkpoint, device: torch.device) -> Weights:
    """Copy the weights to the GPU."""
    loader = _Loader(checkpoint.tensors, device, _ranks(checkpoint))
    head = checkpoint.tensors["head.weight"]
    return Weights(
        _embedding(checkpoint.tensors, device),
        [loader.layer(i) for i in range(checkpoint.layers)],
        loader.norm("ln_out"),
        _padded(head.to(device, torch.float16), 0, _up(len(head), HEAD_MULTIPLE)),
        len(head),
    )


def _embedding(tensors: dict[str, Tensor], device: torch.device) -> Tensor:
    weight, bias = (tensors[f"blocks.0.ln0.{name}"].to(device, torch.float32) for name in ("weight", "bias"))
    table = torch.empty(tensors["emb.weight"].shape, device=device, dtype=torch.float16)
    for start in range(0, len(table), EMBEDDING_ROWS):
        rows = slice(start, start + EMBEDDING_ROWS)
        table[rows] = layer_norm(
            tensors["emb.weight"][rows].to(device, torch.float32), weight.shape, weight, bias
        )
    return table


def _ranks(checkpoint: Checkpoint) -> dict[str, int]:
    """The most of any layer, as the layers share their buffers: a checkpoint may have other ranks in each."""
    largest = {
        name: max(
            checkpoint.tensors[f"blocks.{index}.att.{name}1"].shape[1]
            for index in range(name == "v", checkpoint.layers)
        )
        for name in _low_rank_names(checkpoint.layers - 1)
    }
    return {name: _up(rank, RANK_MULTIPLE) for name, rank in largest.items()}


def _low_rank_names(layer: int) -> list[str]:
    return [name for name in LOW_RANKS if layer > 0 or name != "v"]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(matrix: Tensor, dimension: int, size: int) -> Tensor:
    missing = size - matrix.shape[dimension]
    return pad(matrix, (0, 0, 0, missing) if dimension == 0 else (0, missing)).contiguous()


@dataclass(frozen=True)
class _Loader:
    tensors: dict[str, Tensor]
    device: torch.device
    ranks: dict[str, int]

    def get(self, name: str) -> Tensor:
        return self.tensors[name].to(self.device, torch.float16)

    def norm(self, name: str) -> tuple[Tensor, Tensor]:
        return self.get(name + ".weight"), self.get(name + ".bias")

    def layer(self, index: int) -> Layer:
        block = f"blocks.{index}."
        att, ffn = block + "att.", block + "ffn."
        names = _low_rank_names(index)
        return Layer(
            norm1=self.norm(block + "ln1"),
            mixes=torch.stack([self.get(f"{att}x_{name}").flatten() for name in MIXES]),
            rkv=torch.stack([self.get(f"{att}{name}.weight") for name in ("receptance", "key", "value")]),
            low_in={name: _padded(self.get(f"{att}{name}1").T, 0, self.ranks[name]) for name in names},
            low_out={name: _padded(self.get(f"{att}{name}2").T, 1, self.ranks[name]) for name in names},
            w0=self.get(att + "w0").flatten(),
            a0=self.get(att + "a0").flatten(),
            v0=self.get(att + "v0").flatten() if index > 0 else None,
            k_k=self.get(att + "k_k").flatten(),
            k_a=self.get(att + "k_a").flatten(),
            r_k=self.get(att + "r_k").flatten(),
            group_norm=self.norm(att + "ln_x"),
            output=self.get(att + "output.weight"),
            norm2=self.norm(block + "ln2"),
            x_k=self.get(ffn + "x_k").view(1, -1),
            key=self.get(ffn + "key.weight"),
            value=self.get(ffn + "value.weight").T.contiguous(),
        )

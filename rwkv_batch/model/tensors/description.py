"""RWKV-7 as data: every tensor of a checkpoint by name, shape and role; with those of 7a, DeepEmbed.

Torch and CUDA weights are two packings of it. Names are those of the official checkpoints; formulas and roles
those of the paper ("Goose", arXiv 2503.14456). Below, C is the width and V the vocabulary. Linear maps are
stored `[out, in]`, low-rank pairs `[in, rank]` and `[rank, out]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from rwkv_batch.ops.torch_ops import HEAD_SIZE
from rwkv_batch.ops.weights.weight import Matrix, Weight

MIXES = "rkvwag"  # the six token-shift mixes of the time mix; r, k, v first: their GEMMs have one shape
DEEP_EMBED, DEEP_RANK = 1024, 32  # numbers of a token in DeepEmbed: a matrix [32, 32]
EMBEDDING_ROWS = 4096  # normalised at a time, so that no second fp32 copy of the table is made

Activation = Literal["tanh", "sigmoid", "identity"]
LOW_RANKS: dict[str, Activation] = {"w": "tanh", "a": "identity", "g": "sigmoid", "v": "identity"}
"""The low-rank functions of the time mix, with what is applied between their two matrices: decay, in-context
learning rate, gate, value residual. Each reads the mix of its name. Layer 0 has no value residual."""


class Norm(NamedTuple):
    """A layer norm or the group norm over heads."""

    weight: Tensor  # [C]
    bias: Tensor  # [C]

    def __call__(self, x: Tensor) -> Tensor:
        """The layer norm of every row of x."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Norm":
        return Norm(self.weight.to(device, dtype), self.bias.to(device, dtype))


@dataclass(frozen=True)
class LowRankTensors:
    """`offset + activation(x inner) outer`."""

    activation: Activation
    inner: Tensor  # [C, rank]
    outer: Tensor  # [rank, C]
    offset: Tensor | None  # [C]; the gate has none


@dataclass(frozen=True)
class DeepEmbedTensors:
    """What RWKV-7a multiplies the hidden units of a channel mix with, by token: see `rwkv7.DeepEmbed`."""

    table: Tensor  # [V, 1024]
    from_embedding: Tensor  # [1024, C]
    inner: Tensor  # [C, 32]
    outer: Tensor  # [32, 4 C]
    offset: Tensor  # [4 C]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer, as they are in the checkpoint."""

    ln1: Norm
    mixes: dict[str, Tensor]  # [C] each, in the order of MIXES
    receptance: Matrix  # [C, C]
    key: Matrix  # [C, C]
    value: Matrix  # [C, C]
    output: Matrix  # [C, C]
    low_rank: dict[str, LowRankTensors]  # by the names of LOW_RANKS
    k_k: Tensor  # [C]
    k_a: Tensor  # [C]
    r_k: Tensor  # [heads, 64]
    ln_x: Norm
    ln2: Norm
    ffn_mix: Tensor  # [C]
    ffn_key: Matrix  # [4 C, C]
    ffn_value: Matrix  # [C, 4 C]
    deep_embed: DeepEmbedTensors | None  # of RWKV-7a


def low_rank_names(layer: int) -> list[str]:
    """The low-rank functions of a layer: layer 0 sets the values that the others mix in."""
    return [name for name in LOW_RANKS if layer > 0 or name != "v"]


def layer_tensors(tensors: Mapping[str, Tensor], packed: Mapping[str, Weight], layer: int) -> LayerTensors:
    """The tensors of one layer out of all of a checkpoint."""
    block, att, ffn = f"blocks.{layer}.", f"blocks.{layer}.att.", f"blocks.{layer}.ffn."

    def low_rank(name: str) -> LowRankTensors:
        inner, outer = tensors[f"{att}{name}1"], tensors[f"{att}{name}2"]
        return LowRankTensors(LOW_RANKS[name], inner, outer, tensors.get(f"{att}{name}0"))

    return LayerTensors(
        ln1=norm_tensors(tensors, block + "ln1"),
        mixes={name: tensors[f"{att}x_{name}"] for name in MIXES},
        receptance=matrix(tensors, packed, att + "receptance"),
        key=matrix(tensors, packed, att + "key"),
        value=matrix(tensors, packed, att + "value"),
        output=matrix(tensors, packed, att + "output"),
        low_rank={name: low_rank(name) for name in low_rank_names(layer)},
        k_k=tensors[att + "k_k"],
        k_a=tensors[att + "k_a"],
        r_k=tensors[att + "r_k"],
        ln_x=norm_tensors(tensors, att + "ln_x"),
        ln2=norm_tensors(tensors, block + "ln2"),
        ffn_mix=tensors[ffn + "x_k"],
        ffn_key=matrix(tensors, packed, ffn + "key"),
        ffn_value=matrix(tensors, packed, ffn + "value"),
        deep_embed=_deep_embed(tensors, ffn),
    )


def _deep_embed(tensors: Mapping[str, Tensor], ffn: str) -> DeepEmbedTensors | None:
    if f"{ffn}s0" not in tensors:
        return None
    names = ("s_emb.weight", "s_emb_x.weight", "s1", "s2", "s0")
    return DeepEmbedTensors(*(tensors[ffn + name] for name in names))


def matrix(tensors: Mapping[str, Tensor], packed: Mapping[str, Weight], name: str) -> Matrix:
    """The matrix `name.weight` of a checkpoint, packed if it is."""
    key = f"{name}.weight"
    return packed[key] if key in packed else tensors[key]


def norm_tensors(tensors: Mapping[str, Tensor], name: str) -> Norm:
    """The norm of that name out of all tensors of a checkpoint."""
    return Norm(tensors[name + ".weight"], tensors[name + ".bias"])


def shapes(
    layers: int, width: int, vocab: int, rank: Callable[[str], int], deep_embed: bool = False
) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model, with its shape. `rank(name)`: columns of the inner matrix of that name."""
    vector, square = (width,), (width, width)
    found: dict[str, tuple[int, ...]] = {"emb.weight": (vocab, width), "head.weight": (vocab, width)}
    norms = ["blocks.0.ln0", "ln_out"]
    for layer in range(layers):
        block, att, ffn = f"blocks.{layer}.", f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
        norms += [block + "ln1", block + "ln2", att + "ln_x"]
        found |= {att + name: vector for name in (*(f"x_{mix}" for mix in MIXES), "k_k", "k_a")}
        found |= {att + "r_k": (width // HEAD_SIZE, HEAD_SIZE)}
        for name in low_rank_names(layer):
            inner = f"{att}{name}1"
            found |= {inner: (width, rank(inner)), f"{att}{name}2": (rank(inner), width)}
            found |= {} if name == "g" else {f"{att}{name}0": vector}
        found |= {f"{att}{name}.weight": square for name in ("receptance", "key", "value", "output")}
        found |= {
            ffn + "x_k": vector,
            ffn + "key.weight": (4 * width, width),
            ffn + "value.weight": (width, 4 * width),
        }
        if deep_embed:
            found |= {
                ffn + "s_emb.weight": (vocab, DEEP_EMBED),
                ffn + "s_emb_x.weight": (DEEP_EMBED, width),
                ffn + "s1": (width, DEEP_RANK),
                ffn + "s2": (DEEP_RANK, 4 * width),
                ffn + "s0": (4 * width,),
            }
    return found | {f"{norm}.{part}": vector for norm in norms for part in ("weight", "bias")}


def normed_embedding(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The embedding with layer norm ln0 of every row already applied, here or in the file: `[V, C]`."""
    table = tensors["emb.weight"]
    if "blocks.0.ln0.weight" not in tensors:
        return table.to(device, dtype)
    norm = norm_tensors(tensors, "blocks.0.ln0").to(device, torch.float32)
    normed = torch.empty(table.shape, device=device, dtype=dtype)
    for rows in (slice(start, start + EMBEDDING_ROWS) for start in range(0, len(table), EMBEDDING_ROWS)):
        normed[rows] = norm(table[rows].to(device, torch.float32))
    return normed

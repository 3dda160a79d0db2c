"""RWKV-6 (x060) as data: every tensor of a checkpoint by name, shape and role.

Names are those of the official checkpoints; formulas and roles those of the paper ("Eagle and Finch", arXiv
2404.05892). Below, C is the width, F the hidden units of a channel mix and D a rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from rwkv_batch.model.tensors.description import Norm, matrix, norm_tensors
from rwkv_batch.ops.torch_ops import HEAD_SIZE
from rwkv_batch.ops.weights.weight import Matrix, Weight

RWKV6_MIXES = "wkvrg"  # the token-shift mixes of the time mix, in the order of `time_maa_w2`


@dataclass(frozen=True)
class Rwkv6LayerTensors:
    """The tensors of one layer, as they are in the checkpoint."""

    ln1: Norm
    mix_x: Tensor  # [C]: the mix from which the others are made
    mixes: list[Tensor]  # [C] each, in the order of RWKV6_MIXES
    mix_inner: Tensor  # [C, 5 D]
    mix_outer: Tensor  # [5, D, C]
    decay: Tensor  # [C]
    decay_inner: Tensor  # [C, D]
    decay_outer: Tensor  # [D, C]
    bonus: Tensor  # [heads, 64]: how much a token reads of its own value
    receptance: Matrix  # [C, C]
    key: Matrix  # [C, C]
    value: Matrix  # [C, C]
    gate: Matrix  # [C, C]
    output: Matrix  # [C, C]
    ln_x: Norm
    ln2: Norm
    ffn_mix_k: Tensor  # [C]
    ffn_mix_r: Tensor  # [C]
    ffn_key: Matrix  # [F, C]
    ffn_value: Matrix  # [C, F]
    ffn_receptance: Matrix  # [C, C]


def rwkv6_layer_tensors(
    tensors: Mapping[str, Tensor], packed: Mapping[str, Weight], layer: int
) -> Rwkv6LayerTensors:
    """The tensors of one layer out of all of a checkpoint."""
    block, att, ffn = f"blocks.{layer}.", f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
    return Rwkv6LayerTensors(
        ln1=norm_tensors(tensors, block + "ln1"),
        mix_x=tensors[att + "time_maa_x"],
        mixes=[tensors[f"{att}time_maa_{name}"] for name in RWKV6_MIXES],
        mix_inner=tensors[att + "time_maa_w1"],
        mix_outer=tensors[att + "time_maa_w2"],
        decay=tensors[att + "time_decay"],
        decay_inner=tensors[att + "time_decay_w1"],
        decay_outer=tensors[att + "time_decay_w2"],
        bonus=tensors[att + "time_faaaa"],
        receptance=matrix(tensors, packed, att + "receptance"),
        key=matrix(tensors, packed, att + "key"),
        value=matrix(tensors, packed, att + "value"),
        gate=matrix(tensors, packed, att + "gate"),
        output=matrix(tensors, packed, att + "output"),
        ln_x=norm_tensors(tensors, att + "ln_x"),
        ln2=norm_tensors(tensors, block + "ln2"),
        ffn_mix_k=tensors[ffn + "time_maa_k"],
        ffn_mix_r=tensors[ffn + "time_maa_r"],
        ffn_key=matrix(tensors, packed, ffn + "key"),
        ffn_value=matrix(tensors, packed, ffn + "value"),
        ffn_receptance=matrix(tensors, packed, ffn + "receptance"),
    )


def rwkv6_shapes(
    layers: int, width: int, vocab: int, size: Callable[[str, int], int]
) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model, with its shape. `size(name, dimension)`: that of a tensor in the file."""
    vector, square = (width,), (width, width)
    found: dict[str, tuple[int, ...]] = {"emb.weight": (vocab, width), "head.weight": (vocab, width)}
    norms = ["blocks.0.ln0", "ln_out"]
    for layer in range(layers):
        block, att, ffn = f"blocks.{layer}.", f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
        norms += [block + "ln1", block + "ln2", att + "ln_x"]
        found |= {f"{att}time_maa_{name}": vector for name in "x" + RWKV6_MIXES}
        count, rank = len(RWKV6_MIXES), size(att + "time_maa_w2", 1)
        decay_rank, hidden = size(att + "time_decay_w1", 1), size(ffn + "key.weight", 0)
        found |= {
            att + "time_maa_w1": (width, count * rank),
            att + "time_maa_w2": (count, rank, width),
            att + "time_decay": vector,
            att + "time_decay_w1": (width, decay_rank),
            att + "time_decay_w2": (decay_rank, width),
            att + "time_faaaa": (width // HEAD_SIZE, HEAD_SIZE),
            ffn + "time_maa_k": vector,
            ffn + "time_maa_r": vector,
            ffn + "key.weight": (hidden, width),
            ffn + "value.weight": (width, hidden),
            ffn + "receptance.weight": square,
        }
        found |= {f"{att}{n}.weight": square for n in ("receptance", "key", "value", "gate", "output")}
    return found | {f"{norm}.{part}": vector for norm in norms for part in ("weight", "bias")}

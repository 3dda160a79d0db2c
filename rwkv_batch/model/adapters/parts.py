"""What an adapter does to one tensor: a class for each method, with its formula.

Weights W are `[out, in]`, as in checkpoints; r is the rank of the adapter. A part knows its tensors as they
are in the file. `merged` takes W in fp32 and returns W' in fp32; `factor` is the scaling of the training, by
which methods that are `scaled` multiply their change. LoRA and shards only add to W, so that they can also be
applied beside it: `x W^T + factor (x A^T) B^T`, and `x W^T + factor s D^T` with
`s[j] = sum of x[k] over k mod r = j`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

DORA_EPS = 1e-6


@dataclass(frozen=True)
class Scaling:
    """What a change is multiplied with: `factor`, or `alpha / rank`. Exactly one is given."""

    factor: float | None = None
    alpha: float | None = None

    def of(self, rank: int) -> float:
        """The factor for a change of that rank."""
        if self.factor is not None:
            return self.factor
        assert self.alpha is not None
        return self.alpha / rank


@dataclass(frozen=True)
class LoraPart:
    """`W' = W + factor B A`: LoRA (arXiv 2106.09685), as RWKV-PEFT and RWKV-LM-RLHF train it."""

    scaled: ClassVar = True
    inner: Tensor  # A [r, in]
    outer: Tensor  # B [out, r]

    @property
    def rank(self) -> int:
        return len(self.inner)

    def merged(self, weight: Tensor, factor: float) -> Tensor:
        return weight.addmm(self.outer.float(), self.inner.float(), alpha=factor)


@dataclass(frozen=True)
class DoraPart:
    """`W' = M V / (|V| + 1e-6)` with `V = W + factor B A`: DoRA as RWKV-LM-RLHF trains it.

    `|V|` is the norm of each column, over the outputs. (The paper, arXiv 2402.09353, says column too;
    Hugging Face's PEFT takes rows, so its files are others.)
    """

    scaled: ClassVar = True
    lora: LoraPart
    magnitude: Tensor  # M [1, in]

    @property
    def rank(self) -> int:
        return self.lora.rank

    def merged(self, weight: Tensor, factor: float) -> Tensor:
        changed = self.lora.merged(weight, factor)
        length: Tensor = changed.norm(dim=0, keepdim=True)
        return changed * (self.magnitude.float() / (length + DORA_EPS))


@dataclass(frozen=True)
class PissaPart:
    """`W' = W - B0 A0 + B A`: PiSSA (arXiv 2404.02948), whose training begins at B0 A0, a part of W.

    It has no scaling (RWKV-PEFT: merge/merge_pissa.py).
    """

    scaled: ClassVar = False
    lora: LoraPart
    init: LoraPart  # A0 and B0, from a file of their own

    @property
    def rank(self) -> int:
        return self.lora.rank

    def merged(self, weight: Tensor, factor: float) -> Tensor:
        return self.lora.merged(self.init.merged(weight, -factor), factor)


@dataclass(frozen=True)
class BonePart:
    """`W'[a, b] = W[a, b] + W[a, b] D[b] + D[b]` for the r x r blocks `[a, b]` of W: Bone, or DiSHA "bat".

    The formula is that of RWKV-PEFT (merge/merge_disha.py, "row") and RWKV-LM-RLHF. It has no scaling.
    """

    scaled: ClassVar = False
    blocks: Tensor  # D [in / r, r, r]

    @property
    def rank(self) -> int:
        return self.blocks.shape[-1]

    def merged(self, weight: Tensor, factor: float) -> Tensor:
        (out, inputs), rank, blocks = weight.shape, self.rank, self.blocks.float()
        grid = weight.view(out // rank, rank, inputs // rank, rank).transpose(1, 2)  # [a, b, r, r]
        return (grid + grid @ blocks + blocks).transpose(1, 2).reshape(out, inputs)


@dataclass(frozen=True)
class ShardPart:
    """`W'[:, j] = W[:, j] + factor D[:, j mod r]`: one shard D, shared by all runs of r inputs.

    This is DiSHA "bone" of RWKV-PEFT (`.disha` [r, out], merge/merge_disha.py), which has no scaling; and
    MiSS (arXiv 2409.15371) as rwkv_lightning_cuda trains it (`.weight.D` [out, r], src/miss/README.md), whose
    factor is alpha / r. Where r does not divide the inputs, the last run is cut short.
    """

    shard: Tensor  # D [out, r]
    scaled: bool

    @property
    def rank(self) -> int:
        return self.shard.shape[1]

    def merged(self, weight: Tensor, factor: float) -> Tensor:
        inputs = weight.shape[1]
        runs = math.ceil(inputs / self.rank)
        return weight.add(self.shard.float().repeat(1, runs)[:, :inputs], alpha=factor)


@dataclass(frozen=True)
class FullPart:
    """The tensor itself, in place of the model's: full and hybrid training."""

    scaled: ClassVar = False
    rank: ClassVar = 1
    tensor: Tensor  # in the shape of the model's

    def merged(self, weight: Tensor, factor: float) -> Tensor:
        return self.tensor


Part = LoraPart | DoraPart | PissaPart | BonePart | ShardPart | FullPart

"""MoLE: a mixture of LoRA experts in the channel mix of RWKV-7, as RWKV-LM-RLHF trains it.

For the shifted input x of a token, expert e gives `FFN_e(x) = V_e relu(K_e x)^2`, where K_e and V_e are the
model's key and value, each with a change of the expert's own. The output is `sum of p_e FFN_e(x)`. There are
E experts, k of them active; the router has scores s for all but expert 0. Two rules give p, and a file does
not say which it was trained with:

    topk0    expert 0 has score 0; p = softmax of the k largest scores
    shared   p_0 = 1; beside it, p = softmax of the k - 1 largest of s. This trainer (main/src/rwkv7.py) took
             place i of s for expert i, so place 0 adds nothing where it is chosen, and expert E - 1 is never
             used. It is kept, as the files were trained so.

The model's key is applied to x once for all experts, and its value to the sum of their hidden units, as both
are linear.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rwkv_batch.ops.linear import Linear

RouterRule = Literal["topk0", "shared"]
TOGETHER = 16  # tokens whose products with Bone's blocks are made at once, as these are large


class LoraExpert(NamedTuple):
    """`W_e = W + outer inner`."""

    inner: Tensor  # [r, in]
    outer: Tensor  # [out, r], scaled


class BoneExpert(NamedTuple):
    """`W_e[a, b] = W[a, b] + W[a, b] D[b] + D[b]` for the r x r blocks `[a, b]`."""

    blocks: Tensor  # D [in / r, r, r]


@dataclass(frozen=True)
class MoleTensors:
    """The experts of one layer."""

    router: Tensor  # [E - 1, C]
    bias: Tensor | None  # [E - 1]
    active: int  # k
    experts: tuple[tuple[LoraExpert | BoneExpert, LoraExpert | BoneExpert], ...]  # of key and value


@dataclass(frozen=True)
class Mole:
    """The experts of a model."""

    rule: RouterRule
    layers: tuple[MoleTensors, ...]


Change = Callable[[Tensor], tuple[Tensor | None, Tensor]]
"""x -> u, y, so that `W_e x = W (x + u) + y`; u None is zero."""


@dataclass(frozen=True)
class ExpertMix:
    """Packed experts of one layer."""

    rule: RouterRule
    active: int
    router: Linear
    changes: list[tuple[Change, Change]]

    def __call__(self, x: Tensor, key: Linear, value: Linear) -> Tensor:
        """x `[T, C]`, shifted; key and value of the model. Returns what is added to x's stream."""
        shares, shared = self.shares(x), key(x)
        hidden, added = torch.zeros_like(shared), torch.zeros_like(x)
        for share, (of_key, of_value) in zip(shares.unbind(1), self.changes, strict=True):
            rows = share.nonzero().squeeze(1)
            if not len(rows):
                continue
            u, y = of_key(x[rows])
            units = shared[rows].add_(y) if u is None else shared[rows].add_(y).add_(key(u))
            units = units.relu_().square_()
            u, y = of_value(units)
            own = share[rows].unsqueeze(1)
            hidden.index_add_(0, rows, own * (units if u is None else units + u))
            added.index_add_(0, rows, own * y)
        return value(hidden).add_(added)

    def shares(self, x: Tensor) -> Tensor:
        """How much of each expert goes into each token, by the rule: `[T, E]`."""
        scores = self.router(x).float()
        shares = scores.new_zeros(len(x), scores.shape[1] + 1)
        if self.rule == "topk0":
            scores = torch.cat([scores.new_zeros(len(x), 1), scores], 1)
            best = scores.topk(self.active)
        else:
            best = scores.topk(self.active - 1)
        shares.scatter_(1, best.indices, best.values.softmax(1))
        if self.rule == "shared":
            shares[:, 0] = 1
        return shares.to(x.dtype)


def bone_change(blocks: Tensor, outputs: int) -> Change:
    """That of Bone's D `[in / r, r, r]`: `u[b] = D[b] x[b]`, and y[a] the sum of all u[b], for every a."""
    count, rank, _ = blocks.shape

    def change(x: Tensor) -> tuple[Tensor | None, Tensor]:
        # Products and sums by element come out the same, bit for bit, beside any other rows.
        pieces = [(blocks * part.view(-1, count, 1, rank)).sum(-1) for part in x.split(TOGETHER)]
        u = torch.cat(pieces)  # [T, in / r, r]
        return u.flatten(1), u.sum(1).repeat(1, outputs // rank)

    return change


def lora_change(inner: Linear, outer: Linear) -> Change:
    """That of a low-rank pair: u = 0, `y = outer inner x`."""
    return lambda x: (None, outer(inner(x)))

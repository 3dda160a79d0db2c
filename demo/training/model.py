"""RWKV-7 for training: whole sequences in parallel, over a compact vocabulary.

Parameter names are those of the official checkpoints, but for `code_in` and `code_out`: the rows of emb and
head are a row of the known ids, or one that all others share, plus the code of the id
(rwkv_batch/bundled/codes.py) times a matrix.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo.training.wkv_chunk import wkv_chunked
from rwkv_batch.bundled.codes import BITS, codes, rows

try:
    from demo.training.wkv_triton import KEPT, wkv_tokens
except ImportError:  # torch for a CPU comes without Triton
    KEPT = 0

LAYERS, WIDTH, HEAD = 8, 256, 64
RANK, GATE_RANK = 32, 64


def wkv(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """`wkv_chunked`, on a GPU by a kernel where that takes the length."""
    if inputs[0].is_cuda and KEPT and inputs[0].shape[1] % KEPT == 0:
        return wkv_tokens(*inputs)
    return wkv_chunked(*inputs)


def shifted(x: Tensor, inner: Tensor) -> Tensor:
    """The previous token's row of `[tokens, C]`; zero where `inner` `[tokens, 1]` is 0, at the start of a text."""
    return F.pad(x, (0, 0, 1, -1)) * inner.to(x.dtype)


def mixed(x: Tensor, step: Tensor, share: Tensor) -> Tensor:
    return torch.addcmul(x, step, share.view(-1).to(x.dtype))


def lowered(x: Tensor) -> Tensor:
    """In the precision of the products under autocast, which the mixtures of two tokens do not need to exceed."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class TrainingTimeMix(nn.Module):
    """The recurrent half of a block."""

    x_r: Tensor
    x_w: Tensor
    x_k: Tensor
    x_v: Tensor
    x_a: Tensor
    x_g: Tensor
    w0: Tensor
    w1: Tensor
    w2: Tensor
    a0: Tensor
    a1: Tensor
    a2: Tensor
    v0: Tensor
    v1: Tensor
    v2: Tensor
    g1: Tensor
    g2: Tensor
    time_state: nn.Parameter | None

    def __init__(self, layer: int, layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        depth, rest = layer / max(1, layers - 1), 1 - layer / layers
        ramp = torch.arange(width) / (width - 1)
        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            setattr(self, f"x_{name}", nn.Parameter((1 - ramp ** (power * rest)).view(1, 1, -1)))

        def low_rank(name: str, rank: int, bias: Tensor | None) -> None:
            setattr(self, f"{name}1", nn.Parameter(torch.zeros(width, rank)))
            setattr(self, f"{name}2", nn.Parameter(nn.init.orthogonal_(torch.empty(rank, width), 0.1)))
            if bias is not None:
                setattr(self, f"{name}0", nn.Parameter(bias.view(1, 1, -1)))

        low_rank(
            "w", RANK, -6.5 + 5 * ramp ** (0.85 + depth**0.5)
        )  # from long to short memory across the channels
        low_rank("a", RANK, torch.zeros(width))
        if layer:
            low_rank("v", RANK, torch.ones(width))
        low_rank("g", GATE_RANK, None)
        self.k_k = nn.Parameter(torch.full((1, 1, width), 0.85))
        self.k_a = nn.Parameter(torch.ones(1, 1, width))
        self.r_k = nn.Parameter(torch.zeros(width // HEAD, HEAD))
        self.receptance, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        bound = width**-0.5
        for linear, scale in ((self.receptance, 0.5), (self.key, 0.1), (self.value, 0.5)):
            nn.init.uniform_(linear.weight, -scale * bound, scale * bound)
        nn.init.zeros_(self.output.weight)
        self.ln_x = nn.GroupNorm(width // HEAD, width, eps=64e-5)
        self.register_parameter("time_state", None)  # [heads, value, key] where a start state is trained

    def before(self, h: Tensor, inner: Tensor, v_first: Tensor | None) -> tuple[list[Tensor], Tensor, Tensor]:
        """`[tokens, width]` -> what the recurrence takes, fp32, the gate, and the values of the first layer."""
        heads = (-1, self.width // HEAD, HEAD)
        step = shifted(h, inner) - h
        r, k, v = (
            linear(mixed(h, step, mix)).float()
            for linear, mix in ((self.receptance, self.x_r), (self.key, self.x_k), (self.value, self.x_v))
        )

        def low_rank(name: str, squash: Callable[[Tensor], Tensor]) -> Tensor:
            """`x0 + squash(h x1) x2`, fp32."""
            first, second = getattr(self, f"{name}1"), getattr(self, f"{name}2")
            change = squash(mixed(h, step, getattr(self, f"x_{name}")) @ first) @ second
            return getattr(self, f"{name}0").view(-1) + change.float()

        def as_it_is(x: Tensor) -> Tensor:
            return x

        w_log = -math.exp(-0.5) * torch.sigmoid(low_rank("w", torch.tanh))
        a = torch.sigmoid(low_rank("a", as_it_is))
        gate = torch.sigmoid(mixed(h, step, self.x_g) @ self.g1) @ self.g2
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(low_rank("v", as_it_is))
        kk = F.normalize((k * self.k_k.view(-1)).view(heads), dim=-1)
        k = k * (1 + (a - 1) * self.k_a.view(-1))
        return (
            [r.view(heads), w_log.view(heads), k.view(heads), v.view(heads), kk, a.view(heads)],
            gate,
            v_first,
        )

    def recurrence(self, parts: list[Tensor], length: int) -> Tensor:
        """Texts of so many tokens each: `[tokens, heads, 64]` six times -> the same shape."""
        parts = [x.unflatten(0, (-1, length)) for x in parts]
        batch, _, heads, _ = parts[0].shape
        if self.time_state is None:
            start = torch.zeros(heads, HEAD, HEAD, device=parts[0].device)
        else:
            start = self.time_state
        with torch.autocast(parts[0].device.type, enabled=False):
            y, _ = wkv(*parts, start.expand(batch, -1, -1, -1))
        return y.flatten(0, 1)

    def after(self, y: Tensor, parts: list[Tensor], gate: Tensor) -> Tensor:
        """What the recurrence gave -> `[tokens, width]`."""
        r, _, k, v, _, _ = parts
        y = F.layer_norm(y, (HEAD,), eps=self.ln_x.eps).flatten(1)
        y = y * self.ln_x.weight + self.ln_x.bias  # with the line above: ln_x, but with a faster gradient
        y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * v).flatten(1)
        return self.output(y * gate)


class TrainingChannelMix(nn.Module):
    """The feed-forward half of a block."""

    def __init__(self, layer: int, layers: int, width: int) -> None:
        super().__init__()
        ramp = torch.arange(width) / (width - 1)
        self.x_k = nn.Parameter((1 - ramp ** ((1 - layer / layers) ** 4)).view(1, 1, -1))
        self.key, self.value = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        nn.init.uniform_(self.key.weight, -0.5 * width**-0.5, 0.5 * width**-0.5)
        nn.init.zeros_(self.value.weight)

    def forward(self, h: Tensor, inner: Tensor) -> Tensor:
        return self.value(torch.relu(self.key(mixed(h, shifted(h, inner) - h, self.x_k))).square())


class Block(nn.Module):
    """One layer."""

    def __init__(self, layer: int, layers: int, width: int) -> None:
        super().__init__()
        if not layer:
            self.ln0 = nn.LayerNorm(width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.att, self.ffn = TrainingTimeMix(layer, layers, width), TrainingChannelMix(layer, layers, width)

    def before(self, x: Tensor, inner: Tensor, v_first: Tensor | None) -> tuple[list[Tensor], Tensor, Tensor]:
        """Up to the recurrence."""
        return self.att.before(lowered(self.ln1(x)), inner, v_first)

    def after(self, x: Tensor, inner: Tensor, y: Tensor, parts: list[Tensor], gate: Tensor) -> Tensor:
        """From the recurrence on."""
        x = x + self.att.after(y, parts, gate)
        return x + self.ffn(lowered(self.ln2(x)), inner)


class TrainingModel(nn.Module):
    """The whole model over all 65536 ids.

    `emb` and `head` have one row for each id of `known`, and a last one that all other ids share.
    """

    table: Tensor
    codes: Tensor

    def __init__(self, known: np.ndarray, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("table", torch.from_numpy(rows(known)), persistent=False)
        self.register_buffer("codes", torch.from_numpy(codes()), persistent=False)
        self.emb = nn.Embedding(len(known) + 1, width)
        nn.init.uniform_(self.emb.weight, -0.02, 0.02)
        self.blocks = nn.ModuleList(Block(i, layers, width) for i in range(layers))
        self.ln_out = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(known) + 1, bias=False)
        nn.init.orthogonal_(self.head.weight, 0.5)
        self.code_in = nn.Parameter(nn.init.orthogonal_(torch.empty(BITS, width), 0.2))
        self.code_out = nn.Parameter(nn.init.orthogonal_(torch.empty(BITS, width), 0.1))

    def hidden(self, tokens: Tensor) -> Tensor:
        """`[B, T]` ids -> `[B, T, width]` fp32, before the head."""
        ids = tokens.flatten()
        length = tokens.shape[1]
        inner = (torch.arange(len(ids), device=ids.device) % length != 0).float().unsqueeze(1)
        x = self.blocks[0].ln0(F.embedding(self.table[ids], self.emb.weight) + self.codes[ids] @ self.code_in)
        v_first = None
        for block in self.blocks:
            parts, gate, v_first = block.before(x, inner, v_first)
            y = block.att.recurrence(parts, length)
            x = block.after(x, inner, y, parts, gate)
        return self.ln_out(x.float()).unflatten(0, tokens.shape)

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        """The rows of the head for `ids`, or for all 65536: `[ids, width]`."""
        table, signs = (self.table, self.codes) if ids is None else (self.table[ids], self.codes[ids])
        return F.embedding(table, self.head.weight) + signs @ self.code_out

    def compile(self) -> None:
        """Fuse what stands between the products and the recurrences. The first use of it takes a minute."""
        for block in self.blocks:
            block.before, block.after = torch.compile(block.before), torch.compile(block.after)

"""RWKV-7 for training: whole sequences in parallel, over a compact vocabulary.

Parameter names are those of the official checkpoints, but for `code_in` and `code_out` (demo/codes.py): the rows
of emb and head are a row of the known ids, or one that all others share, plus the code of the id times a matrix.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo.codes import BITS, codes, rows
from demo.wkv_chunk import wkv_chunked

LAYERS, WIDTH, HEAD = 8, 256, 64
RANK, GATE_RANK = 32, 64


def shifted(x: Tensor) -> Tensor:
    """The previous token's row of `[B, T, C]`, zero before the first."""
    return F.pad(x, (0, 0, 1, -1))


def mixed(x: Tensor, step: Tensor, share: Tensor) -> Tensor:
    return torch.addcmul(x, step, share.to(x.dtype))


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

    def forward(self, h: Tensor, v_first: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, length, width = h.shape
        step = shifted(h) - h
        r, k, v = (
            linear(mixed(h, step, mix))
            for linear, mix in ((self.receptance, self.x_r), (self.key, self.x_k), (self.value, self.x_v))
        )
        r, k, v = r.float(), k.float(), v.float()
        w_log = -math.exp(-0.5) * torch.sigmoid(
            (self.w0 + torch.tanh(mixed(h, step, self.x_w) @ self.w1) @ self.w2).float()
        )
        a = torch.sigmoid((self.a0 + mixed(h, step, self.x_a) @ self.a1 @ self.a2).float())
        g = torch.sigmoid(mixed(h, step, self.x_g) @ self.g1) @ self.g2
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(
                (self.v0 + mixed(h, step, self.x_v) @ self.v1 @ self.v2).float()
            )
        heads = (batch, length, width // HEAD, HEAD)
        kk = F.normalize((k * self.k_k).view(heads), dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        r, w_log, k, values, a = (x.view(heads) for x in (r, w_log, k, v, a))
        if self.time_state is None:
            state = torch.zeros(batch, heads[2], HEAD, HEAD, device=h.device)
        else:
            state = self.time_state.expand(batch, -1, -1, -1)
        with torch.autocast(h.device.type, enabled=False):
            y, _ = wkv_chunked(r, w_log, k, values, kk, a, state)
        y = F.layer_norm(y, (HEAD,), eps=self.ln_x.eps).reshape(
            h.shape
        )  # with the next line: ln_x, but with a faster gradient
        y = y * self.ln_x.weight + self.ln_x.bias
        y = y + ((r * k * self.r_k).sum(-1, keepdim=True) * values).reshape(batch, length, width)
        return self.output(y * g), v_first


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

    def forward(self, h: Tensor) -> Tensor:
        return self.value(torch.relu(self.key(mixed(h, shifted(h) - h, self.x_k))).square())


class Block(nn.Module):
    """One layer."""

    def __init__(self, layer: int, layers: int, width: int) -> None:
        super().__init__()
        if not layer:
            self.ln0 = nn.LayerNorm(width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.att, self.ffn = TrainingTimeMix(layer, layers, width), TrainingChannelMix(layer, layers, width)

    def forward(self, x: Tensor, v_first: Tensor | None) -> tuple[Tensor, Tensor]:
        if v_first is None:
            x = self.ln0(x)
        y, v_first = self.att(lowered(self.ln1(x)), v_first)
        x = x + y
        return x + self.ffn(lowered(self.ln2(x))), v_first


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
        x = self.emb(self.table[tokens]) + self.codes[tokens] @ self.code_in
        v_first = None
        for block in self.blocks:
            x, v_first = block(x, v_first)
        return self.ln_out(x.float())

    def head_rows(self, ids: Tensor | None = None) -> Tensor:
        """The rows of the head for `ids`, or for all 65536: `[ids, width]`."""
        table, signs = (self.table, self.codes) if ids is None else (self.table[ids], self.codes[ids])
        return self.head.weight[table] + signs @ self.code_out

"""RWKV-7 for training: whole sequences in parallel, over a compact vocabulary.

Parameter names are those of the official checkpoints.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo.wkv_chunk import wkv_chunked

LAYERS, WIDTH, HEAD = 6, 192, 64
RANK, GATE_RANK = 32, 64


def shifted(x: Tensor) -> Tensor:
    """The previous token's row of `[B, T, C]`, zero before the first."""
    return F.pad(x, (0, 0, 1, -1))


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

    def __init__(self, layer: int) -> None:
        super().__init__()
        depth, rest = layer / max(1, LAYERS - 1), 1 - layer / LAYERS
        ramp = torch.arange(WIDTH) / (WIDTH - 1)
        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            setattr(self, f"x_{name}", nn.Parameter((1 - ramp ** (power * rest)).view(1, 1, -1)))

        def low_rank(name: str, rank: int, bias: Tensor | None) -> None:
            setattr(self, f"{name}1", nn.Parameter(torch.zeros(WIDTH, rank)))
            setattr(self, f"{name}2", nn.Parameter(nn.init.orthogonal_(torch.empty(rank, WIDTH), 0.1)))
            if bias is not None:
                setattr(self, f"{name}0", nn.Parameter(bias.view(1, 1, -1)))

        low_rank(
            "w", RANK, -6.5 + 5 * ramp ** (0.85 + depth**0.5)
        )  # from long to short memory across the channels
        low_rank("a", RANK, torch.zeros(WIDTH))
        if layer:
            low_rank("v", RANK, torch.ones(WIDTH))
        low_rank("g", GATE_RANK, None)
        self.k_k = nn.Parameter(torch.full((1, 1, WIDTH), 0.85))
        self.k_a = nn.Parameter(torch.ones(1, 1, WIDTH))
        self.r_k = nn.Parameter(torch.zeros(WIDTH // HEAD, HEAD))
        self.receptance, self.key, self.value, self.output = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        bound = WIDTH**-0.5
        for linear, scale in ((self.receptance, 0.5), (self.key, 0.1), (self.value, 0.5)):
            nn.init.uniform_(linear.weight, -scale * bound, scale * bound)
        nn.init.zeros_(self.output.weight)
        self.ln_x = nn.GroupNorm(WIDTH // HEAD, WIDTH, eps=64e-5)

    def forward(self, h: Tensor, v_first: Tensor | None) -> tuple[Tensor, Tensor]:
        batch, length, width = h.shape
        step = shifted(h) - h
        r, k, v = (
            linear(h + step * mix)
            for linear, mix in ((self.receptance, self.x_r), (self.key, self.x_k), (self.value, self.x_v))
        )
        r, k, v = r.float(), k.float(), v.float()
        w_log = -math.exp(-0.5) * torch.sigmoid(
            (self.w0 + torch.tanh((h + step * self.x_w) @ self.w1) @ self.w2).float()
        )
        a = torch.sigmoid((self.a0 + (h + step * self.x_a) @ self.a1 @ self.a2).float())
        g = torch.sigmoid((h + step * self.x_g) @ self.g1) @ self.g2
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(
                (self.v0 + (h + step * self.x_v) @ self.v1 @ self.v2).float()
            )
        heads = (batch, length, width // HEAD, HEAD)
        kk = F.normalize((k * self.k_k).view(heads), dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        r, w_log, k, values, a = (x.view(heads) for x in (r, w_log, k, v, a))
        state = torch.zeros(batch, heads[2], HEAD, HEAD, device=h.device)
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

    def __init__(self, layer: int) -> None:
        super().__init__()
        ramp = torch.arange(WIDTH) / (WIDTH - 1)
        self.x_k = nn.Parameter((1 - ramp ** ((1 - layer / LAYERS) ** 4)).view(1, 1, -1))
        self.key, self.value = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )
        nn.init.uniform_(self.key.weight, -0.5 * WIDTH**-0.5, 0.5 * WIDTH**-0.5)
        nn.init.zeros_(self.value.weight)

    def forward(self, h: Tensor) -> Tensor:
        return self.value(torch.relu(self.key(h + (shifted(h) - h) * self.x_k)) ** 2)


class Block(nn.Module):
    """One layer."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        if not layer:
            self.ln0 = nn.LayerNorm(WIDTH)
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.att, self.ffn = TrainingTimeMix(layer), TrainingChannelMix(layer)

    def forward(self, x: Tensor, v_first: Tensor | None) -> tuple[Tensor, Tensor]:
        if v_first is None:
            x = self.ln0(x)
        y, v_first = self.att(self.ln1(x), v_first)
        x = x + y
        return x + self.ffn(self.ln2(x)), v_first


class TrainingModel(nn.Module):
    """The whole model.

    `emb` and `head` have one row for each known id, and a last one that all other ids share.
    """

    def __init__(self, known: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(known + 1, WIDTH)
        nn.init.uniform_(self.emb.weight, -0.02, 0.02)
        self.blocks = nn.ModuleList(Block(i) for i in range(LAYERS))
        self.ln_out = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, known + 1, bias=False)
        nn.init.orthogonal_(self.head.weight, 0.5)

    def hidden(self, tokens: Tensor) -> Tensor:
        """`[B, T]` rows of the compact vocabulary -> `[B, T, WIDTH]` fp32, before the head."""
        x = self.emb(tokens)
        v_first = None
        for block in self.blocks:
            x, v_first = block(x, v_first)
        return self.ln_out(x.float())

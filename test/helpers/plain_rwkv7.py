"""RWKV-7 in fp64, token by token, written down from the formulas of the paper (arXiv 2503.14456).

A test gives it its own linear maps or channel mix, where the product has another form of the same.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import group_norm, layer_norm, normalize

Product = Callable[[str, Tensor], Tensor]  # (name of a weight, x [in]) -> [out]
ChannelMix = Callable[[int, Tensor], Tensor]  # (layer, shifted x [C]) -> [C]


def plain_logits(
    tensors: dict[str, Tensor],
    tokens: list[int],
    product: Product | None = None,
    channel_mix: ChannelMix | None = None,
    offsets: Tensor | None = None,
    wkv: Tensor | None = None,
) -> Tensor:
    """The logits after the tokens.

    offsets `[layers, C]`: time_offset, by which what is read out of the state is scaled. wkv `[layers, heads,
    64, 64]`: the state before the first token; None: zero.
    """
    w = {name: tensor.double().squeeze() for name, tensor in tensors.items()}
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    width = w["ln_out.weight"].numel()
    product = product or (lambda name, x: w[name] @ x)
    channel_mix = channel_mix or (
        lambda layer, x: product(
            f"blocks.{layer}.ffn.value.weight", product(f"blocks.{layer}.ffn.key.weight", x).relu() ** 2
        )
    )

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, (width,), w[name + ".weight"], w[name + ".bias"])

    shift = torch.zeros(layers, 2, width, dtype=torch.double)
    state = (
        torch.zeros(layers, width // 64, 64, 64, dtype=torch.double) if wkv is None else wkv.double().clone()
    )
    scales = torch.ones(layers, width) if offsets is None else 1 + offsets.double()
    for token in tokens:
        x = norm(w["emb.weight"][token], "blocks.0.ln0")
        for layer in range(layers):
            block, att = f"blocks.{layer}.", f"blocks.{layer}.att."
            h = norm(x, block + "ln1")
            d, shift[layer, 0] = shift[layer, 0] - h, h
            xr, xw, xk, xv, xa, xg = (h + d * w[f"{att}x_{name}"] for name in "rwkvag")
            r, k, v = (
                product(f"{att}{n}.weight", y) for n, y in (("receptance", xr), ("key", xk), ("value", xv))
            )
            decay = torch.exp(
                -0.6065306597126334
                * torch.sigmoid(w[att + "w0"] + torch.tanh(xw @ w[att + "w1"]) @ w[att + "w2"])
            )
            a = torch.sigmoid(w[att + "a0"] + (xa @ w[att + "a1"]) @ w[att + "a2"])
            g = torch.sigmoid(xg @ w[att + "g1"]) @ w[att + "g2"]
            kk = normalize((k * w[att + "k_k"]).view(-1, 64), dim=-1)
            k = k * (1 + (a - 1) * w[att + "k_a"])
            if layer == 0:
                first = v
            else:
                v = v + (first - v) * torch.sigmoid(w[att + "v0"] + (xv @ w[att + "v1"]) @ w[att + "v2"])
            rh, wh, kh, vh, ah = (t.view(-1, 64) for t in (r, decay, k, v, a))
            old = state[layer]
            state[layer] = (
                old * wh[:, None, :]
                - (old @ kk[:, :, None]) @ (kk * ah)[:, None, :]
                + vh[:, :, None] @ kh[:, None, :]
            )
            y = (state[layer] @ rh[:, :, None]).reshape(1, -1) * scales[layer]
            y = group_norm(y, width // 64, w[att + "ln_x.weight"], w[att + "ln_x.bias"], 64e-5)[0]
            y = y + ((rh * kh * w[att + "r_k"].view(-1, 64)).sum(-1, keepdim=True) * vh).flatten()
            x = x + product(att + "output.weight", y * g)
            h = norm(x, block + "ln2")
            d, shift[layer, 1] = shift[layer, 1] - h, h
            x = x + channel_mix(layer, h + d * w[block + "ffn.x_k"])
    return product("head.weight", norm(x, "ln_out"))

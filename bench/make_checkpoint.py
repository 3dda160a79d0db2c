#!/usr/bin/env python3
"""Write a random RWKV checkpoint in the layout of the official `.pth` files: RWKV-7, 7a or 6.

Its text means nothing. The tensor names, the shapes, bf16 storage and the size are those of published
models. So is the one statistic that decides speed: about a tenth of the channel-mix activations survive the
ReLU, as in the published 7.2B model (90.2% zeros). It replaces published weights in tests and benchmarks.

    python bench/make_checkpoint.py --size 0.1b /tmp/rwkv7-0.1b.pth
    python bench/make_checkpoint.py --layers 2 --width 128 /tmp/tiny.pth
"""

import argparse
import math

import torch
from torch import Tensor

HEAD_SIZE = 64
SIZES = {  # layers, width
    "0.1b": (12, 768),
    "0.4b": (24, 1024),
    "1.5b": (24, 2048),
    "2.9b": (32, 2560),
    "7.2b": (32, 4096),
    "13.3b": (61, 4096),
}
ALL_SIZES = SIZES | {"1.6b": (24, 2048)}  # with those of RWKV-6 alone
ACTIVE_SHARE = 0.10  # of the channel-mix activations stay positive ...
ACTIVE_QUANTILE = 1.2816  # ... where a normal variable must pass this many deviations
LN2_BIAS = 0.5
USED_IDS = 65530  # the World vocabulary has ids 1..65529 in its 65536 rows; 0 ends a text


def published_ranks(width: int) -> dict[str, int]:
    """Ranks of the low-rank pairs w, a, v, g in the published models of this width."""

    def rank(x: float) -> int:
        return max(32, round(x / 32) * 32)

    root = width**0.5
    return {
        "w": rank(1.8 * root),
        "a": rank(1.8 * root),
        "v": rank(1.3 * root),
        "g": 128 if width == 1024 else rank(0.6 * width**0.8),
    }


class Draw:
    """Random bf16 tensors on the CPU. `device` is where they are drawn; a GPU draws other numbers."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, device=self._generator.device)
        return drawn.mul_(std).add_(mean).bfloat16().cpu()

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        drawn = torch.rand(shape, generator=self._generator, device=self._generator.device)
        return drawn.mul_(high - low).add_(low).bfloat16().cpu()

    def norm(self, name: str, width: int) -> dict[str, Tensor]:
        weight = self.normal(width, mean=1.0, std=0.05)
        return {f"{name}.weight": weight, f"{name}.bias": self.normal(width, std=0.05)}

    def head(self, vocab: int, width: int) -> dict[str, Tensor]:
        head = self.normal(vocab, width, std=3 * width**-0.5)
        head[0] = 0  # a text as good as never ends, and ids without text stay unlikely
        head[USED_IDS:] = 0
        return {"head.weight": head}


def random_checkpoint(
    layers: int,
    width: int,
    vocab: int = 65536,
    seed: int = 0,
    device: str = "cpu",
    ranks: dict[str, int] | None = None,
) -> dict[str, Tensor]:
    """Tensors by their official names, as drawn by `Draw`.

    Raises ValueError for a width that is no multiple of HEAD_SIZE.
    """
    if width % HEAD_SIZE:
        raise ValueError(f"width is {width}; use a multiple of {HEAD_SIZE}")
    draw = Draw(seed, device)
    normal, uniform = draw.normal, draw.uniform
    ranks = ranks or published_ranks(width)
    hidden = 4 * width
    branch = 0.5 / math.sqrt(layers)  # keeps the residual stream of order one at any depth
    tensors = {"emb.weight": normal(vocab, width, std=0.5), **draw.norm("blocks.0.ln0", width)}
    for layer in range(layers):
        block, att, ffn = f"blocks.{layer}.", f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
        tensors |= draw.norm(block + "ln1", width)
        tensors[block + "ln2.weight"] = torch.ones(width, dtype=torch.bfloat16)
        tensors[block + "ln2.bias"] = torch.full((width,), LN2_BIAS, dtype=torch.bfloat16)
        for name in "rwkvag":
            tensors[f"{att}x_{name}"] = uniform(1, 1, width)
        tensors[att + "w0"] = uniform(1, 1, width, low=-6.0, high=0.5)
        tensors[att + "a0"] = normal(1, 1, width, std=0.5)
        if layer > 0:
            tensors[att + "v0"] = normal(1, 1, width, mean=0.5, std=0.5)
        for name, rank in ranks.items():
            if layer == 0 and name == "v":
                continue
            tensors[f"{att}{name}1"] = normal(width, rank, std=width**-0.5)
            tensors[f"{att}{name}2"] = normal(rank, width, std=rank**-0.5)
        tensors[att + "k_k"] = normal(1, 1, width, mean=0.85, std=0.1)
        tensors[att + "k_a"] = normal(1, 1, width, mean=1.0, std=0.1)
        tensors[att + "r_k"] = normal(width // HEAD_SIZE, HEAD_SIZE, std=0.1)
        for name in ("receptance", "key", "value"):
            tensors[f"{att}{name}.weight"] = normal(width, width, std=width**-0.5)
        tensors[att + "output.weight"] = normal(width, width, std=branch * width**-0.5)
        tensors |= draw.norm(att + "ln_x", width)
        tensors[ffn + "x_k"] = uniform(1, 1, width)
        # The input's mean is LN2_BIAS: a negative mean weight shifts the pre-activations until only the
        # wanted share is positive.
        tensors[ffn + "key.weight"] = normal(
            hidden, width, mean=-ACTIVE_QUANTILE / (LN2_BIAS * width), std=(width * (1 + LN2_BIAS**2)) ** -0.5
        )
        tensors[ffn + "value.weight"] = normal(width, hidden, std=branch * (hidden * ACTIVE_SHARE) ** -0.5)
    tensors |= draw.norm("ln_out", width)
    return tensors | draw.head(vocab, width)


def random_rwkv6(
    layers: int, width: int, vocab: int = 65536, seed: int = 0, device: str = "cpu"
) -> dict[str, Tensor]:
    """A random checkpoint of RWKV-6: the shapes of published models, 3.5 C hidden units."""
    draw = Draw(seed, device)
    normal = draw.normal
    hidden, heads = width * 7 // 2 // 32 * 32, width // HEAD_SIZE
    mix_rank, decay_rank = (64, 128) if width >= 4096 else (32, 64)
    branch = 0.5 / math.sqrt(layers)
    tensors = {"emb.weight": normal(vocab, width, std=0.5), **draw.norm("blocks.0.ln0", width)}
    for layer in range(layers):
        block, att, ffn = f"blocks.{layer}.", f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
        for name in (block + "ln1", block + "ln2", att + "ln_x"):
            tensors |= draw.norm(name, width)
        for name in (*(f"{att}time_maa_{mix}" for mix in "xwkvrg"), ffn + "time_maa_k", ffn + "time_maa_r"):
            tensors[name] = normal(1, 1, width, mean=0.5, std=0.2)
        tensors[att + "time_maa_w1"] = normal(width, 5 * mix_rank, std=width**-0.5)
        tensors[att + "time_maa_w2"] = normal(5, mix_rank, width, std=0.2 * mix_rank**-0.5)
        tensors[att + "time_decay"] = normal(1, 1, width, mean=-3.0, std=1.5)  # from 0.99 a token to almost 0
        tensors[att + "time_decay_w1"] = normal(width, decay_rank, std=width**-0.5)
        tensors[att + "time_decay_w2"] = normal(decay_rank, width, std=decay_rank**-0.5)
        tensors[att + "time_faaaa"] = normal(heads, HEAD_SIZE, std=0.5)
        for name in ("receptance", "key", "value", "gate"):
            tensors[f"{att}{name}.weight"] = normal(width, width, std=width**-0.5)
        tensors[att + "output.weight"] = normal(width, width, std=branch * width**-0.5)
        tensors[ffn + "key.weight"] = normal(hidden, width, std=width**-0.5)
        tensors[ffn + "receptance.weight"] = normal(width, width, std=width**-0.5)
        tensors[ffn + "value.weight"] = normal(width, hidden, std=branch * hidden**-0.5)
    tensors |= draw.norm("ln_out", width)
    return tensors | draw.head(vocab, width)


def with_deep_embed(tensors: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """An RWKV-7 checkpoint made into one of RWKV-7a: hidden units times numbers around 1, by token."""
    draw = Draw(seed)
    vocab, width = tensors["emb.weight"].shape
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".ffn.x_k")]:
        ffn, hidden = name.removesuffix("x_k"), 4 * width
        shapes = {"s_emb.weight": (vocab, 1024), "s_emb_x.weight": (1024, width)}
        shapes |= {"s1": (width, 32), "s2": (32, hidden), "s0": (hidden,)}
        for part, shape in shapes.items():
            std = {"s_emb.weight": 0.2, "s2": 0.2}.get(part, width**-0.5)
            mean = 1.0 if part == "s0" else 0.0
            found[ffn + part] = draw.normal(*shape, mean=mean, std=std)
    return found


def random_rwkv7a(
    layers: int, width: int, vocab: int = 65536, seed: int = 0, device: str = "cpu"
) -> dict[str, Tensor]:
    return with_deep_embed(random_checkpoint(layers, width, vocab, seed, device), seed)


FAMILIES = {"rwkv7": random_checkpoint, "rwkv7a": random_rwkv7a, "rwkv6": random_rwkv6}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="file to write")
    parser.add_argument("--size", choices=ALL_SIZES, help="a published size; or give --layers and --width")
    parser.add_argument("--family", choices=FAMILIES, default="rwkv7")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help="where the numbers are drawn; cuda is much faster for the large sizes"
    )
    args = parser.parse_args()
    layers, width = ALL_SIZES[args.size] if args.size else (args.layers, args.width)
    make = FAMILIES[args.family]
    tensors = make(layers, width, args.vocab, args.seed, args.device)
    torch.save(tensors, args.path)
    print(
        f"{args.path}: {layers} layers, width {width}, vocabulary {args.vocab}, "
        f"{sum(t.numel() for t in tensors.values()):,} parameters"
    )


if __name__ == "__main__":
    main()

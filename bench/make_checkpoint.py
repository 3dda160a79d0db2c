#!/usr/bin/env python3
"""Write a random RWKV-7 checkpoint in the layout of the official `.pth` files.

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


def random_checkpoint(
    layers: int,
    width: int,
    vocab: int = 65536,
    seed: int = 0,
    device: str = "cpu",
    ranks: dict[str, int] | None = None,
) -> dict[str, Tensor]:
    """Random bf16 tensors by their official names, on the CPU.

    `device` is where they are drawn; a GPU draws other numbers. Raises ValueError for a width that is no
    multiple of HEAD_SIZE.
    """
    if width % HEAD_SIZE:
        raise ValueError(f"width is {width}; use a multiple of {HEAD_SIZE}")
    draw = torch.Generator(device).manual_seed(seed)
    ranks = ranks or published_ranks(width)
    hidden = 4 * width

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).mul_(std).add_(mean).bfloat16().cpu()

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(shape, generator=draw, device=device).mul_(high - low).add_(low).bfloat16().cpu()

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": normal(width, mean=1.0, std=0.05), f"{name}.bias": normal(width, std=0.05)}

    branch = 0.5 / math.sqrt(layers)  # keeps the residual stream of order one at any depth
    tensors = {"emb.weight": normal(vocab, width, std=0.5), **norm("blocks.0.ln0")}
    for layer in range(layers):
        block, att, ffn = f"blocks.{layer}.", f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
        tensors |= norm(block + "ln1")
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
        tensors |= norm(att + "ln_x")
        tensors[ffn + "x_k"] = uniform(1, 1, width)
        # The input's mean is LN2_BIAS: a negative mean weight shifts the pre-activations until only the
        # wanted share is positive.
        tensors[ffn + "key.weight"] = normal(
            hidden, width, mean=-ACTIVE_QUANTILE / (LN2_BIAS * width), std=(width * (1 + LN2_BIAS**2)) ** -0.5
        )
        tensors[ffn + "value.weight"] = normal(width, hidden, std=branch * (hidden * ACTIVE_SHARE) ** -0.5)
    tensors |= norm("ln_out")
    head = normal(vocab, width, std=3 * width**-0.5)
    head[0] = 0  # a text as good as never ends, and ids without text stay unlikely
    head[USED_IDS:] = 0
    return tensors | {"head.weight": head}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="file to write")
    parser.add_argument("--size", choices=SIZES, help="a published size; or give --layers and --width")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help="where the numbers are drawn; cuda is much faster for the large sizes"
    )
    args = parser.parse_args()
    layers, width = SIZES[args.size] if args.size else (args.layers, args.width)
    tensors = random_checkpoint(layers, width, args.vocab, args.seed, args.device)
    torch.save(tensors, args.path)
    print(
        f"{args.path}: {layers} layers, width {width}, vocabulary {args.vocab}, "
        f"{sum(t.numel() for t in tensors.values()):,} parameters"
    )


if __name__ == "__main__":
    main()

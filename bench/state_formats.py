#!/usr/bin/env python3
"""States in fewer bits: how far the rounding of every token carries a model from fp32 over a long text.

All formats read the same sequence, each as a row of one batch whose state is rounded after every token, or
after every so many. Of each part of the text it prints

    KL           of the row's distribution of the next token from that of fp32, in nats
    perplexity   of the tokens that count, by how many percent it is above that of fp32
    state        the size of the difference by that of the fp32 state, mean over the heads of all layers

The text is prompts of `demo/evaluate.py` with their answers, one after the other without a new state between.
Tokens of answers count.

    python bench/state_formats.py                             # the bundled model
    python bench/state_formats.py --layers 2 --width 256      # random weights
    python bench/state_formats.py --model rwkv7-g1-0.1b.pth --tokens 20000 --part 5000
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.make_checkpoint import random_checkpoint  # noqa: E402
from demo import unpack  # noqa: E402
from rwkv_batch.evaluate.compare import Distance, held_out  # noqa: E402
from rwkv_batch.evaluate.report import table  # noqa: E402
from rwkv_batch.model.checkpoint import Checkpoint, from_tensors, load  # noqa: E402
from rwkv_batch.ops.cpu import binding  # noqa: E402
from rwkv_batch.ops.weights.weight import over  # noqa: E402
from rwkv_batch.runner.torch_runner import TorchRunner  # noqa: E402

VALUE, KEY = -2, -1  # dimensions of a state [heads, 64 (value), 64 (key)]
INT8, E4M3 = 127, 448  # the largest numbers
COMPARED_EVERY = 100  # tokens, states with those of fp32
TOKENS_BY_ANSWER = 5  # tokens of the text for one that counts, at least


@dataclass(frozen=True)
class StateFormat:
    """How a state is stored. `rounded`: fp32 to the fp32 numbers that storage gives back."""

    name: str
    rounded: Callable[[Tensor], Tensor]
    every: int = 1  # tokens


@dataclass
class Part:
    """What a format is apart from fp32 in a part of the text."""

    distance: Distance = field(default_factory=Distance)
    errors: list[float] = field(default_factory=list)


def half(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda state: state.to(dtype).float()


def scaled(along: int, most: float, encode: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """One scale for the numbers that lie along a dimension: KEY for a scale a row, VALUE for one a column.

    encode: numbers of at most `most` to the nearest that there are.
    """

    def rounded(state: Tensor) -> Tensor:
        scales = state.abs().amax(along, keepdim=True) / most
        return encode(over(state, scales).clamp_(-most, most)).mul_(scales)

    return rounded


def stochastic(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Up or down to a whole number, as often as makes the mean right."""

    def encode(numbers: Tensor) -> Tensor:
        drawn = torch.rand(numbers.shape, generator=generator)
        return drawn.add_(numbers).floor_().clamp_(-INT8, INT8)

    return encode


def formats(seed: int = 0) -> list[StateFormat]:
    """fp32 first, with which the others are compared."""
    row, column = scaled(KEY, INT8, torch.round), scaled(VALUE, INT8, torch.round)
    draw = stochastic(torch.Generator().manual_seed(seed))
    return [
        StateFormat("fp32", lambda state: state),
        StateFormat("fp16", half(torch.float16)),
        StateFormat("bf16", half(torch.bfloat16)),
        StateFormat("int8, scale a row", row),
        StateFormat("int8, scale a column", column),
        StateFormat("int8, scale a row, stochastic", scaled(KEY, INT8, draw)),
        StateFormat("int8, scale a column, stochastic", scaled(VALUE, INT8, draw)),
        StateFormat("fp8 e4m3, scale a row", scaled(KEY, E4M3, half(torch.float8_e4m3fn))),
        StateFormat("int8, scale a row, every 16 tokens", row, 16),
        StateFormat("int8, scale a column, every 16 tokens", column, 16),
        StateFormat("int8, scale a row, every 256 tokens", row, 256),
        StateFormat("int8, scale a column, every 256 tokens", column, 256),
    ]


def text(tokens: int) -> tuple[list[int], list[bool]]:
    """So many tokens and one more, and whether each counts."""
    texts = held_out(tokens // TOKENS_BY_ANSWER + 1)
    ids = [token for each in texts for token in each.tokens]
    counts = [place >= each.first for each in texts for place in range(len(each.tokens))]
    return ids[: tokens + 1], counts[: tokens + 1]


@torch.inference_mode()
def read(
    checkpoint: Checkpoint, kinds: Sequence[StateFormat], tokens: int, part: int
) -> list[tuple[Part, ...]]:
    """For each part of so many tokens, what every format is apart from the first."""
    model = TorchRunner(checkpoint, torch.device("cpu"), torch.float32, kernels=binding.load()).model
    states, rows = model.new_states(len(kinds)), range(len(kinds))
    ids, counts = text(tokens)
    parts: list[tuple[Part, ...]] = []
    for place in tqdm(range(tokens), unit="token", disable=None):
        if place % part == 0:
            parts.append(tuple(Part() for _ in kinds))
        counted = counts[place + 1]  # the logits here are those of the token behind
        fed = torch.full((len(kinds),), ids[place])
        logits = model.forward(fed, [1] * len(kinds), rows, states, None if counted else [])
        for row, kind in enumerate(kinds):
            if (place + 1) % kind.every == 0:
                states.wkv[row] = kind.rounded(states.wkv[row])
        if counted:
            found, target = logits.log_softmax(1), torch.tensor(ids[place + 1 : place + 2])
            for row, each in enumerate(parts[-1]):
                each.distance.add(found[:1], found[row : row + 1], target)
        if (place + 1) % COMPARED_EVERY == 0:
            sizes = states.wkv[0].norm(dim=(VALUE, KEY))  # [layers, heads]
            for row, each in enumerate(parts[-1]):
                apart = (states.wkv[row] - states.wkv[0]).norm(dim=(VALUE, KEY))
                each.errors.append(float(over(apart, sizes).mean()))
    return parts


def tables(kinds: Sequence[StateFormat], parts: Sequence[tuple[Part, ...]], part: int) -> str:
    """A table for each measure: a row a format, a column a part, and one for all of them."""
    columns = {f"to {(place + 1) * part}": [each] for place, each in enumerate(parts)} | {"all": list(parts)}

    def mean(row: int, of: str) -> list[float]:
        """By column, of what a distance has summed up over places."""
        found = [[each[row].distance for each in column] for column in columns.values()]
        return [sum(getattr(d, of) for d in each) / sum(d.places for d in each) for each in found]

    plain = mean(0, "logprob")
    measures: dict[str, Callable[[int], list[float]]] = {
        "KL": lambda row: mean(row, "divergence"),
        "perplexity above fp32, %": lambda row: [
            100 * math.expm1(wanted - found)
            for wanted, found in zip(plain, mean(row, "logprob"), strict=True)
        ],
        "state error, %": lambda row: [
            100 * fmean(error for each in column for error in each[row].errors) for column in columns.values()
        ],
    }
    found = [
        table([(name, *columns), *((kind.name, *measure(row)) for row, kind in enumerate(kinds) if row)])
        for name, measure in measures.items()
    ]
    counted = [sum(each[0].distance.places for each in column) for column in columns.values()]
    found.append(
        table([("fp32", *columns), ("perplexity", *map(math.exp, (-x for x in plain))), ("tokens", *counted)])
    )
    return "\n\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a checkpoint; without it, the bundled model")
    parser.add_argument("--layers", type=int, help="of random weights in place of a model")
    parser.add_argument("--width", type=int, default=256, help="of random weights")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--only", default="", help="formats with this in their names, beside fp32")
    parser.add_argument("--part", type=int, default=20_000, help="tokens of a column")
    args = parser.parse_args()
    if args.model:
        checkpoint = load(args.model)
    elif args.layers:
        checkpoint = from_tensors("random", random_checkpoint(args.layers, args.width))
    else:
        checkpoint = from_tensors("the bundled model", unpack.tensors())
    first, *others = formats()
    kinds = [first, *(kind for kind in others if args.only in kind.name)]
    parts = read(checkpoint, kinds, args.tokens, args.part)
    print(
        f"{checkpoint.name}, {checkpoint.layers} layers of width {checkpoint.width}, {args.tokens} tokens\n"
    )
    print(tables(kinds, parts, args.part))


if __name__ == "__main__":
    main()

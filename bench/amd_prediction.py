#!/usr/bin/env python3
"""What a decode step should take on two AMD GPUs that the kernels have never run on.

    python bench/amd_prediction.py                       shares of the roofline by kernel, and steps by size
    python bench/amd_prediction.py --size 7.2b --rows 8  every kernel of one step
    python bench/amd_prediction.py --count               compile, and print COUNTS for bench/amd_counts.py

bench/amd_cards.py says how long a launch takes, and what is assumed and left out. Here is what it has to do.
Bytes are what must move if caches keep nothing between kernels and lose nothing inside one. LDS passes and
ALU issues are those of a loop in the compiled code (COUNTS) times how often it runs. A GEMM runs by the
faster of its methods, as the autotuner would choose.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.amd_cards import CARDS, Launches
from bench.amd_counts import COUNTS, Count, as_source, count
from bench.make_checkpoint import ACTIVE_SHARE, HEAD_SIZE, SIZES, published_ranks

VALU_CLOCKS = 0.5  # of a CU, for 32 lanes

LOOP_WEIGHTS = 4096  # of gemm_stream and gemm_sparse, in a pass of 32 lanes
STREAM_ROWS = {"stream16": 16, "stream32": 32, "short": 64}  # of w, of a block
SPARSE_ROWS = (1, 2, 4, 8)
SPARSE_PARTS = 8
WKV_WARPS = 4  # of a block, which shares a state
WRITES = 1 / 3  # of the steps write an fp16 state
DEFERRED_BYTES = 5 * HEAD_SIZE * 2  # of one token and head; a state lags one token on average
CHUNK_INPUT, CHUNK_DATA, CHUNK_OUT = 7 * 16 * 128, 12928, 2048  # bytes of a chunk of 16 tokens and a head
SAMPLE_LOOP = 1024  # logits in a pass of 32 lanes


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    vocab: int = 65536

    @property
    def heads(self) -> int:
        return self.width // HEAD_SIZE

    @property
    def ranks(self) -> list[int]:
        return [-(-rank // 32) * 32 for rank in published_ranks(self.width).values()]


class Step:
    """The launches of a decode step of so many rows, as rwkv_batch/model/cuda/rwkv7.py makes them."""

    def __init__(self, gpu: str, shape: Shape, rows: int, state_bytes: int = 2) -> None:
        self.card, self.counts, self.shape, self.rows = CARDS[gpu], COUNTS[gpu], shape, rows
        self.state_bytes = state_bytes

    def run(self, source: str, name: str, moved: float, passes: float, blocks: float = math.inf) -> Launches:
        """A kernel that runs what was counted as `name` that many times."""
        lds, valu = self.counts[name]
        return Launches(source, moved, lds * passes, valu * passes * VALU_CLOCKS, blocks)

    def gemm_bytes(self, weights: float, inputs: float, outputs: float) -> float:
        return 2 * (weights + self.rows * (inputs + outputs))

    def stream(self, n: int, k: int, kind: str) -> Launches:
        """gemm_stream: tiles of 8 rows, or of 16."""
        columns, tile = (1, 8) if self.rows <= 8 else (-(-self.rows // 16), 16)
        passes = n * k / LOOP_WEIGHTS * columns
        moved = self.gemm_bytes(n * k, k, n)
        blocks = columns * n / STREAM_ROWS[kind]
        return self.run("gemm_stream.cu", f"{kind} {tile}", moved, passes, blocks)

    def library(self, n: int, k: int, launches: int = 1) -> Launches:
        moved, operations = self.gemm_bytes(n * k, k, n), 2.0 * self.rows * n * k
        return Launches("library", moved / launches, operations=operations / launches, number=launches)

    def sparse(self) -> Launches:
        """gemm_sparse: the units that are active in any of up to 8 rows."""
        rows, width = next(m for m in SPARSE_ROWS if m >= self.rows), self.shape.width
        weights = 4 * width**2 * (1 - (1 - ACTIVE_SHARE) ** rows)
        moved = self.gemm_bytes(weights, 4 * width, 0) + SPARSE_PARTS * rows * width * 4
        blocks = SPARSE_PARTS * width / HEAD_SIZE
        return self.run("gemm_sparse.cu", f"sparse {rows}", moved, weights / LOOP_WEIGHTS, blocks)

    def wkv(self) -> Launches:
        """wkv_decode: a block of four warps for each state, one of which prepares and finishes its row."""
        name, states, size = "wkv fp16", self.rows * self.shape.heads, HEAD_SIZE**2 * self.state_bytes
        if self.state_bytes == 4:
            name, moved, loop = "wkv fp32", 2.0 * size, self.counts["wkv fp32"]
        else:
            moved = (1 + WRITES) * size + (1 + 1 - WRITES) * DEFERRED_BYTES
            all_of, less = self.counts[name], self.counts[f"{name} deferred"]
            loop = Count(*(WRITES * x + (1 - WRITES) * y for x, y in zip(all_of, less, strict=True)))
        rest, vectors = self.counts[f"{name} rest"], 9 * HEAD_SIZE * 2
        lds, valu = (WKV_WARPS * x + y for x, y in zip(loop, rest, strict=True))
        source = f"wkv_decode_{name[-4:]}.cu"
        return Launches(source, states * (moved + vectors), states * lds, states * valu * VALU_CLOCKS, states)

    def norm(self, mixes: int, partials: int = 0) -> Launches:
        """A block for each row, 8 columns a lane. mixes: 0 is norm.cu."""
        width = self.shape.width
        row = width * (8 + (4 * partials or 2) + (2 * mixes + 4 if mixes else 2))
        source = "norm_mix_decode.cu" if mixes else "norm.cu"
        name = f"norm {mixes}" if mixes else "norm"
        return self.run(source, name, self.rows * row, self.rows * width / 256, self.rows)

    def relu_square(self) -> Launches:
        numbers = 4 * self.shape.width * self.rows
        return self.run("gemm_relu_square.cu", "relu square", 4 * numbers, numbers / 256)

    def sample(self) -> Launches:
        """The pass that reads logits, with one block a row; what follows reads them twice more."""
        logits = self.rows * self.shape.vocab
        return self.run("sample.cu", "sample", 2 * 4 * logits, logits / SAMPLE_LOOP, self.rows)

    def faster(self, *ways: list[Launches]) -> list[Launches]:
        return min(ways, key=lambda way: sum(one.seconds(self.card) for one in way))

    def gemm(self, n: int, k: int, after: list[Launches]) -> list[Launches]:
        """By the fastest method; after: what a library needs besides."""
        streams = [[self.stream(n, k, kind)] for kind in ("stream16", "stream32")]
        return self.faster(*streams, [self.library(n, k), *after])

    def layer(self) -> list[Launches]:
        c, low = self.shape.width, sum(self.shape.ranks)
        both = [[self.stream(3 * c + low, c, kind)] for kind in ("stream16", "stream32")]
        ways = [[self.library(c, 4 * c)]]
        if self.rows <= SPARSE_ROWS[-1]:
            ways.insert(0, [self.sparse()])
        value = self.faster(*ways)
        return [
            self.norm(6, SPARSE_PARTS if value[0].source == "gemm_sparse.cu" else 0),
            *self.faster(*both, [self.library(3 * c, c), self.stream(low, c, "stream16")]),
            *self.faster([self.stream(c, low, "short")], [self.library(c, low, launches=4)]),
            self.wkv(),
            *self.gemm(c, c, []),
            self.norm(1),
            *self.gemm(4 * c, c, [self.relu_square()]),
            *value,
        ]

    def launches(self) -> Iterator[Launches]:
        """The feed, all layers, the head, and the draw."""
        yield Launches("sequence_feed.cu", 128.0 * self.rows, number=2)
        yield from self.layer() * self.shape.layers
        yield self.norm(0)
        yield from self.gemm(self.shape.vocab, self.shape.width, [])
        yield self.sample()

    def seconds(self) -> float:
        return sum(one.seconds(self.card) for one in self.launches())

    def prefill(self) -> list[Launches]:
        """The own kernels of a prefill, with one chunk of 16 tokens for each row."""
        units, tokens, width = self.rows * self.shape.heads, 16 * self.rows, self.shape.width
        prepared, scanned = units * (CHUNK_INPUT + CHUNK_DATA), units * (CHUNK_DATA + CHUNK_OUT)
        state = units * (4 * HEAD_SIZE**2 + DEFERRED_BYTES)
        return [
            self.run("norm_mix_prefill.cu", "prefill norm 6", 22 * tokens * width, tokens * width / 256),
            self.run("wkv_prefill_prepare.cu", "prepare", prepared, units * WKV_WARPS),
            self.run("wkv_prefill_scan.cu", "scan", scanned, units * WKV_WARPS * self.card.wave / 32),
            self.run("wkv_prefill_finish.cu", "finish", units * 4 * CHUNK_OUT, units),
            self.run("wkv_flush.cu", "flush", state, units * 2 * WKV_WARPS),
        ]


def comparison(gpu: str, shape: Shape, rows: int, state_bytes: int, seconds: float) -> str:
    """What a line of bench/decode.py says of a measured step besides; nothing for GPUs without prediction."""
    if gpu not in CARDS:
        return ""
    predicted = Step(gpu, shape, rows, state_bytes).seconds()
    return f", predicted {predicted * 1e3:.3f} ms, measured/predicted {seconds / predicted:.2f}"


def shares() -> Iterator[str]:
    """How far each kernel uses memory bandwidth, LDS and ALUs of both cards, in percent, at 7.2B."""

    def of(gpu: str) -> list[tuple[str, Launches]]:
        shape = Shape(*SIZES["7.2b"])
        step = {rows: Step(gpu, shape, rows) for rows in (1, 8, 16, 320)}
        many, long = step[320], Step(gpu, shape, 8 * 512 // 16)
        decode = [many.wkv(), Step(gpu, shape, 320, 4).wkv(), many.norm(0), many.norm(6), many.relu_square()]
        streams = [
            (f"{rows} rows", step[rows].stream(4 * shape.width, shape.width, "stream16")) for rows in (8, 16)
        ]
        return [
            *streams,
            *((f"{rows} rows", step[rows].sparse()) for rows in (1, 8)),
            *(("320 rows", one) for one in [*decode, many.sample()]),
            *(("8x512 tokens", one) for one in long.prefill()),
        ]

    for (at, one), (_, other) in zip(of("gfx942"), of("gfx1100"), strict=True):
        loads = one.loads(CARDS["gfx942"]), other.loads(CARDS["gfx1100"])
        figures = (", ".join(f"{100 * load:.0f}" for load in card) for card in loads)
        yield f"{one.source:24} {at:12} | {' | '.join(figures)} |"


def report(size: str, rows: int) -> Iterator[str]:
    """The launches of a step, equal ones together."""
    for gpu, card in CARDS.items():
        step = Step(gpu, Shape(*SIZES[size]), rows)
        yield f"{card.name}, {size}, {rows} rows: {step.seconds() * 1e3:.3f} ms"
        every = list(step.launches())
        for one in dict.fromkeys(every):
            number = every.count(one) * one.number
            each, (memory, lds, valu) = one.seconds(card) / one.number, one.loads(card)
            yield (
                f"{number:5d} {one.source:22} {one.moved / 1e6:8.2f} MB {each * 1e3:7.4f} ms, "
                f"memory {memory:4.0%} LDS {lds:4.0%} ALU {valu:4.0%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--count", action="store_true", help="count in the compiled code")
    args = parser.parse_args()
    if args.count:
        print(as_source(count(CARDS)))
    elif args.size:
        print("\n".join(report(args.size, args.rows)))
    else:
        print("\n".join(shares()))
        for size in SIZES:
            for rows in (1, 8, 32, 320):
                steps = {card.name: Step(gpu, Shape(*SIZES[size]), rows) for gpu, card in CARDS.items()}
                line = (f"{name} {rows / step.seconds():7.0f} tokens/s" for name, step in steps.items())
                print(f"{size:6} {rows:4d} rows  {'  '.join(line)}")


if __name__ == "__main__":
    main()

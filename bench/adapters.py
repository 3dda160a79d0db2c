#!/usr/bin/env python3
"""Speed of decoding with adapters of requests, beside plain rows.

Random weights and random LoRAs for all matrices that requests can change. Every step has as many rows in each
case: plain ones, all with one adapter, or with --adapters different ones in turn; and half of the rows with
one adapter, half plain. Times are medians of runs, the cases in turn.

Predicted before it was measured, for a 7.2B model, 32 rows, rank 16, 8 adapters, on an H200: 4.5 ms plain;
256 launches of 1.5 to 2.5 us more, which also bring weights of the next GEMM into the cache, and for 8
adapters 600 MB at 4.3 TB/s. So one adapter 0.87 of plain speed, 8 adapters 0.84, half of the rows 0.87. 1.5B,
32 rows: 192 launches beside 1.3 ms, so one adapter 0.77, 8 adapters 0.75.

    python bench/adapters.py --size 7.2b --rows 32,320
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from msgspec.structs import replace

from bench.engine_level import ENDLESS, KEY, compare, request_for
from bench.make_checkpoint import SIZES, random_checkpoint
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model import checkpoint
from rwkv_batch.ops.low_rank import TARGETS, shapes
from rwkv_batch.wire.commands import LoadAdapter
from rwkv_batch.wire.protocol import CommandReply, GenerateRequest

PROMPT = 4  # tokens


def load_adapters(engine: Engine, count: int, rank: int, layers: int, width: int) -> None:
    """Random LoRAs named "0", "1", ..."""
    sizes = list(zip(TARGETS, shapes(width, 4 * width), strict=True))
    for number in range(count):
        with tempfile.NamedTemporaryFile(suffix=".pth") as file:
            tensors = {}
            for layer in range(layers):
                for name, (outputs, inputs) in sizes:
                    prefix = f"blocks.{layer}.{name}"
                    tensors[f"{prefix}.lora_A"] = (torch.randn(rank, inputs) * inputs**-0.5).bfloat16()
                    tensors[f"{prefix}.lora_B"] = (torch.randn(outputs, rank) * 0.01).bfloat16()
            torch.save(tensors, file.name)
            engine.command((KEY, "load"), LoadAdapter("load", str(number), file.name, scaling=1.0))
            while not engine.adapters.infos(str(number)):
                for _, event in engine.step():
                    if not isinstance(event, CommandReply):
                        raise SystemExit(str(event))
                time.sleep(0.01)


def cases_of(rows: int, adapters: int) -> dict[str, list[GenerateRequest]]:
    """Requests that together have so many rows."""

    def part(count: int, adapter: str) -> GenerateRequest:
        return replace(request_for(count, PROMPT, ENDLESS), id=f"of {adapter}", adapter=adapter)

    return {
        "plain": [part(rows, "")],
        "one adapter": [part(rows, "0")],
        f"{adapters} adapters": [part(rows // adapters, str(number)) for number in range(adapters)],
        "half with an adapter": [part(rows // 2, ""), part(rows // 2, "0")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--rows", default="32,320", help="rows of a step")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    layers, width = SIZES[options.size]
    counts = [int(rows) for rows in options.rows.split(",")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = checkpoint.from_tensors(options.size, random_checkpoint(layers, width, device=device))
    engine = Engine(
        weights,
        device=options.device,
        max_rows=max(counts),
        l1=0,
        prefix_cache_mb=0,
        max_adapters=options.adapters,
    )
    load_adapters(engine, options.adapters, options.rank, layers, width)
    for rows in counts:
        cases = cases_of(rows, options.adapters)
        compare(engine, rows, cases, options.runs)
    engine.close()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Speed of decoding with start states and with mixtures of them, beside plain rows.

Random weights and random states. Every step has as many rows in each case: plain ones, rows that began in a
start state, or mixtures of --states states each. Times are medians of runs, the cases in turn.

    python bench/start_states.py --size 7.2b --rows 32,320
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from msgspec.structs import replace

from bench.engine_level import ENDLESS, KEY, compare, request_for
from bench.make_checkpoint import HEAD_SIZE, SIZES, random_checkpoint
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model import checkpoint
from rwkv_batch.wire.commands import PutStartState
from rwkv_batch.wire.protocol import MixturePart

PROMPT = 4  # tokens


def put_states(engine: Engine, count: int, layers: int, width: int) -> None:
    """Store random states named "0", "1", ..."""
    for number in range(count):
        with tempfile.NamedTemporaryFile(suffix=".pth") as file:
            shape = (width // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE)
            torch.save({f"blocks.{i}.att.time_state": torch.randn(shape) for i in range(layers)}, file.name)
            engine.command((KEY, "put"), PutStartState("put", str(number), file.name, "vk", b""))
            while engine.pool.starts.find(str(number)) is None:
                engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="7.2b")
    parser.add_argument("--rows", default="32,320", help="rows of a step")
    parser.add_argument("--states", type=int, default=4, help="of a mixture")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    layers, width = SIZES[options.size]
    counts = [int(rows) for rows in options.rows.split(",")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = checkpoint.from_tensors(options.size, random_checkpoint(layers, width, device=device))
    engine = Engine(weights, device=options.device, max_rows=max(counts), l1=0, prefix_cache_mb=0)
    put_states(engine, options.states, layers, width)
    mixture = [MixturePart(str(number), 1.0) for number in range(options.states)]
    for rows in counts:
        plain = request_for(rows, PROMPT, ENDLESS)
        cases = {
            "plain": [plain],
            "start state": [replace(plain, start_state="0")],
            f"mixtures of {options.states}": [
                replace(request_for(rows // options.states, PROMPT, ENDLESS), mixture=mixture)
            ],
        }
        compare(engine, rows, cases, options.runs)
    engine.close()


if __name__ == "__main__":
    main()

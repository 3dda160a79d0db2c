#!/usr/bin/env python3
"""What grammars cost: masks alone, on any machine, and a decode step of the engine with bound rows.

    python bench/grammars.py --rows 1,16,64                       masks alone
    python bench/grammars.py --size 7.2b --rows 1,16,64,320       with random weights on a GPU
    python bench/grammars.py --demo --rows 16                     the bundled model on the CPU

The text of bound rows is an endless list of objects with strings, numbers and lists. In "half" every second
row is bound. A mask's time is that of all rows of a step: what they drew is read, and the masks are written.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from msgspec.structs import replace

from bench.engine_level import ENDLESS, KEY, STEPS, request_for
from bench.make_checkpoint import ALL_SIZES, FAMILIES
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.scheduling.row import DECODING
from rwkv_batch.model import checkpoint
from rwkv_batch.sampling.masks import mask_words
from rwkv_batch.text.grammars import BoundText, GrammarCompiler, MaskThreads, prepare
from rwkv_batch.wire.protocol import GenerateRequest, Grammar

RUNS = 9
TOKENS = 150  # of each row, for masks alone
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "home": {"type": "object", "properties": {"city": {"type": "string"}, "since": {"type": "number"}}},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
ENDLESS_LIST = json.dumps({"type": "array", "items": PERSON, "minItems": 2000})


def masks_alone(rows: int) -> None:
    """Rows that draw any allowed token, each for itself."""
    vocab = 65536
    compiler = GrammarCompiler(vocab)
    threads = MaskThreads(max(1, min(8, (os.cpu_count() or 1) // 2)), mask_words(vocab))
    prepare(vocab)
    began = time.perf_counter()
    matchers = [compiler.matcher(BoundText("json_schema", ENDLESS_LIST)) for _ in range(rows)]
    compiled = time.perf_counter() - began
    generator, times = np.random.default_rng(1), []
    bits, _ = threads.masks(matchers)
    for _ in range(TOKENS):
        allowed = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")) for row in bits]
        tokens = [int(generator.choice(ids)) for ids in allowed]
        began = time.perf_counter()
        threads.advance(matchers, tokens)
        bits, errors = threads.masks(matchers)
        times.append(time.perf_counter() - began)
        assert not any(errors), errors
    median, worst = statistics.median(times) * 1e3, max(times) * 1e3
    print(f"{rows:4d} rows: compiled {compiled * 1e3:.1f} ms, masks {median:.2f} ms (worst {worst:.2f})")


def engine_steps(engine: Engine, rows: int) -> None:
    """The time of a step in each case, the cases in turns."""
    plain = request_for(rows, 4, ENDLESS)
    bound = replace(plain, id="bound", grammar=Grammar("json_schema", ENDLESS_LIST))
    half = rows // 2
    cases = {
        "plain": [plain],
        "bound": [bound],
        "half": [replace(plain, prompts=plain.prompts[half:]), replace(bound, prompts=plain.prompts[:half])],
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(RUNS):
        for name, requests in cases.items():
            times[name].append(seconds_of_step(engine, [one for one in requests if one.prompts], rows))
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, median in medians.items():
        rate, share = rows / median, medians["plain"] / median
        print(f"{rows:4d} rows, {name}: {median * 1e3:.3f} ms a step, {rate:.0f} tokens/s, {share:.3f}")
    engine.cancel_frontend(KEY)


def seconds_of_step(engine: Engine, requests: list[GenerateRequest], rows: int) -> float:
    """With these requests, whose rows all decode by then."""
    engine.cancel_frontend(KEY)
    for request in requests:
        engine.add((KEY, request.id), request)
    while sum(row.state is DECODING for row in engine.scheduler.running.values()) < rows:
        step(engine)
    draw(engine, 4 * STEPS * rows)  # the first masks of each kind take longer
    began = time.perf_counter()
    drawn = draw(engine, 4 * STEPS * rows)
    return (time.perf_counter() - began) * rows / drawn


def draw(engine: Engine, tokens: int) -> int:
    """Step until at least so many tokens are drawn; how many."""
    before = drawn_tokens(engine)
    while (drawn := drawn_tokens(engine) - before) < tokens:
        step(engine)
    return drawn


def step(engine: Engine) -> None:
    """A step; where all rows wait for their masks, until one is there."""
    if not engine.busy:
        engine.masks.wait()
    engine.step()


def drawn_tokens(engine: Engine) -> int:
    return sum(len(row.drawn) for row in engine.scheduler.running.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,16,64", help="of a step")
    parser.add_argument("--size", choices=ALL_SIZES, help="an engine with random weights on a GPU")
    parser.add_argument("--model", help="an engine with this checkpoint")
    parser.add_argument("--demo", action="store_true", help="the bundled model on the CPU")
    args = parser.parse_args()
    random.seed(1)
    counts = [int(rows) for rows in args.rows.split(",")]
    for rows in counts:
        masks_alone(rows)
    if not (args.size or args.model or args.demo):
        return
    weights = args.model
    if args.size:
        tensors = FAMILIES["rwkv7"](*ALL_SIZES[args.size], device="cuda")
        weights = checkpoint.from_tensors(f"random-{args.size}", tensors)
    engine = Engine(
        weights, device="cpu" if args.demo else "cuda", max_rows=max(counts), l1=0, prefix_cache_mb=0
    )
    for rows in counts:
        engine_steps(engine, rows)
    engine.close()


if __name__ == "__main__":
    main()

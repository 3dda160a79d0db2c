#!/usr/bin/env python3
"""What an engine takes of a GPU: its weights, and the most that it holds while all rows have work.

Every row reads a prompt, then writes a text; all rows want logprobs. torch keeps within --gpu-memory: an
engine that needed more would fail. As in the server, graphs come later, so the speed is not what it will be.

    python bench/memory.py --model rwkv7-13.3b.pth --weights int4 --gpu-memory 12 --max-rows 64
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.decode import environment, need_gpu
from rwkv_batch.config import ActivationsName
from rwkv_batch.engine.engine import Engine
from rwkv_batch.ops.weights.formats import FORMATS
from rwkv_batch.wire.protocol import GenerateRequest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a checkpoint file")
    parser.add_argument("--weights", choices=FORMATS, help="as of app.py")
    parser.add_argument("--activations", choices=get_args(ActivationsName), help="as of app.py")
    parser.add_argument("--gpu-memory", type=float, help="GiB, as of app.py")
    parser.add_argument("--max-rows", type=int, help="as of app.py")
    parser.add_argument("--prompt-tokens", type=int, default=300, help="of each row")
    parser.add_argument("--max-tokens", type=int, default=200, help="of each row's text")
    args = parser.parse_args()
    need_gpu()
    limit = None if args.gpu_memory is None else int(args.gpu_memory * 2**30)
    began = time.perf_counter()
    engine = Engine(
        args.model,
        weights=args.weights,
        activations=args.activations,
        gpu_memory=limit,
        max_rows=args.max_rows,
        device="cuda",
        capture_late=True,
    )
    started, loaded = time.perf_counter() - began, torch.cuda.memory_allocated()
    rows = engine.info.slots
    words = torch.randint(1, engine.parts.weights.vocab, (rows, args.prompt_tokens)).tolist()
    request = GenerateRequest(
        id="all", prompts=words, max_tokens=args.max_tokens, top_logprobs=1, stop_ids=[]
    )
    engine.add((b"memory", "all"), request)
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    seconds = time.perf_counter() - began
    found = {
        **environment(),
        "weights GB": round(engine.weight_bytes / 1e9, 3),
        "rows": rows,
        "idle sessions": len(engine.runner.states) - rows,
        "prompt tokens of a step": engine.scheduler.prefill_tokens,
        "allocated after start GiB": round(loaded / 2**30, 2),
        "most held GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "seconds to start": round(started, 1),
        "tokens of text a second": round(rows * args.max_tokens / seconds),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Speed of the model on a CUDA GPU, without server and engine: decode by batch size, prefill by shape.

A decode step is one replay of a CUDA graph: embedding, all layers, head, and the greedy choice of the next token, which feeds the next
step on the device. Rows begin with different tokens and random states. Times are medians; "floor" is the roofline (bench/roofline.py).

    python bench/decode.py --size 1.5b
    python bench/decode.py --model rwkv7-g1-7.2b.pth --batches 1,32,320 --prefill 1x1024,8x512 --json out.json
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.make_checkpoint import ACTIVE_SHARE, SIZES, random_checkpoint
from bench.roofline import Work, decode_floor, prefill_floor
from bench.trace import report
from rwkv_batch import checkpoint
from rwkv_batch.ops.cuda_capture import capture
from rwkv_batch.ops.cuda_model import CudaModel
from rwkv_batch.rwkv7 import States

RUNS = 15
STEPS = 4               # of a run
PREFILL_RUNS = 5
COPY_BYTES = 4 << 30
TENSOR_RATE = 790e12    # fp16 operations/s of a large product on an H200
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def copy_bandwidth() -> float:
    """Bytes/s, read and written, of a device copy."""
    source = torch.empty(COPY_BYTES // 2, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    return COPY_BYTES / statistics.median(timed(lambda: target.copy_(source), 1) for _ in range(RUNS))


def timed(run, count: int) -> float:
    """Seconds of one call, between two events around `count` of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def decode_graph(model: CudaModel, states: States, rows: int, arena: dict[str, torch.Tensor]) -> torch.cuda.CUDAGraph:
    """One step of so many rows, with its buffers in `arena`, which must live as long."""
    tokens = torch.randint(1, 65000, (rows,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(len(states.wkv), device="cuda", dtype=torch.int32)[:rows]
    logits = torch.empty(rows, len(model.weights.head), device="cuda", dtype=torch.float16)
    arena |= {"tokens": tokens, "slots": slots, "logits": logits}
    states.wkv.normal_(std=0.1)
    model.tuning.methods(rows)

    def step() -> None:
        model.decode(tokens, slots, states, logits, arena)
        tokens.copy_(logits.argmax(-1))

    return capture(step)


def decode(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one step."""
    for _ in range(3):
        graph.replay()
    return statistics.median(timed(graph.replay, STEPS) for _ in range(RUNS))


def prefill(model: CudaModel, states: States, rows: int, length: int) -> float:
    """Seconds for so many rows of so many tokens, launches included."""
    tokens = torch.randint(1, 65000, (rows * length,), device="cuda")
    slots = list(range(rows))

    def run() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.prefill(tokens, [length] * rows, slots, states, slots)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    run()
    return statistics.median(run() for _ in range(PREFILL_RUNS))


def environment() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    return {"gpu": torch.cuda.get_device_name(), "driver": driver.stdout.strip(), "torch": torch.__version__, "commit": commit,
            "command": " ".join(["python", *sys.argv])}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="random weights of a published size, made on the GPU")
    parser.add_argument("--model", help="a checkpoint file instead")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256,320,512,960", help="rows of a decode step (empty: none)")
    parser.add_argument("--prefill", default="1x128,1x1024,1x4096,8x512,32x128", help="rows x tokens (empty: none)")
    parser.add_argument("--wkv", choices=DTYPES, default="fp16", help="how states are stored")
    parser.add_argument("--trace", action="store_true", help="say where the time of each decode step goes, and how long the device idles")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    if not args.size and not args.model:
        parser.error("give --size or --model")
    weights = checkpoint.load(args.model) if args.model else \
        checkpoint.from_tensors(f"random-{args.size}", random_checkpoint(*SIZES[args.size], device="cuda"))
    batches = [int(rows) for rows in args.batches.split(",") if rows]
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.prefill.split(",") if shape]
    bandwidth, work = copy_bandwidth(), Work.of(weights)
    model = CudaModel(weights, torch.device("cuda"))
    most = max([*batches, *(rows for rows, _ in shapes)])
    states = States.zeros(most, weights.layers, weights.width, torch.float16, DTYPES[args.wkv], "cuda")
    print(json.dumps(environment()))
    print(f"{weights.name}, states {args.wkv}, device copy {bandwidth / 1e12:.2f} TB/s")
    results: dict[str, dict[str, dict[str, float]]] = {"decode": {}, "prefill": {}}
    for rows in batches:
        arena: dict[str, torch.Tensor] = {}
        graph = decode_graph(model, states, rows, arena)
        seconds = decode(graph)
        floor = decode_floor(work, rows, bandwidth, TENSOR_RATE, DTYPES[args.wkv].itemsize, ACTIVE_SHARE)
        results["decode"][str(rows)] = {"ms": seconds * 1e3, "tokens_per_s": rows / seconds, "floor": floor / seconds}
        print(f"decode {rows:5d} rows {seconds * 1e3:8.3f} ms {rows / seconds:9.0f} tokens/s, {floor / seconds:4.0%} of the floor"
              f"   {' '.join(f'{kind}:{method}' for kind, method in model.tuning.methods(rows).items())}", flush=True)
        if args.trace:
            print(f"products in us: {model.tuning.report(rows)}\n{report(graph.replay)}", flush=True)
    for rows, length in shapes:
        seconds = prefill(model, states, rows, length)
        floor = prefill_floor(work, rows * length, TENSOR_RATE)
        results["prefill"][f"{rows}x{length}"] = {"ms": seconds * 1e3, "tokens_per_s": rows * length / seconds, "floor": floor / seconds}
        print(f"prefill {rows}x{length} {seconds * 1e3:8.2f} ms {rows * length / seconds:9.0f} tokens/s, "
              f"{floor / seconds:4.0%} of the floor", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({**environment(), "model": weights.name, "wkv": args.wkv, "copy": bandwidth, **results}))


if __name__ == "__main__":
    main()

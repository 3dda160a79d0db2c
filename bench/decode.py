#!/usr/bin/env python3
"""Speed of the engine on a CUDA GPU: decode by batch size, prefill by shape.

Embedding, sampling and detokenizing are included. Times are medians of runs; "floor" is the roofline
(`decode_floor`), of fp16 weights also with --weights. --graphs leaves the engine out: it replays the
model's CUDA graph alone, and a greedy choice feeds the next step.

    python bench/decode.py --size 1.5b
    python bench/decode.py --family rwkv6 --size 1.6b --batches 1,64,320
    python bench/decode.py --model rwkv7-g1-7.2b.pth --batches 1,32,320 --prefill 1x1024,8x512 --json out.json
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine_level import Through
from bench.graphs import Graphs, report
from bench.host_handover import through_host
from bench.make_checkpoint import ACTIVE_SHARE, ALL_SIZES, FAMILIES
from rwkv_batch.config import ActivationsName
from rwkv_batch.model import checkpoint
from rwkv_batch.model.checkpoint import HEAD_SIZE, Checkpoint
from rwkv_batch.model.cuda.steps.capture import gpu_seconds
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.ops.weights.formats import FORMATS

RUNS = 15
PREFILL_RUNS = 5
COPY_BYTES = 4 << 30
TENSOR_RATE = 790e12  # fp16 operations/s of a large product on an H200
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}

HALF = 2  # bytes
# No matrices, or tables of which a token reads one row; s_emb_x is added to such a table beforehand.
NOT_READ_WHOLE = ("r_k", "time_faaaa", "s_emb.weight", "s_emb_x.weight")


@dataclass(frozen=True)
class Work:
    """What one token takes, and what a step of any size reads. In numbers, not bytes."""

    dense: (
        int  # weights read whole: all matrices but the value matrices of the channel mix, and the embedding
    )
    value: int  # weights of those value matrices
    state: int  # numbers of a recurrent state
    width: int
    layers: int
    vocab: int
    head: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "Work":
        matrices = {
            name: t.numel()
            for name, t in checkpoint.tensors.items()
            if t.dim() >= 2 and not name.endswith(NOT_READ_WHOLE)
        }
        value = sum(n for name, n in matrices.items() if name.endswith("ffn.value.weight"))
        dense = sum(matrices.values()) - matrices["emb.weight"] - value
        return cls(
            dense,
            value,
            checkpoint.layers * checkpoint.heads * HEAD_SIZE**2,
            checkpoint.width,
            checkpoint.layers,
            checkpoint.vocab,
            matrices["head.weight"],
        )


def decode_floor(
    work: Work, rows: int, bandwidth: float, rate: float, state_bytes: int = HALF, active: float = 1.0
) -> float:
    """Seconds of one decode step.

    bandwidth: bytes/s; rate: operations/s; active: share of hidden units that are not zero in a row.
    GEMMs and states do not overlap: the recurrence of a layer is between its GEMMs. Logits are written and
    read once. So are states, for every token, though the kernels defer some of these writes (cuda/wkv.cuh).
    """
    weights = work.dense + work.value * (1 - (1 - active) ** rows)
    products = max(weights * HALF / bandwidth, 2 * rows * (work.dense + work.value) / rate)
    shift = 2 * work.layers * 2 * work.width * HALF
    return products + rows * (2 * work.state * state_bytes + shift + 2 * work.vocab * HALF) / bandwidth


def prefill_floor(work: Work, tokens: int, rate: float) -> float:
    """Seconds of the GEMMs alone; the head is for the last tokens only."""
    return 2 * tokens * (work.dense + work.value - work.head) / rate


def need_gpu() -> None:
    """End the process with one sentence if torch has no GPU."""
    if not torch.cuda.is_available():
        sys.exit("This measures a GPU, and torch finds none; run it on a machine with one.")


def copy_bandwidth() -> float:
    """Bytes/s, read and written, of a device copy."""
    source = torch.empty(COPY_BYTES // 2, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    return COPY_BYTES / statistics.median(gpu_seconds(lambda: target.copy_(source)) for _ in range(RUNS))


def environment() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    driver = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "commit": commit,
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", choices=ALL_SIZES, help="random weights of a published size, made on the GPU"
    )
    parser.add_argument("--family", choices=FAMILIES, default="rwkv7", help="of the random weights")
    parser.add_argument("--model", help="a checkpoint file instead")
    parser.add_argument(
        "--batches",
        default="1,2,4,8,16,32,64,128,256,320,512,960",
        help="rows of a decode step (empty: none)",
    )
    parser.add_argument(
        "--prefill", default="1x128,1x1024,1x4096,8x512,32x128", help="rows x tokens (empty: none)"
    )
    parser.add_argument(
        "--wkv", choices=DTYPES, help="how states are stored (default: fp16, fp32 with --batch-invariant)"
    )
    parser.add_argument("--weights", choices=FORMATS, help="as of app.py")
    parser.add_argument(
        "--quantize-head", action=argparse.BooleanOptionalAction, help="as of app.py, with --weights"
    )
    parser.add_argument("--activations", choices=get_args(ActivationsName), help="as of app.py")
    parser.add_argument("--backend", default="auto", help="as of app.py: portable, or torch")
    parser.add_argument("--batch-invariant", action="store_true", help="as of app.py")
    parser.add_argument(
        "--stages", type=int, default=1, help="run the layers in so many stages, on several GPUs if there are"
    )
    parser.add_argument(
        "--stage-devices", help="the GPUs of the stages instead, one for each: 0,0,1,1 are four on two GPUs"
    )
    parser.add_argument(
        "--through-host", action="store_true", help="with --stages: hand over by pinned memory of the host"
    )
    parser.add_argument("--graphs", action="store_true", help="the model's kernels alone, without the engine")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="say where the time of each decode step goes, and how long the device idles",
    )
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    args.wkv = args.wkv or ("fp32" if args.batch_invariant else "fp16")
    if not args.size and not args.model:
        parser.error("give --size or --model")
    need_gpu()
    if args.through_host:
        through_host()
    weights = (
        checkpoint.load(args.model)
        if args.model
        else checkpoint.from_tensors(
            f"random-{args.family}-{args.size}",
            FAMILIES[args.family](*ALL_SIZES[args.size], device="cuda"),
        )
    )
    # On as many GPUs as there are, and on the first one again where there are fewer.
    gpus = [stage % torch.cuda.device_count() for stage in range(args.stages)]
    if args.stage_devices:
        gpus = [int(number) for number in args.stage_devices.split(",")]
    batches = [int(rows) for rows in args.batches.split(",") if rows]
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.prefill.split(",") if shape]
    bandwidth, work = copy_bandwidth(), Work.from_checkpoint(weights)
    if args.weights:
        weights = quantize(weights, args.weights, args.quantize_head, device="cuda")
    torch.cuda.empty_cache()
    active = 1.0 if weights.family == "rwkv6" else ACTIVE_SHARE  # no kernel skips hidden units of RWKV-6
    most = max([*batches, *(rows for rows, _ in shapes)])
    with torch.inference_mode(args.graphs):
        runner = (
            Graphs(weights, most, DTYPES[args.wkv], args.activations is not None)
            if args.graphs
            else Through(
                weights,
                most,
                max((rows * length for rows, length in shapes), default=4096),
                gpus,
                wkv=args.wkv,
                backend=args.backend,
                batch_invariant=args.batch_invariant,
                activations=args.activations,
            )
        )
        print(json.dumps(environment()))
        level = "graphs" if args.graphs else "engine"
        print(
            f"{weights.name} {args.weights or ''}"
            f"{f' with activations {args.activations}' if args.activations else ''}, "
            f"{level}, states {args.wkv}, device copy "
            f"{bandwidth / 1e12:.2f} TB/s"
        )
        results: dict[str, dict[str, dict[str, float]]] = {"decode": {}, "prefill": {}}
        for rows in batches:
            seconds = runner.decode(rows, RUNS)
            floor = decode_floor(work, rows, bandwidth, TENSOR_RATE, DTYPES[args.wkv].itemsize, active)
            results["decode"][str(rows)] = {
                "ms": seconds * 1e3,
                "tokens_per_s": rows / seconds,
                "floor": floor / seconds,
            }
            print(
                f"decode {rows:5d} rows {seconds * 1e3:8.3f} ms {rows / seconds:9.0f} tokens/s, "
                f"{floor / seconds:4.0%} of the floor   {runner.about(rows)}",
                flush=True,
            )
            if args.trace:
                print(report(runner.step), flush=True)
        for rows, length in shapes:
            seconds = runner.prefill(rows, length, PREFILL_RUNS)
            floor = prefill_floor(work, rows * length, TENSOR_RATE)
            results["prefill"][f"{rows}x{length}"] = {
                "ms": seconds * 1e3,
                "tokens_per_s": rows * length / seconds,
                "floor": floor / seconds,
            }
            print(
                f"prefill {rows}x{length} {seconds * 1e3:8.2f} ms {rows * length / seconds:9.0f} tokens/s, "
                f"{floor / seconds:4.0%} of the floor",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(
            json.dumps(
                {
                    **environment(),
                    "model": weights.name,
                    "weights": args.weights,
                    "activations": args.activations,
                    "level": level,
                    "wkv": args.wkv,
                    "copy": bandwidth,
                    **results,
                }
            ),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()

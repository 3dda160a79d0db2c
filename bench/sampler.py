"""Microseconds of one sampler call on the GPU, by method and rows: the p50 of replays of a graph of 20 calls.

    python bench/sampler.py [--rows 1 32 320 960] [--fp16] [--json FILE]

Logits fall off with the rank of a token like 1.3 log(rank), in random order, differently in every row. Two
sets of them are taken in turns: 1 and 32 rows are in the L2 cache, as they are after the GEMM of the head;
more rows are read from memory.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rwkv_batch.ops.cuda.capture import gpu_seconds
from rwkv_batch.sampling.sampler_cuda import CudaSampler
from rwkv_batch.wire.protocol import Sampling

VOCAB = 65536
CALLS, REPLAYS = 20, 15
METHODS = {
    "greedy": Sampling(temperature=0),
    "softmax": Sampling(),
    "rapid, top_p 0.9": Sampling(top_p=0.9),
    "rapid, top_k 50, top_p 0.6": Sampling(top_k=50, top_p=0.6),
    "rapid, top_k 500": Sampling(top_k=500),
    "nucleus, top_k 50, top_p 0.9": Sampling(method="nucleus", top_k=50, top_p=0.9),
    "noise 1.5": Sampling(method="noise", noise=1.5),
    "rapid, top_p 0.9, 500 penalties": Sampling(
        top_p=0.9, alpha_presence=0.5, alpha_frequency=0.5, alpha_decay=0.996
    ),
}


@dataclass
class SamplerTime:
    method: str
    rows: int
    microseconds: float
    bandwidth: float  # bytes of logits a second


def zipf(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits [rows, VOCAB]."""
    falling = -1.3 * torch.arange(1, VOCAB + 1, device="cuda").log()
    return torch.stack([falling[torch.randperm(VOCAB, device="cuda")] for _ in range(rows)]).to(dtype)


def measure(name: str, params: Sampling, sets: list[torch.Tensor]) -> SamplerTime:
    rows = len(sets[0])
    sampler = CudaSampler(rows, VOCAB, "cuda")
    for slot in range(rows):
        sampler.set_row(slot, params, 1, slot)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    ids = torch.empty(rows, dtype=torch.int32, device="cuda")
    if "penalties" in name:
        flat = torch.zeros(1, VOCAB, device="cuda").expand(rows, -1)  # nearly every draw is a new token
        for _ in range(500):
            sampler.prepare(range(rows))
            sampler.sample_async(flat, slots, ids)
    for _ in range(CALLS * (REPLAYS + 1)):
        sampler.prepare(range(rows))
    sampler.sample_async(sets[0], slots, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            sampler.sample_async(sets[call % len(sets)], slots, ids)
    time = median(gpu_seconds(graph.replay) for _ in range(REPLAYS)) / CALLS
    return SamplerTime(name, rows, time * 1e6, sets[0].nbytes / time)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 320, 960])
    parser.add_argument("--fp16", action="store_true", help="fp16 logits instead of fp32")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This measures a GPU, and there is none; run it on a machine with one.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = []
    for rows in options.rows:
        sets = [zipf(rows, torch.float16 if options.fp16 else torch.float32) for _ in range(2)]
        for name, params in METHODS.items():
            result = measure(name, params, sets)
            results.append(result)
            print(
                f"{result.rows:5} rows  {result.microseconds:8.1f} us  {result.bandwidth / 1e12:5.2f} TB/s  "
                f"{result.method}"
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()

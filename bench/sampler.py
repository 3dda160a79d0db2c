"""Microseconds of one sampler call on the GPU, by method and rows: the p50 of replays of a graph of 20 calls.

    python bench/sampler.py [--rows 1 32 320 960] [--fp16] [--json FILE]

Logits fall off with the rank of a token like 1.3 log(rank), in random order, differently in every row. Two
sets of them are taken in turn: 1 and 32 rows find theirs in L2, as they do after the GEMM of the head; more
rows come from memory.

Where FlashInfer is installed, it is timed beside our own sampler. It cannot be captured in a graph, so both
are queued behind a kernel that keeps the GPU busy until the host is done: the time is the GPU's alone, and
that of the host is given beside it. Ours and FlashInfer's take turns.
"""

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.decode import need_gpu
from rwkv_batch.model.cuda.steps.capture import gpu_seconds
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

COMPARED = {
    "nucleus, top_k 50, top_p 0.6": Sampling(method="nucleus", top_k=50, top_p=0.6),
    "nucleus, top_k 50, top_p 0.6, 500 penalties": Sampling(
        method="nucleus", top_k=50, top_p=0.6, alpha_presence=0.5, alpha_frequency=0.5, alpha_decay=0.996
    ),
    "nucleus, top_p 0.9": Sampling(method="nucleus", top_p=0.9),
    "nucleus, no limits": Sampling(method="nucleus"),
}
BUSY_CYCLES = 60_000_000  # about 30 ms, in which the host queues CALLS calls


@dataclass
class SamplerTime:
    method: str
    rows: int
    microseconds: float
    bandwidth: float  # bytes of logits a second
    sampler: str = "own"
    host_microseconds: float | None = None


def zipf(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits [rows, VOCAB]."""
    falling = -1.3 * torch.arange(1, VOCAB + 1, device="cuda").log()
    return torch.stack([falling[torch.randperm(VOCAB, device="cuda")] for _ in range(rows)]).to(dtype)


def filled(name: str, sampling: Sampling, rows: int, sampler: Literal["own", "flashinfer"]) -> CudaSampler:
    """With a row in each slot; for "penalties" in its name, of 500 tokens each."""
    made = CudaSampler(rows, VOCAB, "cuda", sampler)
    for slot in range(rows):
        made.begin(slot, sampling, 1, slot)
    if "penalties" in name:
        slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        flat = torch.zeros(1, VOCAB, device="cuda").expand(rows, -1)  # nearly every draw is a new token
        for _ in range(500):
            made.prepare(range(rows))
            made.sample_async(flat, slots)
    for _ in range(3 * CALLS * (REPLAYS + 1)):  # no list of penalties moves while it is timed
        made.prepare(range(rows))
    return made


def measure(name: str, sampling: Sampling, sets: list[torch.Tensor]) -> SamplerTime:
    rows = len(sets[0])
    sampler = filled(name, sampling, rows, "own")
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    ids = torch.empty(rows, dtype=torch.int32, device="cuda")
    sampler.sample_async(sets[0], slots, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            sampler.sample_async(sets[call % len(sets)], slots, ids)
    time = median(gpu_seconds(graph.replay) for _ in range(REPLAYS)) / CALLS
    return SamplerTime(name, rows, time * 1e6, sets[0].nbytes / time)


def compare(name: str, sampling: Sampling, sets: list[torch.Tensor]) -> list[SamplerTime]:
    """Our sampler and FlashInfer, in turn."""
    rows = len(sets[0])
    samplers = {kind: filled(name, sampling, rows, kind) for kind in ("own", "flashinfer")}
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    times: dict[str, list[tuple[float, float, bool]]] = {kind: [] for kind in samplers}
    for _ in range(REPLAYS + 1):
        for kind, sampler in samplers.items():
            times[kind].append(queued(sampler, sets, slots))
    results = []
    for kind, found in times.items():
        gpu, hosts, late = zip(*found[1:], strict=True)  # the first one loads kernels and allocates
        if any(late):
            raise RuntimeError("The host was not done while the GPU was kept busy; raise BUSY_CYCLES.")
        time, host = median(gpu), median(hosts)
        results.append(SamplerTime(name, rows, time * 1e6, sets[0].nbytes / time, kind, host * 1e6))
    return results


def queued(sampler: CudaSampler, sets: list[torch.Tensor], slots: torch.Tensor) -> tuple[float, float, bool]:
    """Seconds of one call of CALLS on the GPU, and on the host; whether the GPU had to wait for the host."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    begun = perf_counter()
    for call in range(CALLS):
        sampler.prepare(range(len(slots)))
        sampler.sample_async(sets[call % len(sets)], slots)
    host = perf_counter() - begun
    late = start.query()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / CALLS, host / CALLS, late


def show(result: SamplerTime) -> None:
    host = f", {result.host_microseconds:.0f} us on the host" if result.host_microseconds else ""
    print(
        f"{result.rows:5} rows  {result.microseconds:8.1f} us  {result.bandwidth / 1e12:5.2f} TB/s  "
        f"{result.method} ({result.sampler}{host})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 320, 960])
    parser.add_argument("--fp16", action="store_true", help="fp16 logits instead of fp32")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    need_gpu()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = []
    for rows in options.rows:
        sets = [zipf(rows, torch.float16 if options.fp16 else torch.float32) for _ in range(2)]
        for name, params in METHODS.items():
            results.append(measure(name, params, sets))
            show(results[-1])
        if importlib.util.find_spec("flashinfer"):
            for name, params in COMPARED.items():
                for result in compare(name, params, sets):
                    results.append(result)
                    show(result)
    if options.json:
        options.json.write_text(
            json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()

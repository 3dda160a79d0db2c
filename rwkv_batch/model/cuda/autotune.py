"""The fastest method for each GEMM and number of tokens, measured once on the GPU at hand and kept in a file.

GEMMs are timed alone first. Those within CLOSE of the fastest of their kind are timed once more in sequence
between their neighbours in some layers: only there it shows what a GEMM gains by beginning before the kernel
before it has ended or by prefetching weights for the next one, and what split-K costs the norm that adds up
the partial sums.
"""

import json
import logging
import os
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from rwkv_batch.model.cuda.gemm import METHODS, WHOLE, Gemms
from rwkv_batch.model.cuda.packed.weights import CudaLayer
from rwkv_batch.ops.cuda import build
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.cuda.capture import capture, gpu_seconds

log = logging.getLogger(__name__)

RUNS = 5
ROUNDS = 20  # of all candidates that are timed between their neighbours
LAYERS = 12  # timed one after the other, so that no weight comes from the cache
CLOSE, FEW = 1.25, 4  # times the fastest, and how many at most: what is timed between its neighbours too
ACTIVE_SHARE = 0.1  # of the hidden units, while GEMMs are timed
MEASURED_TOKENS = 1024  # more are prefill

Layers = Callable[[int], Callable[[dict[str, str]], object]]


@dataclass
class Autotuner:
    """The choices for one model's shapes.

    `file` keeps them; a missing or invalid file costs only time. `layers`: for a number of tokens, a call
    that launches some layers by the methods given.
    """

    gemms: Gemms
    file: Path
    layers: Layers
    chosen: dict[str, str]

    @classmethod
    def from_cache(cls, gemms: Gemms, device: torch.device, layers: Layers) -> "Autotuner":
        """With what an earlier start has measured on such a GPU for such shapes."""
        layer, head = gemms.weights.layers[-1], len(gemms.weights.head)
        sizes = (len(layer.output), *(len(w) for w in layer.low_in.values()), head)
        gpu = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
        bits = "-8bit" if gemms.is_coded("out") else ""
        name = f"tuning-{gpu}-torch{torch.__version__}-{'-'.join(map(str, sizes))}{bits}.json"
        name = name.replace("+", "-")
        file = build.build(gemms.kernels.architecture).parent / name
        chosen = {}
        with suppress(OSError, ValueError):
            chosen = usable(json.loads(file.read_text()), gemms)
        return cls(gemms, file, layers, chosen)

    def measure(self, sizes: Iterable[int], progress: bool = True) -> None:
        """Measure what is missing for these numbers of tokens, with a progress bar and a line in the log."""
        small = {tokens for tokens in sizes if tokens <= MEASURED_TOKENS}
        missing = [tokens for tokens in sorted(small, reverse=True) if self._missing(tokens)]
        if not missing:
            return
        log.info("timing GEMMs for %d batch sizes (once for a model's shape; about a minute)", len(missing))
        for tokens in tqdm(missing, desc="timing GEMMs", unit="size", disable=not progress):
            self.methods(tokens)

    def methods(self, tokens: int) -> dict[str, str]:
        """The method for every kind of GEMM at that many tokens, measured first if it is missing."""
        if tokens > MEASURED_TOKENS:
            return {kind: self.gemms.untimed(kind) for kind in METHODS}
        if missing := self._missing(tokens):
            buffers = Buffers(self.gemms.weights.buffer_shape, tokens, {})
            times = {kind: self._times(kind, buffers) for kind in missing}
            del buffers
            for kind, seconds in times.items():
                self.chosen[f"{kind} {tokens}"] = min(seconds, key=seconds.__getitem__)
            for kind, seconds in times.items():
                limit = CLOSE * min(seconds.values())
                close = [m for m in sorted(seconds, key=seconds.__getitem__) if seconds[m] <= limit][:FEW]
                if kind != "head" and len(close) > 1:
                    self.chosen[f"{kind} {tokens}"] = self._fastest_in_sequence(tokens, kind, close)
            self._save()
        return self._chosen(tokens)

    def _missing(self, tokens: int) -> list[str]:
        """The kinds of GEMM that are to be measured at that many tokens."""
        return [kind for kind in METHODS if f"{kind} {tokens}" not in self.chosen]

    def _chosen(self, tokens: int) -> dict[str, str]:
        return {kind: self.chosen[f"{kind} {tokens}"] for kind in METHODS}

    def _fastest_in_sequence(self, tokens: int, kind: str, methods: list[str]) -> str:
        """Of the methods for a kind of GEMM, the one with which some layers take the least time."""
        run, chosen = self.layers(tokens), self._chosen(tokens)
        graphs = [capture(partial(run, chosen | {kind: method})) for method in methods]
        # In turn, as the GPU's clock changes slowly. The first round warms up.
        rounds = [[gpu_seconds(graph.replay) for graph in graphs] for _ in range(1 + ROUNDS)][1:]
        return min(zip(map(statistics.median, zip(*rounds, strict=True)), methods, strict=True))[1]

    def _times(self, kind: str, buffers: Buffers) -> dict[str, float]:
        """Milliseconds of each candidate alone."""
        layers = self.gemms.weights.layers[1:][:LAYERS] or self.gemms.weights.layers
        layers = layers[:1] if kind == "head" else layers
        candidates = self.gemms.candidates(kind, len(buffers.x))
        if len(candidates) == 1:
            return {candidates[0]: 0.0}
        _fill(buffers)
        times = {method: self.time(kind, buffers, method, layers) for method in candidates if method != WHOLE}
        # Split-K gives only partial sums: it is compared with the whole GEMM where a norm adds them up.
        return {WHOLE: min(times.values()), **times} if WHOLE in candidates else times

    def time(self, kind: str, buffers: Buffers, method: str, layers: list[CudaLayer]) -> float:
        """Milliseconds of one GEMM, the median of some runs over all these layers."""
        calls = [self.gemms.call(kind, layer, buffers, method) for layer in layers]
        graph = capture(lambda: [call() for call in calls])
        graph.replay()
        return statistics.median(gpu_seconds(graph.replay) for _ in range(RUNS)) * 1e3 / len(calls)

    def _save(self) -> None:
        device = self.gemms.weights.head.device
        if device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            return  # measured while other models ran: the next start does it again
        with suppress(OSError):  # without the file they are measured again
            part = self.file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(self.chosen, indent=0))
            os.replace(part, self.file)


def usable(chosen: object, gemms: Gemms) -> dict[str, str]:
    """The entries of a file that name methods which can be run: it may be of another version, or damaged."""
    if not isinstance(chosen, dict):
        return {}

    def runs(key: str, method: object) -> bool:
        kind, _, tokens = key.partition(" ")
        return kind in METHODS and tokens.isdecimal() and method in gemms.candidates(kind, int(tokens))

    return {key: method for key, method in chosen.items() if runs(key, method)}


def _fill(buffers: Buffers) -> None:
    """Fill inputs with numbers like those of a real step, whatever a GEMM timed before has left in them.

    GEMMs of zeros run faster than others, and the sparse one runs slower the more hidden units are active.
    """
    for tensor in (buffers.mixed, buffers.y, buffers.normed, *buffers.low.values()):
        tensor.normal_()
    buffers.hidden.copy_(torch.rand_like(buffers.hidden).add_(ACTIVE_SHARE - 1).relu_())

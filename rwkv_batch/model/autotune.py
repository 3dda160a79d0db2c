"""Which way to run each product, for each number of rows: measured once on the GPU at hand and remembered in
a file.

Products are timed alone first, then those that come close to the fastest of their kind once more between
their neighbours in some layers: only there it shows what a product gains as it begins before the one before
has ended, or fetches weights for the one after, and what it costs the norm to add up a product in shares of
K.
"""

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from rwkv_batch.model.gemm import METHODS, WHOLE, Buffers, Products
from rwkv_batch.model.weights_cuda import CudaLayer
from rwkv_batch.ops.cuda import build
from rwkv_batch.ops.cuda.capture import capture, gpu_seconds

RUNS = 5
ROUNDS = 20  # of all that are timed between their neighbours
LAYERS = 12  # timed one after the other, so that no weight comes from the cache
CLOSE, FEW = 1.25, 4  # times the fastest, and how many at most: what is timed between its neighbours too
ACTIVE_SHARE = 0.1  # of the hidden units, while products are timed
MEASURED_TOKENS = 1024  # more are prefill


Chain = Callable[[int], Callable[[dict[str, str]], object]]


@dataclass
class Tuning:
    """The choices for one model's shapes. `file` keeps them; a missing or foreign file costs only time.
    `chain`: for so many rows, what launches some layers by given methods.
    """

    products: Products
    file: Path
    chain: Chain
    chosen: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, products: Products, device: torch.device, chain: Chain) -> "Tuning":
        """With what an earlier start has measured."""
        layer = products.weights.layers[-1]
        shape = "-".join(
            str(n)
            for n in (
                layer.output.shape[0],
                *(len(w) for w in layer.low_in.values()),
                len(products.weights.head),
            )
        )
        name = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
        file = build.build(
            build.architecture(device)
        ).parent / f"tuning-{name}-torch{torch.__version__}-{shape}.json".replace("+", "-")
        try:
            chosen = json.loads(file.read_text())
        except (OSError, ValueError):
            chosen = {}
        return cls(products, file, chain, usable(chosen, products))

    def methods(self, tokens: int) -> dict[str, str]:
        """The method for every kind of product at that many tokens, measured now if it has not been."""
        if tokens > MEASURED_TOKENS:
            return {kind: self.products.for_many(kind) for kind in METHODS}
        missing = [kind for kind in METHODS if f"{kind} {tokens}" not in self.chosen]
        if missing:
            buffers = Buffers(self.products.weights, tokens, {})
            times = {kind: self._times(kind, buffers) for kind in missing}
            for kind, of in times.items():
                self.chosen[f"{kind} {tokens}"] = min(of, key=lambda method: of[method])
            del buffers
            for kind, of in times.items():
                close = [
                    method
                    for method in sorted(of, key=lambda method: of[method])
                    if of[method] <= CLOSE * min(of.values())
                ][:FEW]
                if kind != "head" and len(close) > 1:
                    self.chosen[f"{kind} {tokens}"] = self._fastest_between(tokens, kind, close)
            self._save()
        return self._chosen(tokens)

    def _chosen(self, tokens: int) -> dict[str, str]:
        return {kind: self.chosen[f"{kind} {tokens}"] for kind in METHODS}

    def _fastest_between(self, tokens: int, kind: str, methods: list[str]) -> str:
        """Of the methods for that kind of product, the one with which some layers take the least time."""
        run, others = self.chain(tokens), self._chosen(tokens)
        graphs = [capture(partial(run, others | {kind: method})) for method in methods]
        times = [[gpu_seconds(graph.replay) for graph in graphs] for _ in range(1 + ROUNDS)][
            1:
        ]  # in turn: the GPU's pace changes slowly
        return min(zip(map(statistics.median, zip(*times, strict=True)), methods, strict=True))[1]

    def _times(self, kind: str, buffers: Buffers) -> dict[str, float]:
        layers = self.products.weights.layers[1:][:LAYERS] or self.products.weights.layers
        layers = layers[:1] if kind == "head" else layers
        possible = self.products.possible(kind, len(buffers.x))
        if len(possible) == 1:
            return {possible[0]: 0.0}
        _fill(buffers)
        times = {method: self.time(kind, buffers, method, layers) for method in possible if method != WHOLE}
        # Partial sums are less than what the whole product gives: that is compared with the best of them only
        # where a norm adds them up.
        return {WHOLE: min(times.values()), **times} if WHOLE in possible else times

    def time(self, kind: str, buffers: Buffers, method: str, layers: list[CudaLayer]) -> float:
        """Milliseconds of one product, the median of some runs."""
        calls = [self.products.call(kind, layer, buffers, method) for layer in layers]
        graph = capture(lambda: [call() for call in calls])
        graph.replay()
        return statistics.median(gpu_seconds(graph.replay) for _ in range(RUNS)) * 1e3 / len(calls)

    def _save(self) -> None:
        try:
            part = self.file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(self.chosen, indent=0))
            os.replace(part, self.file)
        except OSError:
            pass  # it will be measured again


def usable(chosen: object, products: Products) -> dict[str, str]:
    """What of a file's content names products that can be run: the file may be of another version, or
    damaged.
    """
    if not isinstance(chosen, dict):
        return {}
    known = {}
    for key, method in chosen.items():
        kind, _, tokens = key.partition(" ")
        if kind in METHODS and tokens.isdecimal() and method in products.possible(kind, int(tokens)):
            known[key] = method
    return known


def _fill(buffers: Buffers) -> None:
    """With numbers like those of a real step, also where a product that was timed before has left something
    else: products of zeros run faster than others, and the sparse one the slower the more hidden units are
    active.
    """
    for tensor in (buffers.mixed, buffers.y, buffers.normed, *buffers.low.values()):
        tensor.normal_()
    buffers.hidden.copy_(torch.rand_like(buffers.hidden).add_(ACTIVE_SHARE - 1).relu_())

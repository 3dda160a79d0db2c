"""Decode and prefill through the engine: requests in, text out, without the socket."""

import gc
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.runner.cuda_runner import CudaRunner
from rwkv_batch.runner.staged_runner import StagedRunner
from rwkv_batch.wire.protocol import GenerateRequest, Progress

STEPS = 9  # that are launched in a run, alone or several at once: states are written at every third
WARM_UP = 12  # before the first run
TEXTS = 5  # that a figure is of: how many hidden units are active depends on the text
KEY = b"bench"
ENDLESS = 1 << 30


class Through:
    """An engine with rows of random prompts. Every row has its own seed and draws by the default method."""

    def __init__(
        self,
        weights: Checkpoint,
        rows: int,
        prefill_tokens: int,
        gpus: Sequence[int] = (0,),
        **options: Any,
    ) -> None:
        """gpus: of the model's stages, in their order; one may have several. options: of EngineConfig."""
        self.engine = Engine(
            weights,
            device="+".join(f"cuda:{number}" for number in gpus),
            max_rows=rows,
            prefill_tokens=prefill_tokens,
            l1=0,
            prefix_cache_mb=0,
            **options,
        )
        gc.collect()
        gc.freeze()  # as the server does: a collection of all there is would take as long as four large steps

    def decode(self, rows: int, runs: int) -> float:
        """Seconds for a token of every row. The rows run until the next call; `step` is what comes next."""
        found = []
        for _ in range(TEXTS):
            self.engine.cancel_frontend(KEY)
            self._add(request_for(rows, 4, ENDLESS))
            for _ in range(WARM_UP):
                self.step()
            found += [seconds_a_token(self.engine, rows) for _ in range(-(-runs // TEXTS))]
        return statistics.median(found)

    def step(self) -> None:
        self.engine.step()

    def prefill(self, rows: int, length: int, runs: int) -> float:
        """Seconds from a request with so many prompts of so many tokens to the first token of each."""
        self.engine.cancel_frontend(KEY)
        return statistics.median([self._first_tokens(rows, length) for _ in range(runs + 1)][1:])

    def about(self, rows: int) -> str:
        """The method of each GEMM."""
        runner = self.engine.runner
        if isinstance(runner, StagedRunner):
            return f"in stages on {', '.join(map(str, runner.devices))}"
        if not isinstance(runner, CudaRunner):
            return "torch operations"
        methods = runner.model.methods(rows)
        return " ".join(f"{kind}:{method}" for kind, method in methods.items())

    def _add(self, request: GenerateRequest) -> None:
        self.engine.add((KEY, request.id), request)

    def _first_tokens(self, rows: int, length: int) -> float:
        while self.engine.busy:
            self.step()
        request = request_for(rows, length, 1)
        torch.cuda.synchronize()
        start, came = time.perf_counter(), 0
        self._add(request)
        while came < rows:
            came += sum(len(event.rows) for _, event in self.engine.step() if isinstance(event, Progress))
        return time.perf_counter() - start


def seconds_a_token(engine: Engine, rows: int) -> float:
    """Of so many rows, which all run on, in the next steps."""
    start, before = time.perf_counter(), engine.counts.generation_tokens
    for _ in range(STEPS):
        engine.step()
    drawn = engine.counts.generation_tokens - before
    return (time.perf_counter() - start) * rows / drawn


def request_for(rows: int, length: int, max_tokens: int, name: str = "rows") -> GenerateRequest:
    prompts: list[str | list[int]] = [
        [random.randrange(1, 65000) for _ in range(length)] for _ in range(rows)
    ]
    return GenerateRequest(
        id=name, prompts=prompts, max_tokens=max_tokens, stop_ids=[], flush_tokens=1, prefix_cache=False
    )

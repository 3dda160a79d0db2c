"""The fastest method for each GEMM and number of tokens, measured once on the GPU at hand and kept in a file.

Until it is measured, a number of tokens runs with what is the fastest for a similar one, or with a guess.

GEMMs are timed alone first. Those within CLOSE of the fastest of their kind are timed once more in sequence
between their neighbours in some layers and the head: only there it shows what a GEMM gains by beginning
before the kernel before it has ended or by prefetching weights for the next one, and what split-K costs the
norm that adds up the partial sums.
"""

import json
import logging
import os
import statistics
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from tqdm import tqdm

from rwkv_batch.model.cuda.gemms.block_codes import CODES
from rwkv_batch.model.cuda.gemms.gemms import FOR_MANY, Gemms
from rwkv_batch.model.cuda.gemms.halves import LT_TOKENS, TILE_TOKENS
from rwkv_batch.model.cuda.gemms.kinds import (
    BESIDE,
    BETWEEN,
    HEAD,
    KINDS,
    MANY,
    OUT,
    SPARSE,
    STREAM,
    TILE,
    VALUE,
    WHOLE,
    output_method,
)
from rwkv_batch.model.cuda.gemms.low_rank import STREAM_TOKENS
from rwkv_batch.model.cuda.gemms.method import GemmCall
from rwkv_batch.model.cuda.gemms.search import Methods, Search, Seconds, Timing
from rwkv_batch.model.cuda.steps.capture import capture, gpu_seconds
from rwkv_batch.ops.cuda import build
from rwkv_batch.ops.cuda.buffers import Buffers
from rwkv_batch.ops.progress import hidden

log = logging.getLogger(__name__)

VERSION = 2  # of how methods are chosen; files of others are not read
RUNS = 5  # of all candidates that are timed alone
ROUNDS = 20  # of all candidates that are timed between their neighbours
IN_TURN = 12  # layers whose GEMMs of a kind are timed in turn, so that no weight comes from the cache
CLOSE, FEW = 1.25, 4  # times the fastest, and how many at most: what is timed between its neighbours too
ACTIVE_SHARE = 0.1  # of the hidden units, while GEMMs are timed
GUESSED_TOKENS = 1024  # for more, cuBLAS is the fastest, or comes close
SIMILAR = 1.5  # times as many tokens, or as few: what is the fastest for them is a good guess

Times = dict[str, float]  # milliseconds by method
Graph = torch.cuda.CUDAGraph
Step = Callable[[int], Callable[[Methods], object]]


@dataclass
class Autotuner:
    """The choices for one model's shapes.

    `file` keeps them; a missing or invalid file costs only time. `step`: for a number of tokens, a call that
    launches some layers and the head by the methods given.
    """

    gemms: Gemms
    file: Path
    step: Step
    chosen: dict[str, str]
    # Of kinds and tokens that are measured and not chosen yet: alone, and in sequence.
    _alone: dict[tuple[str, int], Times] = field(default_factory=dict)
    _searches: dict[int, Search] = field(default_factory=dict)
    _guesses: dict[tuple[str, int], str] = field(default_factory=dict)

    @classmethod
    def from_cache(cls, gemms: Gemms, device: torch.device, step: Step) -> "Autotuner":
        """With what an earlier start has measured on such a GPU for such shapes."""
        layer, head = gemms.weights.layers[-1], len(gemms.weights.head)
        sizes = (len(layer.output), *(len(w) for w in layer.low_in.values()), head)
        gpu = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
        bits = "" if gemms.format == "fp16" else f"-{gemms.format}"
        folder = build.build(gemms.kernels.architecture).parent

        def file_of(stage: str) -> Path:
            shape = f"{'-'.join(map(str, sizes))}{bits}{stage}"
            return folder / f"tuning-{gpu}-torch{torch.__version__}-{shape}-{VERSION}.json".replace("+", "-")

        whole = file_of("")
        if gemms.whole:
            return cls(gemms, whole, step, kept_in(whole, gemms))
        # The layers of a stage never run together, so it has a file of its own for what differs.
        own = file_of("-stage")
        return cls(gemms, own, step, kept_in(whole, gemms) | kept_in(own, gemms))

    def measure(self, sizes: Sequence[int], progress: bool = True) -> None:
        """Measure what is missing for these numbers of tokens, with a progress bar and a line in the log."""
        missing = self.unmeasured(sizes)
        if not missing:
            return
        log.info("timing GEMMs for %d batch sizes (once for a model's shape; about a minute)", len(missing))
        for tokens in tqdm(missing[::-1], desc="timing GEMMs", unit="size", disable=hidden(not progress)):
            for _ in self.measuring(tokens):
                pass

    def unmeasured(self, sizes: Sequence[int]) -> list[int]:
        """Of these numbers of tokens, those for which something is to be measured; they ascend."""
        return [tokens for tokens in sorted(set(sizes)) if self._missing(tokens)]

    def methods(self, tokens: int) -> dict[str, str]:
        """The method for every kind of GEMM at that many tokens: the fastest, or a guess."""
        return {kind: self.chosen.get(f"{kind} {tokens}") or self._guess(kind, tokens) for kind in KINDS}

    def measuring(self, tokens: int) -> Timing:
        """Measure what is missing for that many tokens, a piece for each `next`.

        In between, it holds buffers of a step of so many tokens, logits and graphs. It can be given up at any
        time: what it has found out about a kind of GEMM stays.
        """
        if not self._missing(tokens):
            return
        buffers = Buffers(self.gemms.weights.buffer_shape, tokens, {})
        for kind in KINDS:
            if (kind, tokens) not in self._alone:
                self._alone[kind, tokens] = yield from self._times(kind, buffers)
        del buffers
        if tokens not in self._searches:
            close = {kind: self._close(kind, tokens) for kind in KINDS}
            self._searches[tokens] = Search(close, partial(self._compare, tokens), step_of)
        yield from self._searches[tokens].timing()
        best = self._searches.pop(tokens).best
        self.chosen |= {f"{kind} {tokens}": method for kind, method in best.items()}
        self._guesses.clear()
        for kind in KINDS:
            del self._alone[kind, tokens]
        if self.gemms.weights.head.device.type == "cuda":
            torch.cuda.empty_cache()  # each graph had memory of its own
        self._save()

    def _missing(self, tokens: int) -> bool:
        """Whether anything is to be measured. Then all kinds are, as each depends on the others."""
        return any(f"{kind} {tokens}" not in self.chosen for kind in KINDS)

    def _guess(self, kind: str, tokens: int) -> str:
        if tokens > GUESSED_TOKENS:
            return self.gemms.untimed(kind)
        if (kind, tokens) not in self._guesses:
            candidates = self.gemms.candidates(kind, tokens)
            guesses = chain(self._of_similar(kind, tokens), likely(tokens))
            self._guesses[kind, tokens] = next(method for method in guesses if method in candidates)
        return self._guesses[kind, tokens]

    def _of_similar(self, kind: str, tokens: int) -> list[str]:
        """The methods chosen for similar numbers of tokens, the most similar first."""
        found = []
        for key, method in self.chosen.items():
            of, _, other = key.partition(" ")
            ratio = max(int(other) / tokens, tokens / int(other))
            if of == kind and ratio <= SIMILAR:
                found.append((ratio, method))
        return [method for _, method in sorted(found)]

    def _close(self, kind: str, tokens: int) -> list[str]:
        """The methods that are close to the fastest alone, which is the first."""
        times = self._alone[kind, tokens]
        limit = CLOSE * min(times.values())
        return [method for method in sorted(times, key=times.__getitem__) if times[method] <= limit][:FEW]

    def _compare(self, tokens: int, options: list[Methods]) -> Seconds:
        """Seconds of a step of some layers and the head by the methods of each option."""
        run, graphs = self.step(tokens), list[Graph]()
        for option in options:
            graphs.append(capture(partial(run, option)))
            yield
        return (yield from _medians(graphs, ROUNDS))

    def _times(self, kind: str, buffers: Buffers) -> Generator[None, None, Times]:
        """Of each candidate alone."""
        layers = self.gemms.weights.layers[1:][:IN_TURN] or self.gemms.weights.layers
        layers = layers[:1] if kind == HEAD else layers
        candidates = self.gemms.candidates(kind, len(buffers.x))
        if len(candidates) == 1 or kind in BETWEEN:  # which show only between their neighbours
            return dict.fromkeys(candidates, 0.0)
        _fill(buffers)
        calls = [self.gemms.call(kind, layer, buffers) for layer in layers]
        graphs: dict[str, Graph] = {}
        for method in candidates:
            if method != WHOLE:
                graphs[method] = capture(partial(self._run, kind, method, calls))
                yield
        seconds = yield from _medians(list(graphs.values()), RUNS)
        times = {method: 1e3 * of_all / len(layers) for method, of_all in zip(graphs, seconds, strict=True)}
        # Split-K gives only partial sums: it is compared with the whole GEMM where a norm adds them up.
        return {WHOLE: min(times.values()), **times} if WHOLE in candidates else times

    def _run(self, kind: str, name: str, calls: Sequence[GemmCall]) -> None:
        method = self.gemms.find(kind.removesuffix("_split"), name)
        for call in calls:
            method.run(call)

    def _save(self) -> None:
        device = self.gemms.weights.head.device
        if device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            return  # measured while other models ran: the next start does it again
        chosen = kept_in(self.file, self.gemms) | self.chosen  # other servers of this user write to it too
        with suppress(OSError):  # without the file they are measured again
            part = self.file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(chosen, indent=0), encoding="utf-8")
            os.replace(part, self.file)


def likely(tokens: int) -> tuple[str, ...]:
    """Methods that are fast for so many tokens of most models; the first that can run is the best."""
    if tokens <= STREAM_TOKENS:
        return SPARSE, STREAM, BESIDE, *CODES, TILE, *FOR_MANY
    if tokens <= LT_TOKENS:
        return TILE, *CODES, *FOR_MANY
    return "fp8", TILE if tokens <= TILE_TOKENS else MANY, *FOR_MANY


def kept_in(file: Path, gemms: Gemms) -> dict[str, str]:
    """What can be used of a file; nothing of one that cannot be read."""
    with suppress(OSError, ValueError):
        return usable(json.loads(file.read_text(encoding="utf-8")), gemms)
    return {}


def usable(chosen: object, gemms: Gemms) -> dict[str, str]:
    """The entries of a file that name methods which can be run: it may be of another version, or damaged."""
    if not isinstance(chosen, dict):
        return {}

    def runs(key: str, method: object) -> bool:
        kind, _, tokens = key.partition(" ")
        if kind not in KINDS or not tokens.isdecimal() or int(tokens) == 0:
            return False
        return method in gemms.candidates(kind, int(tokens))

    return {key: method for key, method in chosen.items() if runs(key, method)}


def step_of(methods: Methods) -> Hashable:
    """A key that choices of methods share if the same kernels run by them."""
    outputs = {kind: output_method(methods, kind) for kind in (OUT, VALUE)}
    return tuple(sorted((methods | outputs).items()))


def _medians(graphs: Sequence[Graph], rounds: int) -> Generator[None, None, list[float]]:
    """Seconds of each. They run in turn, as the GPU's clock changes slowly; the first round warms up."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(1 + rounds):
        for graph, of_graph in zip(graphs, times, strict=True):
            of_graph.append(gpu_seconds(graph.replay))
            yield
    return [statistics.median(of_graph[1:]) for of_graph in times]


def _fill(buffers: Buffers) -> None:
    """Fill inputs with numbers like those of a real step, in place of what a GEMM timed before has left.

    GEMMs of zeros run faster than others, and the sparse one runs slower the more hidden units are active.
    """
    for tensor in (buffers.mixed, buffers.y, buffers.normed, *buffers.low.values()):
        tensor.normal_()
    buffers.hidden.copy_(torch.rand_like(buffers.hidden).add_(ACTIVE_SHARE - 1).relu_())

"""Training batches: examples of similar length side by side, made by worker processes without end."""

import multiprocessing as mp
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from demo.training.encoding import END, answer_ids, prompt_ids
from demo.training.example import Example
from demo.training.text import training_example
from rwkv_batch.bundled.codes import SIZE

LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
CANDIDATES = 16384  # ids that compete for each next token: the known ones, the batch's own, and random ones


@dataclass(frozen=True)
class TrainingBatch:
    """`tokens` `[B, T]`, and which of them are trained on.

    `candidates`: as many ids as are asked for, ascending. `positions` index the flattened tokens whose next token is the
    candidate in `targets`; `weights` are 0 for padding. `shares`: of each candidate, the logarithm of how many
    ids it stands for: the random ones stand for all that are no candidates too.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    candidates: np.ndarray
    shares: np.ndarray

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


Maker = Callable[[Random], Example]


def stream(
    known: np.ndarray,
    seed: int,
    tokens_per_batch: int,
    make: Maker = training_example,
    candidates: int = CANDIDATES,
) -> Iterator[TrainingBatch]:
    """Fresh batches for ever. Every batch of one length has one shape."""
    rng, noise = Random(seed), np.random.default_rng(seed)
    waiting: dict[int, list[tuple[list[int], list[int]]]] = {length: [] for length in LENGTHS}
    while True:
        example = make(rng)
        prompt, answer = prompt_ids(example), answer_ids(example)
        size = len(prompt) + len(answer) - 1
        if size > LENGTHS[-1]:
            continue
        length = next(n for n in LENGTHS if size <= n)
        waiting[length].append((prompt, answer))
        if len(waiting[length]) == tokens_per_batch // length:
            yield make_batch(waiting[length], length, known, noise, candidates)
            waiting[length] = []


def make_batch(
    examples: list[tuple[list[int], list[int]]],
    length: int,
    known: np.ndarray,
    noise: np.random.Generator,
    count: int = CANDIDATES,
) -> TrainingBatch:
    """Pad the examples to `length`; the loss stands on the answers alone. count: of candidates."""
    tokens = np.full((len(examples), length), END)
    capacity = tokens.size // 2
    positions: list[int] = []
    targets: list[int] = []
    for i, (prompt, answer) in enumerate(examples):
        row = prompt + answer
        tokens[i, : len(row) - 1] = row[:-1]
        start = i * length + len(prompt) - 1
        positions.extend(range(start, start + len(answer)))
        targets.extend(answer)
    keep = min(len(positions), capacity)
    room = capacity - keep
    anywhere = range(
        room
    )  # padding of its own for each place, since a GPU adds up gradients of one place in turns

    wanted = np.union1d(known, targets)
    others = noise.permutation(np.setdiff1d(np.arange(SIZE), wanted, assume_unique=True))
    candidates = np.sort(np.concatenate((wanted, others[: count - len(wanted)])))
    each = np.log(len(others) / (count - len(wanted)))
    return TrainingBatch(
        tokens,
        np.array([*positions[:keep], *anywhere]),
        np.searchsorted(candidates, np.array([*targets[:keep], *([0] * room)])) % count,
        np.array([1.0] * keep + [0.0] * room, dtype=np.float32),
        candidates,
        np.where(np.isin(candidates, wanted), 0, each).astype(np.float32),
    )


def work(
    queue: mp.Queue, known: np.ndarray, seed: int, tokens_per_batch: int, make: Maker, candidates: int
) -> None:
    for batch in stream(known, seed, tokens_per_batch, make, candidates):
        queue.put(batch)


def from_workers(
    count: int,
    known: np.ndarray,
    seed: int,
    tokens_per_batch: int,
    make: Maker = training_example,
    candidates: int = CANDIDATES,
) -> Iterator[TrainingBatch]:
    """Batches from `count` processes, which start at once and end with this one."""
    context = mp.get_context("fork")
    queue: mp.Queue = context.Queue(maxsize=8 * count)
    workers = [
        context.Process(
            target=work,
            args=(queue, known, seed * 1000 + i, tokens_per_batch, make, candidates),
            daemon=True,
        )
        for i in range(count)
    ]
    for worker in workers:
        worker.start()
    return iter(queue.get, None)

"""Training batches: examples of similar length side by side, made by worker processes without end."""

import multiprocessing as mp
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from pyrwkv_tokenizer import RWKVTokenizer

from demo.text import training_example
from demo.vocabulary import END, rows

LENGTHS = (32, 64, 128, 256, 384)
NOISE = 0.08  # share of the examples in which one to three tokens of the prompt become unknown ones


@dataclass(frozen=True)
class TrainingBatch:
    """`tokens` `[B, T]`, and which of them are trained on.

    `positions` index the flattened tokens whose next token is in `targets`; `weights` are 0 for padding.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


def stream(known: np.ndarray, seed: int, tokens_per_batch: int) -> Iterator[TrainingBatch]:
    """Fresh batches for ever. Every batch of one length has one shape."""
    tokenizer, table, rng = RWKVTokenizer(), rows(known), Random(seed)
    waiting: dict[int, list[tuple[list[int], list[int]]]] = {length: [] for length in LENGTHS}
    while True:
        example = training_example(rng)
        prompt, answer = tokenizer.encode(example.prompt), [*tokenizer.encode(example.answer), END]
        size = len(prompt) + len(answer) - 1
        if size > LENGTHS[-1]:
            continue
        length = next(n for n in LENGTHS if size <= n)
        waiting[length].append((prompt, answer))
        if len(waiting[length]) == tokens_per_batch // length:
            yield make_batch(waiting[length], length, table, rng)
            waiting[length] = []


def make_batch(
    examples: list[tuple[list[int], list[int]]], length: int, table: np.ndarray, rng: Random
) -> TrainingBatch:
    """Pad the examples to `length`; the loss stands on the answers alone."""
    tokens = np.full((len(examples), length), table[END])
    capacity = tokens.size // 2
    positions: list[int] = []
    targets: list[int] = []
    for i, (prompt, answer) in enumerate(examples):
        row = table[np.array(prompt + answer)]
        if rng.random() < NOISE:
            row[[rng.randrange(len(prompt)) for _ in range(rng.randint(1, 3))]] = table.max()
        tokens[i, : len(row) - 1] = row[:-1]
        start = i * length + len(prompt) - 1
        positions.extend(range(start, start + len(answer)))
        targets.extend(row[len(prompt) :])
    keep = min(len(positions), capacity)
    room = capacity - keep

    def padded(values: list) -> np.ndarray:
        return np.array([*values[:keep], *([0] * room)], dtype=np.int64)

    return TrainingBatch(
        tokens, padded(positions), padded(targets), np.array([1.0] * keep + [0.0] * room, dtype=np.float32)
    )


def work(queue: mp.Queue, known: np.ndarray, seed: int, tokens_per_batch: int) -> None:
    for batch in stream(known, seed, tokens_per_batch):
        queue.put(batch)


def from_workers(count: int, known: np.ndarray, seed: int, tokens_per_batch: int) -> Iterator[TrainingBatch]:
    """The same from `count` processes, which start at once and end with this one."""
    context = mp.get_context("fork")
    queue: mp.Queue = context.Queue(maxsize=8 * count)
    workers = [
        context.Process(target=work, args=(queue, known, seed * 1000 + i, tokens_per_batch), daemon=True)
        for i in range(count)
    ]
    for worker in workers:
        worker.start()
    return iter(queue.get, None)

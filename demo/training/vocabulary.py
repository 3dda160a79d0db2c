"""The compact vocabulary: single bytes, common marks, and the ids that the training text holds most often.

The other ids have no row of their own; names are made of them, and their codes are enough to copy them.
"""

import string
from collections import Counter
from collections.abc import Iterable
from multiprocessing import get_context
from random import Random

import numpy as np

from demo.training.encoding import END, answer_ids, prompt_ids, tokenizer
from demo.training.text import training_example

MOST = 8800  # known ids, so that the packed file stays below 12 MB
SAMPLE = 100_000
PARTS = 20  # of the sample, for any number of processes
SELDOM = 4  # examples; an id seen in fewer stands in a name


def collect(seed: int, most: int = MOST, sample: int = SAMPLE, workers: int = 1) -> np.ndarray:
    """The sorted known ids, at most `most`, counted in `sample` training examples by so many processes."""
    counts = Counter[int]()
    always = {END, *range(1, 257)}
    for text in extra_texts():
        always.update(tokenizer().encode(text))
    parts = [(seed * 1000 + i, sample // PARTS) for i in range(PARTS)]
    if workers == 1:
        found = map(count, parts)
    else:
        with get_context("fork").Pool(workers) as pool:
            found = iter(pool.map(count, parts))
    for part in found:
        counts.update(part)
    often = [token for token, number in counts.most_common() if token not in always and number >= SELDOM]
    return np.array(sorted(always | set(often[: most - len(always)])), dtype=np.int64)


def count(part: tuple[int, int]) -> Counter[int]:
    """In how many of so many examples, drawn from a seed, each id stands."""
    seed, sample = part
    rng, counts = Random(seed), Counter[int]()
    for _ in range(sample):
        example = training_example(rng)
        counts.update({*prompt_ids(example), *answer_ids(example)})
    return counts


def extra_texts() -> Iterable[str]:
    """Common marks and words that prompts hold although the training text may not."""
    yield from string.punctuation
    yield from (f" {mark}" for mark in string.punctuation)
    yield from ("\n" * n for n in range(1, 4))
    yield from (" " * n for n in range(1, 9))
    yield from (str(n) for n in range(1000))
    yield from "，。！？：；、“”‘’（）《》…—"

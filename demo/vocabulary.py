"""The compact vocabulary: the ids of the training text, all single bytes, and one row for all other ids."""

import string
from collections.abc import Iterable
from random import Random

import numpy as np
from pyrwkv_tokenizer import RWKVTokenizer

from demo.text import training_example

SIZE = 65536  # rows of the unpacked emb and head
END = 0  # end of text
SAMPLE = 120_000


def collect(tokenizer: RWKVTokenizer, seed: int, sample: int = SAMPLE) -> np.ndarray:
    """The sorted known ids, read off `sample` training examples."""
    rng = Random(seed)
    ids = {END, *range(1, 257)}
    for text in extra_texts():
        ids.update(tokenizer.encode(text))
    for _ in range(sample):
        example = training_example(rng)
        ids.update(tokenizer.encode(example.prompt))
        ids.update(tokenizer.encode(example.answer))
    return np.array(sorted(ids), dtype=np.int64)


def extra_texts() -> Iterable[str]:
    """Common marks and words that prompts hold although the training text may not."""
    yield from string.punctuation
    yield from (f" {mark}" for mark in string.punctuation)
    yield from ("\n" * n for n in range(1, 4))
    yield from (" " * n for n in range(1, 9))
    yield from (str(n) for n in range(1000))
    yield from "，。！？：；、“”‘’（）《》…—"


def rows(known: np.ndarray) -> np.ndarray:
    """For each of the 65536 ids its row in the compact tables; unknown ids share the last one."""
    table = np.full(SIZE, len(known), dtype=np.int64)
    table[known] = np.arange(len(known))
    return table

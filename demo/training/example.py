"""One training example, and the rule that keeps some combinations out of training."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

HELD_OUT_ONE_IN = 20
T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """A prompt as the server sends it and the answer, which the end-of-text token follows.

    `key` names the combination of words that the example shows ("" if it belongs to a small closed set that
    is always trained on). `names`: words that the answer copies from the prompt (see demo/training/encoding.py).
    `lead`: token ids in front of the prompt. `parts`: the prompt in the pieces that the server encodes one by
    one, where it is more than one.
    """

    kind: str
    prompt: str
    answer: str
    key: str = ""
    names: tuple[str, ...] = ()
    lead: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()


def held_out(key: str) -> bool:
    """Whether a combination is kept for evaluation.

    Its hash alone decides, so it is the same in every run and process.
    """
    if not key:
        return False
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % HELD_OUT_ONE_IN == 0


def pick(make: Callable[[Random], T], key_of: Callable[[T], str], rng: Random, evaluation: bool) -> T:
    """Draw until the combination is on the wanted side of the split.

    A closed set (empty key) is on the training side.
    """
    while True:
        item = make(rng)
        if held_out(key_of(item)) == evaluation:
            return item

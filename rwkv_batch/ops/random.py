"""Counter-based random numbers: each depends on a key and a position only.

So a row with a seed draws the same beside any other rows. cuda/sample_number.cuh computes the same bits.
"""

import numpy as np
from numpy.typing import NDArray

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


def random_key(seed: int, stream: int) -> np.uint64:
    """The key of a row's random numbers; `seed` and `stream` count modulo 2**64."""
    return np.uint64(_mixed(_mixed(seed) + (stream + 1) * GOLDEN))


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The random number of each key (uint64) at each position (uint64): in [0, 1), 53 bits."""
    return _uniform(mix(keys + _step(positions)))


def token_uniforms(key: np.uint64, position: np.uint64, tokens: np.ndarray) -> np.ndarray:
    """A random number for each of `tokens` (any integers) at one position of a row: in [0, 1), 53 bits."""
    here = mix(np.array([key]) + _step(np.array([position])))
    return _uniform(mix(mix(here) + _step(tokens.astype(np.uint64))))


def _uniform(words: np.ndarray) -> np.ndarray:
    return (words >> np.uint64(11)) * 2.0**-53


def _step(counts: np.ndarray) -> np.ndarray:
    """The increment of SplitMix64 after each of `counts` numbers."""
    return (counts + np.uint64(1)) * np.uint64(GOLDEN)


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64, a bijection.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    return words ^ (words >> np.uint64(31))


def _mixed(word: int) -> int:
    """`mix` of one integer, modulo 2**64; for a single number numpy would make ten small arrays."""
    word %= 2**64
    word = (word ^ (word >> 30)) * FIRST % 2**64
    word = (word ^ (word >> 27)) * SECOND % 2**64
    return word ^ (word >> 31)

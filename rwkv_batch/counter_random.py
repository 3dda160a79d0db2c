"""Random numbers that depend on a key and counters only, so what a seeded row draws does not depend on what runs beside it."""
import numpy as np


def random_key(seed: int, stream: int) -> np.uint64:
    """The key of a row's random numbers; `seed` and `stream` count modulo 2**64."""
    words = np.array([seed % 2**64, stream % 2**64], np.uint64)
    return mix(mix(words[:1]) + _step(words[1:]))[0]


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The random number of each key (uint64) at each position (uint64): in [0, 1), 53 bits."""
    return _uniform(mix(keys + _step(positions)))


def token_uniforms(key: np.uint64, position: np.uint64, tokens: np.ndarray) -> np.ndarray:
    """A random number for each of `tokens` (ids, any integers) at one position of a row: in [0, 1), 53 bits."""
    here = mix(np.array([key]) + _step(np.array([position])))
    return _uniform(mix(mix(here) + _step(tokens.astype(np.uint64))))


def _uniform(words: np.ndarray) -> np.ndarray:
    return (words >> np.uint64(11)) * 2.0**-53


def _step(counts: np.ndarray) -> np.ndarray:
    """The increment of SplitMix64 after each of `counts` numbers."""
    return (counts + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


def mix(words: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), a bijection."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))

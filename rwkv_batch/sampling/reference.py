"""The exact distributions: one token drawn from the logits of one row, after its bias and penalties.

sampler.py defines the methods; cuda/sample.cu draws from the same distributions. Every function takes logits
`[vocab]` fp32, top_k in 1..vocab and 0 < top_p <= 1 where it has them, `uniform` in [0, 1), and `scratch`
`[vocab]` fp32, which is overwritten. Where the largest logit is no number to draw by, they return BROKEN.
"""

import math

import numpy as np

from rwkv_batch.ops.random import token_uniforms
from rwkv_batch.sampling.params import LikelihoodLimits

LARGEST = float(np.finfo(np.float32).max)
BROKEN = -1  # in place of a token: nothing can be drawn, as `is_broken` says
LIKELY = 1024  # top_p first looks at this many of the likeliest tokens; they nearly always hold its mass
BLOCK = 256  # weights are summed in blocks, then one block is searched: two short sums instead of a long one


def is_broken(top: float) -> bool:
    """Whether nothing can be drawn by logits of which this is the largest, or NaN if one is that.

    That is where one is NaN or infinity, or where all are -infinity.
    """
    return not -LARGEST < top < math.inf


def draw(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, uniform: float, scratch: np.ndarray
) -> int:
    """Draw by "rapid"; without limits that is a plain draw from the softmax, which is "gumbel"."""
    vocab = len(logits)
    top = float(logits.max())
    if is_broken(top):
        return BROKEN
    mass = math.inf  # that top_p leaves, on the scale where the likeliest token weighs 1
    if top_p < 1 or top_k == vocab:
        weights = _all_weights(logits, top, temperature, scratch)
        if top_p == 1:
            return _pick(weights, uniform)
        mass = top_p * float(weights.sum(dtype=np.float64))
    threshold, sums = _cut(logits, top, temperature, top_k, mass)

    kept = np.flatnonzero(logits >= threshold)
    values = logits[kept]
    weights = _weights(values, top, temperature)
    tied = values == threshold
    above = len(kept) - int(tied.sum())
    if above > 0:  # otherwise all that is left weighs the same
        share = float(top_k - above)
        if weights[tied][0] > 0:
            share = min(share, (mass - sums[above - 1]) / weights[tied][0])
        weights[tied] *= min(max(share / (len(kept) - above), 0.0), 1.0)
    return int(kept[_pick(weights, uniform)])


def draw_nucleus(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, uniform: float, scratch: np.ndarray
) -> int:
    """Draw by "nucleus"."""
    vocab = len(logits)
    if top_k == vocab and top_p == 1:
        return draw(logits, temperature, top_k, top_p, uniform, scratch)
    top = float(logits.max())
    if is_broken(top):
        return BROKEN
    kept = (
        np.flatnonzero(logits >= np.partition(logits, vocab - top_k)[vocab - top_k])
        if top_k < vocab
        else np.arange(vocab)
    )
    values = logits[kept]
    if top_p < 1:
        mass = top_p * float(
            _all_weights(values, top, temperature, scratch[: len(kept)]).sum(dtype=np.float64)
        )
        threshold, _ = _cut(values, top, temperature, len(values), mass)
        kept = kept[values >= threshold]
    return int(kept[_pick(_weights(logits[kept], top, temperature), uniform)])


def draw_noisy(
    logits: np.ndarray, temperature: float, noise: float, key: np.uint64, position: np.uint64
) -> int:
    """Draw by "noise", for noise > 0, with the random numbers of the row's `key` at `position`."""
    top = float(logits.max())
    if is_broken(top):
        return BROKEN
    kept = np.flatnonzero(logits >= np.float64(top - noise * temperature))  # the others cannot win
    noisy = logits[kept].astype(np.float64) / temperature + noise * token_uniforms(key, position, kept)
    return int(kept[noisy.argmax()])


def divide_repeated(logits: np.ndarray, seen: np.ndarray, penalty: float) -> None:
    """The repetition penalty (CTRL, arXiv:1909.05858, with negative logits multiplied), in place.

    seen: ids, each once.
    """
    values = logits[seen]
    divided = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))
    logits[seen] = np.where(values < np.inf, np.clip(divided, -LARGEST, LARGEST), values)


def add(logits: np.ndarray, ids: np.ndarray, amounts: np.ndarray) -> None:
    """Add to the logits of `ids`, each of which comes at most once, in place. What is broken stays that."""
    values = logits[ids]
    logits[ids] = np.where(values < np.inf, np.clip(values + amounts, -LARGEST, LARGEST), values)


def remaining(
    logits: np.ndarray, allowed: np.ndarray | None, temperature: float, limits: LikelihoodLimits
) -> np.ndarray:
    """The ids that a mask and the limits by likelihood leave, ascending; the likeliest always stays.

    allowed: the ids of the mask, ascending; None: all. The limits are measured on the softmax of their logits
    / temperature: min_p keeps p >= min_p max(p), top_a keeps p >= top_a max(p)**2.
    """
    values = logits if allowed is None else logits[allowed]
    top = float(values.max())
    if limits.off or is_broken(top):
        return np.arange(len(logits)) if allowed is None else allowed
    least = limits.min_p
    if limits.top_a > 0:
        least = max(least, limits.top_a / float(_weights(values, top, temperature).sum()))
    kept = np.flatnonzero(values >= np.float32(top + temperature * math.log(min(least, 1.0))))
    return kept if allowed is None else allowed[kept]


def likeliest(logits: np.ndarray) -> int:
    """The greedy choice: the lowest id of the largest logit."""
    token = int(logits.argmax())  # of a NaN, if there is one
    return BROKEN if is_broken(float(logits[token])) else token


def _cut(
    logits: np.ndarray, top: float, temperature: float, top_k: int, mass: float
) -> tuple[np.float32, np.ndarray]:
    """The threshold: the value of the token with which `top_k` tokens or a weight of `mass` are in.

    Tokens come in likeliest first. Also returns the running sums of their weights.
    """
    size = len(logits)
    # The value is looked for among the likeliest tokens only, as many as it takes.
    for most in (top_k if mass == math.inf else min(LIKELY, top_k), top_k):
        likely = logits if most == size else np.partition(logits, size - most)[size - most :]
        likely = np.sort(likely)[::-1]
        sums = _weights(likely, top, temperature).cumsum()
        last = int(sums.searchsorted(mass))  # the first token with which the mass is in
        if last < most or most == top_k:
            break
    return likely[min(last, most - 1)], sums


def _weights(values: np.ndarray, top: float, temperature: float) -> np.ndarray:
    """Unnormalised probabilities in fp64; a value of `top` weighs 1."""
    return np.exp((values.astype(np.float64) - top) / temperature)


def _all_weights(values: np.ndarray, top: float, temperature: float, scratch: np.ndarray) -> np.ndarray:
    """`_weights` in fp32, written to `scratch`: for a whole vocabulary, whose sum is taken in fp64."""
    np.subtract(values, np.float32(top), out=scratch)
    scratch *= np.float32(1 / temperature)
    np.exp(scratch, out=scratch)
    return scratch


def _pick(weights: np.ndarray, uniform: float) -> int:
    """The index at which the running sum (fp64) of `weights` passes `uniform` of the whole.

    Its weight is never 0.
    """
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64).cumsum()
    point = uniform * blocks[-1]
    block = int(blocks.searchsorted(point, side="right"))
    if block > 0:
        point -= blocks[block - 1]
    sums = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    inside = int(sums.searchsorted(point, side="right"))
    last = int(sums.searchsorted(sums[-1]))  # rounding may carry `point` past the block's end
    return block * BLOCK + min(inside, last)

"""Exact distributions under masks, min_p, top_a and repetition penalties, by definition; and masks."""

import numpy as np
from exact import softmax

from rwkv_batch.sampling.masks import RowMasks, mask_words
from rwkv_batch.wire.protocol import Sampling


def masks_of(allowed: dict[int, np.ndarray]) -> RowMasks:
    """By place: which ids the row may draw, `[vocab]` bool."""
    lines = []
    for may in allowed.values():
        bits = np.zeros(mask_words(len(may)) * 32, np.uint8)
        bits[: len(may)] = may
        lines.append(np.packbits(bits, bitorder="little").view(np.int32))
    return RowMasks(list(allowed), np.stack(lines))


def exact_filtered(logits, sampling: Sampling, allowed=None, seen=()) -> np.ndarray:
    """Probabilities in fp64 for "rapid" without penalties but that of repetition; top_p without ties."""
    values = np.array(logits, np.float64)
    for token in set(seen):
        scale = sampling.repetition_penalty
        values[token] = values[token] / scale if values[token] > 0 else values[token] * scale
    for token, amount in sampling.logit_bias.items():
        values[token] += amount
    if allowed is not None:
        values[~np.asarray(allowed)] = -np.inf
    if sampling.temperature <= 0:
        return np.eye(len(values))[values.argmax()]
    p = softmax(values / sampling.temperature)
    p[p < max(sampling.min_p * p.max(), sampling.top_a * p.max() ** 2)] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if sampling.top_k > 0:
        p[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:  # the token that reaches it keeps the share that fills it, as of all of p
        whole = softmax(values / sampling.temperature)
        whole[(whole < max(sampling.min_p * whole.max(), sampling.top_a * whole.max() ** 2))] = 0
        whole /= whole.sum()
        before = whole[order].cumsum() - whole[order]
        p[order] = np.minimum(p[order], np.maximum(sampling.top_p - before, 0))
    return p / p.sum()


FILTERED = {
    "a mask": Sampling(),
    "hot": Sampling(temperature=1.9),
    "greedy": Sampling(temperature=0),
    "top_k of what is left": Sampling(top_k=3),
    "top_k of more than is left": Sampling(top_k=20),
    "top_p of what is left": Sampling(top_p=0.7),
    "top_k and top_p": Sampling(top_k=5, top_p=0.8, temperature=1.3),
    "min_p": Sampling(min_p=0.15),
    "min_p, then top_k": Sampling(min_p=0.02, top_k=4),
    "min_p after the temperature": Sampling(min_p=0.1, temperature=1.8),
    "only the likeliest": Sampling(min_p=1.0),
    "top_a": Sampling(top_a=0.4),
    "top_a, then top_p": Sampling(top_a=0.1, top_p=0.9),
    "repetition": Sampling(repetition_penalty=1.6),
    "repetition that is rewarded": Sampling(repetition_penalty=0.7, temperature=1.4),
    "repetition and bias": Sampling(repetition_penalty=1.3, logit_bias={2: 1.5, 9: -100.0}),
}

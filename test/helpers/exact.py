"""The exact distributions that samplers are tested against: dense vectors in fp64, from the definition."""

import numpy as np

from rwkv_batch.wire.protocol import Sampling

EXEMPT = {33, 10, 11, *range(49, 59)}
TIES = [0.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0, -4.0, 0.0, 0.0]


def nucleus(**fields):
    return Sampling(method="nucleus", **fields)


def exact(logits, params, history=()):
    """The probability of each token, after the tokens of `history` were drawn; not for "noise"."""
    return (_rapid if params.method == "rapid" else _other)(logits, params, history)


def _rapid(logits, params, history=()):
    """`exact` for "rapid"."""
    logits = np.array(logits, np.float64)
    for token, value in params.logit_bias.items():
        logits[token] += value
    native, counts = np.zeros(len(logits)), np.zeros(len(logits))
    for token in history:
        native *= params.alpha_decay
        native[token] += params.alpha_frequency if counts[token] else params.alpha_presence
        counts[token] += 1
    logits -= native + params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    if params.temperature <= 0 or params.top_p == 0 or params.top_k == 1:
        return np.eye(len(logits))[logits.argmax()]
    z = logits / min(max(params.temperature, 0.001), 1000)
    p = np.exp(z - z.max())
    p /= p.sum()
    top_k = params.top_k if params.top_k > 0 else len(p)
    top_p = params.top_p if 0 <= params.top_p <= 1 else 1.0
    if top_k >= len(p) and top_p == 1:
        return p
    for threshold in sorted(set(p), reverse=True):
        if (p >= threshold).sum() >= top_k or p[p >= threshold].sum() >= top_p:
            break
    above, tied = p > threshold, p == threshold
    share = min((top_p - p[above].sum()) / (threshold * tied.sum()), (top_k - above.sum()) / tied.sum())
    weights = p * above + p * tied * min(max(share, 0), 1)
    return weights / weights.sum()


def adjusted(logits, params, history):
    logits = np.array(logits, np.float64)
    for token, value in params.logit_bias.items():
        logits[token] += value
    counts = np.bincount(history, minlength=len(logits)) if len(history) else np.zeros(len(logits))
    logits -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    if params.method == "nucleus":
        occurrences, presence = np.zeros(len(logits)), np.zeros(len(logits))
        for token in history:
            occurrences[token] += token not in EXEMPT
            presence[token] = params.alpha_presence
            occurrences *= params.alpha_decay  # before the draw that follows
        logits -= presence + params.alpha_frequency * occurrences
    return logits


def softmax(z):
    p = np.exp(z - z.max())
    return p / p.sum()


def _other(logits, params, history=()):
    """`exact` for "nucleus" and "gumbel"."""
    logits = adjusted(logits, params, history)
    limited = params.method == "nucleus"
    if params.temperature <= 0 or (limited and (params.top_p == 0 or params.top_k == 1)):
        return np.eye(len(logits))[logits.argmax()]
    z = logits / params.temperature
    if limited and 0 < params.top_k < len(z):
        z[z < np.sort(z)[-params.top_k]] = -np.inf
    p = softmax(z)
    if limited and 0 < params.top_p < 1:
        values, places = np.unique(-p, return_inverse=True)  # likeliest first
        masses = np.bincount(places, p, len(values))
        likelier = (masses.cumsum() - masses)[places]  # the mass of the tokens likelier than each
        p = np.where(likelier < params.top_p, p, 0)
    return p / p.sum()


RAPID = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.4),
    "hot": Sampling(temperature=3.0),
    "top_k": Sampling(top_k=2),
    "top_k among ties": Sampling(top_k=3),
    "top_k ends with the ties": Sampling(top_k=6),
    "top_p in the first": Sampling(top_p=0.3),
    "top_p crosses": Sampling(top_p=0.65),
    "top_p crosses among ties": Sampling(top_p=0.85),
    "top_p nearly all": Sampling(top_p=0.999),
    "top_k binds": Sampling(top_k=3, top_p=0.95, temperature=1.5),
    "top_p binds": Sampling(top_k=5, top_p=0.7),
    "both among the same ties": Sampling(top_k=4, top_p=0.8),
    "filters after the temperature": Sampling(temperature=2.5, top_k=5, top_p=0.6),
    "top_k past the vocabulary": Sampling(top_k=11),
    "top_k off": Sampling(top_k=-1, top_p=0.9),
    "top_p above its range is off": Sampling(top_p=1.5, top_k=4),
    "top_p below its range is off": Sampling(top_p=-0.5),
    "bias": Sampling(logit_bias={0: 3.0, 4: -100.0, 9: 1.5}),
    "bias and filters": Sampling(logit_bias={0: 3.0, 4: -1.0}, top_k=4, top_p=0.9),
    "temperature past its range": Sampling(temperature=1e9, top_k=4),
}
OTHERS = {
    "plain": nucleus(),
    "temperature": nucleus(temperature=0.4),
    "top_k": nucleus(top_k=2),
    "ties at rank top_k all stay": nucleus(top_k=3),
    "top_k past the vocabulary": nucleus(top_k=11),
    "top_k off": nucleus(top_k=-1, top_p=0.9),
    "the first token crosses top_p": nucleus(top_p=0.3),
    "the second crosses": nucleus(top_p=0.65),
    "ties cross": nucleus(top_p=0.85),
    "nearly all": nucleus(top_p=0.999),
    "top_p of what top_k left": nucleus(top_k=6, top_p=0.68, temperature=2.0),
    "top_p above its range is off": nucleus(top_p=1.5, top_k=4),
    "top_p below its range is off": nucleus(top_p=-0.5),
    "bias": nucleus(logit_bias={0: 3.0, 4: -100.0, 9: 1.5}, top_k=3, top_p=0.9),
    "gumbel": Sampling(method="gumbel"),
    "gumbel hot": Sampling(method="gumbel", temperature=3.0),
    "gumbel knows no limits": Sampling(method="gumbel", top_k=1, top_p=0.0),
    "gumbel bias": Sampling(method="gumbel", logit_bias={0: 3.0, 4: -100.0}),
}

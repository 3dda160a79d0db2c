"""What the tests of the samplers share: drawing many tokens, and comparing them with exact probabilities."""

import itertools
import math

import numpy as np
import torch
from exact import TIES, exact
from scipy.stats import chisquare

from rwkv_batch.sampling.sampler import Sampler

UNLIKELY = 1e-4  # seeds are fixed, so a test that passes keeps passing
PENALTIES = {"alpha_presence": 1.0, "alpha_frequency": 0.5, "alpha_decay": 0.5, "presence_penalty": 0.5}


def assert_drawn_from(drawn, probabilities):
    """Chi-square over outcomes joined, likeliest first, into at most fifty groups of about the same
    expectation.
    """
    observed = np.bincount(drawn, minlength=len(probabilities))
    assert observed[probabilities == 0].sum() == 0
    order = np.argsort(-probabilities)
    groups = (probabilities[order].cumsum() * 49.999).astype(int)
    expected = np.bincount(groups, probabilities[order] * len(drawn))
    observed = np.bincount(groups, observed[order])[expected > 0]
    expected = expected[expected > 0]
    if len(expected) > 1:  # otherwise nothing else was possible, and nothing else came
        assert chisquare(observed, expected).pvalue > UNLIKELY


def run(logits, params, rows, steps=1):
    """Tokens [rows, steps] of rows that all see the same logits at every step."""
    sampler = Sampler(rows, len(logits), "cpu")
    for row in range(rows):
        sampler.begin(row, params, seed=2024, stream=row)
    batch = torch.tensor(np.asarray(logits), dtype=torch.float32)
    drawn = []
    for _ in range(steps):
        parts = [range(at, min(at + 100, rows)) for at in range(0, rows, 100)]
        drawn.append([token for part in parts for token in sampler.sample(batch.repeat(len(part), 1), part)])
    return np.array(drawn).T


def assert_sequences_drawn_from(params):
    """All sequences of four tokens out of three, against the exact probability of each."""
    logits = [1.0, 0.5, 0.0]
    sequences = list(itertools.product(range(3), repeat=4))
    probabilities = [math.prod(exact(logits, params, s[:i])[s[i]] for i in range(4)) for s in sequences]
    drawn = run(logits, params, 2500, steps=4)
    assert_drawn_from(drawn @ [27, 9, 3, 1], np.array(probabilities))


def assert_pairs_drawn_from(sampler, params):
    """Two draws in a row from TIES; `sampler` has 2000 rows that have just begun with `params`."""
    logits = torch.tensor(TIES, device=sampler.device).repeat(2000, 1)
    first, second = (np.array(sampler.sample(logits, range(2000))) for _ in range(2))
    probabilities = exact(TIES, params)
    assert_drawn_from(first, probabilities)
    after = np.array([exact(TIES, params, [token]) for token in range(10)])
    assert_drawn_from(first * 10 + second, (probabilities[:, None] * after).ravel())

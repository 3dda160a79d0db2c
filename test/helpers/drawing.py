"""What the tests of the samplers share: drawing many tokens, and comparing them with exact probabilities."""

import numpy as np
import torch
from scipy.stats import chisquare

from rwkv_batch.sampling.sampler import Sampler

UNLIKELY = 1e-4  # seeds are fixed, so a test that passes keeps passing


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
        sampler.set_row(row, params, seed=2024, stream=row)
    batch = torch.tensor(np.asarray(logits), dtype=torch.float32)
    drawn = []
    for _ in range(steps):
        parts = [range(at, min(at + 100, rows)) for at in range(0, rows, 100)]
        drawn.append([token for part in parts for token in sampler.sample(batch.repeat(len(part), 1), part)])
    return np.array(drawn).T

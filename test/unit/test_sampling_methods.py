"""What "nucleus", "gumbel" and "noise" draw, against exact distributions."""

import math

import numpy as np
import pytest
import torch
from drawing import UNLIKELY, assert_drawn_from, assert_sequences_drawn_from, run
from exact import EXEMPT, OTHERS, TIES, adjusted, exact, nucleus
from scipy.integrate import quad_vec
from scipy.stats import chisquare

from rwkv_batch.ops.random import random_key, token_uniforms
from rwkv_batch.sampling.params import check
from rwkv_batch.sampling.reference import BROKEN
from rwkv_batch.sampling.sampler import Sampler
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", OTHERS)
def test_distribution_with_ties(name):
    assert_drawn_from(run(TIES, OTHERS[name], 3000)[:, 0], exact(TIES, OTHERS[name]))


def test_top_p_counts_what_top_k_left():
    """ "rapid" measures both limits on the whole distribution, and cuts the last token."""
    logits = np.log([0.4, 0.3, 0.1, 0.1, 0.1])
    limits = {"top_k": 2, "top_p": 0.5}
    assert set(run(logits, nucleus(**limits), 300)[:, 0]) == {0}  # 0.4 of 0.7 is more than half
    assert set(run(logits, Sampling(**limits), 300)[:, 0]) == {0, 1}


@pytest.mark.parametrize(
    "params",
    [
        nucleus(top_p=0.9, temperature=3.0),  # more tokens than are looked at first
        nucleus(top_k=2000, top_p=0.9, temperature=3.0),
        nucleus(top_k=50, top_p=0.6),
        Sampling(method="gumbel", temperature=2.0),
    ],
)
def test_distribution_over_some_thousand_tokens(params):
    logits = np.random.default_rng(5).normal(size=5000).astype(np.float32) * 3
    assert_drawn_from(run(logits, params, 2000)[:, 0], exact(logits, params))


@pytest.mark.parametrize(
    "params",
    [
        nucleus(alpha_presence=1.0, alpha_frequency=0.5, alpha_decay=0.5),
        nucleus(alpha_frequency=2.0),
        nucleus(alpha_presence=-1.5, alpha_decay=0.9),
        nucleus(
            alpha_presence=0.7,
            alpha_frequency=0.4,
            temperature=0.7,
            top_k=3,
            top_p=0.8,
            presence_penalty=0.5,
            frequency_penalty=0.3,
        ),
        Sampling(
            method="gumbel", presence_penalty=1.0, frequency_penalty=0.7, temperature=0.8, alpha_presence=5.0
        ),
    ],
)
def test_penalties_over_a_sequence(params):
    assert_sequences_drawn_from(params)


@pytest.mark.parametrize(
    "params",
    [
        nucleus(temperature=0, alpha_presence=0.8, alpha_frequency=0.3, alpha_decay=0.99),
        nucleus(top_k=1, alpha_frequency=0.4, alpha_decay=0.9),
        nucleus(
            top_p=0.0, alpha_presence=0.5, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={7: 2.0}
        ),
        Sampling(method="gumbel", temperature=0, alpha_presence=5.0, frequency_penalty=0.4),
        Sampling(method="noise", alpha_presence=5.0, presence_penalty=0.4, frequency_penalty=0.4),
    ],
)
def test_greedy_with_penalties_over_a_long_sequence(params):
    """Of the sixty tokens a dozen are exempt from counting in "nucleus"."""
    generator = np.random.default_rng(3)
    sampler = Sampler(1, 300, "cpu")
    sampler.begin(0, params, 0, 0)
    history = []
    for _ in range(250):
        logits = generator.normal(size=300).astype(np.float32)
        logits[:60] += 2
        token = sampler.sample(torch.tensor(logits[None]), [0])[0]
        assert token == adjusted(logits, params, history).argmax()
        history.append(token)
    assert len(EXEMPT & set(history)) > 8 and len(set(history)) < len(history)


@pytest.mark.parametrize("token", [10, 11, 33, 49, 58, 12, 48, 59])
def test_exempt_tokens_pay_for_presence_only(token):
    logits = torch.zeros(1, 70)
    logits[0, token], logits[0, 5] = 4.5, 1.0
    sampler = Sampler(1, 70, "cpu")
    sampler.begin(0, nucleus(temperature=0, alpha_presence=3.0, alpha_frequency=1.0), 0, 0)
    drawn = [sampler.sample(logits.clone(), [0])[0] for _ in range(3)]
    assert drawn == [token, token if token in EXEMPT else 5, drawn[2]]


@pytest.mark.parametrize(
    "temperature, noise", [(1.0, 1.5), (0.5, 1.0), (2.0, 0.4), (0.0, 1.5), (-1.0, 3.0), (1.0, 1000.0)]
)
def test_noise(temperature, noise):
    """P(token i is the largest) is the integral over u_i of the probabilities that each other one is smaller.
    Two draws in a row.
    """
    logits = [0.0, 0.3, 0.9, 0.9, -0.5, -4.0]
    z = np.array(logits) / (temperature if temperature > 0 else 1)

    def beaten(u):
        below = np.clip((z[:, None] + u - z[None, :]) / noise, 0, 1)
        np.fill_diagonal(below, 1)
        return below.prod(1) / noise

    kinks = [b - a for a in z for b in [*z, *(z + noise)] if 0 < b - a < noise]
    exact_probabilities = quad_vec(beaten, 0, noise, points=kinks)[0]
    assert exact_probabilities.sum() == pytest.approx(1, abs=1e-6)
    params = Sampling(
        method="noise", temperature=temperature, noise=noise, top_k=1, top_p=0.0, alpha_presence=9.0
    )
    pairs = run(logits, params, 3000, steps=2) @ [6, 1]
    assert_drawn_from(pairs, np.outer(exact_probabilities, exact_probabilities).ravel())


def test_noise_reaches_no_further_than_it_is_large():
    logits = np.zeros(5000)
    logits[[3, 700]] = [5.0, 4.2]
    assert set(run(logits, Sampling(method="noise", noise=1.0), 500)[:, 0]) == {3, 700}
    assert set(run(logits, Sampling(method="noise", noise=0.79), 500)[:, 0]) == {3}


@pytest.mark.parametrize("noise", [0.0, -1.0])
def test_without_noise_the_likeliest_wins(noise):
    assert set(run(TIES, Sampling(method="noise", noise=noise), 50)[:, 0]) == {4}


def test_the_random_numbers_of_tokens_are_independent():
    tokens = np.arange(20000)
    cells = [
        (token_uniforms(random_key(*key), np.uint64(at), tokens + shift) * 8).astype(int)
        for key, at, shift in [((0, 0), 0, 0), ((0, 0), 1, 0), ((0, 1), 0, 0), ((0, 0), 0, 1)]
    ]
    for other in cells[1:]:
        assert chisquare(np.bincount(cells[0] * 8 + other, minlength=64)).pvalue > UNLIKELY
    at_one = np.array([token_uniforms(random_key(0, 0), np.uint64(at), tokens[:1])[0] for at in range(2000)])
    assert chisquare(np.bincount((at_one * 20).astype(int), minlength=20)).pvalue > UNLIKELY


METHODS = [
    nucleus(seed=1),
    nucleus(temperature=0),
    nucleus(top_k=5),
    nucleus(top_p=0.9, top_k=7),
    Sampling(method="gumbel"),
    Sampling(method="gumbel", temperature=0),
    Sampling(method="noise", noise=2.0),
    Sampling(method="noise"),
]


@pytest.mark.parametrize("params", METHODS)
def test_ids_without_text_are_never_drawn(params):
    logits = torch.zeros(20, 65536)
    logits[:, VOCABULARY:] = 50.0
    sampler = Sampler(20, 65536, "cpu")
    for slot in range(20):
        sampler.begin(slot, params, 9, slot)
    assert max(sampler.sample(logits, range(20))) < VOCABULARY


@pytest.mark.parametrize("params", METHODS)
def test_broken_logits(params):
    assert set(run([0.0, 1.0, math.inf, math.nan], params, 20)[:, 0]) == {BROKEN}
    assert set(run([math.nan, -80.0, -math.inf, -90.0], params, 20)[:, 0]) == {BROKEN}


@pytest.mark.parametrize(
    "params",
    [
        nucleus(top_k=20, top_p=0.9, alpha_presence=0.5),
        Sampling(method="gumbel"),
        Sampling(method="noise", noise=3.0),
    ],
)
def test_a_seeded_row_draws_the_same_beside_any_others(params):
    logits = torch.tensor(np.random.default_rng(1).normal(size=(40, 500)), dtype=torch.float32)
    alone = Sampler(1, 500, "cpu")
    alone.begin(0, params, 77, 2)
    expected = [alone.sample(row[None].clone(), [0])[0] for row in logits]

    crowded = Sampler(8, 500, "cpu")
    crowded.begin(6, params, 77, 2)
    drawn = []
    for step, row in enumerate(logits):
        others = [slot for slot in (0, 1, 2, 5, 7) if (slot + step) % 3]
        for slot in others:
            crowded.begin(slot, METHODS[(slot + step) % len(METHODS)], step, slot)
        batch = torch.randn(len(others) + 1, 500)
        batch[2] = row
        drawn.append(crowded.sample(batch, [*others[:2], 6, *others[2:]])[2])
    assert drawn == expected
    assert len(set(drawn)) > 10


def test_noise_must_be_a_number():
    with pytest.raises(ValueError, match="noise is nan"):
        check(Sampling(method="noise", noise=math.nan), 100)

"""What "nucleus", "gumbel" and "noise" draw, against exact distributions worked out here in fp64, straight
from the definition.
"""

import itertools
import math
import sys
import types

import numpy as np
import pytest
import torch
from drawing import UNLIKELY, assert_drawn_from, run
from scipy.integrate import quad_vec
from scipy.stats import chisquare

from rwkv_batch.sampling.random import random_key, token_uniforms
from rwkv_batch.sampling.sampler import Sampler, flashinfer
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

EXEMPT = {33, 10, 11, *range(49, 59)}
TIES = [0.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0, -4.0, 0.0, 0.0]


def nucleus(**fields):
    return Sampling(method="nucleus", **fields)


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


def exact(logits, params, history=()):
    """The probability of each token, after the tokens of `history` were drawn, for "nucleus" and "gumbel"."""
    logits = adjusted(logits, params, history)
    limited = params.method == "nucleus"
    if params.temperature <= 0 or (limited and (params.top_p == 0 or params.top_k == 1)):
        return np.eye(len(logits))[logits.argmax()]
    z = logits / params.temperature
    if limited and 0 < params.top_k < len(z):
        z[z < np.sort(z)[-params.top_k]] = -np.inf
    p = softmax(z)
    if limited and 0 < params.top_p < 1:
        p = np.where([p[p > one].sum() < params.top_p for one in p], p, 0)
    return p / p.sum()


SETS = {
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


@pytest.mark.parametrize("name", SETS)
def test_distribution_with_ties(name):
    assert_drawn_from(run(TIES, SETS[name], 3000)[:, 0], exact(TIES, SETS[name]))


def test_top_p_counts_what_top_k_left():
    """The same numbers mean something else to "rapid", which measures both limits on the whole distribution
    and cuts the last token.
    """
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
    """All sequences of four tokens out of three, against the exact probability of each."""
    logits = [1.0, 0.5, 0.0]
    sequences = list(itertools.product(range(3), repeat=4))
    probabilities = [math.prod(exact(logits, params, s[:i])[s[i]] for i in range(4)) for s in sequences]
    drawn = run(logits, params, 2500, steps=4)
    assert_drawn_from(drawn @ [27, 9, 3, 1], np.array(probabilities))


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
    sampler.set_row(0, params, 0, 0)
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
    sampler.set_row(0, nucleus(temperature=0, alpha_presence=3.0, alpha_frequency=1.0), 0, 0)
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
        sampler.set_row(slot, params, 9, slot)
    assert max(sampler.sample(logits, range(20))) < VOCABULARY


@pytest.mark.parametrize("params", METHODS)
def test_broken_logits(params):
    assert set(run([0.0, 1.0, math.inf, math.nan], params, 20)[:, 0]) == {2}
    assert set(run([math.nan, -80.0, -math.inf, -90.0], params, 20)[:, 0]) == {0}


@pytest.mark.parametrize(
    "params",
    [
        nucleus(top_k=20, top_p=0.9, alpha_presence=0.5),
        Sampling(method="gumbel"),
        Sampling(method="noise", noise=3.0),
    ],
)
def test_a_seeded_row_draws_the_same_whatever_runs_beside_it(params):
    logits = torch.tensor(np.random.default_rng(1).normal(size=(40, 500)), dtype=torch.float32)
    alone = Sampler(1, 500, "cpu")
    alone.set_row(0, params, 77, 2)
    expected = [alone.sample(row[None].clone(), [0])[0] for row in logits]

    crowded = Sampler(8, 500, "cpu")
    crowded.set_row(6, params, 77, 2)
    drawn = []
    for step, row in enumerate(logits):
        others = [slot for slot in (0, 1, 2, 5, 7) if (slot + step) % 3]
        for slot in others:
            crowded.set_row(slot, METHODS[(slot + step) % len(METHODS)], step, slot)
        batch = torch.randn(len(others) + 1, 500)
        batch[2] = row
        drawn.append(crowded.sample(batch, [*others[:2], 6, *others[2:]])[2])
    assert drawn == expected
    assert len(set(drawn)) > 10


def test_noise_must_be_a_number():
    with pytest.raises(ValueError, match="noise is nan"):
        Sampler(1, 100, "cpu").check(Sampling(method="noise", noise=math.nan))


def drawing_as_the_device_would(calls):
    """Draws from the definition, row by row, with what FlashInfer's function is given."""
    generator = np.random.default_rng(4)

    def draw(logits, top_k, top_p):
        calls.append(len(logits))
        assert (top_k.dtype, top_p.dtype, logits.dtype) == (torch.int32, torch.float32, torch.float32)
        rows = [
            exact(row, nucleus(top_k=k, top_p=p))
            for row, k, p in zip(logits.numpy(), top_k.tolist(), top_p.tolist(), strict=True)
        ]
        return torch.tensor([generator.choice(len(p), p=p) for p in rows], dtype=torch.int32)

    return draw


@pytest.mark.parametrize(
    "params",
    [
        nucleus(top_k=6, top_p=0.68, temperature=2.0),
        nucleus(
            logit_bias={0: 3.0, 4: -1.0},
            top_k=5,
            presence_penalty=0.5,
            alpha_presence=1.0,
            alpha_frequency=0.5,
            alpha_decay=0.5,
        ),
    ],
)
def test_rows_drawn_on_the_device_have_the_same_distribution(monkeypatch, params):
    calls = []
    monkeypatch.setattr(flashinfer, "load", lambda device: drawing_as_the_device_would(calls))
    drawn = run(TIES, params, 2000, steps=2)
    assert sum(calls) == 4000
    first = exact(TIES, params)
    assert_drawn_from(drawn[:, 0], first)
    after = np.array([exact(TIES, params, [token]) for token in range(10)])
    assert_drawn_from(drawn @ [10, 1], (first[:, None] * after).ravel())


def test_seeded_greedy_and_other_rows_stay_on_the_host(monkeypatch):
    different = [
        nucleus(seed=5),
        nucleus(),
        Sampling(),
        nucleus(temperature=0),
        nucleus(top_k=3),
        Sampling(method="noise", noise=2.0),
    ]
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))

    def drawn():
        sampler = Sampler(6, 40, "cpu")
        for slot, params in enumerate(different):
            sampler.set_row(slot, params, 11, slot)
        return [sampler.sample(logits.clone(), range(6)) for _ in range(5)]

    expected, calls = drawn(), []
    monkeypatch.setattr(flashinfer, "load", lambda device: drawing_as_the_device_would(calls))
    found = drawn()
    assert calls == [2] * 5
    for ours, theirs in zip(expected, found, strict=True):
        assert [ours[i] for i in (0, 2, 3, 5)] == [theirs[i] for i in (0, 2, 3, 5)]
    assert [row[4] for row in found] != [row[4] for row in expected]


def test_without_flashinfer_the_host_draws(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", None)  # importing it fails
    assert flashinfer.load(torch.device("cuda")) is None


def test_a_flashinfer_that_does_not_run_is_reported_and_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    broken = types.SimpleNamespace(top_k_top_p_sampling_from_logits=None)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", broken)
    assert flashinfer.load(torch.device("cuda")) is None
    assert "flashinfer does not run here" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [
        nucleus(),
        nucleus(top_k=3),
        nucleus(top_p=0.65),
        nucleus(top_k=6, top_p=0.68, temperature=2.0),
        nucleus(logit_bias={0: 3.0}, top_k=5, alpha_presence=1.0),
    ],
)
def test_flashinfer(params):
    pytest.importorskip("flashinfer")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    sampler = Sampler(2000, 10, "cuda")
    for slot in range(2000):
        sampler.set_row(slot, params, 0, slot)
    batch = torch.tensor(TIES, device="cuda").repeat(2000, 1)
    first = sampler.sample(batch.clone(), range(2000))
    assert_drawn_from(np.array(first), exact(TIES, params))
    after = np.array([exact(TIES, params, [token]) for token in range(10)])
    pairs = np.array(first) * 10 + sampler.sample(batch.clone(), range(2000))
    assert_drawn_from(pairs, (exact(TIES, params)[:, None] * after).ravel())

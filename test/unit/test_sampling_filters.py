"""Masks, min_p, top_a and the repetition penalty on the host, against exact distributions."""

import numpy as np
import pytest
import torch
from drawing import assert_drawn_from
from masked import FILTERED, exact_filtered, masks_of

from rwkv_batch.sampling.params import check
from rwkv_batch.sampling.reference import BROKEN
from rwkv_batch.sampling.sampler import Sampler
from rwkv_batch.wire.protocol import Sampling

VOCAB, ROWS = 40, 3000
LOGITS = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32) * 2
ALLOWED = np.random.default_rng(4).random(VOCAB) < 0.3
PROMPT = [2, 5, 5, 11, 30]


def draws(params, allowed, rows=ROWS, steps=1):
    """Ids `[steps, rows]` of rows with one distribution, in batches; every third row has no mask."""
    sampler = Sampler(rows, VOCAB, "cpu")
    drawn = np.zeros((steps, rows), int)
    for row in range(rows):
        sampler.begin(row, params, 2024, row, [], PROMPT)
    for step in range(steps):
        for first in range(0, rows, 100):
            slots = list(range(first, first + 100))
            logits = torch.tensor(LOGITS).repeat(100, 1)
            masks = (
                masks_of({place: allowed for place in range(100) if place % 3})
                if allowed is not None
                else None
            )
            drawn[step, slots] = sampler.sample(logits, slots, masks)
    return drawn


@pytest.mark.parametrize("name", FILTERED)
def test_distribution_under_a_mask(name):
    params = FILTERED[name]
    drawn, masked = draws(params, ALLOWED)[0], np.arange(ROWS) % 100 % 3 > 0
    assert_drawn_from(drawn[masked], exact_filtered(LOGITS, params, ALLOWED, PROMPT))
    assert_drawn_from(drawn[~masked], exact_filtered(LOGITS, params, None, PROMPT))


def test_drawn_tokens_count_for_the_repetition_penalty():
    params = Sampling(repetition_penalty=1.8)
    first, second = draws(params, None, steps=2)
    after = np.array([exact_filtered(LOGITS, params, None, [*PROMPT, token]) for token in range(VOCAB)])
    once = exact_filtered(LOGITS, params, None, PROMPT)
    assert_drawn_from(first * VOCAB + second, (once[:, None] * after).ravel())


def test_a_row_that_goes_on_has_seen_what_it_drew():
    params = Sampling(repetition_penalty=1.8, seed=1)
    whole, resumed = Sampler(1, VOCAB, "cpu"), Sampler(1, VOCAB, "cpu")
    whole.begin(0, params, 1, 0, [], PROMPT)
    logits = torch.tensor(LOGITS)[None]
    drawn = [whole.sample(logits.clone(), [0])[0] for _ in range(30)]
    resumed.begin(0, params, 1, 0, drawn[:10], PROMPT)
    assert [resumed.sample(logits.clone(), [0])[0] for _ in range(20)] == drawn[10:]


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_noise_draws_the_best_of_what_a_mask_leaves(noise):
    """Masked or not, the noise of each id is the same."""
    params = Sampling(method="noise", noise=noise)
    free, bound = draws(params, None, 100)[0], draws(params, ALLOWED, 100)[0]
    masked = np.arange(100) % 3 > 0
    assert ALLOWED[bound[masked]].all()
    kept = ALLOWED[free] | ~masked
    assert (free[kept] == bound[kept]).all()


def test_a_mask_that_leaves_one_id_decides():
    only = np.arange(VOCAB) == 7
    for params in FILTERED.values():
        assert set(draws(params, only, 100)[0][np.arange(100) % 3 > 0]) == {7}


def test_a_mask_wins_over_bias():
    sampler = Sampler(1, VOCAB, "cpu")
    sampler.begin(0, Sampling(temperature=0, logit_bias={3: 1e6}), 1, 0)
    assert sampler.sample(torch.zeros(1, VOCAB), [0], masks_of({0: np.arange(VOCAB) == 9})) == [9]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", FILTERED.values())
def test_a_mask_hides_no_broken_logit(params, number):
    sampler = Sampler(1, VOCAB, "cpu")
    sampler.begin(0, params, 1, 0, prompt=[3])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = number
    assert sampler.sample(logits, [0], masks_of({0: np.arange(VOCAB) == 9})) == [BROKEN]


def test_a_mask_that_leaves_nothing_the_model_could_draw():
    sampler = Sampler(1, VOCAB, "cpu")
    sampler.begin(0, Sampling(), 1, 0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = -float("inf")
    assert sampler.sample(logits, [0], masks_of({0: np.arange(VOCAB) == 9})) == [BROKEN]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_repetition_penalty_without_sense_is_refused(value):
    with pytest.raises(ValueError, match="repetition_penalty"):
        check(Sampling(repetition_penalty=value), VOCAB)

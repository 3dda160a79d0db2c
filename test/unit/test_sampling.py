"""What the host sampler draws, against exact distributions."""

import math

import numpy as np
import pytest
import torch
from drawing import UNLIKELY, assert_drawn_from, assert_sequences_drawn_from, run
from exact import RAPID, TIES, exact
from scipy.stats import chi2_contingency, chisquare

from rwkv_batch.ops.random import random_key, uniforms
from rwkv_batch.sampling.params import check
from rwkv_batch.sampling.reference import BROKEN, draw
from rwkv_batch.sampling.sampler import Sampler
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", RAPID)
def test_distribution_with_ties(name):
    assert_drawn_from(run(TIES, RAPID[name], 3000)[:, 0], exact(TIES, RAPID[name]))


@pytest.mark.parametrize(
    "params",
    [
        Sampling(temperature=2.0),
        Sampling(top_p=0.9, temperature=3.0),  # more tokens than are looked at first
        Sampling(top_k=2000, top_p=0.97, temperature=3.0),
        Sampling(top_k=1500, temperature=3.0),
        Sampling(top_p=0.5),
    ],
)
def test_distribution_over_some_thousand_tokens(params):
    logits = np.random.default_rng(5).normal(size=5000).astype(np.float32) * 3
    assert_drawn_from(run(logits, params, 3000)[:, 0], exact(logits, params))


@pytest.mark.parametrize(
    "params", [Sampling(), Sampling(top_k=50, top_p=0.6), Sampling(top_p=0.8, temperature=1.2)]
)
def test_distribution_over_the_whole_vocabulary(params):
    logits = np.random.default_rng(6).normal(size=65536).astype(np.float32) * 2
    logits[np.arange(40) * 1638] += np.linspace(6, 12, 40, dtype=np.float32)
    masked = np.where(np.arange(65536) < VOCABULARY, logits, -np.inf)
    assert_drawn_from(run(logits, params, 1500)[:, 0], exact(masked, params))


def test_the_tail_keeps_its_mass():
    """Sixty thousand unlikely tokens that together weigh half: a sum in low precision would lose some."""
    logits = np.zeros(60001)
    logits[0] = math.log(60000)
    drawn = run(logits, Sampling(), 1500)[:, 0]
    assert chisquare([(drawn == 0).sum(), (drawn > 0).sum()]).pvalue > UNLIKELY
    assert chisquare(np.bincount(drawn[drawn > 0] // 6001, minlength=10)).pvalue > UNLIKELY


@pytest.mark.parametrize(
    "params",
    [
        Sampling(alpha_presence=1.0, alpha_frequency=0.5, alpha_decay=0.5),
        Sampling(alpha_frequency=2.0),
        Sampling(alpha_presence=-1.5, alpha_decay=0.9),
        Sampling(presence_penalty=1.0, frequency_penalty=0.7),
        Sampling(presence_penalty=-1.0),
        Sampling(
            alpha_presence=1.0,
            alpha_frequency=0.5,
            alpha_decay=0.8,
            presence_penalty=0.5,
            frequency_penalty=0.3,
        ),
        Sampling(alpha_presence=1.0, frequency_penalty=0.3, logit_bias={2: 1.0}),
        Sampling(alpha_presence=0.7, alpha_frequency=0.4, temperature=0.7, top_k=3, top_p=0.8),
    ],
)
def test_penalties_over_a_sequence(params):
    assert_sequences_drawn_from(params)


@pytest.mark.parametrize(
    "params",
    [
        Sampling(temperature=0, alpha_presence=0.8, alpha_frequency=0.3, alpha_decay=0.99),
        Sampling(top_k=1, alpha_frequency=0.4),
        Sampling(top_p=0.0, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={7: 2.0}),
    ],
)
def test_greedy_with_penalties_over_a_long_sequence(params):
    vocab, generator = 300, np.random.default_rng(3)
    sampler = Sampler(1, vocab, "cpu")
    sampler.begin(0, params, 0, 0)
    history, distinct = [], set()
    for _ in range(250):
        logits = generator.normal(size=vocab).astype(np.float32)
        logits[:100] += 2
        token = sampler.sample(torch.tensor(logits[None]), [0])[0]
        assert token == exact(logits, params, history).argmax()
        history.append(token)
        distinct.add(token)
    assert len(distinct) > 64 and len(distinct) < len(history)


@pytest.mark.parametrize(
    "params",
    [
        Sampling(alpha_presence=1.0, alpha_frequency=0.5, alpha_decay=0.99, top_p=0.9),
        Sampling(method="nucleus", alpha_presence=0.7, alpha_frequency=0.4, alpha_decay=0.9, top_k=30),
        Sampling(method="gumbel", presence_penalty=1.0, frequency_penalty=0.7),
        Sampling(method="noise", noise=2.0, frequency_penalty=0.2),
        Sampling(temperature=0, alpha_presence=0.8, alpha_frequency=0.3, alpha_decay=0.999),
        Sampling(),
    ],
)
def test_a_row_that_begins_with_a_past_draws_on_as_if_it_had_drawn_that(params):
    vocab, steps = 300, 120
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(steps, 1, vocab)).astype(np.float32) * 2)
    whole = Sampler(1, vocab, "cpu")
    whole.begin(0, params, 7, 3)
    drawn = [whole.sample(logits[i].clone(), [0])[0] for i in range(steps)]
    for past in (1, 50, steps - 1):
        resumed = Sampler(1, vocab, "cpu")
        resumed.begin(0, params, 7, 3, drawn[:past])
        assert [resumed.sample(logits[i].clone(), [0])[0] for i in range(past, steps)] == drawn[past:]


def test_a_new_row_in_a_slot_forgets_the_last_one():
    params = Sampling(temperature=0, presence_penalty=5.0)
    sampler = Sampler(1, 3, "cpu")
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    for _ in range(2):
        sampler.begin(0, params, 1, 0)
        assert [sampler.sample(logits.clone(), [0])[0] for _ in range(3)] == [1, 2, 0]


@pytest.mark.parametrize(
    "params", [Sampling(temperature=0), Sampling(temperature=-1), Sampling(top_p=0), Sampling(top_k=1)]
)
def test_greedy_takes_the_lowest_of_equal_ids(params):
    sampler = Sampler(2, 2000, "cpu")
    logits = torch.zeros(2, 2000)
    logits[0, [700, 1500, 1999]] = 1.0
    for slot in range(2):
        sampler.begin(slot, params, 1, slot)
    assert sampler.sample(logits, [0, 1]) == [700, 0]


def test_greedy_takes_bias_into_account():
    sampler = Sampler(1, 4, "cpu")
    sampler.begin(0, Sampling(temperature=0, logit_bias={3: 1.5}), 1, 0)
    assert sampler.sample(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), [0]) == [3]


@pytest.mark.parametrize(
    "params",
    [
        Sampling(),
        Sampling(temperature=0),
        Sampling(top_k=5),
        Sampling(top_p=0.9),
        Sampling(logit_bias={65530: 9.0, 65535: 9.0}),
    ],
)
def test_ids_without_text_are_never_drawn(params):
    logits = torch.zeros(20, 65536)
    logits[:, VOCABULARY:] = 50.0
    sampler = Sampler(20, 65536, "cpu")
    for slot in range(20):
        sampler.begin(slot, params, 9, slot)
    assert max(sampler.sample(logits, range(20))) < VOCABULARY


DIFFERENT = [
    Sampling(temperature=0),
    Sampling(top_k=3),
    Sampling(),
    Sampling(top_p=0.4, alpha_presence=1.0),
    Sampling(logit_bias={1: 5.0}),
]


@pytest.mark.parametrize(
    "params", [Sampling(), Sampling(top_k=20, top_p=0.9, alpha_presence=0.5), Sampling(top_p=0.95)]
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
            crowded.begin(slot, DIFFERENT[(slot + step) % 5], step, slot)
        slots = [*others[:2], 6, *others[2:]]
        batch = torch.randn(len(slots), 500)
        batch[2] = row
        drawn.append(crowded.sample(batch, slots)[2])
    assert drawn == expected
    assert len(set(drawn)) > 10


def test_streams_and_seeds_are_independent():
    positions = np.arange(20000, dtype=np.uint64)

    def cells(seed, stream, at=positions):
        return (uniforms(np.full(len(at), random_key(seed, stream)), at) * 8).astype(int)

    first = cells(0, 0)
    for other in (cells(0, 1), cells(1, 0), cells(1, 1), cells(0, 0, positions + np.uint64(1)), cells(-1, 0)):
        pairs = np.bincount(first * 8 + other, minlength=64)
        assert chisquare(pairs).pvalue > UNLIKELY
        assert chi2_contingency(pairs.reshape(8, 8)).pvalue > UNLIKELY
    assert (cells(0, 0) == first).all()
    by_stream = np.array(
        [uniforms(np.array([random_key(5, stream)]), positions[:1])[0] for stream in range(4000)]
    )
    assert chisquare(np.bincount((by_stream * 20).astype(int), minlength=20)).pvalue > UNLIKELY


@pytest.mark.parametrize("top_k, top_p", [(5, 1.0), (4, 1.0), (5, 0.9999)])
def test_the_ends_of_the_random_range_draw_possible_tokens(top_k, top_p):
    for uniform, token in ((0.0, 1), (1 - 2**-53, 3)):
        logits = np.array([-math.inf, 0.0, 0.0, 0.0, -math.inf], np.float32)
        assert draw(logits, 1.0, top_k, top_p, uniform, np.empty(5, np.float32)) == token


def test_rounding_never_draws_an_impossible_token():
    """The largest random number, for weights whose sum depends on the order of adding."""
    generator = np.random.default_rng(8)
    for _ in range(1000):
        logits = np.append(generator.normal(size=200) * 3, [-math.inf] * 50).astype(np.float32)
        assert 150 < draw(logits, 1.0, 240, 1.0, 1 - 2**-53, np.empty(250, np.float32)) < 200


def test_a_row_that_begins_again_draws_the_same():
    sampler = Sampler(1, 100, "cpu")
    runs = []
    for _ in range(2):
        sampler.begin(0, Sampling(), 3, 1)
        runs.append([sampler.sample(torch.zeros(1, 100), [0])[0] for _ in range(20)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 10


ALL_WAYS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(top_k=3),
    Sampling(top_p=0.8),
    Sampling(presence_penalty=0.5, frequency_penalty=0.1, alpha_decay=0.99, alpha_presence=1.0),
    Sampling(logit_bias={0: 3.0, 1: -100.0, 2: 1.0, 3: 1.0, 4: 1.0}),
    Sampling(temperature=0, logit_bias={0: 3.0, 2: 1e300}),
    Sampling(repetition_penalty=1.5),
    Sampling(min_p=0.1),
    Sampling(top_a=0.2, temperature=0),
    Sampling(method="nucleus", top_p=0.5),
    Sampling(method="nucleus", top_k=2),
    Sampling(method="gumbel"),
    Sampling(method="noise", noise=2.0),
    Sampling(method="noise", temperature=0),
]


@pytest.mark.parametrize("params", ALL_WAYS)
@pytest.mark.parametrize(
    "logits",
    [
        [math.nan, 1.0, -math.inf, 0.5, math.nan],
        [0.0, 1.0, math.inf, 0.5, 2.0],
        [-5.0, 1.0, 9.0, 8.0, math.nan],
        [math.nan] * 5,
        [math.inf] * 5,
        [-math.inf] * 5,
    ],
)
def test_logits_that_are_not_finite_draw_nothing(params, logits):
    assert (run(logits, params, 20) == BROKEN).all()


@pytest.mark.parametrize("params", [params for params in ALL_WAYS if not params.logit_bias])
def test_minus_infinity_is_never_drawn(params):
    assert run([-math.inf, 1.0, -math.inf, 0.5, -math.inf], params, 100)[:, 0].min() >= 1
    drawn = set(run([-math.inf, 1.0, -math.inf, 0.5, -math.inf], params, 300)[:, 0])
    assert drawn <= {1, 3} and 1 in drawn


def test_ids_without_text_may_have_any_logit():
    sampler = Sampler(1, 65536, "cpu")
    sampler.begin(0, Sampling(temperature=0), 9, 0)
    logits = torch.zeros(1, 65536)
    logits[:, 7], logits[:, VOCABULARY:] = 1.0, math.nan
    assert sampler.sample(logits, [0]) == [7]


def test_a_bias_past_what_fp32_holds_is_no_broken_logit():
    assert run([0.0, 1.0, 2.0], Sampling(temperature=0, logit_bias={1: 1e300}), 1)[0, 0] == 1
    assert run([0.0, 1.0, 2.0], Sampling(temperature=0, logit_bias={2: -1e300}), 1)[0, 0] == 1


@pytest.mark.parametrize(
    "bias, message", [({100: 1.0}, "token 100"), ({-1: 1.0}, "token -1"), ({3: math.nan}, "token 3 is nan")]
)
def test_a_bias_that_cannot_be_meant(bias, message):
    with pytest.raises(ValueError, match=message):
        Sampler(1, 100, "cpu").begin(0, Sampling(logit_bias=bias), 0, 0)


@pytest.mark.parametrize("name", ["temperature", "top_p", "alpha_decay", "frequency_penalty"])
def test_parameters_must_be_numbers(name):
    with pytest.raises(ValueError, match=f"{name} is inf"):
        check(Sampling(**{name: math.inf}), 100)


def test_a_slot_without_a_row():
    with pytest.raises(ValueError, match="slot 1"):
        Sampler(2, 10, "cpu").sample(torch.zeros(1, 10), [1])

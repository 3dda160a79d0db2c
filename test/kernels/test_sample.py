"""The sampler on the GPU draws the ids of the one on the host, for any batch and any split of a row."""

import math

import numpy as np
import pytest
import torch
from cuda_gpu import needs_gpu
from drawing import assert_drawn_from
from exact import OTHERS, RAPID, TIES, exact, nucleus

from rwkv_batch.ops.random import random_key, uniforms
from rwkv_batch.sampling.reference import BROKEN
from rwkv_batch.sampling.sampler import Sampler
from rwkv_batch.sampling.sampler_cuda import CudaSampler
from rwkv_batch.sampling.slots_cuda import FIRST_CAPACITY
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

pytestmark = needs_gpu

SETS = {f"rapid: {name}": params for name, params in RAPID.items()} | OTHERS
NOISY = Sampling(method="noise", noise=3.0)
LONG = 1500  # ids
VARIED = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(top_k=50, top_p=0.6),
    Sampling(top_p=0.8, temperature=1.2),
    Sampling(top_k=20),
    Sampling(top_k=500),
    Sampling(top_k=5000, temperature=3.0),
    Sampling(top_p=0.999, temperature=2.0),
    Sampling(top_p=0.9999999),
    Sampling(top_p=0.5, temperature=0.3),
    Sampling(temperature=1000.0, top_p=0.7),
    Sampling(temperature=0.001, top_k=40),
    nucleus(),
    nucleus(top_k=20),
    nucleus(top_p=0.9),
    nucleus(top_k=100, top_p=0.95),
    nucleus(top_k=3000, top_p=0.9, temperature=3.0),
    Sampling(method="gumbel"),
    Sampling(method="gumbel", temperature=0),
    NOISY,
    Sampling(method="noise", noise=0.5, temperature=0.2),
    Sampling(method="noise"),
    Sampling(logit_bias={65529: 19.0, 7: 18.0, 65535: 50.0}, top_k=2),
    Sampling(logit_bias={3: 30.0, 4: 30.0}),
]


def pair(slots, vocab, params, seed=11):
    """A sampler on the host and one on the device, with the same rows. `params`: of each slot."""
    samplers = Sampler(slots, vocab, "cpu"), CudaSampler(slots, vocab, "cuda")
    for sampler in samplers:
        for slot in range(slots):
            sampler.begin(slot, params[slot % len(params)], seed, slot)
    return samplers


def assert_same(host, device, logits, params, position=0, seed=11):
    """Where ids differ, the random number is at the border of the token that the device drew. `logits`: of a
    row, or of each row.
    """
    different = [row for row in range(len(host)) if host[row] != device[row]]
    assert len(different) <= 2 + len(host) // 1000
    for row in different:
        one = params[row % len(params)]
        assert one.method != "noise"
        values = np.array(logits[row] if np.ndim(logits) == 2 else logits, np.float64)
        values[VOCABULARY:] = -np.inf
        ends = exact(values, one).cumsum()
        uniform = uniforms(np.array([random_key(seed, row)]), np.array([position], np.uint64))[0]
        assert (
            ends[device[row]] - exact(values, one)[device[row]] - 1e-5 <= uniform <= ends[device[row]] + 1e-5
        )


def like_a_model(rows, seed, vocab=65536):
    """Logits with some likely tokens, and numbers where no token is that must not matter."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(rows, vocab)).astype(np.float32) * 2
    likely = generator.integers(0, min(vocab, VOCABULARY), (rows, 40))
    np.put_along_axis(logits, likely, np.linspace(4, 12, 40, dtype=np.float32), 1)
    logits[:, VOCABULARY:] = np.array([np.nan, np.inf, 99, 1e38, 50, 50], np.float32)[
        : max(0, vocab - VOCABULARY)
    ]
    return logits


@pytest.mark.many_launches
@pytest.mark.parametrize("name", SETS)
def test_distribution_with_ties(name):
    params = SETS[name]
    host, device = pair(2000, len(TIES), [params])
    logits = torch.tensor(TIES).repeat(2000, 1)
    for position in range(2):
        expected, drawn = host.sample(logits.clone(), range(2000)), device.sample(logits.cuda(), range(2000))
        assert_same(expected, drawn, TIES, [params], position)
        assert_drawn_from(np.array(drawn), exact(TIES, params))


@pytest.mark.many_launches
@pytest.mark.parametrize(
    "params",
    [
        Sampling(temperature=2.0),
        Sampling(top_k=50, top_p=0.6),
        Sampling(top_p=0.8, temperature=1.2),
        Sampling(top_k=1500, temperature=3.0),
        nucleus(top_k=2000, top_p=0.9, temperature=3.0),
        nucleus(top_p=0.9, temperature=3.0),
    ],
)
def test_distribution_over_some_thousand_tokens(params):
    logits = np.random.default_rng(5).normal(size=5000).astype(np.float32) * 3
    _, device = pair(4000, 5000, [params])
    drawn = device.sample(torch.tensor(logits, device="cuda").expand(4000, -1), range(4000))
    assert_drawn_from(np.array(drawn), exact(logits, params))


@pytest.mark.parametrize("rows", [1, 3, 33, 321])
def test_same_ids_as_on_the_host(rows):
    host, device = pair(rows, 65536, VARIED)
    for position in range(2):
        logits = like_a_model(rows, 100 * rows + position)
        ids = torch.full((rows,), -7, dtype=torch.int32, device="cuda")
        device.prepare(range(rows))
        on_device = torch.tensor(logits, device="cuda")
        device.sample_async(on_device, torch.arange(rows, dtype=torch.int32, device="cuda"), ids)
        assert np.array_equal(on_device.cpu().numpy(), logits, equal_nan=True)
        assert_same(host.sample(torch.tensor(logits), range(rows)), ids.tolist(), logits, VARIED, position)


@pytest.mark.many_launches
@pytest.mark.parametrize("params", VARIED)
def test_same_ids_over_many_rows_of_one_kind(params):
    host, device = pair(100, 65536, [params])
    logits = like_a_model(100, 7)
    assert_same(
        host.sample(torch.tensor(logits), range(100)),
        device.sample(torch.tensor(logits, device="cuda"), range(100)),
        logits,
        [params],
    )


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_the_split_of_a_row_does_not_matter(blocks):
    """One block a row is also what older GPUs run."""
    slots = len(VARIED) * 3
    logits = torch.tensor(like_a_model(slots, 3), device="cuda").half()
    samplers = [pair(slots, 65536, VARIED)[1] for _ in range(4)]
    samplers[1].blocks = samplers[3].blocks = blocks
    numbers = (logits, logits, logits.float(), logits.float())
    drawn = [sampler.sample(one, range(slots)) for sampler, one in zip(samplers, numbers, strict=True)]
    assert drawn == drawn[:1] * 4


@pytest.mark.parametrize("rows", [1, 2, 7, 17, 33, 129, 321])
def test_same_ids_from_fp16_as_on_the_host(rows):
    host, device = pair(rows, 65536, VARIED)
    for position in range(2):
        half = torch.tensor(like_a_model(rows, 100 * rows + position)).half()
        on_device = half.cuda()
        logits = half.float()
        assert_same(
            host.sample(logits.clone(), range(rows)),
            device.sample(on_device, range(rows)),
            logits.numpy(),
            VARIED,
            position,
        )
        assert torch.equal(on_device.cpu().view(torch.int16), half.view(torch.int16))


@pytest.mark.parametrize("vocab", [1, 7, 8, 250, 4095, 4097, 20001, 65529, 65535])
def test_same_ids_from_fp16_as_from_fp32_of_any_width(vocab):
    """Rows may begin at no multiple of 16 bytes."""
    params = [p for p in VARIED if not p.logit_bias]
    rows = 2 * len(params)
    half = torch.tensor(like_a_model(rows, vocab, vocab), device="cuda").half()
    half[:, :1], half[::3, -1:] = -3, -0.0
    first, second = (pair(rows, vocab, params)[1] for _ in range(2))
    assert first.sample(half, range(rows)) == second.sample(half.float(), range(rows))


def test_fp16_that_is_not_finite():
    """A few of a row's segments have numbers that are not finite; the others stay fp16."""
    rows = len(VARIED) * 4
    half = torch.tensor(like_a_model(rows, 6), device="cuda").half()
    for row in range(rows):
        one, other = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(row))[:2]
        half[row, one], half[row, other] = -math.inf, (0.0, math.nan, math.inf, -math.inf)[row % 4]
    half[0] = -math.inf
    first, second = (pair(rows, 65536, VARIED)[1] for _ in range(2))
    drawn = first.sample(half, range(rows))
    assert drawn == second.sample(half.float(), range(rows))
    assert [token == BROKEN for token in drawn] == [row % 4 in (1, 2) or not row for row in range(rows)]


@pytest.mark.parametrize(
    "values",
    [
        [0.0] * 65536,
        [-math.inf] * 65536,
        [math.inf, math.nan, -math.inf, 0.0] * 16384,
        [1.0, 1.0 + 2**-23, 1.0 - 2**-24, -1.0] * 16384,
        [0.0, -0.0, 1e-30, -1e-30] * 16384,
        list(np.linspace(-3.4e38, 3.4e38, 65536)),
        list(np.linspace(-1e-3, 1e-3, 65536)),
        [-5.0] * 65535 + [5.0],
    ],
)
def test_extreme_logits(values):
    logits = np.array(values, np.float32)
    varied = [p for p in VARIED if not p.logit_bias]
    host, device = pair(len(varied) * 3, 65536, varied)
    slots = range(len(varied) * 3)
    clean = np.nan_to_num(logits, nan=0.0)
    drawn = device.sample(torch.tensor(logits, device="cuda").expand(len(slots), -1), slots)
    assert_same(host.sample(torch.tensor(logits).repeat(len(slots), 1), slots), drawn, clean, varied)
    half = torch.tensor(logits, device="cuda").half().expand(len(slots), -1)
    first, second = (pair(len(slots), 65536, varied)[1] for _ in range(2))
    assert first.sample(half, slots) == second.sample(half.float(), slots)


@pytest.mark.many_launches
@pytest.mark.parametrize(
    "params",
    [
        Sampling(alpha_presence=1.0, alpha_frequency=0.5, alpha_decay=0.99, top_p=0.9),
        Sampling(
            temperature=0, alpha_presence=0.8, alpha_frequency=0.3, alpha_decay=0.999, frequency_penalty=0.1
        ),
        nucleus(
            alpha_presence=0.7,
            alpha_frequency=0.4,
            alpha_decay=0.99,
            top_k=30,
            top_p=0.8,
            presence_penalty=0.5,
        ),
        nucleus(
            temperature=0,
            alpha_presence=0.5,
            alpha_frequency=0.4,
            alpha_decay=0.9,
            logit_bias={7: 2.0, 33: 3.0},
        ),
        Sampling(method="gumbel", presence_penalty=1.0, frequency_penalty=0.7),
        Sampling(method="noise", noise=2.0, frequency_penalty=0.2),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_penalties_over_a_long_sequence(params, half):
    """More different tokens than a row has room for at first."""
    host, device = pair(2, LONG, [params])
    drawn = []
    for logits in long_logits(half):
        expected = host.sample(logits.float().clone(), [0, 1])
        assert device.sample(logits.cuda(), [0, 1]) == expected
        drawn.append(expected[0])
    assert FIRST_CAPACITY < len(set(drawn)) < len(drawn)


def long_logits(half, steps=700):
    """`[2, LONG]` for each step, of which some tokens come again and again."""
    generator = np.random.default_rng(3)
    for _ in range(steps):
        logits = generator.normal(size=(2, LONG)).astype(np.float32) * 2
        logits[:, :60] += 2
        yield torch.tensor(logits).half() if half else torch.tensor(logits)


@pytest.mark.many_launches
@pytest.mark.parametrize(
    "params",
    [
        Sampling(alpha_presence=1.0, alpha_frequency=0.5, alpha_decay=0.99, top_p=0.9),
        nucleus(alpha_presence=0.7, alpha_frequency=0.4, alpha_decay=0.99, top_k=30, presence_penalty=0.5),
        Sampling(temperature=0, alpha_presence=0.8, frequency_penalty=0.1),
        Sampling(),
    ],
)
def test_a_row_that_begins_with_a_past_draws_on_as_if_it_had_drawn_that(params):
    """Its penalties may need more room than a row has at first."""
    whole = CudaSampler(2, LONG, "cuda")
    for slot in range(2):
        whole.begin(slot, params, 7, slot)
    steps = [logits.cuda() for logits in long_logits(half=True)]
    drawn = [whole.sample(logits, [0, 1]) for logits in steps]
    for past in (1, 100, 500):
        resumed = CudaSampler(3, LONG, "cuda")
        resumed.begin(0, params, 7, 0)  # whose list lies before that of the row with a past
        resumed.begin(1, params, 7, 1, [ids[1] for ids in drawn[:past]])
        for logits, ids in zip(steps[past:], drawn[past:], strict=True):
            assert resumed.sample(logits[[1]], [1]) == ids[1:]


@pytest.mark.parametrize("token", [10, 11, 33, 49, 58, 12, 48, 59])
def test_exempt_tokens_pay_for_presence_only(token):
    logits = torch.zeros(1, 70, device="cuda")
    logits[0, token], logits[0, 5] = 4.5, 1.0
    host, device = pair(1, 70, [nucleus(temperature=0, alpha_presence=3.0, alpha_frequency=1.0)])
    assert [device.sample(logits, [0]) for _ in range(3)] == [
        host.sample(logits.cpu(), [0]) for _ in range(3)
    ]


def test_a_new_row_in_a_slot_forgets_the_last_one():
    params = Sampling(temperature=0, presence_penalty=5.0)
    sampler = CudaSampler(1, 3, "cuda")
    logits = torch.tensor([[0.0, 2.0, 1.0]], device="cuda")
    for _ in range(2):
        sampler.begin(0, params, 1, 0)
        assert [sampler.sample(logits, [0])[0] for _ in range(3)] == [1, 2, 0]


def test_of_rows_that_begin_in_a_slot_before_a_step_the_last_one_counts():
    logits = torch.tensor([[0.0, 2.0, 1.0]], device="cuda").expand(3, -1)
    sampler = CudaSampler(3, 3, "cuda")
    for slot in range(3):
        sampler.begin(slot, Sampling(temperature=0, logit_bias={0: 5.0}), 1, slot)
    for slot in (2, 0):
        sampler.begin(slot, Sampling(temperature=0, presence_penalty=1.5), 2, slot)
    assert [sampler.sample(logits, [2, 1, 0]) for _ in range(2)] == [[1, 0, 1], [2, 0, 2]]


@pytest.mark.many_launches
@pytest.mark.parametrize("steps", [1, 3], ids="prepared for {}".format)
def test_rows_that_begin_leave_the_penalties_of_the_others_alone(steps):
    """The list of these may have just moved to a larger place."""
    vocab = 2 * FIRST_CAPACITY
    sampler = CudaSampler(2, vocab, "cuda")
    sampler.begin(0, Sampling(temperature=0, presence_penalty=1000.0), 1, 0)
    logits = -torch.arange(vocab, dtype=torch.float32, device="cuda").expand(1, -1)
    slots, drawn = torch.zeros(1, dtype=torch.int32, device="cuda"), []
    for step in range(0, vocab, steps):
        sampler.begin(1, Sampling(), step, 1)
        sampler.prepare([0], steps)
        drawn += [sampler.sample_async(logits, slots).item() for _ in range(steps)]
    assert drawn[:vocab] == list(range(vocab))


@pytest.mark.many_launches
def test_a_captured_call_draws_on():
    """Rows come and go, and are padded, without another capture."""
    rows, vocab, steps = 5, 3000, 300
    params = [
        Sampling(top_p=0.9, alpha_presence=1.0, alpha_frequency=0.3, alpha_decay=0.99),
        nucleus(top_k=40),
        Sampling(),
        NOISY,
    ]
    host, device = pair(8, vocab, params)
    logits = torch.empty(rows, vocab, device="cuda")
    slots = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    ids = torch.full((rows,), -7, dtype=torch.int32, device="cuda")
    device.sample_async(logits, slots, ids)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.sample_async(logits, slots, ids)
    generator = np.random.default_rng(9)
    for step in range(steps):
        if step % 40 == 39:
            for sampler in (host, device):
                sampler.begin(step % 8, params[step % 4], step, 0)
        now = [int(slot) for slot in generator.permutation(8)[: generator.integers(1, rows + 1)]]
        values = torch.tensor(generator.normal(size=(rows, vocab)).astype(np.float32) * 2)
        logits.copy_(values)
        slots.copy_(torch.tensor(now + [-1] * (rows - len(now)), dtype=torch.int32))
        device.prepare(now)
        graph.replay()
        assert ids.tolist() == host.sample(values[: len(now)], now) + [0] * (rows - len(now))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_current_device_does_not_matter():
    sampler = CudaSampler(2, 3, "cuda:1")
    logits = torch.tensor([[0.0, 2.0, 1.0]], device="cuda:1").expand(2, -1)
    with torch.cuda.device(0):
        for slot in range(2):
            sampler.begin(slot, Sampling(temperature=0, presence_penalty=1.5), 1, slot)
        assert [sampler.sample(logits, [1, 0]) for _ in range(2)] == [[1, 1], [2, 2]]


def test_what_cannot_be_sampled():
    sampler = CudaSampler(2, 100, "cuda")
    sampler.begin(0, Sampling(), 0, 0)
    slots = torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="slot 1"):
        sampler.sample(torch.zeros(1, 100, device="cuda"), [1])
    with pytest.raises(ValueError, match=r"\[1, 99\]"):
        sampler.sample_async(torch.zeros(1, 99, device="cuda"), slots)
    with pytest.raises(ValueError, match="int64"):
        sampler.sample_async(torch.zeros(1, 100, device="cuda"), slots.long())
    with pytest.raises(ValueError, match="token 100"):
        sampler.begin(1, Sampling(logit_bias={100: 1.0}), 0, 0)

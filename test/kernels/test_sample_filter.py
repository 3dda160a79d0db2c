"""rwkv_sample_filtered: rows with masks, min_p, top_a and repetition penalties draw the ids of the host."""

import math
from contextlib import nullcontext

import emulated
import host_kernels
import numpy as np
import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu
from drawing import assert_drawn_from
from exact import nucleus
from masked import FILTERED, exact_filtered, masks_of

from rwkv_batch.ops.cuda import build, gemms
from rwkv_batch.ops.cuda.inputs import staging
from rwkv_batch.sampling.reference import BROKEN
from rwkv_batch.sampling.sampler import Sampler
from rwkv_batch.sampling.sampler_cuda import CudaSampler
from rwkv_batch.wire.protocol import Sampling

pytestmark = needs_gpu

NOISY = Sampling(method="noise", noise=3.0)
VARIED = [
    *FILTERED.values(),
    nucleus(top_k=20, top_p=0.9, min_p=0.02),
    nucleus(top_a=0.2),
    Sampling(method="gumbel", top_a=0.2),
    NOISY,
    Sampling(repetition_penalty=2.0, presence_penalty=0.5, alpha_frequency=0.3, top_k=30),
    Sampling(min_p=0.01, top_k=500, temperature=1.5),
]
TIED = {
    "without filters": [
        Sampling(top_k=5, top_p=0.5, presence_penalty=0.5),
        Sampling(top_k=5),
        Sampling(top_p=0.5, frequency_penalty=0.2),
        Sampling(temperature=0, presence_penalty=0.5),
        Sampling(top_k=280, top_p=0.99, temperature=3.0),
        nucleus(top_k=5, presence_penalty=0.5),
        nucleus(top_p=0.5),
        nucleus(top_k=200, top_p=0.9, alpha_presence=0.3),
        Sampling(method="gumbel"),
        NOISY,
    ],
    "with filters": [
        Sampling(top_a=0.2, top_k=5, top_p=0.5, presence_penalty=0.5),
        Sampling(min_p=0.9, top_p=0.5),
        Sampling(min_p=1.0, top_k=280),
        Sampling(temperature=0, min_p=0.5),
        Sampling(repetition_penalty=1.5, top_k=5),
        nucleus(top_a=0.9, top_k=200, top_p=0.9, presence_penalty=0.5),
        nucleus(min_p=0.5, top_p=0.5),
    ],
}
KINDS = 3  # of masks: half of the ids, one in a hundred, about three


@pytest.fixture(autouse=True)
def emulation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under --emulated the sampler runs on the kernels for a CPU."""
    if target := request.config.getoption("--emulated"):
        library = emulated.load(target)
        monkeypatch.setattr(build, "architecture", lambda device: target)
        monkeypatch.setattr(build, "load", lambda arch: library)
        monkeypatch.setattr(staging, "Uploads", host_kernels.AtOnce)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(gemms, "raw_stream", lambda: 0)


def allowed_ids(generator: np.random.Generator, vocab: int, kind: int) -> np.ndarray:
    allowed = generator.random(vocab) < (0.5, 0.01, 3 / vocab)[kind]
    allowed[generator.integers(0, vocab)] = True
    return allowed


def samplers(params: list[Sampling], vocab: int, prompt: list[int]) -> tuple[Sampler, CudaSampler]:
    made = Sampler(len(params), vocab, "cpu"), CudaSampler(len(params), vocab, DEVICE)
    for sampler in made:
        for slot, one in enumerate(params):
            sampler.begin(slot, one, 11, slot, [], prompt)
    return made


def drawn_on_device(device: CudaSampler, logits: torch.Tensor, masks) -> list[int]:
    rows = len(logits)
    device.prepare(range(rows))
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    return device.sample_async(logits.to(DEVICE), slots, masks=masks).tolist()


@pytest.mark.parametrize("blocks", [0, 1, 4, 8])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("vocab", [300, 5000, 65529])
def test_same_ids_as_on_the_host(request: pytest.FixtureRequest, vocab: int, half: bool, blocks: int):
    """Every second row has a mask, in turns; penalties and seen tokens are carried from draw to draw."""
    generator = np.random.default_rng(vocab)
    host, device = samplers(VARIED, vocab, generator.integers(0, vocab, 50).tolist())
    if blocks > 1:
        request.getfixturevalue("clusters")
    device.blocks = blocks
    for step in range(4):
        logits = torch.tensor(generator.normal(size=(len(VARIED), vocab)).astype(np.float32) * 3)
        logits = logits.half() if half else logits
        masked = range(step % 2, len(VARIED), 2)
        masks = masks_of({row: allowed_ids(generator, vocab, row % KINDS) for row in masked})
        drawn = drawn_on_device(device, logits, masks)
        for place, ids in masks.ids(vocab).items():
            assert drawn[place] in ids
        assert drawn == host.sample(logits.float(), range(len(VARIED)), masks)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("params", TIED)
@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [1.0, 1.0 + 2**-10],
        [0.0, 1e-37],  # closer than a histogram can divide
        [3e38, -3e38, 3e38],  # further apart than a float can say
    ],
)
def test_many_equal_logits(values: list[float], params: str, half: bool):
    """More of them at the threshold than one block ranks, after the first draw beside penalized ones."""
    rows, vocab = TIED[params], 600
    host, device = samplers(rows, vocab, [3, 7])
    for _ in range(3):
        logits = torch.tensor(values).repeat(vocab)[:vocab].repeat(len(rows), 1)
        logits = logits.clamp(-65000, 65000).half() if half else logits
        assert drawn_on_device(device, logits, None) == host.sample(logits.float(), range(len(rows)))


@pytest.mark.many_launches
@pytest.mark.parametrize("name", FILTERED)
def test_distribution_under_a_mask(name: str):
    params, vocab, rows, prompt = FILTERED[name], 40, 2000, [2, 5, 5, 11, 30]
    logits = np.random.default_rng(3).normal(size=vocab).astype(np.float32) * 2
    allowed = np.random.default_rng(4).random(vocab) < 0.3
    _, device = samplers([params] * rows, vocab, prompt)
    masks = masks_of({row: allowed for row in range(0, rows, 2)})
    drawn = np.array(drawn_on_device(device, torch.tensor(logits).repeat(rows, 1), masks))
    assert_drawn_from(drawn[::2], exact_filtered(logits, params, allowed, prompt))
    assert_drawn_from(drawn[1::2], exact_filtered(logits, params, None, prompt))


def test_rows_without_a_filter_draw_what_they_draw_without_the_others():
    generator = np.random.default_rng(8)
    plain = [Sampling(), Sampling(top_k=50, top_p=0.6), Sampling(temperature=0), nucleus(top_p=0.9), NOISY]
    _, alone = samplers(plain, 65529, [])
    _, beside = samplers(plain, 65529, [])
    for _ in range(3):
        logits = torch.tensor(generator.normal(size=(len(plain), 65529)).astype(np.float32) * 3).half()
        masks = masks_of({0: np.ones(65529, bool)})  # which leaves all
        assert drawn_on_device(alone, logits, None) == drawn_on_device(beside, logits, masks)


def test_padding_draws_id_0():
    _, device = samplers([Sampling(), Sampling(min_p=0.1)], 300, [])
    device.prepare(range(2))
    slots = torch.tensor([-1, 1], dtype=torch.int32, device=DEVICE)
    logits = torch.zeros(2, 300, device=DEVICE)
    logits[1, 7] = 50.0
    assert device.sample_async(logits, slots, masks=masks_of({0: np.ones(300, bool)})).tolist() == [0, 7]


def test_a_mask_wins_over_bias():
    _, device = samplers([Sampling(temperature=0, logit_bias={3: 1e6})], 300, [])
    assert drawn_on_device(device, torch.zeros(1, 300), masks_of({0: np.arange(300) == 9})) == [9]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        Sampling(),
        Sampling(temperature=0),
        Sampling(logit_bias={3: 5.0, 9: 1.0}),
        Sampling(top_k=5, top_p=0.5, presence_penalty=0.5),
        Sampling(min_p=0.1),
        Sampling(top_a=0.1, repetition_penalty=1.3),
        nucleus(top_p=0.9, min_p=0.01),
        NOISY,
    ],
)
def test_logits_that_are_not_finite_draw_nothing(params, masked, half):
    """Beside rows that do: a mask, a bias or a limit hides none of them, and -infinity is no fault."""
    numbers = [math.nan, math.inf, -math.inf, 0.0]
    host, device = samplers([params] * (2 * len(numbers)), 300, [3])
    logits = torch.randn(2 * len(numbers), 300, generator=torch.Generator().manual_seed(1)) * 3
    for row, number in enumerate(numbers[:-1]):
        logits[2 * row, 3], logits[2 * row + 1, :] = number, number
    logits = logits.half() if half else logits
    masks = (
        masks_of({row: np.isin(np.arange(300), (9, 250)) for row in range(len(logits))}) if masked else None
    )
    drawn = drawn_on_device(device, logits, masks)
    assert [token == BROKEN for token in drawn] == [True] * 4 + [False, True, False, False]
    assert host.sample(logits.float(), range(len(logits)), masks) == drawn


def test_a_mask_that_leaves_nothing_the_model_could_draw():
    _, device = samplers([Sampling()], 300, [])
    logits = torch.zeros(1, 300)
    logits[0, 9] = -math.inf
    assert drawn_on_device(device, logits, masks_of({0: np.arange(300) == 9})) == [BROKEN]

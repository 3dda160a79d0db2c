"""What FlashInfer draws in CudaSampler, against exact distributions."""

import importlib.util

import numpy as np
import pytest
import torch
from cuda_gpu import needs_gpu
from drawing import PENALTIES, assert_drawn_from, assert_pairs_drawn_from
from exact import OTHERS, TIES, exact, nucleus

from rwkv_batch.sampling.sampler_cuda import CudaSampler
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

installed = importlib.util.find_spec("flashinfer") is not None
pytestmark = [*needs_gpu, pytest.mark.skipif(not installed, reason="needs flashinfer-python")]


class seeded(torch.Generator):
    """A generator that takes no seed but this one."""

    def seed(self) -> int:
        self.manual_seed(2024)
        return 2024


def filled(params: list[Sampling], vocab: int, fixed: bool = True) -> CudaSampler:
    """With a row for each of `params`, in the slot of its number; `fixed`: the random numbers are."""
    with pytest.MonkeyPatch.context() as patch:
        if fixed:
            patch.setattr(torch, "Generator", seeded)
        sampler = CudaSampler(len(params), vocab, "cuda", "flashinfer")
    for slot, one in enumerate(params):
        sampler.begin(slot, one, 11, slot)
    return sampler


@pytest.mark.parametrize(
    "params",
    [
        *(one for one in OTHERS.values() if one.method == "nucleus"),
        nucleus(**PENALTIES),
        nucleus(logit_bias={0: 3.0, 4: -1.0}, top_k=5, **PENALTIES),
    ],
)
def test_distribution_with_ties(params):
    assert_pairs_drawn_from(filled([params] * 2000, 10), params)


@pytest.mark.parametrize(
    "params",
    [
        nucleus(top_k=50, top_p=0.6),
        nucleus(top_k=50, top_p=0.9, temperature=1.5),
        nucleus(top_p=0.8),
        nucleus(top_k=3000, top_p=0.9, temperature=3.0),
        nucleus(),
        nucleus(logit_bias={65529: 12.0, 7: 11.5, 65535: 50.0}, top_k=4),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_distribution_over_the_whole_vocabulary(params, half):
    """Some likely tokens, and numbers where no token is that must not matter."""
    logits = np.random.default_rng(6).normal(size=65536) * 2
    logits[np.arange(40) * 1638] += np.linspace(6, 12, 40)
    logits[VOCABULARY:] = 50
    given = torch.tensor(logits, device="cuda", dtype=torch.float16 if half else torch.float32)
    drawn = filled([params] * 1500, 65536).sample(given.expand(1500, -1), range(1500))
    masked = np.where(np.arange(65536) < VOCABULARY, given.cpu().double().numpy(), -np.inf)
    assert_drawn_from(np.array(drawn), exact(masked, params))


def test_rows_with_different_limits_and_other_methods():
    """Limits, logits and ids are those of each row."""
    kinds = [
        nucleus(top_k=2),
        nucleus(),
        nucleus(seed=3),
        nucleus(top_p=0.3),
        Sampling(temperature=0),
        nucleus(top_k=3, temperature=2.0, logit_bias={7: 6.0}),
    ]
    logits = torch.stack([torch.tensor(TIES).roll(i) for i in range(len(kinds))]).repeat(1200, 1).cuda()
    drawn = np.array(filled(kinds * 1200, 10).sample(logits, range(len(logits))))
    for i, params in enumerate(kinds):
        assert_drawn_from(drawn[i :: len(kinds)], exact(np.roll(TIES, i), params))


def test_two_samplers_draw_differently():
    logits = torch.zeros(200, 5000, device="cuda")
    samplers = [filled([nucleus()] * 200, 5000, fixed=False) for _ in range(2)]
    first, second = (sampler.sample(logits, range(200)) for sampler in samplers)
    assert first != second


def test_the_host_does_not_wait():
    params = [nucleus(top_k=50, **PENALTIES), nucleus(seed=1), nucleus(), Sampling()] * 8
    sampler = filled(params, 65536)
    logits = torch.randn(32, 65536, device="cuda").half()
    slots = torch.arange(32, dtype=torch.int32, device="cuda")
    sampler.sample(logits, range(32))
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.prepare(range(32))
        ids = sampler.sample_async(logits, slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(0 <= token < VOCABULARY for token in ids.tolist())

"""Rows that FlashInfer draws: which they are, the logits that it is given, and what is recorded.

Functions of the tests stand in for FlashInfer, and host_kernels.py for the kernels where there is no GPU.
test_flashinfer.py has the tests with FlashInfer itself.
"""

import math
import sys
import types
from collections.abc import Callable

import host_kernels
import numpy as np
import pytest
import torch
from cuda_gpu import needs_gpu
from drawing import PENALTIES, assert_pairs_drawn_from
from exact import TIES, exact, nucleus
from torch import Tensor

from rwkv_batch.sampling import flashinfer
from rwkv_batch.sampling.flashinfer import SamplerError
from rwkv_batch.sampling.params import RowSampling, drawable
from rwkv_batch.sampling.penalties import Penalties
from rwkv_batch.sampling.reference import BROKEN, add
from rwkv_batch.sampling.sampler_cuda import CudaSampler
from rwkv_batch.sampling.slots_cuda import FIRST_CAPACITY
from rwkv_batch.text.tokenizer import VOCABULARY
from rwkv_batch.wire.protocol import Sampling

BIASED = nucleus(logit_bias={0: 3.0, 4: -1.0}, top_k=5, **PENALTIES)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        host_kernels.install(monkeypatch)
    return request.param


def stand_in(monkeypatch: pytest.MonkeyPatch, draw: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Let `draw` be FlashInfer's function."""
    monkeypatch.setattr(flashinfer, "load", lambda device, width: draw)


def filled(params: list[Sampling], vocab: int, device: str, sampler: str = "flashinfer") -> CudaSampler:
    """With a row for each of `params`, in the slot of its number."""
    made = CudaSampler(len(params), vocab, device, sampler)
    for slot, one in enumerate(params):
        made.begin(slot, one, 11, slot)
    return made


def adjusted(logits: np.ndarray, sampling: Sampling, history: list[int]) -> np.ndarray:
    """What FlashInfer is to see of the ids that can be drawn, as the host's sampler works it out."""
    row = RowSampling.from_sampling(sampling, len(logits))
    values = np.nan_to_num(logits[: drawable(len(logits))].astype(np.float32))  # -inf is the least number
    if row.bias is not None:
        add(values, *row.bias)
    if row.penalties is not None:
        penalties = Penalties(row.penalties)
        for token in history:
            penalties.record(token)
        ids, amounts = penalties.amounts()
        add(values, ids, -amounts)
    with np.errstate(over="ignore"):
        return (values - values.max()) / np.float32(row.temperature)


def test_unseeded_nucleus_rows_are_drawn_by_flashinfer_and_no_others(monkeypatch, device):
    params = [
        nucleus(seed=5),
        nucleus(),
        Sampling(),
        nucleus(temperature=0),
        nucleus(top_k=3),
        Sampling(method="noise", noise=2.0),
        Sampling(method="gumbel"),
        nucleus(top_k=1),
        nucleus(top_p=0.0),
    ]
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(1)).to(device)
    order = [4, 2, 0, 1, 8, 3, 5, 7, 6]
    limits = []

    def draw(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        assert (logits.dtype, top_k.dtype, top_p.dtype) == (torch.float32, torch.int32, torch.float32)
        assert logits.is_contiguous() and len(logits) == len(top_k) == len(top_p)
        limits.append(list(zip(top_k.tolist(), top_p.tolist(), strict=True)))
        return torch.tensor([30, 31], dtype=torch.int32, device=device)

    expected = filled(params, 40, device, "own").sample(logits, order)
    stand_in(monkeypatch, draw)
    drawn = filled(params, 40, device).sample(logits, order)
    assert (drawn[0], drawn[3]) == (30, 31)
    assert [drawn[i] for i in (1, 2, 4, 5, 6, 7, 8)] == [expected[i] for i in (1, 2, 4, 5, 6, 7, 8)]
    assert limits == [[(3, 2.0), (40, 2.0)]]


def test_a_batch_without_such_rows_does_not_call_flashinfer(monkeypatch, device):
    def draw(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        raise AssertionError

    params = [nucleus(seed=1), Sampling(), nucleus()]
    logits = torch.zeros(2, 40, device=device)
    expected = filled(params, 40, device, "own").sample(logits, [0, 1])
    stand_in(monkeypatch, draw)
    assert filled(params, 40, device).sample(logits, [0, 1]) == expected


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("vocab", [10, pytest.param(5000, marks=pytest.mark.many_launches), 65536])
def test_the_logits_are_those_of_the_host_sampler_and_what_is_drawn_is_recorded(
    monkeypatch, device, vocab, half
):
    """Over more draws than a row has room for at first; -infinity comes too."""
    params = [
        nucleus(temperature=0.3, top_k=7, top_p=0.25),
        nucleus(temperature=1.7, frequency_penalty=0.1, **PENALTIES),
        nucleus(presence_penalty=-0.5),
        nucleus(logit_bias={0: 3.0, 4: -100.0, vocab - 1: 9.0}, alpha_frequency=0.3, alpha_decay=0.99),
    ]
    generator = np.random.default_rng(vocab)
    steps = 3 * FIRST_CAPACITY if vocab == 5000 else 4
    tokens = generator.integers(0, min(vocab, VOCABULARY), (steps, len(params)))
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def draw(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        seen.append((logits.cpu(), top_k.cpu(), top_p.cpu()))
        return torch.tensor(tokens[len(seen) - 1], dtype=torch.int32, device=device)

    stand_in(monkeypatch, draw)
    sampler = filled(params, vocab, device)
    for step in range(steps):
        logits = generator.normal(size=(len(params), vocab)).astype(np.float16 if half else np.float32) * 3
        logits[:2, generator.integers(0, vocab, 2)] = -np.inf
        logits[:, VOCABULARY:] = 99
        given = torch.tensor(logits, device=device)
        assert sampler.sample(given, range(len(params))) == tokens[step].tolist()
        assert np.array_equal(given.cpu().numpy(), logits, equal_nan=True)
        if step % 50 and step < steps - 2:
            continue
        values, top_k, top_p = seen[-1]
        for row, one in enumerate(params):
            expected = adjusted(logits[row], one, tokens[:step, row].tolist())
            np.testing.assert_allclose(values[row, : len(expected)], expected, rtol=2e-6, atol=2e-6)
            assert (values[row, len(expected) :] == -np.inf).all()
        assert top_k.tolist() == [min(7, vocab), *[drawable(vocab)] * 3]
        assert top_p.tolist() == [0.25, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("half", [False, True])
def test_rows_whose_logits_are_not_finite_draw_nothing(monkeypatch, device, half):
    """No matter what FlashInfer, which gets finite numbers or -infinity, makes of them."""
    params = [nucleus(), nucleus(alpha_presence=1.0, logit_bias={3: 1.0}), nucleus(), nucleus(), Sampling()]
    logits = torch.zeros(5, 300, dtype=torch.float16 if half else torch.float32)
    logits[0, 3], logits[1, 3], logits[2], logits[3, 3] = math.nan, math.inf, -math.inf, -math.inf
    logits[4, 3] = math.nan

    def draw(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        assert not logits.isnan().any() and not logits.eq(math.inf).any()
        assert logits.isfinite().any(1).all()
        return torch.full((4,), 7, dtype=torch.int32, device=device)

    stand_in(monkeypatch, draw)
    sampler = filled(params, 300, device)
    drawn = sampler.sample(logits.to(device), range(5))
    assert drawn[:4] == [BROKEN, BROKEN, BROKEN, 7]
    assert device == "cpu" or drawn[4] == BROKEN  # the stand-in for a CPU draws fixed ids


def test_padding_is_drawn_but_not_recorded(monkeypatch, device):
    """A row that has ended is padding on the device only."""
    seen = []

    def draw(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        seen.append(logits[:, :10].cpu().numpy())
        return torch.full((len(logits),), 4, dtype=torch.int32, device=device)

    stand_in(monkeypatch, draw)
    params = [nucleus(presence_penalty=2.0), nucleus(presence_penalty=2.0), Sampling(temperature=0)]
    sampler = filled(params, 10, device)
    logits = torch.tensor(TIES, device=device).repeat(3, 1)
    sampler.prepare([0, 1, 2])
    ids = sampler.sample_async(logits, torch.tensor([-1, 1, 2], dtype=torch.int32, device=device))
    assert ids.tolist()[:2] == [0, 4]
    sampler.sample(logits, [0, 1, 2])
    for row, history in enumerate(([], [4])):
        np.testing.assert_allclose(seen[1][row], adjusted(np.array(TIES), params[0], history), atol=1e-6)


@needs_gpu[0]
@needs_gpu[1]
@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_the_split_of_a_row_does_not_matter(monkeypatch, blocks):
    """One block a row is also what older GPUs run."""
    seen = []

    def draw(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        seen.append(logits.clone())
        return torch.arange(len(logits), dtype=torch.int32, device="cuda")

    stand_in(monkeypatch, draw)
    params = [nucleus(temperature=0.7, logit_bias={0: 3.0}, **PENALTIES)] * 7
    samplers = filled(params, 65536, "cuda"), filled(params, 65536, "cuda")
    samplers[1].blocks = blocks
    logits = torch.randn(7, 65536, device="cuda").half()
    for sampler in samplers:
        for _ in range(2):
            sampler.sample(logits, range(7))
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])


def test_a_new_row_in_the_slot_may_be_drawn_by_the_other_sampler(monkeypatch, device):
    stand_in(
        monkeypatch, lambda logits, top_k, top_p: torch.full((len(logits),), 9, dtype=torch.int32).to(device)
    )
    sampler = filled([nucleus()], 10, device)
    logits = torch.tensor([TIES], device=device)
    greedy = filled([Sampling(temperature=0)], 10, device, "own").sample(logits, [0])
    drawn = [sampler.sample(logits, [0])]
    for params in (Sampling(temperature=0), nucleus()):
        sampler.begin(0, params, 1, 0)
        drawn.append(sampler.sample(logits, [0]))
    assert drawn == [[9], greedy, [9]]


@pytest.mark.many_launches
@pytest.mark.parametrize("params", [nucleus(top_k=6, top_p=0.68, temperature=2.0), BIASED])
def test_distribution(monkeypatch, device, params):
    """Of two draws in a row, where FlashInfer's function draws from the definition."""
    generator = np.random.default_rng(4)

    def draw(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        rows = zip(logits[:, :10].cpu().numpy(), top_k.tolist(), top_p.tolist(), strict=True)
        weights = [exact(row, nucleus(top_k=k, top_p=p)) for row, k, p in rows]
        return torch.tensor([generator.choice(10, p=p) for p in weights], dtype=torch.int32).to(device)

    stand_in(monkeypatch, draw)
    assert_pairs_drawn_from(filled([params] * 2000, 10, device), params)


def test_without_the_package_it_cannot_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", None)  # importing it fails
    with pytest.raises(SamplerError, match=r"needs flashinfer\b.*pip install .*--sampler own"):
        flashinfer.load(torch.device("cuda"), 4096)


def test_where_it_does_not_run_it_cannot_start(monkeypatch, caplog):
    def broken(*arguments: object, **options: object) -> Tensor:
        raise RuntimeError("Ninja build failed.")

    module = types.SimpleNamespace(top_k_top_p_sampling_from_logits=broken)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    with pytest.raises(SamplerError, match=r"does not run here \(RuntimeError.*--sampler own"):
        flashinfer.load(torch.device("cpu"), 4096)
    assert "Ninja build failed." in caplog.text

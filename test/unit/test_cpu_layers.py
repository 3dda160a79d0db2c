"""Steps of a few tokens, which are one call for all layers, against the kernels one by one."""

import pytest
import torch
from checkpoints import tiny
from cpu_models import TARGETS, kernels_for, poisoned_outputs, torch_threads

from rwkv_batch.model import rwkv7_cpu
from rwkv_batch.model.quantization.quantize import quantize
from rwkv_batch.model.rwkv7_cpu import CpuRWKV7
from rwkv_batch.model.stages import StagedModel
from rwkv_batch.ops.cpu.products import packed_linear

pytestmark = pytest.mark.thorough

SLOTS = 9
# Lengths of rows, and their slots.
BATCHES = [
    ([1], [4]),
    ([1, 1], [0, 1]),
    ([1] * 8, [8, 0, 3, 2, 5, 7, 1, 4]),
    ([1, 1, 1, 19, 40], [4, 2, 7, 0, 3]),
]


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request):
    return kernels_for(request.param)


@pytest.fixture(autouse=True)
def poisoned():
    with poisoned_outputs():
        yield


@pytest.fixture
def one_by_one(monkeypatch):
    """From when it is called on, no step is one call."""
    return lambda: monkeypatch.setattr(rwkv7_cpu, "FEW", 0)


def steps(model, batches):
    """Logits of each, and the states that they leave."""
    states, generator = model.new_states(SLOTS), torch.Generator().manual_seed(1)
    logits = []
    for lengths, slots in batches:
        tokens = torch.randint(1, 500, (sum(lengths),), generator=generator)
        logits.append(model.forward(tokens, lengths, slots, states))
    parts = states.parts if isinstance(model, StagedModel) else [states]
    return torch.cat(logits), torch.cat([part.memory for part in parts], 1)


def assert_same(found, wanted):
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights", ["as they are", "fp32", "int8", "int4", "fp8", "nf4"])
def test_one_call_has_the_bits_of_the_kernels_one_by_one(compiled, weights, threads, one_by_one):
    checkpoint = tiny(layers=3, width=192, vocab=500, seed=1)
    if weights == "fp32":  # numbers that fp16 does not have
        for tensor in checkpoint.tensors.values():
            tensor.data = tensor.float() * 1.001
    elif weights != "as they are":
        checkpoint = quantize(checkpoint, weights)
    model = CpuRWKV7(checkpoint, kernels=compiled)
    with torch_threads(threads):
        found = steps(model, BATCHES)
        one_by_one()
        assert_same(found, steps(model, BATCHES))


def test_a_row_has_the_same_bits_beside_more_tokens_than_one_call_takes(compiled):
    model = CpuRWKV7(tiny(layers=3, width=192, vocab=500, seed=1), kernels=compiled)
    tokens = torch.randint(1, 500, (300,), generator=torch.Generator().manual_seed(1))
    alone, beside = model.new_states(SLOTS), model.new_states(SLOTS)
    for step in range(3):
        want = model.forward(tokens[step : step + 1], [1], [5], alone)
        got = model.forward(tokens[step : step + 201], [1, 200], [5, 2], beside)
        assert torch.equal(got[0], want[0])
    assert torch.equal(alone.memory[5], beside.memory[5])


def test_a_stage_takes_the_values_of_the_first_layer_from_the_one_before(compiled, one_by_one):
    checkpoint = tiny(layers=4, width=192, vocab=500, seed=1)
    whole = CpuRWKV7(checkpoint, kernels=compiled)
    parts = [CpuRWKV7(checkpoint, kernels=compiled, part=part) for part in (range(1), range(1, 4))]
    found = steps(StagedModel(parts), BATCHES)
    assert torch.equal(found[0], steps(whole, BATCHES)[0])
    one_by_one()
    assert_same(found, steps(StagedModel(parts), BATCHES))


@pytest.mark.parametrize(("name", "function"), [("tanh", torch.tanh), ("sigmoid", torch.sigmoid)])
def test_an_activation_is_that_of_fp64(compiled, name, function):
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.logspace(-30, 2, 400), torch.tensor([0.0, -1e-9])])
    product = packed_linear(compiled, torch.eye(1), None)
    got = product.activated(x.unsqueeze(1), name).flatten()
    want = function(x.double())
    assert ((got - want).abs() <= 4e-7 * want.abs() + 1e-37).all()
    for bad, end in ((torch.nan, torch.nan), (torch.inf, 1.0)):
        assert torch.equal(
            product.activated(torch.tensor([[bad]]), name).nan_to_num(7), torch.tensor([[end]]).nan_to_num(7)
        )

"""Codes of 8 and 4 bits, as a Hopper's GEMMs read them, as fp16 numbers, bit for bit."""

import pytest
import torch
from coded import numbers, random_weight
from cuda_gpu import DEVICE, needs_gpu, poisoned

from rwkv_batch.model.cuda.packed import coded as packed
from rwkv_batch.model.cuda.packed.coded import coded, decoded_room
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.codes.kernels import CodeKernels
from rwkv_batch.ops.weights.channels import Int8Weight
from rwkv_batch.ops.weights.groups import WideInt4Weight

FORMS = [("int8", False), ("int8", True), ("int4", False)]  # and whether by columns
pytestmark = needs_gpu


@pytest.fixture(scope="module")
def codes(kernels: Kernels) -> CodeKernels:
    return CodeKernels(kernels)


def room(weight):
    return decoded_room([weight], torch.device(DEVICE))


def decoded(codes, weight, columns):
    """All numbers `[N, K]`."""
    w = coded(weight, room(weight), columns)
    n, k = w.shape
    to = poisoned(k, n) if columns else poisoned(n, k)
    codes.decode_tiles(w.codes, w.scales, to, columns)
    return (to.T if columns else to).cpu()


@pytest.mark.parametrize(("kind", "columns"), FORMS)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (192, 320), (704, 1024), (128, 4096)])
def test_numbers(codes, kind, columns, n, k):
    weight = random_weight(kind, n, k)
    assert torch.equal(decoded(codes, weight, columns), numbers(weight).float().half())


def test_groups_of_128(codes):
    weight = WideInt4Weight.pack(torch.randn(64, 320))
    scales, minimums = (
        weight.parts[name].repeat_interleave(128, 1)[:, :320].double() for name in ("scales", "minimums")
    )
    values = weight.parts["values"]
    plain = torch.stack([values & 15, values >> 4], 2).flatten(1).double()
    assert torch.equal(decoded(codes, weight, False), (plain * scales + minimums).half())


@pytest.mark.parametrize("columns", [False, True])
def test_too_large_numbers_become_the_largest(codes, columns):
    weight = Int8Weight.pack(torch.randn(64, 128) * 1e5)
    assert torch.equal(decoded(codes, weight, columns), numbers(weight).clamp(-65504, 65504).float().half())


@pytest.mark.parametrize("columns", [False, True])
def test_every_code(codes, columns):
    """That a matrix of int8 can have."""
    matrix = torch.arange(-127, 128).repeat(64, 2)[:, :320].float()
    assert torch.equal(decoded(codes, Int8Weight.pack(matrix), columns), matrix.half())


@pytest.mark.parametrize(("kind", "columns"), FORMS)
def test_some_outputs_of_a_larger_matrix(codes, kind, columns, monkeypatch):
    """As many as there is room for, with zeros behind the last."""
    monkeypatch.setattr(packed, "DECODED_BYTES", 2 * 128 * 320)
    weight = random_weight(kind, 300, 320)
    w = coded(weight, room(weight), columns)
    wanted = torch.zeros(320, 320).half()
    wanted[:300] = numbers(weight).float().half()
    found = []
    for part in w.decoded_parts():
        place = w.decoded_place(part)
        to = place.fill_(float("nan")).view(320, -1) if columns else place.fill_(float("nan"))
        codes.decode_tiles(w.codes_of(part), w.scales_of(part), to, columns)
        found.append((to.T if columns else to).clone())
    assert [len(part) for part in found] == [128, 128, 64]
    assert torch.equal(torch.cat(found).cpu(), wanted)


def test_sizes_that_it_does_not_take(codes):
    w, to = torch.zeros(64, 96, dtype=torch.uint8, device=DEVICE), poisoned(64, 96)
    with pytest.raises(RuntimeError, match="rwkv_decode_tiles"):
        codes.decode_tiles(w, torch.ones(64, device=DEVICE), to)
    with pytest.raises(RuntimeError, match="rwkv_decode_tiles"):
        codes.decode_tiles(w, torch.ones(96, device=DEVICE), poisoned(32, 64), columns=True)

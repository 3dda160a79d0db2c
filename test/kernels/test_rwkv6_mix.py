"""What RWKV-6 computes between its GEMMs, against torch."""

import pytest
from cuda_gpu import ROWS, needs_gpu, normal, off

pytestmark = needs_gpu


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [64, 2048])
def test_mixes_that_depend_on_the_data(kernels, rows, width):
    amounts, x, before, offsets = (
        normal(5, rows, width),
        normal(rows, width),
        normal(rows, width),
        normal(5, width),
    )
    step = before.double() - x.double()
    want = x.double() + step * (amounts.double() + offsets.double().unsqueeze(1))
    kernels.shift_mix(amounts, x, before, offsets)
    assert off(amounts, want) < 1e-3


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [64, 2048])
def test_gate(kernels, rows, width):
    y, gates = normal(rows, width), normal(rows, width, std=4)
    want = y.double() * gates.double().sigmoid()
    kernels.gate(y, gates)
    assert off(y, want) < 1e-3

"""What RWKV-7a's DeepEmbed does between its GEMMs, against torch."""

import pytest
import torch
from cuda_gpu import DEVICE, ROWS, needs_gpu, normal, off, poisoned

pytestmark = needs_gpu


@pytest.mark.parametrize("rows", ROWS)
def test_product_with_the_matrix_of_the_token(kernels, rows):
    q, table, out = normal(rows, 32), normal(50, 1024), poisoned(rows, 32)
    tokens = torch.randint(0, 50, (rows,), device=DEVICE, dtype=torch.int32)
    kernels.deep_embed(q, table, tokens, out)
    want = torch.bmm(q.double().unsqueeze(1), table[tokens.long()].double().view(-1, 32, 32)).squeeze(1)
    assert off(out, want) < 1e-3


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("units", [256, 8192])
def test_units_are_scaled_zero_stays_zero_and_nothing_overflows(kernels, rows, units):
    hidden, factors, offsets = normal(rows, units).relu(), normal(rows, units), normal(units, mean=1)
    hidden[:, 0], factors[:, 0], offsets[0] = 60000, 3, 1
    inactive = hidden == 0
    want = (hidden.double() * (offsets.double() + factors.double())).clamp(-65504, 65504)
    kernels.deep_scale(hidden, factors, offsets)
    assert off(hidden[:, 1:], want[:, 1:]) < 1e-3
    assert (hidden[:, 0] == 65504).all() and not hidden[inactive].any()

"""The GEMM that skips inactive hidden units against torch in fp64."""

import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu, normal, off, poisoned

from rwkv_batch.ops.cuda.abi import SPARSE_SPLITS
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS

pytestmark = needs_gpu


@pytest.fixture(params=["together", "apart"])
def together(request, kernels):
    if request.param == "together" and not kernels.has_lowrank:
        pytest.skip("this GPU has no clusters")
    return request.param == "together"


@pytest.mark.parametrize("rows", SPARSE_ROWS)
@pytest.mark.parametrize(
    ("n", "k"), [(64, 8), (64, 256), (192, 768), (64, 20480), (2048, 8192), (2624, 1032), (4096, 16384)]
)
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_gemms(kernels, rows, n, k, share, together):
    w, h = normal(k, n, std=k**-0.5), normal(rows, k) * (torch.rand(rows, k, device=DEVICE) < share)
    room = poisoned(SPARSE_SPLITS, rows, n, dtype=torch.float32)
    partials = kernels.gemm_sparse(h, w, room, together=together)
    want = h.double() @ w.double()
    assert partials.isfinite().all() and room[len(partials) :].isnan().all()
    assert (
        off(partials.sum(0), want) < 2e-5 if want.any() else not partials.any()
    )  # tensor cores cut off what they add


def test_only_the_weights_of_inactive_units_are_skipped(kernels, together):
    w, h = normal(1024, 192), normal(4, 1024).relu()
    h[:, 5:900:7] = 0
    inactive = ~h.any(0)
    inactive[::128] = False  # the first of a slice may fill up the units of an mma
    want = h.double() @ w.double()
    w[inactive] = float("nan")
    room = poisoned(SPARSE_SPLITS, 4, 192, dtype=torch.float32)
    assert off(kernels.gemm_sparse(h, w, room, together=together).sum(0), want) < 2e-5


def test_it_is_offered_where_shared_memory_suffices(kernels):
    assert all(kernels.sparse_fits(rows, 4 * 1024) for rows in SPARSE_ROWS)
    assert not kernels.sparse_fits(3, 1024) and not kernels.sparse_fits(8, 1 << 20)

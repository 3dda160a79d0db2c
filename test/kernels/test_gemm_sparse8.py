"""The GEMM with codes of 8 bits that skips inactive hidden units, against torch in fp64."""

import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu, normal, off, poisoned
from torch import Tensor

from rwkv_batch.model.cuda.packed.orders import paired_columns
from rwkv_batch.ops.cuda.abi import SPARSE_SPLITS
from rwkv_batch.ops.cuda.gemms import SPARSE_ROWS

MOST = torch.finfo(torch.float16).max


def quantized(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random weights: as the kernel takes them, their scales, and `[K, N]` in fp64."""
    scale = (torch.rand(n, device=DEVICE) + 0.5) / k**0.5 / 64
    numbers = torch.randint(-127, 128, (n, k), device=DEVICE)
    weights = (numbers.double() * scale.double()[:, None]).T
    return paired_columns((numbers + 128).to(torch.uint8)), scale, weights


def active(rows: int, k: int, share: float) -> Tensor:
    """Hidden units `[rows, k]`, of which that share is not zero."""
    return normal(rows, k) * (torch.rand(rows, k, device=DEVICE) < share)


def room(rows: int, n: int) -> Tensor:
    return poisoned(SPARSE_SPLITS, rows, n, dtype=torch.float32)


@pytest.mark.parametrize("rows", SPARSE_ROWS)
@pytest.mark.parametrize(
    ("n", "k"),
    [
        *[(64, 8), (64, 256), (128, 64), (192, 768), (320, 1032), (64, 20480), (768, 3072)],
        *[(2048, 8192), (2624, 1032), (4096, 16384)],
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("together", [False, True])
class TestProducts:
    pytestmark = needs_gpu

    def test_gemms(self, kernels, rows, n, k, share, together):
        if not kernels.sparse8_fits(rows, k) or (together and not kernels.has_lowrank):
            pytest.skip("this GPU has no shared memory for it, or no clusters")
        (w, scale, weights), h, to = quantized(n, k), active(rows, k, share), room(rows, n)
        partials = kernels.gemm_sparse8(h, w, scale, to, together=together)
        want = h.double() @ weights
        assert partials.isfinite().all() and to[len(partials) :].isnan().all()
        assert (
            off(partials.sum(0), want) < 2e-5 if want.any() else not partials.any()
        )  # tensor cores cut off what they add


class TestNumbers:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("n", [64, 192, 256])
    def test_every_code_is_its_number(self, kernels, n):
        """At every place of 16 columns and 16 units, as each product is of one unit alone."""
        codes = (torch.arange(256, device=DEVICE)[None] + 5 * torch.arange(n, device=DEVICE)[:, None]) % 256
        scale = 1 + torch.arange(n, device=DEVICE).float()  # of whole numbers: products are exact
        w, units = paired_columns(codes.to(torch.uint8)), torch.eye(256, device=DEVICE).half()
        found = [kernels.gemm_sparse8(h, w, scale, room(8, n)).sum(0) for h in units.split(8)]
        assert torch.equal(torch.cat(found), (codes.T - 128).float() * scale)

    def test_a_row_has_its_own_units(self, kernels):
        """Each row has other units than its neighbours, and one has none."""
        w, scale, weights = quantized(192, 1024)
        h = normal(8, 1024)
        for row in range(8):
            h[row, torch.arange(1024, device=DEVICE) % 8 != row] = 0
        h[5] = 0
        found, want = kernels.gemm_sparse8(h, w, scale, room(8, 192)).sum(0), h.double() @ weights
        assert not found[5].any() and off(found, want) < 2e-5
        alone = kernels.gemm_sparse8(h[3:4].contiguous(), w, scale, room(1, 192)).sum(0)
        assert off(alone, want[3:4]) < 2e-5

    def test_the_largest_hidden_units_give_finite_sums(self, kernels):
        numbers = torch.full((64, 4096), 127, device=DEVICE)
        numbers[1::2] = -127
        w, scale = paired_columns((numbers + 128).to(torch.uint8)), torch.ones(64, device=DEVICE)
        h = torch.full((8, 4096), MOST, device=DEVICE, dtype=torch.float16)
        found = kernels.gemm_sparse8(h, w, scale, room(8, 64)).sum(0)
        assert found.isfinite().all() and off(found, h.double() @ numbers.T.double()) < 2e-5

    def test_outputs_without_weights_are_zero(self, kernels):
        """An output of zeros has the scale zero, and so has what fills up outputs."""
        w, scale, weights = quantized(128, 512)
        scale[70:] = 0
        h = active(4, 512, 0.5)
        found = kernels.gemm_sparse8(h, w, scale, room(4, 128)).sum(0)
        assert not found[:, 70:].any() and off(found[:, :70], h.double() @ weights[:, :70]) < 2e-5

    def test_it_is_offered_where_shared_memory_suffices(self, kernels):
        assert all(kernels.sparse8_fits(rows, 4 * 1024) for rows in SPARSE_ROWS)
        assert not kernels.sparse8_fits(3, 1024) and not kernels.sparse8_fits(8, 1 << 20)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 192)])
def test_the_order_of_the_columns(n, k):
    """A unit's codes are side by side: of each 16 columns 0, 8, 1, 9 and so on."""
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    paired = paired_columns(codes)
    assert paired.shape == (k, n) and paired.is_contiguous()
    for unit in (0, 5, k - 1):
        for first in range(0, n, 16):
            wanted = [codes[first + i + half, unit] for i in range(8) for half in (0, 8)]
            assert paired[unit, first : first + 16].tolist() == [int(code) for code in wanted]

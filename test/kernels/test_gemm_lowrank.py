"""GEMMs with small weights against torch in fp64, at odd sizes and with poisoned outputs."""

import pytest
import torch
from cuda_gpu import ACTIVATIONS, ROWS, needs_gpu, off, poisoned

from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SIGMOID, TANH
from rwkv_batch.ops.cuda.gemms import AUTO, MAX_RESIDENT_K, RESIDENT

pytestmark = [*needs_gpu, pytest.mark.usefixtures("hopper")]
OUTER = [(64, 32), (320, 96), (2048, 256), (4096, 480), (208, MAX_RESIDENT_K)]  # N, K
INNER = [(32, 64), (96, 320), (208, 2080), (480, 4096)]


def random_parts(rows, n, k):
    """Four GEMMs of different sizes and activations, not all of the same K, as [w, x, y, activation]."""
    parts = []
    for activation, more_n, k_of_part in (
        (IDENTITY, 0, k),
        (TANH, 16, max(32, k // 96 * 32)),
        (SIGMOID, 48, k),
        (RELU_SQUARE, 32, k),
    ):
        w = torch.randn(n + more_n, k_of_part, device="cuda") * k_of_part**-0.5
        parts.append(
            [
                w.half(),
                torch.randn(rows, k_of_part, device="cuda").half(),
                poisoned(rows, n + more_n),
                activation,
            ]
        )
    return parts


@pytest.mark.parametrize("rows", [*ROWS, 65, 128, 200, 1000, 4096])
@pytest.mark.parametrize(
    ("n", "k", "split_k"),
    [
        *((n, k, RESIDENT) for n, k in OUTER),
        *((n, k, split_k) for n, k in INNER for split_k in (AUTO, 1, 2, 4, 8)),
    ],
)
def test_gemms(kernels, rows, n, k, split_k):
    parts = random_parts(rows, n, k)
    kernels.gemm_lowrank(parts, split_k)
    for w, x, y, activation in parts:
        assert off(y, ACTIVATIONS[activation](x.double() @ w.double().T)) < 1e-3


def test_tall_tiles_and_wide_ones(kernels):
    """Tiles of several groups are among them. One case has all, so that the sanitizer sees them."""
    for rows, n, k, split_k in (
        (1, 208, 2080, 4),
        (129, 208, 2080, 4),
        (321, 208, 2080, 4),
        (1000, 96, 320, 4),
        (1000, 480, 4096, 1),
        (4096, 208, 2080, 1),
        (1000, 2048, 480, RESIDENT),
        (128, 4096, 480, RESIDENT),
        (200, 4096, 480, RESIDENT),
        (321, 2048, 480, RESIDENT),
        (321, 4096, 480, RESIDENT),
    ):
        test_gemms(kernels, rows, n, k, split_k)


@pytest.mark.parametrize("rows", [3, 65, 128, 200, 321, 1000])
@pytest.mark.parametrize(
    ("n", "k", "split_k"),
    [
        (2048, 256, RESIDENT),
        (2048, 480, RESIDENT),
        (4080, 480, RESIDENT),
        *((256, 2048, split_k) for split_k in (1, 2, 4, 8)),
    ],
)
def test_a_row_alone_gets_the_same_bits(kernels, rows, n, k, split_k):
    parts = random_parts(rows, n, k)
    kernels.gemm_lowrank(parts, split_k)
    for row in {0, rows // 2, rows - 1}:
        alone = [
            [w, x[row : row + 1].clone(), poisoned(1, len(w)), activation] for w, x, _, activation in parts
        ]
        kernels.gemm_lowrank(alone, split_k)
        assert all(torch.equal(one[2][0], among[2][row]) for one, among in zip(alone, parts, strict=True))


def test_prefetched_weights_change_nothing(kernels):
    parts = random_parts(65, 320, 256)
    kernels.gemm_lowrank(parts, RESIDENT)
    again = [[w, x, poisoned(*y.shape), activation] for w, x, y, activation in parts]
    kernels.gemm_lowrank(again, RESIDENT, torch.zeros(1000, 4104, device="cuda").half())
    assert all(torch.equal(one[2], other[2]) for one, other in zip(parts, again, strict=True))


def test_nothing_outside_the_results_is_written(kernels):
    rows, n = 70, 96
    room = poisoned(rows + 2, n)
    w, x = torch.randn(n, 64, device="cuda").half(), torch.randn(rows, 64, device="cuda").half()
    kernels.gemm_lowrank([(w, x, room[1:-1], IDENTITY)], RESIDENT)
    assert room[1:-1].isfinite().all() and room[0].isnan().all() and room[-1].isnan().all()


def test_a_failed_launch_names_the_kernel(kernels):
    k = 4096  # too long to be resident
    part = (
        torch.zeros(64, k, device="cuda").half(),
        torch.zeros(64, k, device="cuda").half(),
        poisoned(64, 64),
        IDENTITY,
    )
    with pytest.raises(RuntimeError, match="rwkv_gemm_lowrank"):
        kernels.gemm_lowrank([part], RESIDENT)

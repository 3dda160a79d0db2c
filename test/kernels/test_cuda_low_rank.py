"""The product kernel for small matrices against torch in fp64, on fresh random numbers, odd sizes and
poisoned outputs.
"""

import pytest
import torch
from cuda_gpu import ROWS, needs_gpu, off, poisoned

from rwkv_batch.ops.cuda.binding import AUTO, IDENTITY, KEPT, MOST_KEPT, RELU_SQUARE, SIGMOID, TANH, Kernels

pytestmark = needs_gpu
FUNCTIONS = {
    IDENTITY: lambda x: x,
    TANH: torch.tanh,
    SIGMOID: torch.sigmoid,
    RELU_SQUARE: lambda x: x.relu().square(),
}
OUTER = [(64, 32), (320, 96), (2048, 256), (4096, 480), (208, MOST_KEPT)]  # N, K
INNER = [(32, 64), (96, 320), (208, 2080), (480, 4096)]


@pytest.fixture(scope="module")
def kernels():
    kernels = Kernels(torch.device("cuda"))
    if not kernels.has_low:
        pytest.skip("needs a Hopper GPU")
    return kernels


def random_parts(rows, n, k):
    """Four products of different sizes and functions, not all of the same K, as [w, x, y, function]."""
    parts = []
    for function, more_n, k_of_part in (
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
                function,
            ]
        )
    return parts


@pytest.mark.parametrize("rows", [*ROWS, 65, 128, 200, 1000, 4096])
@pytest.mark.parametrize(
    ("n", "k", "slices"),
    [*((n, k, KEPT) for n, k in OUTER), *((n, k, slices) for n, k in INNER for slices in (AUTO, 1, 2, 4, 8))],
)
def test_products_of_small_matrices(kernels, rows, n, k, slices):
    parts = random_parts(rows, n, k)
    kernels.products_low(parts, slices)
    for w, x, y, function in parts:
        assert off(y, FUNCTIONS[function](x.double() @ w.double().T)) < 1e-3


def test_tall_tiles_and_wide_ones(kernels):
    """And parts in turn. In one case, so that the sanitizer sees them all."""
    for rows, n, k, slices in (
        (1, 208, 2080, 4),
        (129, 208, 2080, 4),
        (321, 208, 2080, 4),
        (1000, 96, 320, 4),
        (1000, 480, 4096, 1),
        (4096, 208, 2080, 1),
        (1000, 2048, 480, KEPT),
        (128, 4096, 480, KEPT),
        (200, 4096, 480, KEPT),
        (321, 2048, 480, KEPT),
        (321, 4096, 480, KEPT),
    ):
        test_products_of_small_matrices(kernels, rows, n, k, slices)


@pytest.mark.parametrize("rows", [3, 65, 128, 200, 321, 1000])
@pytest.mark.parametrize(
    ("n", "k", "slices"),
    [
        (2048, 256, KEPT),
        (2048, 480, KEPT),
        (4080, 480, KEPT),
        *((256, 2048, slices) for slices in (1, 2, 4, 8)),
    ],
)
def test_a_row_alone_gets_the_same_bits(kernels, rows, n, k, slices):
    parts = random_parts(rows, n, k)
    kernels.products_low(parts, slices)
    for row in {0, rows // 2, rows - 1}:
        alone = [[w, x[row : row + 1].clone(), poisoned(1, len(w)), function] for w, x, _, function in parts]
        kernels.products_low(alone, slices)
        assert all(torch.equal(one[2][0], among[2][row]) for one, among in zip(alone, parts, strict=True))


def test_weights_brought_ahead_change_nothing(kernels):
    parts = random_parts(65, 320, 256)
    kernels.products_low(parts, KEPT)
    again = [[w, x, poisoned(*y.shape), function] for w, x, y, function in parts]
    kernels.products_low(again, KEPT, torch.zeros(1000, 4104, device="cuda").half())
    assert all(torch.equal(one[2], other[2]) for one, other in zip(parts, again, strict=True))


def test_nothing_outside_the_results_is_written(kernels):
    rows, n = 70, 96
    room = poisoned(rows + 2, n)
    w, x = torch.randn(n, 64, device="cuda").half(), torch.randn(rows, 64, device="cuda").half()
    kernels.products_low([(w, x, room[1:-1], IDENTITY)], KEPT)
    assert room[1:-1].isfinite().all() and room[0].isnan().all() and room[-1].isnan().all()


def test_a_failed_launch_names_the_kernel(kernels):
    k = 4096  # too long to be kept
    part = (
        torch.zeros(64, k, device="cuda").half(),
        torch.zeros(64, k, device="cuda").half(),
        poisoned(64, 64),
        IDENTITY,
    )
    with pytest.raises(RuntimeError, match="rwkv_products_low"):
        kernels.products_low([part], KEPT)

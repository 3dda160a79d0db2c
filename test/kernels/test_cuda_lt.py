"""Products by cuBLASLt against torch in fp64, whole and in shares of K, by every algorithm that
it proposes.
"""

import pytest
import torch
from cuda_gpu import needs_gpu, off, poisoned

from rwkv_batch.ops.cuda import cublaslt
from rwkv_batch.ops.cuda.cublaslt import Shape

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def lt():
    return cublaslt.of(torch.device("cuda"))


@pytest.mark.parametrize("rows", [1, 64, 129, 321])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (320, 1280), (1280, 320)])
@pytest.mark.parametrize("across", [False, True])
def test_one_product(lt, rows, n, k, across):
    w, x = torch.randn(n, k, device="cuda").half() * k**-0.5, torch.randn(rows, k, device="cuda").half()
    stored = w.T.contiguous() if across else w
    want = x.double() @ w.double().T
    count = lt.count(Shape(1, n, rows, k, across))
    assert count
    for number in range(count):
        y = poisoned(rows, n)
        lt.run(stored, x, y, number, across)
        assert off(y, want) < 1e-3


@pytest.mark.parametrize("rows", [7, 64, 321])
def test_several_products_at_once(lt, rows):
    w, x = (
        torch.randn(3, 256, 192, device="cuda").half() * 192**-0.5,
        torch.randn(6, rows, 192, device="cuda").half(),
    )
    want = x[:3].double() @ w.double().transpose(1, 2)
    for number in range(lt.count(Shape(3, 256, rows, 192, False))):
        y = poisoned(3, rows, 256)
        lt.run(w, x[:3], y, number)
        assert off(y, want) < 1e-3


@pytest.mark.parametrize("rows", [1, 7, 64, 129, 321])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (320, 1280), (1024, 4096)])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shares", [2, 4])
def test_shares_of_one_product(lt, rows, n, k, across, shares):
    w, x = torch.randn(n, k, device="cuda").half() * k**-0.5, torch.randn(rows, k, device="cuda").half()
    stored = w.T.contiguous() if across else w
    count = lt.count(Shape(shares, n, rows, k // shares, across, shares=True))
    assert count
    for number in range(count):
        y = poisoned(shares, rows, n, dtype=torch.float32)
        lt.run(stored, x, y, number, across)
        for part, some_x, some_w in zip(
            y, x.double().chunk(shares, 1), w.double().chunk(shares, 1), strict=True
        ):
            assert off(part, some_x @ some_w.T) < 1e-4

"""GEMMs by cuBLASLt against torch in fp64: whole, in a batch, with split-K, by every algorithm proposed."""

import pytest
import torch
from cuda_gpu import needs_gpu, off, poisoned

from rwkv_batch.ops.cuda import cublaslt
from rwkv_batch.ops.cuda.cublaslt import GemmShape

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def lt():
    return cublaslt.for_device(torch.device("cuda"))


@pytest.mark.parametrize("rows", [1, 64, 129, 321])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (320, 1280), (1280, 320)])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_gemm(lt, rows, n, k, transposed):
    w, x = torch.randn(n, k, device="cuda").half() * k**-0.5, torch.randn(rows, k, device="cuda").half()
    stored = w.T.contiguous() if transposed else w
    want = x.double() @ w.double().T
    count = lt.algorithm_count(GemmShape(1, n, rows, k, transposed))
    assert count
    for algorithm in range(count):
        y = poisoned(rows, n)
        lt.run(stored, x, y, algorithm, transposed)
        assert off(y, want) < 1e-3


@pytest.mark.parametrize("rows", [7, 64, 321])
def test_a_batch(lt, rows):
    w, x = (
        torch.randn(3, 256, 192, device="cuda").half() * 192**-0.5,
        torch.randn(6, rows, 192, device="cuda").half(),
    )
    want = x[:3].double() @ w.double().transpose(1, 2)
    for algorithm in range(lt.algorithm_count(GemmShape(3, 256, rows, 192, False))):
        y = poisoned(3, rows, 256)
        lt.run(w, x[:3], y, algorithm)
        assert off(y, want) < 1e-3


@pytest.mark.parametrize("rows", [1, 7, 64, 129, 321])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (320, 1280), (1024, 4096)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("splits", [2, 4])
def test_split_k(lt, rows, n, k, transposed, splits):
    w, x = torch.randn(n, k, device="cuda").half() * k**-0.5, torch.randn(rows, k, device="cuda").half()
    stored = w.T.contiguous() if transposed else w
    count = lt.algorithm_count(GemmShape(splits, n, rows, k // splits, transposed, split_k=True))
    assert count
    for algorithm in range(count):
        y = poisoned(splits, rows, n, dtype=torch.float32)
        lt.run(stored, x, y, algorithm, transposed)
        for part, some_x, some_w in zip(
            y, x.double().chunk(splits, 1), w.double().chunk(splits, 1), strict=True
        ):
            assert off(part, some_x @ some_w.T) < 1e-4

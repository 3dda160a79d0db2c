"""GEMMs by cuBLASLt or hipBLASLt against torch in fp64: whole, in a batch, with split-K, by every algorithm.

What hipBLASLt is called with is compared with its header where there is no AMD GPU.
"""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_gpu import needs_gpu, off, poisoned

from rwkv_batch.ops.cuda.special import blaslt
from rwkv_batch.ops.cuda.special.blaslt import GemmShape


@pytest.fixture(scope="module")
def lt():
    return blaslt.for_device(torch.device("cuda"))


@needs_gpu[0]
@needs_gpu[1]
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


@needs_gpu[0]
@needs_gpu[1]
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [65, 129, 321])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (320, 1280), (1280, 384)])
def test_fp8_with_a_scale_for_each_row(lt, rows, n, k):
    def coded(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, k, device="cuda").to(torch.float8_e4m3fn), torch.rand(
            count, device="cuda"
        ) + 1

    (w, w_scales), (x, x_scales) = coded(n), coded(rows)
    want = (x.double() * x_scales[:, None]) @ (w.double() * w_scales[:, None]).T
    count = lt.algorithm_count(GemmShape(1, n, rows, k, False, fp8=True))
    assert count
    for algorithm in range(count):
        y = poisoned(rows, n)
        lt.run_fp8(w, w_scales, x, x_scales, y, algorithm)
        assert off(y, want) < 2e-3


@needs_gpu[0]
@needs_gpu[1]
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


@needs_gpu[0]
@needs_gpu[1]
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


class RecordingLibrary:
    """In place of hipBLASLt: what its functions are called with. It proposes one valid algorithm of two."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "hipblasLtMatmulAlgoGetHeuristic":
                *_, proposals, count = arguments
                count._obj.value, proposals[0].state = 2, 1
            return 0

        return call

    def of(self, name: str) -> list[tuple]:
        return [arguments for called, arguments in self.calls if called == f"hipblasLt{name}"]


def test_hipblaslt_is_called_as_its_header_says(monkeypatch):
    """hipblaslt.h and hipblas-common.h: HIPBLAS_OP_T 112, HIPBLAS_COMPUTE_32F 2, HIP_R_16F 2, HIP_R_32F 0."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    library = RecordingLibrary()
    lt = blaslt.BlasLt(blaslt.HIPBLASLT, library, torch.device("cpu"))
    w, x, y = torch.zeros(3, 64, 32).half(), torch.zeros(3, 5, 32).half(), torch.zeros(3, 5, 64).half()
    assert lt.algorithm_count(GemmShape(3, 64, 5, 32, False)) == 1
    lt.run(w, x, y, 0)
    assert {name.removeprefix("hipblasLt") for name, _ in library.calls} == {
        *("Create", "MatmulDescCreate", "MatmulDescSetAttribute", "MatrixLayoutCreate", "Matmul"),
        *("MatrixLayoutSetAttribute", "MatmulPreferenceCreate", "MatmulPreferenceSetAttribute"),
        *("MatmulAlgoGetHeuristic", "MatmulPreferenceDestroy"),
    }
    ((_, compute, scale),) = library.of("MatmulDescCreate")
    assert (compute, scale) == (2, 0)
    ((_, attribute, value, size),) = library.of("MatmulDescSetAttribute")
    assert (attribute, value._obj.value, size.value) == (0, 112, 4)  # HIPBLASLT_MATMUL_DESC_TRANSA, int32_t
    layouts = [
        (dtype, rows.value, columns.value, leading.value)
        for _, dtype, rows, columns, leading in library.of("MatrixLayoutCreate")
    ]
    assert layouts == [(2, 32, 64, 32), (2, 32, 5, 32), (2, 64, 5, 64)]
    batches = [
        (attribute, value._obj.value, size.value)
        for _, attribute, value, size in library.of("MatrixLayoutSetAttribute")
    ]
    # HIPBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t; HIPBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, int64_t
    assert batches == [(0, 3, 4), (1, 32 * 64, 8), (0, 3, 4), (1, 32 * 5, 8), (0, 3, 4), (1, 64 * 5, 8)]
    ((_, attribute, value, size),) = library.of("MatmulPreferenceSetAttribute")
    assert (attribute, value._obj.value, size.value) == (1, blaslt.WORKSPACE, 8)
    (call,) = library.of("Matmul")
    addresses = [call[place].value for place in (3, 5, 8, 10)]
    assert addresses == [w.data_ptr(), x.data_ptr(), y.data_ptr(), y.data_ptr()] and call[-1].value == 77
    # hipblasLtMatmulHeuristicResult_t: 16 bytes and a size_t of the algorithm, size_t, int, float, int[4]
    assert ctypes.sizeof(blaslt.HIPBLASLT.proposal) == 16 + 8 + 8 + 4 + 4 + 16

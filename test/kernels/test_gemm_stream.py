"""GEMMs of few rows with streamed weights against torch in fp64, at odd sizes and with poisoned outputs."""

import pytest
import torch
from cuda_gpu import ACTIVATIONS, ROWS, needs_gpu, normal, off, poisoned

from rwkv_batch.ops.cuda.abi import IDENTITY, RELU_SQUARE, SIGMOID, TANH

pytestmark = needs_gpu


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("warp_rows", "split_k"), [(16, 8), (32, 8), (16, 2)])
@pytest.mark.parametrize(("n", "k"), [(32, 32), (64, 64), (208, 96), (1024, 4096), (2048, 480), (9008, 320)])
def test_gemms(kernels, rows, warp_rows, split_k, n, k):
    parts, wants = [], []
    for activation, extra in ((IDENTITY, 0), (TANH, 16), (SIGMOID, 48), (RELU_SQUARE, 32)):
        w, x = normal(n + extra, k, std=k**-0.5), normal(rows, k)
        parts.append((w, x, poisoned(rows, n + extra), activation))
        wants.append(ACTIVATIONS[activation](x.double() @ w.double().T))
    kernels.gemm_stream(parts, warp_rows, split_k)
    for (_, _, y, _), want in zip(parts, wants, strict=True):
        assert off(y, want) < 1e-3


@pytest.mark.parametrize("rows", [1, 64])
def test_prefetched_weights_change_nothing(kernels, rows):
    w, x, y, again, prefetch = (
        normal(4096, 64),
        normal(rows, 64),
        poisoned(rows, 4096),
        poisoned(rows, 4096),
        normal(2048, 4104),
    )
    kernels.gemm_stream([(w, x, y, IDENTITY)])
    for size in (1, 1000, 2048):  # rows: less than a piece, some, more than is ever prefetched
        kernels.gemm_stream([(w, x, again.fill_(float("nan")), IDENTITY)], prefetch=prefetch[:size])
        assert torch.equal(y, again)


def test_relu_squared_never_overflows(kernels):
    y = poisoned(1, 16)
    kernels.gemm_stream([(normal(16, 32).abs() * 100, normal(1, 32).abs() * 100, y, RELU_SQUARE)])
    assert y.isfinite().all() and y.max() == torch.finfo(torch.float16).max

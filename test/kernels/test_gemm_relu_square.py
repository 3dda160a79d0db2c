"""relu squared in place against torch."""

from cuda_gpu import needs_gpu, normal, off

pytestmark = needs_gpu


def test_relu_square(kernels):
    h = normal(7, 64)
    want = h.float().relu().square()
    kernels.relu_square(h)
    assert off(h, want) < 1e-3

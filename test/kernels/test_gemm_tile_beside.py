"""Small GEMMs in the same launch as tiled ones with weights of codes: both as in launches of their own."""

import pytest
import torch
from cuda_gpu import DEVICE, needs_gpu, normal, poisoned
from torch import Tensor

from rwkv_batch.model.cuda.packed.orders import tiles_of_4_bits
from rwkv_batch.ops.cuda.abi import IDENTITY, SIGMOID, TANH
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.gemms import GROUPS, Codes, Part

pytestmark = [*needs_gpu, pytest.mark.usefixtures("hopper")]
COUNT = 3  # large GEMMs


def multiply(
    kernels: Kernels, kind: str, codes: list[Tensor], xs: list[Tensor], beside: list[Part]
) -> list[Tensor]:
    """The products of xs with weights of these bytes, and in the same launch the small GEMMs."""
    n, k = codes[0].shape
    ys = [poisoned(len(xs[0]), n) for _ in codes]
    if group := GROUPS.get(kind):
        ones = torch.ones(n, -(-k // group), device=DEVICE).half()
        tiles = [tiles_of_4_bits(each % 16, ones, -ones, group) for each in codes]
        ws = Codes(tiles, [], kind)
    else:
        ws = Codes(codes, [torch.ones(n, device=DEVICE) for _ in codes], kind)
    kernels.gemm_tile_codes(ws, xs, ys, beside=beside)
    return ys


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (768, 768), (4096, 192), (4096, 4096)])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "int4-128"])
def test_both_are_as_alone(kernels, rows, n, k, kind):
    codes = [torch.randint(0, 127, (n, k), device=DEVICE, dtype=torch.uint8) for _ in range(COUNT)]
    xs, small = [normal(rows, k) for _ in range(COUNT)], []
    for size, activation in ((16, IDENTITY), (96, TANH), (n + 32, SIGMOID)):
        small.append((normal(size, k, std=k**-0.5), normal(rows, k), poisoned(rows, size), activation))
    alone = [(w, x, torch.empty_like(y), activation) for w, x, y, activation in small]
    kernels.gemm_stream(alone)
    large = multiply(kernels, kind, codes, xs, [])
    for _ in range(3):
        together = multiply(kernels, kind, codes, xs, small)
        assert all(map(torch.equal, together, large))
        for (_, _, y, _), (_, _, wanted, _) in zip(small, alone, strict=True):
            assert torch.equal(y, wanted)
            y.fill_(float("nan"))


def test_more_rows_are_refused(kernels):
    codes = [torch.zeros(64, 64, device=DEVICE, dtype=torch.uint8)]
    small = (normal(16, 64), normal(17, 64), poisoned(17, 16), IDENTITY)
    with pytest.raises(RuntimeError, match="could not be launched"):
        multiply(kernels, "int8", codes, [normal(17, 64)], [small])

"""The kernels for the GPU of this machine, and what they have."""

import pytest
import torch

from rwkv_batch.ops.cuda.binding import Kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    return Kernels(torch.device("cuda"))


@pytest.fixture
def hopper(kernels: Kernels) -> None:
    """For tests of kernels that only a Hopper GPU runs."""
    if not (kernels.has_lowrank and kernels.has_tile):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture
def clusters(kernels: Kernels) -> None:
    """For tests of rows that several blocks share."""
    if kernels.library.rwkv_sample_blocks(1) == 1:
        pytest.skip("these kernels have no clusters")

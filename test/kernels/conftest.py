"""The kernels for the GPU of this machine."""

import pytest
import torch

from rwkv_batch.ops.cuda.binding import Kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    return Kernels(torch.device("cuda"))

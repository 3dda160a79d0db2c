"""The kernels for the GPU of this machine, and what they have."""

from collections.abc import Iterator
from pathlib import Path

import emulated
import pytest
import torch
from tools import absent

from rwkv_batch.model.cuda.gemms.autotune import Autotuner
from rwkv_batch.ops.cuda import binding, build
from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.special import codes as code_kernels


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    target = request.config.getoption("--emulated")
    if target is None:
        yield Kernels(torch.device("cuda"))
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load", emulated.load)
        patch.setattr(binding, "launch", emulated.launch)
        patch.setattr(code_kernels, "launch", emulated.launch)
        yield Kernels(torch.device("cpu"), target)


@pytest.fixture(scope="module")
def untimed(kernels: Kernels, request: pytest.FixtureRequest) -> Iterator[None]:
    """GEMMs run by the methods that are guessed, which are the same in models that are compared."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--emulated"):
            emulated.run_models(patch, kernels.architecture)
            patch.setattr(Autotuner, "from_cache", lambda gemms, _, step: Autotuner(gemms, Path(), step, {}))
        else:
            request.getfixturevalue("own_tuning")
        patch.setattr(Autotuner, "unmeasured", lambda *_: [])
        patch.setattr(Autotuner, "measure", lambda *_: None)  # nor any of them, as --any-method has it
        yield


@pytest.fixture(scope="session")
def nvcc() -> str:
    """The CUDA compiler, for tests that compile without a GPU."""
    return build.nvcc() or absent("There is no nvcc.")


@pytest.fixture
def hopper(kernels: Kernels) -> None:
    """For tests of kernels that only a Hopper GPU runs."""
    if not (kernels.has_lowrank and kernels.has_tile):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture
def graphs(request: pytest.FixtureRequest) -> None:
    """For tests that capture CUDA graphs."""
    if request.config.getoption("--emulated"):
        pytest.skip("needs a GPU")


@pytest.fixture
def clusters(kernels: Kernels) -> None:
    """For tests of rows that several blocks share."""
    if kernels.library.rwkv_sample_blocks(1) == 1:
        pytest.skip("these kernels have no clusters")

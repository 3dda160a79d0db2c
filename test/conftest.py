"""Servers that several test files share; each starts when the first test asks for it."""

from collections.abc import Iterator

import pytest
import torch
from ahead import LateRunner
from serving import Server

from rwkv_batch.ops.cuda import build
from rwkv_batch.runner import backends


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ahead",
        action="store_true",
        help="engines in the tests' own process queue steps ahead, as on a GPU",
    )
    parser.addoption(
        "--portable",
        action="store_true",
        help="tests of an NVIDIA GPU run the kernels for AMD GPUs, as --backend portable does",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--portable"):
        own = build.architecture
        build.architecture = lambda gpu: own(gpu) if torch.version.hip else build.portable_architecture(gpu)
    if config.getoption("--ahead"):
        backends.TorchRunner = LateRunner


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The bundled model on the CPU, no password."""
    running = Server("--device", "cpu")
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(scope="session")
def locked_server() -> Iterator[Server]:
    """The same with the password "open sesame"."""
    running = Server("--device", "cpu", "--password", "open sesame", "--frontends", "1")
    yield running
    assert running.stop() == 0, running.log()

"""Servers that several test files share; each starts when the first test asks for it."""
from collections.abc import Iterator

import pytest
from serving import Server


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

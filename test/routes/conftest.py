"""Front ends that several files use; each file has its own, as it looks at what has come to the engine."""

from collections.abc import Iterator

import pytest
from fake_engine import ChatEngine
from frontend_process import PASSWORD, FrontendProcess


@pytest.fixture(scope="module")
def server() -> Iterator[FrontendProcess]:
    """Without a password."""
    with FrontendProcess() as process:
        yield process


@pytest.fixture(scope="module")
def locked() -> Iterator[FrontendProcess]:
    with FrontendProcess(password=PASSWORD) as process:
        yield process


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    """With a password, and an engine for chats."""
    with (
        ChatEngine(f"ipc://{tmp_path_factory.mktemp('engine')}/engine") as engine,
        FrontendProcess(engine, password=PASSWORD) as process,
    ):
        yield process

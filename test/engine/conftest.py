"""Engines of tests that make several."""

from collections.abc import Callable, Iterator

import pytest
from engine_driver import Driver
from engines_closed import engines_closed

from rwkv_batch.config import EngineConfig
from rwkv_batch.engine.speculation import drafting
from rwkv_batch.engine.speculation.cost import DraftCost
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.ops import device
from rwkv_batch.runner.loading import load_weights


@pytest.fixture(scope="module", autouse=True)
def engines_of_a_file_closed() -> Iterator[None]:
    with engines_closed():
        yield


@pytest.fixture(autouse=True)
def engines_of_a_test_closed(engines_of_a_file_closed: None) -> Iterator[None]:
    with engines_closed():
        yield


@pytest.fixture
def engines() -> Iterator[list[Driver]]:
    """A list to which a test adds its engines; they are closed behind it."""
    made: list[Driver] = []
    yield made
    for driver in made:
        driver.engine.close()


@pytest.fixture
def free_memory(tmp_path_factory, monkeypatch) -> Callable[[int], None]:
    """Call it with a number of bytes: from then on the host has no more of them, as in a container."""
    folder, limit = tmp_path_factory.mktemp("cgroup"), 1 << 50
    monkeypatch.setattr(device, "CGROUP", folder)
    (folder / "memory.max").write_text(f"{limit}\n")
    return lambda free: (folder / "memory.stat").write_text(f"anon {limit - free}\n")


@pytest.fixture(scope="module")
def free_drafts() -> Iterator[None]:
    """Drafts cost nothing: all that are found or guessed are verified, on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "draft_cost", lambda *of: DraftCost(0.0, 0.0))
        yield


@pytest.fixture(scope="module")
def weights() -> Checkpoint:
    """The bundled model's."""
    return load_weights(None, EngineConfig(), None)

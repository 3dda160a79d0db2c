"""An engine that nobody closes: its threads end when it is gone, and what it had to store is stored."""

import gc
import threading
from pathlib import Path

import pytest
from checkpoints import tiny
from row_adapters import write

from rwkv_batch.engine import Engine
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import LoadAdapter
from rwkv_batch.wire.protocol import GenerateRequest, SessionTurn

OPTIONS = {"device": "cpu", "max_rows": 2, "l1": 1, "l2": 1}


@pytest.fixture(scope="module")
def weights() -> Checkpoint:
    return tiny(vocab=400)


def ended(before: set[threading.Thread]) -> None:
    """Wait for all threads that have begun since."""
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("tqdm"):  # one for all bars of the process
            thread.join(60)  # a deadline
            assert not thread.is_alive(), thread.name


def test_the_threads_of_a_dropped_engine_end(weights: Checkpoint, tmp_path: Path) -> None:
    """Also that of adapters; and the file is free for another engine."""
    before, file = set(threading.enumerate()), tmp_path / "sessions.db"
    engine = Engine(weights, state_db=str(file), max_adapters=1, **OPTIONS)
    path = str(write(tmp_path, weights, "lora", 1))
    engine.command((b"test", "1"), LoadAdapter("1", "lora", path, scaling=0.5))
    for key in ("a", "b", "c"):
        turn = SessionTurn(source=key, target=key)
        request = GenerateRequest(id=key, prompts=[[5, 6]], max_tokens=4, stop_ids=[], turn=turn)
        engine.add((b"test", key), request)
    while not engine.drained:
        engine.step()
    assert set(threading.enumerate()) - before
    del engine
    ended(before)
    store = Store(str(file))
    assert all(store.find_session(key) for key in ("a", "b", "c"))
    store.close()


def test_the_threads_of_an_engine_end_behind_with(weights: Checkpoint) -> None:
    before = set(threading.enumerate())
    with Engine(weights, **OPTIONS) as engine:
        assert engine.generate([[5, 6]], max_tokens=3, stop_ids=[])[0].tokens == 3
        engine.close()  # once more does nothing
    ended(before)


def test_what_ends_an_engine_may_come_in_a_thread_of_it(weights: Checkpoint) -> None:
    """The garbage collector finds it wherever it comes."""
    before = set(threading.enumerate())
    engine = Engine(weights, **OPTIONS)
    copier, engine.itself = engine.pool.parts.threads.copier, engine  # type: ignore[attr-defined]
    del engine
    copier.put(gc.collect)
    del copier
    ended(before)

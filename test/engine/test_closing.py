"""What stays of an engine that is closed: nothing."""

import gc
import threading
import weakref
from pathlib import Path

import pytest

from rwkv_batch.bundled.unpack import DRAFT
from rwkv_batch.engine.engine import Engine
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.wire.protocol import Grammar

WORDS = Grammar(kind="regex", source="[a-z ]{1,20}")
KINDS = {"plain": {}, "with drafts": {"speculate": 7}, "with a draft model": {"draft_model": str(DRAFT)}}


@pytest.mark.parametrize("database", [False, True], ids=["in memory", "with a database"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_closed_engine_stays(weights: Checkpoint, tmp_path: Path, kind: str, database: bool):
    before = set(threading.enumerate())
    file = {"state_db": str(tmp_path / "sessions.db")} if database else {}
    engine = Engine(weights, device="cpu", max_rows=2, **file, **KINDS[kind])
    engine.generate(["Hello"], max_tokens=4)
    engine.generate(["Hello"], max_tokens=4, grammar=WORDS)
    parts = engine, engine.pool, engine.parts.runner, engine.parts.runner.states
    left = {type(part).__name__: weakref.ref(part) for part in parts}
    engine.close()
    del engine, parts
    for thread in set(threading.enumerate()) - before:
        if not thread.name.startswith("tqdm"):  # one for all bars of the process
            thread.join(60)  # a deadline, not a wait
            assert not thread.is_alive(), thread.name
    gc.collect()
    assert [name for name, part in left.items() if part() is not None] == []

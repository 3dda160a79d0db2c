"""The thread that writes what keys have used."""

import gc
import threading
from pathlib import Path

from routes.callers import metering
from routes.callers.metering import Accounts
from rwkv_batch.keys import records
from rwkv_batch.keys.records import Key


def test_the_garbage_collector_may_end_a_stream_while_a_write_is_asked_for(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(metering, "TOGETHER", 0.0)
    monkeypatch.setattr(metering, "WRITE_EVERY", 0.001)
    file = tmp_path / "keys.json"
    records.add(file, Key("alice", "", 0, 0.0))
    accounts, done = Accounts(str(file)), threading.Event()

    def ask() -> None:
        for _ in range(200_000):
            kept = [[] for _ in range(3)]  # what the collector counts
            accounts.write_soon()
        del kept
        done.set()

    def a_stream_is_found(phase: str, info: dict[str, int]) -> None:
        accounts.write_soon()

    before = gc.get_threshold()
    gc.callbacks.append(a_stream_is_found)
    try:
        gc.set_threshold(1, 10**6, 10**6)
        threading.Thread(target=ask, daemon=True).start()
        assert done.wait(250), "a thread waits for what it holds itself"
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(a_stream_is_found)

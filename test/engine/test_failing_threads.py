"""The system has no thread left, for once: an engine is whole or leaves nothing, and goes on."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_driver import PROMPTS, WEIGHTS, Driver
from engine_faults import PLATE, POOLED
from fault_points import open_files, opened_since
from row_adapters import write

from rwkv_batch.engine.engine import Engine
from rwkv_batch.wire.commands import LoadAdapter
from rwkv_batch.wire.protocol import CommandReply, Failed, Progress, Rejected, Sampling

GREEDY = Sampling(temperature=0.0)
NO_THREAD = "can't start new thread"  # as CPython says it


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Lets the start of a thread fail, from 1 on counted; the list gets its name then."""
    start = threading.Thread.start

    def at(number: int) -> list[str]:
        failed, count = list[str](), itertools.count(1)

        def begin(thread: threading.Thread) -> None:
            if next(count) == number:
                failed.append(thread.name)
                raise RuntimeError(NO_THREAD)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", begin)
        return failed

    return at


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if not each.name.startswith(POOLED)}


def test_an_engine_that_cannot_start_leaves_nothing(tmp_path: Path, fail: Callable[[int], list[str]]) -> None:
    path, names = tmp_path / "sessions.db", []
    before, files = threads(), open_files()
    for number in itertools.count(1):
        failed = fail(number)
        try:
            engine = Engine(WEIGHTS, device="cpu", max_rows=2, state_db=str(path))
        except RuntimeError as error:
            assert str(error) == NO_THREAD and failed
            for thread in threads() - before:
                thread.join(60)  # a deadline
            assert not threads() - before and not opened_since(files), failed
            names += failed
            continue
        engine.close()
        break
    assert {"state copies", "state reads", "state writer", "state images"} <= {*names}


def test_a_grammar_whose_threads_cannot_start(fail: Callable[[int], list[str]]) -> None:
    """Each thread that it needs, of compiling and of masks; the request beside it goes on."""
    driver = Driver(max_rows=4)
    expected, seen = driver.say(PROMPTS[0]), list[str]()
    for number in itertools.count(1):
        failed = fail(number)
        bound, other = driver.add([7], grammar=PLATE, sampling=GREEDY), driver.add(PROMPTS[0])
        assert driver.said(other) == expected
        last = driver.until(bound, (Progress, Failed, Rejected))[-1]
        if not failed:
            assert isinstance(last, Progress)
            break
        seen += failed
        assert isinstance(last, Progress | Failed | Rejected)
    assert driver.engine.drained and len(seen) > 1
    driver.engine.close()


def test_an_adapter_whose_thread_cannot_start(tmp_path: Path, fail: Callable[[int], list[str]]) -> None:
    """It is refused for now, and its name stays free."""
    driver = Driver(max_adapters=1)
    path = str(write(tmp_path, WEIGHTS, "lora", 1))
    failed = fail(1)
    driver.engine.command((b"test", "1"), LoadAdapter("1", "lora", path, scaling=0.5))
    refused = driver.until("1", (Rejected, CommandReply))[-1]
    assert isinstance(refused, Rejected) and refused.reason == "unavailable" and failed
    assert driver.ask(LoadAdapter("2", "lora", path, scaling=0.5)).adapters
    driver.engine.close()

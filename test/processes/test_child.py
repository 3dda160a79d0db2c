"""Processes for which the system has no room, for once."""

import errno
import multiprocessing.util
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from fault_points import open_files

from rwkv_batch.processes import child, databases
from rwkv_batch.processes.child import CannotStart, Child, LaterStarts
from rwkv_batch.processes.databases import Databases


def answer(control: Connection) -> None:
    control.send("here")
    control.recv()


def name_place(control: Connection) -> None:
    control.send(tempfile.tempdir)


def _no_process(*arguments: object) -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


LACKS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "processes": (multiprocessing.util, "spawnv_passfds", _no_process),
    "threads": (threading.Thread, "start", _no_thread),
}


def test_it_looks_for_no_folder_of_its_own_for_temporary_files() -> None:
    """Looking is a file in each of them, which may stay."""
    one = Child("one", name_place)
    assert one.control.recv() == tempfile.gettempdir()
    one.close()


@pytest.mark.parametrize("what", LACKS)
def test_one_that_cannot_start_leaves_nothing_and_is_started_later(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    first = Child("first", answer)  # with it multiprocessing begins a process of its own
    first.send("end")
    first.close()
    monkeypatch.setattr(child, "START_AGAIN", 0.0)
    later, started = LaterStarts(), list[Child]()
    before, files = threading.active_count(), Counter(open_files())
    with monkeypatch.context() as patch:
        patch.setattr(*LACKS[what])
        with pytest.raises(CannotStart, match="engine: "):
            Child("engine", answer)
        later.start(lambda: started.append(Child("engine", answer)))
        later.look()
    assert not started and later.due == 0.0
    for each in threading.enumerate():
        if each.name == "pipe":
            each.join(60)
    # What earlier tests have left may end meanwhile.
    assert threading.active_count() <= before and Counter(open_files()) <= files
    later.look()
    (engine,) = started
    assert engine.control.recv() == "here" and later.due is None
    engine.send("end")
    engine.close()


def test_the_process_of_a_database_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the first one: that of a model which is loaded while the server runs."""
    monkeypatch.setattr(databases, "START_AGAIN", 0.0)
    all_ = Databases(tmp_path, lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(*LACKS["threads"])
        all_.need("sessions.db")
    assert not all_.children and all_.due == 0.0
    monkeypatch.setattr(databases, "Child", lambda name, *_: name)
    all_.restart()
    assert all_.children == ["database sessions.db"]


def test_what_is_started_later_has_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    later, started, now = LaterStarts(), list[str](), 1000.0
    monkeypatch.setattr(child.time, "monotonic", lambda: now)
    later.start(lambda: started.append("the second"), 8.0)
    later.start(lambda: started.append("the first"), 0.5)
    assert not started and later.due == 0.5
    for now, said in ((1000.4, []), (1000.5, ["the first"]), (1008.0, ["the first", "the second"])):  # noqa: B007
        later.look()
        assert started == said
    assert later.due is None

"""The supervisor's processes that write to databases."""

import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from rwkv_batch.processes import databases, supervised
from rwkv_batch.processes.child import REFUSED, Child
from rwkv_batch.processes.databases import Databases
from rwkv_batch.supervisor import run_database

HERE = "sessions.db"


def test_why_a_database_cannot_be_used_is_known_once_its_process_has_ended(tmp_path: Path) -> None:
    child = Child("database", run_database, "text", str(tmp_path), f"ipc://{tmp_path}/writer", True)
    refusal = child.refusal()
    child.close()
    assert refusal == f"{tmp_path} is a directory; name a file for the database."


def say_and_end(path: str, address: str, first: bool, control: Connection) -> None:
    """In place of a process that writes: it says whether it is the first, and ends as it is asked to."""
    control.send(first)
    code = control.recv()
    control.send("The disk has gone.")
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 0)


class Processes:
    """What `Databases` has of them, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.all = Databases(folder, say_and_end)

    def first(self) -> bool:
        """Whether the one that runs is the first."""
        (child,) = self.all.children
        return child.control.recv()

    def end(self, code: int) -> None:
        (child,) = self.all.children
        child.send(code)
        sentinel = child.process.sentinel
        wait([sentinel])
        self.all.look({sentinel})


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    found.all.need(HERE)
    yield found
    for child in found.all.stop():
        child.process.kill()
        child.close()


@pytest.mark.parametrize("code", [1, REFUSED], ids=["it dies", "it cannot use the database"])
def test_one_that_ends_is_started_again_and_each_time_later(
    processes: Processes, monkeypatch, code: int
) -> None:
    monkeypatch.setattr(supervised, "PAUSES", (0.0, 0.1, 1000.0))
    monkeypatch.setattr(supervised, "STEADY", 1000.0)  # however long a process takes to start here
    assert processes.first()
    processes.end(1)
    assert not processes.first(), "engines may have commits under way that the first one has carried out"
    processes.end(code)
    assert processes.all.children == [] and processes.all.due is not None
    while not processes.all.children:
        wait([], processes.all.due)
        processes.all.restart()
    assert not processes.first()
    processes.end(code)
    due = processes.all.due
    assert processes.all.children == [] and due and due > 900


def test_one_that_is_due_is_waited_for_no_longer(processes: Processes, monkeypatch) -> None:
    """As where the time comes between a look and the next wait, which nothing else may end."""
    monkeypatch.setattr(supervised, "PAUSES", (1000.0,))
    assert processes.all.within(30.0) == 30.0 and processes.first()
    processes.end(1)
    assert processes.all.within(30.0) == 30.0 and 0 < processes.all.within(2000.0) <= 1000.0
    now = time.monotonic()
    monkeypatch.setattr(databases.time, "monotonic", lambda: now + 1001.0)
    assert processes.all.within(30.0) == 0.0


def test_one_that_could_never_use_its_database_is_not_started_again(processes: Processes) -> None:
    assert processes.first()
    processes.end(REFUSED)
    assert processes.all.children == [] and processes.all.due is None
    processes.all.need(HERE)
    assert processes.first()


def test_one_that_nobody_needs_is_not_started_again_unless_it_is_needed(
    processes: Processes, monkeypatch
) -> None:
    assert processes.first()
    processes.end(0)
    assert processes.first(), "an engine has just asked for it"
    monkeypatch.setattr(databases, "WANTED", 0.0)
    processes.end(0)
    assert processes.all.children == [] and processes.all.due is None
    processes.all.need(HERE)
    assert processes.first()

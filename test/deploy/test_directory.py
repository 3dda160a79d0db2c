"""Which server has which slot, and how many servers there should be."""

from types import SimpleNamespace

import pytest

from deploy.cluster.directory import SILENT, Directory
from deploy.cluster.scaling import busy, by_rows


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    return Directory(3, clock)


def test_servers_have_the_lowest_free_slots_and_keep_them(directory: Directory):
    assert [directory.announce(name, f"{name}:1") for name in "abca"] == [1, 2, 3, 1]
    assert directory.announce("d", "d:1") == 0, "there is none left"
    assert directory.servers()[0] == {1: "a:1", 2: "b:1", 3: "c:1"}


def test_a_server_that_leaves_gives_its_slot_to_the_next(directory: Directory):
    for name in "ab":
        directory.announce(name, f"{name}:1")
    directory.leave("a")
    assert directory.servers()[0] == {2: "b:1"}
    assert directory.announce("a", "a:1", 1) == 1 and directory.servers()[0] == {2: "b:1"}, "a late word"
    assert directory.announce("c", "c:1") == 1
    assert directory.servers()[0] == {1: "c:1", 2: "b:1"}


def test_a_server_that_is_silent_loses_its_slot_to_another(directory: Directory, clock: Clock):
    for name in "ab":
        directory.announce(name, f"{name}:1")
    clock.now = SILENT
    directory.announce("b", "b:1", 2)
    assert directory.servers()[0] == {2: "b:1"}
    assert directory.announce("c", "c:1") == 1
    assert directory.announce("a", "a:1", 1) == 3, "it was only slow"


def test_a_directory_that_is_started_again_learns_the_slots(clock: Clock):
    clock.now = 50.0
    directory = Directory(3, clock)
    assert directory.servers() == ({}, False), "not all have announced themselves"
    assert directory.announce("b", "b:1", 2) == 2
    assert directory.announce("new", "new:1") == 1
    clock.now += SILENT + 0.1
    directory.announce("b", "b:1", 2)
    assert directory.servers() == ({2: "b:1"}, True)


def test_servers_are_wanted_by_the_rows_that_wait_or_run():
    models = [{"rows": 10, "running": 10, "waiting": 4}, {"rows": 10, "running": 2, "waiting": 0}]
    assert busy({"models": models}) == 1.4 and busy({"models": []}) == 0.0

    def wanted(*shares: float, silent: int = 0) -> int:
        context = SimpleNamespace(
            aggregated_metrics={"busy": dict(enumerate(shares))} if shares else {},
            current_num_replicas=len(shares) + silent,
            target_num_replicas=4,
            capacity_adjusted_min_replicas=2,
            capacity_adjusted_max_replicas=8,
        )
        return by_rows(context)[0]

    assert [wanted(0.0, 0.1), wanted(0.7, 0.7, 0.7), wanted(1.4, 1.4, 0.1), wanted(*[9.0] * 4)] == [
        2,
        3,
        5,
        8,
    ]
    assert wanted() == 4, "nothing is known"
    assert [wanted(0.0, silent=3), wanted(0.7, 0.7, silent=2), wanted(1.4, silent=1)] == [3, 4, 3]

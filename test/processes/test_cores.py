"""Cores near an engine's memory, as a machine's sysfs says it."""

from pathlib import Path

import pytest

from rwkv_batch.processes.cores import cores_near, cores_of_node


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Of a machine with two nodes, each with eight cores and their second threads, and a GPU at each."""
    for place, cores in (
        ("devices/system/node/node0/cpulist", "0-3,8-11"),
        ("devices/system/node/node1/cpulist", "4-7,12-15"),
        ("devices/system/node/node2/cpulist", ""),  # memory alone
        ("devices/system/node/node10/cpulist", "16"),
        ("bus/pci/devices/0000:3b:00.0/local_cpulist", "0-3,8-11"),
        ("bus/pci/devices/0000:af:00.0/local_cpulist", "4-7,12-15"),
    ):
        file = tmp_path / place
        file.parent.mkdir(parents=True)
        file.write_text(cores + "\n")
    return tmp_path


def test_an_engine_of_a_gpu_stays_on_the_cores_near_it(sysfs: Path) -> None:
    assert cores_near("0000:3B:00.0", sysfs) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert cores_near("0000:AF:00.0", sysfs) == {4, 5, 6, 7, 12, 13, 14, 15}


@pytest.mark.parametrize("said", [None, "", "first-last"])
def test_where_the_machine_does_not_say_it_no_cores_are_near(sysfs: Path, said: str | None) -> None:
    if said is not None:
        device = sysfs / "bus/pci/devices/0000:01:00.0"
        device.mkdir()
        (device / "local_cpulist").write_text(said)
    assert cores_near("0000:01:00.0", sysfs) == set()
    assert cores_of_node(0, {0}, sysfs / "nowhere") == set()


def test_engines_on_a_cpu_are_divided_over_the_nodes_that_they_may_use(sysfs: Path) -> None:
    first, second = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
    every = first | second | {16}
    assert [cores_of_node(place, every, sysfs) for place in range(4)] == [first, second, {16}, first]
    assert [cores_of_node(place, {5, 16}, sysfs) for place in range(2)] == [second, {16}]

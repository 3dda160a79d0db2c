"""A thread cannot be started while an engine that has died is started again: the server comes back by itself.

bench/faults.py --inside tries all kinds of calls inside the processes.
"""

import os
import shutil
import signal
from collections.abc import Iterator

import pytest
from fault_scenario import Scenario, new_folder
from fault_steps import RESTARTS
from inside_faults import InsideFaults
from serving import alive, until

pytestmark = pytest.mark.thorough

# Whose thread, how many of its role can be started before it, and where it is started.
POINTS = (
    ("engine", 0, "loading_libraries"),
    ("engine", 3, "jobs.py"),  # of the state pool
    ("supervisor", 0, "child.py"),  # the pipe to the engine
    ("supervisor", 1, "supervisor.py"),  # which prints the address
)


@pytest.fixture
def faults(tmp_path_factory: pytest.TempPathFactory) -> InsideFaults:
    return InsideFaults(tmp_path_factory.mktemp("inside"))


@pytest.fixture
def place(faults: InsideFaults) -> Iterator[Scenario]:
    folder = new_folder()
    with Scenario(folder, shell=faults.shell) as place:
        yield place
    shutil.rmtree(folder)


def test_an_engine_that_is_started_again_lacks_a_thread(place: Scenario, faults: InsideFaults) -> None:
    """Who was being answered and who asks meanwhile get an answer, and nothing acknowledged is lost."""
    place.note()
    place.restarted = True
    for role, number, where in POINTS:
        faults.arm("thread", role, 0, number)
        assert place.run(RESTARTS["engine killed in use"]) == ""
        fault = faults.disarm()
        assert fault and where in fault.place, f"{fault}: {role} {number}"
        assert place.check() == [], fault
    assert "Traceback" not in place.server.log()
    assert place.stop() == 0, place.server.log()


def test_an_engine_that_never_gets_a_thread_ends_the_server(place: Scenario, faults: InsideFaults) -> None:
    """With an exit code for which systemd starts it again, and without a traceback."""
    children = place.server.children()
    faults.arm("thread", "engine", 0, -1)
    os.kill(children["engine"], signal.SIGKILL)
    assert place.server.process.wait(280) == 1
    log = place.server.log()
    assert "engine cannot begin, as the system has no thread left" in log
    assert "the server ends" in log and "Traceback" not in log
    until(lambda: not any(map(alive, children.values())))

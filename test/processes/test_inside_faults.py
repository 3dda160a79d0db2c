"""A thread cannot be started while an engine that has died is started again: the server comes back by itself.

bench/faults.py --inside tries all kinds of calls inside the processes.
"""

import os
import shutil
import signal
from collections.abc import Iterator

import pytest
from fault_scenario import BACK, Scenario, new_folder
from fault_steps import RESTARTS, chat
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


# Of an engine of two: how many of its threads can be started before one cannot, and where that is started.
POINTS_OF_TWO = ((0, "loading_libraries"), (1, "link.py"), (3, "jobs.py"))


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
    for role, number, where in POINTS:
        faults.arm("thread", role, 0, number)
        assert place.run(RESTARTS["engine killed in use"]) == ""
        fault = faults.disarm()
        assert fault and where in fault.place, f"{fault}: {role} {number}"
        assert place.check() == [], fault
    assert "Traceback" not in place.server.log()
    assert place.stop() == 0, place.server.log()


def test_the_other_engine_serves_while_one_lacks_a_thread(faults: InsideFaults) -> None:
    """Turns of a session and chats are answered all the time, and nothing acknowledged is lost."""
    folder = new_folder()
    with Scenario(folder, engines=2, shell=faults.shell) as place:
        place.note()
        for number, where in POINTS_OF_TWO:
            key = place.name("kept")
            place.say(key, "My name is Ben.")
            faults.arm("thread", "engine", 0, number)
            dead = place.server.children()["engine-0"]
            os.kill(dead, signal.SIGKILL)

            def back(key: str = key, dead: int = dead) -> bool:
                place.say(key, "What is my name?")
                chat(place)
                return place.server.children().get("engine-0", dead) != dead and place.ready_again

            until(back, BACK)
            fault = faults.disarm()
            assert fault and where in fault.place, f"{fault}: {number}"
            assert place.check() == [], fault
        assert "Traceback" not in place.server.log()
        assert place.stop() == 0, place.server.log()
    shutil.rmtree(folder)


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

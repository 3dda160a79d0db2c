"""A call of the operating system fails once under a server that is in use; bench/faults.py tries all of them.

Every request has an answer, what was acknowledged is there, and no open file, process or file stays.
"""

import shutil
from collections.abc import Iterator
from errno import EIO, EMFILE, ENOSPC

import pytest
from fault_scenario import Refused, Scenario, new_folder
from fault_steps import RESTARTS, STEPS
from faults import Call, Faults
from power_cut import missing
from serving import alive, until
from tools import absent

# A step, the call that fails in it, with which error, on which files, and how many of these go well before.
POINTS = (
    ("turns", Call.WRITE, ENOSPC, "sessions.db-wal", 3),
    ("turns", Call.PART, ENOSPC, "sessions.db-wal", 0),
    ("turns", Call.SYNC, EIO, "sessions.db-wal", 1),
    ("dropped", Call.SYNC, EIO, "sessions.db-wal", 2),  # of what was deleted in its turn
    ("export", Call.OPEN, EMFILE, ".part", 0),  # the state of a session that is imported
    ("export", Call.SYNC, EIO, "sessions.db.images", 0),
    ("files", Call.OPEN, EMFILE, "batches/file-", 0),
    ("files", Call.PART, ENOSPC, "batches/file-", 0),
    ("files", Call.RENAME, ENOSPC, "batches/file-", 0),
    ("files", Call.SYNC, EIO, "batches/batches.db-wal", 0),
    ("files", Call.WRITE, ENOSPC, "batches/batches.db-wal", 0),
    ("files", Call.READ, EIO, "batches/file-", 0),
    ("files", Call.UNLINK, EIO, "batches/file-", 0),
    ("start_state", Call.OPEN, EMFILE, "/upload-", 0),
    ("start_state", Call.WRITE, ENOSPC, "/upload-", 0),
    ("start_state", Call.READ, EIO, "/upload-", 0),
    ("start_state", Call.UNLINK, EIO, "/upload-", 0),
    ("start_state", Call.READ, EIO, "/upload-", 2),
    ("adapter", Call.OPEN, EMFILE, "capitals.pth", 2),
    ("batch", Call.OPEN, EMFILE, "batches/file-", 2),  # by the process that runs its rows
    ("batch", Call.READ, EIO, "batches/batches.db-wal", 0),
    ("responses", Call.SYNC, EIO, "sessions.db-wal", 5),  # the second commit of a deletion
    ("chat", Call.PART, ENOSPC, "audit.jsonl", 0),
    ("usage", Call.WRITE, ENOSPC, "usage.db-wal", 0),
)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    if reason := missing():
        absent(reason)
    folder = new_folder()
    yield Faults(tmp_path_factory.mktemp("faults"), folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def place(faults: Faults) -> Iterator[Scenario]:
    with Scenario(faults.prefix, shell=faults.shell) as place:
        place.note()
        for name in dict.fromkeys(point[0] for point in POINTS):
            assert (place.run(STEPS[name]), place.check()) == ("", [])
        yield place
        assert not place.left_behind()
        assert place.stop() == 0, place.server.log()


@pytest.mark.parametrize(("step", "call", "error", "only", "number"), POINTS)
def test_one_call_fails(
    place: Scenario, faults: Faults, step: str, call: Call, error: int, only: str, number: int
) -> None:
    faults.arm(call, error, number, only)
    said = place.run(STEPS[step])
    if only == "audit.jsonl":  # which a thread writes behind the reply
        until(lambda: faults.fired)
    fault = faults.disarm()
    assert fault and only in fault.path, f"{step} has no such call any more: {said}"
    assert place.check() == [], f"{fault}: {said}"


@pytest.mark.parametrize("number", range(9))
def test_a_session_outlives_a_disk_that_cannot_be_read(place: Scenario, faults: Faults, number: int) -> None:
    """SQLite says that the file is damaged then (EIO), which is no reason to drop what it holds."""
    faults.arm(Call.READ, EIO, number, "sessions.db-wal")
    assert place.run(STEPS["rewind"]) == ""
    assert faults.disarm(), "rewind reads less by now"
    assert place.check() == []


def test_a_session_of_a_state_alone_outlives_a_lack_of_open_files(place: Scenario, faults: Faults) -> None:
    """Nothing but the file of its state can bring it back."""
    place.say("alone", "My name is Ben.")
    data = place.ask("GET", "/v1/state/export", params={"session_id": "alone", "what": "state"}).content
    place.ask("POST", "/v1/state/import", params={"session_id": "alone"}, content=data)
    place.sessions["alone"] = []
    for key in ("other", "another", "one more"):  # which take its place in memory
        place.say(key, "My name is Eve.")
    faults.arm(Call.OPEN, EMFILE, 0, ".state")
    with pytest.raises(Refused, match="cannot be read now"):
        place.say("alone", "What is my name?")
    assert faults.disarm()
    assert place.say("alone", "What is my name?")
    assert place.check() == []


def test_an_engine_that_lacks_a_file_as_it_starts_again_is_started_once_more(
    place: Scenario, faults: Faults
) -> None:
    faults.arm(Call.OPEN, EMFILE, 0, "sessions.db.lock")
    assert place.run(RESTARTS["engine restarted"]) == ""
    assert faults.disarm()
    assert place.check() == []


def test_a_front_end_that_is_killed_in_an_upload_leaves_no_file(place: Scenario) -> None:
    (before,) = (pid for name, pid in place.server.children().items() if name.startswith("frontend"))
    assert place.run(RESTARTS["front end killed in an upload"]) == ""
    assert not alive(before), "each upload was over before"
    assert place.check() == []

"""Whose a database is: one server's, under any name by which another one opens its file."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stores import do, next_turn, put_all, session

from rwkv_batch.state.entries import PutSession, StoreAway, StoreDocument, StoreError
from rwkv_batch.state.log.store import Store

ROOT = Path(__file__).resolve().parents[2]
# Opens databases that are named, and says what came of it.
OPENER = """
import json, subprocess, sys
from rwkv_batch.state.entries import StoreError
from rwkv_batch.state.log.store import Store
for line in sys.stdin:
    path, *mounts = json.loads(line)
    for source, target in mounts:
        subprocess.run(["mount", "--bind", source, target], check=True)
    try:
        Store(path).close()
        print(json.dumps("opened"), flush=True)
    except StoreError as error:
        print(json.dumps(str(error)), flush=True)
"""
# Mounts are those of the command alone.
NAMESPACE = ["unshare", "--map-root-user", "--mount"]


def can_mount() -> bool:
    with contextlib.suppress(OSError):
        return not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode
    return False


MOUNTS = ["mounted folder", "mounted file"] if can_mount() else []
ALIASES = ["linked file", "linked folder", "link to a link", "relative path", "hard link", *MOUNTS]


class AnotherServer:
    """A process that opens databases. Paths may be relative to `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [*(NAMESPACE if MOUNTS else []), sys.executable, "-c", OPENER],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def opens(self, path: Path | str, *mounts: tuple[Path, Path]) -> str:
        """What it says about a database, after it has made these mounts."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([str(path), *mounts], default=str), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnotherServer]:
    server = AnotherServer(tmp_path_factory.mktemp("another server"))
    yield server
    server.close()


def make_alias(kind: str, path: Path, folder: Path, working: Path) -> str:
    """Another name of the file, which may not be there yet, for a process that works in the folder `working`.

    The other process makes mounts, which `mount` gives.
    """
    folder.mkdir()
    alias = folder / "alias.db"
    match kind:
        case "linked file":
            alias.symlink_to(path)
        case "linked folder":
            (folder / "link").symlink_to(path.parent)
            return str(folder / "link" / path.name)
        case "link to a link":
            (folder / "between.db").symlink_to(path)
            alias.symlink_to("between.db")
        case "relative path":
            return os.path.relpath(path, working)
        case "hard link":
            alias.hardlink_to(path)
        case "mounted folder":
            return str(folder / path.name)
        case "mounted file":
            alias.touch()
    return str(alias)


def mount(kind: str, path: Path, folder: Path) -> list[tuple[Path, Path]]:
    match kind:
        case "mounted folder":
            return [(path.parent, folder)]
        case "mounted file":
            return [(path, folder / "alias.db")]
    return []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the database is."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "sessions.db"


def assert_undisturbed(store: Store, path: Path) -> None:
    """It still has what it had, takes more, and has moved nothing away."""
    put_all(store, turn := next_turn(2))
    do(store, PutSession(session("b", turn)))
    assert store.read_document("d") == b"text" and store.find_session("b") is not None
    store.close()
    assert {file.name for file in path.parent.iterdir()} <= {"sessions.db", "sessions.db.lock"}
    again = Store(path)
    assert again.read_document("d") == b"text" and again.find_session("b") is not None
    again.close()


@pytest.mark.parametrize("kind", ["itself", *ALIASES])
def test_a_second_server_is_refused_by_any_name_of_the_file(
    kind: str, place: Path, tmp_path: Path, other: AnotherServer
) -> None:
    store = Store(place)
    do(store, StoreDocument("d", 1.5, b"text"))
    folder = tmp_path / "alias"
    name = str(place) if kind == "itself" else make_alias(kind, place, folder, other.folder)
    assert "in use by another server" in other.opens(name, *mount(kind, place, folder))
    assert_undisturbed(store, place)


@pytest.mark.parametrize("kind", ["linked file", "linked folder", "relative path", "hard link"])
def test_a_second_engine_of_the_process_is_refused_and_leaves_the_locks_of_the_first(
    kind: str, place: Path, tmp_path: Path, other: AnotherServer
) -> None:
    store = Store(place)
    do(store, StoreDocument("d", 1.5, b"text"))
    name = make_alias(kind, place, tmp_path / "alias", Path.cwd())
    with pytest.raises(StoreError, match="in use by another server"):
        Store(name)
    # to close the file in this process would have ended the locks that keep others out of it
    assert "in use by another server" in other.opens(place)
    with contextlib.closing(sqlite3.connect(place, timeout=0)) as another, pytest.raises(sqlite3.Error):
        another.execute("PRAGMA journal_mode = DELETE")  # takes a file that nobody else has open
    assert_undisturbed(store, place)


@pytest.mark.parametrize("kind", [kind for kind in ALIASES if kind not in ("hard link", "mounted file")])
def test_a_file_that_is_not_there_yet_is_one_servers_too(
    kind: str, place: Path, tmp_path: Path, other: AnotherServer
) -> None:
    name = make_alias(kind, place, tmp_path / "alias", other.folder)
    store = Store(place if mount(kind, place, tmp_path) or kind == "relative path" else name)
    assert place.exists()
    do(store, StoreDocument("d", 1.5, b"text"))
    assert "in use by another server" in other.opens(name, *mount(kind, place, tmp_path / "alias"))
    assert "in use by another server" in other.opens(place)
    assert_undisturbed(store, place)


def test_a_file_that_was_renamed_under_its_server_is_still_its_own(
    place: Path, tmp_path: Path, other: AnotherServer
) -> None:
    store = Store(place)
    moved = place.rename(tmp_path / "moved.db")
    assert "in use by another server" in other.opens(moved)
    moved.rename(place)
    store.close()
    assert other.opens(place) == "opened"


def test_a_file_that_has_replaced_a_damaged_one_is_its_servers_too(
    place: Path, tmp_path: Path, other: AnotherServer
) -> None:
    store = Store(place)
    do(store, StoreDocument("d", 1.5, b"text"))
    store.restart()
    name = make_alias("hard link", place, tmp_path / "alias", other.folder)
    assert "in use by another server" in other.opens(name)
    assert other.opens(place.with_name("sessions.db.damaged-1")) == "opened"
    assert store.read_document("d") == b"text"
    store.close()


def test_everything_of_a_linked_file_is_beside_the_file(place: Path, tmp_path: Path) -> None:
    store = Store(make_alias("linked file", place, tmp_path / "link", tmp_path))
    do(store, StoreDocument("d", 1.5, b"text"))
    assert store.images_folder == place.with_name("sessions.db.images")
    store.restart()  # which renames the file
    assert [file.name for file in (tmp_path / "link").iterdir()] == ["alias.db"]
    assert (tmp_path / "link" / "alias.db").is_symlink() and store.read_document("d") == b"text"
    store.close()


Leave = Callable[[Path], object]


@pytest.mark.parametrize(
    "leave",
    [
        lambda path: path.with_name(path.name + "-wal").write_bytes(b""),
        lambda path: path.with_name(path.name + ".images").mkdir(),
        lambda path: path.with_name(path.name + ".lock").write_bytes(b""),
    ],
    ids=["log", "images", "lock"],
)
def test_of_two_hard_links_the_one_that_was_used_is_opened(leave: Leave, place: Path, tmp_path: Path) -> None:
    store = Store(place)
    do(store, StoreDocument("d", 1.5, b"text"))
    store.close()
    leave(place)
    alias = Path(make_alias("hard link", place, tmp_path / "hard link", tmp_path))
    with pytest.raises(StoreError, match=r"has 2 names \(hard links\)"):
        Store(alias)
    assert [file.name for file in alias.parent.iterdir()] == ["alias.db"]
    store = Store(place)
    assert store.read_document("d") == b"text"
    store.close()


@pytest.mark.parametrize(
    ("kind", "said"), [("mounted file", "mount its directory"), ("mounted folder", "opened")]
)
def test_a_file_that_is_mounted_alone_is_refused_as_its_log_would_be_elsewhere(
    kind: str, said: str, place: Path, tmp_path: Path, other: AnotherServer
) -> None:
    if kind not in MOUNTS:
        kind, said = "itself", "opened"  # this machine lets no test mount anything
    Store(place).close()
    name = make_alias(kind, place, tmp_path / "alias", other.folder) if kind in MOUNTS else place
    assert said in other.opens(name, *mount(kind, place, tmp_path / "alias"))


def test_links_that_lead_nowhere_are_refused_by_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "circle.db").symlink_to("circle.db")
    with pytest.raises(StoreError, match=r"circle|Too many levels"):
        Store(tmp_path / "circle.db")
    (tmp_path / "dangling.db").symlink_to(tmp_path / "no folder" / "x.db")
    with pytest.raises(StoreError, match=r"There is no directory .*no folder"):
        Store(tmp_path / "dangling.db")


@pytest.mark.parametrize("name", ["n" * 250 + ".db", "ü" * 120, "n" * 300])
def test_a_name_that_leaves_no_room_for_those_beside_it_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"too long, .* use at most 235 bytes"):
        Store(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["n" * 235, "ü" * 117])
def test_a_long_name_has_everything_beside_it(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path / name)
    do(store, StoreDocument("d", 1.5, b"text"))
    for _ in range(2):
        store.restart()
    assert store.read_document("d") == b"text"
    store.close()


def test_a_system_without_locks_of_open_files_keeps_the_lock_beside(tmp_path, monkeypatch):
    """macOS is such a system, and there one name is one server's too."""
    monkeypatch.delattr("fcntl.F_OFD_SETLK")
    first = Store(tmp_path / "sessions.db")
    with pytest.raises(StoreError, match="in use by another server"):
        Store(tmp_path / "sessions.db")
    first.close()
    Store(tmp_path / "sessions.db").close()


@pytest.mark.parametrize("change", ["moved", "deleted", "replaced"])
def test_what_would_be_written_to_a_file_without_its_name_is_refused(change: str, tmp_path: Path) -> None:
    """It would be acknowledged, and gone at the next start. Where it is put back, all goes on."""
    path, aside = tmp_path / "s.db", tmp_path / "aside.db"
    store = Store(path)
    document = [[StoreDocument("d a", 1.0, b"a")]]
    store.commit(document)
    if change == "deleted":
        aside.hardlink_to(path)
        path.unlink()
    else:
        path.rename(aside)
    if change == "replaced":
        path.write_bytes(aside.read_bytes())
    words = "replaced by another file" if change == "replaced" else "moved or deleted"
    with pytest.raises(StoreAway, match=f"{words} while it is in use.*put it back, or start"):
        store.commit([[StoreDocument("d b", 1.0, b"b")]])
    aside.replace(path)
    store.commit([[StoreDocument("d c", 1.0, b"c")]])
    store.close()
    again = Store(path)
    assert again.document_keys("d ") == ["d a", "d c"]
    again.close()

"""A database of the first version becomes one of the present version, whatever happens meanwhile."""

import contextlib
import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from old_database import DOCUMENTS, SESSIONS, Old, make_old, old_session
from stores import MODEL, VOCABULARY, sealed, tiny_layout, tiny_states

from rwkv_batch.state import images, snapshot
from rwkv_batch.state.entries import RowDamaged, StoreError
from rwkv_batch.state.log import migration, sqlite, tables
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.snapshot import PREFIX, Transfer


def rows(path: Path) -> list[list[tuple[object, ...]]]:
    """All that an old database holds."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        columns = "key, updated, tokens, size, checksum, data"
        return [
            database.execute(f"SELECT {columns} FROM {table} ORDER BY id").fetchall()
            for table in ("sessions", "documents")
        ]


ROWS = [[row.columns for row in table] for table in (SESSIONS, DOCUMENTS)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
def old(path: Path) -> Path:
    make_old(path)
    return path


@pytest.fixture
def transfer() -> Transfer:
    return Transfer(tiny_states(), MODEL)


def state_of(store: Store, key: str, transfer: Transfer) -> bytes:
    """A session's state, which has to be the one that its row names."""
    found = store.find_session(key)
    assert found is not None and store.images_folder is not None
    head = found.head
    header, image = transfer.fitted(images.read(store.images_folder, head.turn, pinned=False))
    assert (header.digest, header.tokens) == (head.digest, head.tokens)
    return image[PREFIX:].numpy().tobytes()


def check_all(
    path: Path, transfer: Transfer, sessions: list[Old] = SESSIONS, documents: list[Old] = DOCUMENTS
) -> None:
    """Open the database: it has all of these and nothing else."""
    store = Store(path)
    assert {found.key for found in store.list_sessions(None, 1000)} == {row.key for row in sessions}
    for row in sessions:
        found = store.find_session(row.key)
        assert found is not None and (found.updated, found.head.tokens) == (row.updated, row.tokens)
        assert found.head.imaged == row.tokens and store.image_model(found.head.turn) == found.head.model
        assert store.model(found.head.model)[0] == MODEL
        assert store.read_turn(found.head.turn).past_unknown
        assert state_of(store, row.key, transfer) == row.data[PREFIX:]
    for row in documents:
        assert store.read_document(row.key) == row.data
    folder = store.images_folder
    assert folder is not None
    assert {file.name for file in folder.iterdir()} == {f"{turn}.state" for turn in store.image_turns()}
    store.close()


def test_every_session_and_document_is_there_and_the_old_database_is_kept(
    old: Path, transfer: Transfer
) -> None:
    check_all(old, transfer)
    assert rows(old.with_name("sessions.db.v1")) == ROWS
    left = {"sessions.db", "sessions.db.v1", "sessions.db.images"}
    assert {file.name for file in old.parent.iterdir()} == left
    check_all(old, transfer)  # what it was made into is opened as it is
    assert {file.name for file in old.parent.iterdir()} == left


def test_sessions_of_the_model_that_is_served_are_its_own(old: Path) -> None:
    store = Store(old)
    found = store.find_session("a")
    assert found is not None and found.head.model == store.model_id(MODEL, VOCABULARY)
    store.close()


def test_no_two_states_pass_for_each_other(old: Path) -> None:
    store = Store(old)
    heads = [found.head for found in store.list_sessions(None, 1000)]
    assert len({head.digest for head in heads}) == len({head.turn for head in heads}) == len(SESSIONS)
    store.close()


def test_an_empty_database_of_the_first_version_becomes_an_empty_one(path: Path, transfer: Transfer) -> None:
    make_old(path, [], [])
    check_all(path, transfer, [], [])
    assert rows(path.with_name("sessions.db.v1")) == [[], []]


def test_what_was_still_in_the_log_of_a_killed_server_is_migrated_too(
    tmp_path: Path, transfer: Transfer
) -> None:
    source, killed = tmp_path / "source.db", tmp_path / "killed.db"
    make_old(source)
    with contextlib.closing(sqlite3.connect(source, isolation_level=None)) as running:
        late = old_session("late", 9)
        running.execute("PRAGMA wal_autocheckpoint = 0")
        running.execute(
            "INSERT INTO sessions (key, updated, tokens, size, checksum, data) VALUES (?, ?, ?, ?, ?, ?)",
            late.columns,
        )
        for suffix in ("", "-wal"):
            shutil.copy(f"{source}{suffix}", f"{killed}{suffix}")
    check_all(killed, transfer, [*SESSIONS, late])


def test_states_of_other_models_are_migrated_too(path: Path, transfer: Transfer) -> None:
    other = tiny_layout("other", layers=3, wkv=torch.bfloat16)
    foreign = Old("f", 5.5, 8, sealed(other, 8, seed=5).numpy().tobytes())
    make_old(path, [*SESSIONS, foreign])
    store = Store(path)
    found = store.find_session("f")
    assert found is not None and store.images_folder is not None
    assert store.model(found.head.model)[0] == "other" and found.head.model != store.model_id(
        MODEL, VOCABULARY
    )
    assert store.image_model(found.head.turn) == found.head.model
    image = images.read(store.images_folder, found.head.turn, pinned=False)
    header, _ = snapshot.fitted(image, other)  # a server of that model can use it
    assert header.digest == found.head.digest and image[PREFIX:].numpy().tobytes() == foreign.data[PREFIX:]
    assert all(state_of(store, row.key, transfer) == row.data[PREFIX:] for row in SESSIONS)
    store.close()


def test_damaged_rows_are_left_out_with_a_warning(
    path: Path, transfer: Transfer, caplog: pytest.LogCaptureFixture
) -> None:
    whole = old_session("x", 3)
    make_old(
        path,
        [
            Old("wrong checksum", 1.5, 5, whole.data, checksum=1),
            *SESSIONS[:2],
            Old("damaged snapshot", 1.5, 5, whole.data[:-1] + bytes([whole.data[-1] ^ 1])),
            Old("no snapshot", 1.5, 5, b"text"),
            *SESSIONS[2:],
        ],
        [DOCUMENTS[0], Old("wrong checksum", 1.5, 0, b"text", checksum=1), *DOCUMENTS[1:]],
    )
    check_all(path, transfer)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("left out" in warning for warning in warnings) == 4
    assert any("damaged snapshot" in warning for warning in warnings)
    store = Store(path)
    assert store.read_document("wrong checksum") is None
    store.close()


def test_a_database_that_was_cut_short_is_migrated_with_what_is_whole(path: Path, transfer: Transfer) -> None:
    make_old(path, SESSIONS, [*DOCUMENTS, Old("end", 9.5, 0, random.Random(1).randbytes(200_000))])
    path.write_bytes(path.read_bytes()[:-100_000])
    check_all(path, transfer)
    store = Store(path)
    with contextlib.suppress(RowDamaged):
        assert store.read_document("end") is None
    store.close()


def test_an_older_copy_is_never_overwritten(old: Path) -> None:
    copy = old.with_name("sessions.db.v1")
    copy.write_bytes(b"the user's")
    with pytest.raises(StoreError, match=r"sessions\.db\.v1.*move that away"):
        Store(old)
    assert copy.read_bytes() == b"the user's" and rows(old) == ROWS


# Errors


def fail_at(count: int, error: BaseException, function: Callable[..., object]) -> Callable[..., object]:
    """The function; from its call of this number on it raises the error."""
    calls = 0

    def failing(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls > count:
            raise error
        return function(*arguments, **options)

    return failing


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_database() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


@pytest.mark.parametrize(
    ("place", "name", "count", "error"),
    [
        (images, "write", 0, full_disk()),
        (images, "write", 2, full_disk()),
        (images, "prepared_folder", 0, full_disk()),
        (images, "sync", 0, full_disk()),
        (tables, "apply", 0, full_database()),
        (tables, "apply", 6, full_database()),
        (sqlite, "rename", 0, full_disk()),
    ],
    ids=lambda value: value if isinstance(value, str | int) else "",
)
def test_a_full_disk_leaves_the_old_database_as_it_was(
    old: Path, transfer: Transfer, place: object, name: str, count: int, error: Exception
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(place, name, fail_at(count, error, getattr(place, name)))
        with pytest.raises(StoreError):
            Store(old)
    assert rows(old) == ROWS and not old.with_name("sessions.db.v1").exists()
    check_all(old, transfer)  # there is room again


def test_a_folder_that_cannot_be_made_leaves_the_old_database_as_it_was(
    old: Path, transfer: Transfer
) -> None:
    in_the_way = old.with_name("sessions.db.images")
    in_the_way.write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be made into one of the present version"):
        Store(old)
    assert rows(old) == ROWS
    in_the_way.unlink()
    check_all(old, transfer)


class Stopped(BaseException):
    """In place of the end of the process: nothing handles it."""


class Steps:
    """Numbers the steps of a migration, and stops it before the one with a given number."""

    def __init__(self, stop: int | None) -> None:
        self._stop, self.done = stop, 0

    def counted(self, function: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **options: object) -> object:
            if self.done == self._stop:
                raise Stopped
            self.done += 1
            return function(*arguments, **options)

        return step


STEPS: list[tuple[object, str]] = [
    (Path, "rename"),
    (Path, "unlink"),
    (os, "write"),
    (os, "fsync"),
    (os, "fdatasync"),
    (sqlite, "connect"),
    (tables, "prepare"),
    (tables, "model_id"),
    (tables, "apply"),
    (migration, "_schema"),
]


def migrate(path: Path, stop: int | None = None) -> int:
    """Migrate, and stop before a step; the number of steps that were done."""
    steps = Steps(stop)
    with pytest.MonkeyPatch.context() as patched:
        for place, name in STEPS:
            patched.setattr(place, name, steps.counted(getattr(place, name)))
        with contextlib.suppress(Stopped):
            migration.migrate(path)
    return steps.done


@contextlib.contextmanager
def copied(source: Path, folder: Path) -> Iterator[Path]:
    """A copy in a folder of its own."""
    folder.mkdir()
    yield shutil.copy(source, folder / "sessions.db")
    shutil.rmtree(folder)


def test_being_stopped_at_any_step_and_started_again_loses_nothing(
    old: Path, tmp_path: Path, transfer: Transfer
) -> None:
    with copied(old, tmp_path / "all") as copy:
        steps = migrate(copy)
    assert steps > 4 * len(SESSIONS)  # so that there is something to stop
    for stop in range(steps):
        with copied(old, tmp_path / f"stopped{stop}") as copy:
            assert migrate(copy, stop) == stop
            check_all(copy, transfer)
            assert rows(copy.with_name("sessions.db.v1")) == ROWS


LATE = Old("late", 9.5, 0, b"in the log")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Somebody reads the database, whose log is not empty."""
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as writer,
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as reader,
    ):
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        writer.execute(
            "INSERT INTO documents (key, updated, tokens, size, checksum, data) VALUES (?, ?, ?, ?, ?, ?)",
            LATE.columns,
        )
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM documents").fetchall()
        yield


def test_being_stopped_while_somebody_reads_the_old_database_loses_nothing(
    old: Path, tmp_path: Path, transfer: Transfer
) -> None:
    """A reader, such as a backup, keeps the old log: it must never become that of the new database."""
    with copied(old, tmp_path / "all") as copy:
        steps = migrate(copy)
    for stop in range(steps - 8, steps + 4):  # the renames come last, and there is one more for each log
        with copied(old, tmp_path / f"stopped{stop}") as copy, reading(copy):
            migrate(copy, stop)
            check_all(copy, transfer, documents=[*DOCUMENTS, LATE])
            assert rows(copy.with_name("sessions.db.v1")) == [ROWS[0], [*ROWS[1], LATE.columns]]

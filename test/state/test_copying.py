"""python -m rwkv_batch.sessions copy: a file into PostgreSQL, and back."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from databases import new_name
from postgres_server import PostgresServer
from stores import chain, do, next_turn, put_image, raw, sealed, session, tiny_layout, unknown_past

from rwkv_batch import sessions
from rwkv_batch.state import images
from rwkv_batch.state.entries import HIDDEN, PutModel, PutSession, PutTurn, StoreDocument, Unread
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.postgres.database.schema import schema_of
from rwkv_batch.state.postgres.store import PostgresStore

DAMAGE = "UPDATE turns SET digest = x'00' WHERE id = 1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with something of each kind."""
    path = tmp_path / "sessions.db"
    one, two, three = chain(1, [5, 70, 5])
    branch, begun = replace(next_turn(4, one), request=b"k".ljust(20, b".")), unknown_past(5, tokens=3)
    data = sealed(tiny_layout(), tokens=3)
    with closing(Store(path)) as store:
        do(store, PutModel("m", 70_000), PutModel("n", 0))
        do(store, *map(PutTurn, (one, two, three, branch, begun)))
        do(store, PutSession(session("a", three, updated=2.5)), PutSession(session("\udc80 ä:1", branch)))
        do(store, PutSession(session(f"{HIDDEN}start:x", begun)))
        do(store, StoreDocument("d\0:\udc80", 1.25, bytes(range(256))), StoreDocument("e", 1.5, b""))
        images.write(images.prepared_folder(images.folder(path)), begun.id, data)
        do(store, put_image(begun, len(data), model=7), put_image(two, 1000))
    return path


def contents(name: object, model: str = "") -> dict[str, list]:
    with sessions.opened(str(name), model) as found:
        return {
            kind: sorted(getattr(found, kind)(), key=repr)
            for kind in ("models", "turns", "sessions", "documents", "states")
        }


def copy(*words: object) -> int:
    return sessions.main(["copy", *map(str, words)])


def test_all_that_a_file_holds_goes_into_postgresql_and_back(
    path: Path, tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    model, back = new_name(), tmp_path / "back.db"
    assert copy(path, postgres.url, "--model", model) == 0
    assert capsys.readouterr().out == "3 sessions of 5 turns, 2 documents\n"
    assert copy(postgres.url, back, "--model", model) == 0
    found = contents(path)
    assert [len(found[kind]) for kind in found] == [2, 5, 3, 2, 1]
    assert contents(postgres.url, model) == found == contents(back)


def test_a_server_goes_on_with_the_copy(path: Path, tmp_path: Path, postgres: PostgresServer) -> None:
    model = new_name()
    assert copy(path, postgres.url, "--model", model) == 0
    with closing(PostgresStore(postgres.url, tmp_path, name=schema_of(model))) as store:
        three = store.read_turn(3)
        late = next_turn(next(store.turn_numbers()), three)
        do(store, PutTurn(late), PutSession(session("a", late), follows=3))
        assert store.image_model(5) == 7 and store.model(store.model_id("m", 0)) == ("m", 70_000)
    with closing(PostgresStore(postgres.url, tmp_path, name=schema_of(model))) as store:
        assert store.turn_ids(late.id, range(1, 9)) == [1, 2, 3, late.id]


def test_servers_that_have_been_started_keep_their_models(path: Path, tmp_path: Path, postgres) -> None:
    model = new_name()
    with closing(PostgresStore(postgres.url, tmp_path, name=schema_of(model))) as store:
        mine = store.model_id("mine", 5)
        assert copy(path, postgres.url, "--model", model) == 0
        assert store.model(mine) == ("mine", 5) and store.model_id("m", 0)


def test_nothing_is_copied_into_what_holds_something(
    path: Path, tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    model = new_name()
    assert copy(path, postgres.url, "--model", model) == 0
    for source, target in ((path, postgres.url), (postgres.url, path)):
        assert copy(source, target, "--model", model) == 1
        assert "already; name an empty database" in capsys.readouterr().err
    assert len(contents(path)["sessions"]) == 3


def test_a_copy_that_fails_leaves_nothing(
    path: Path, tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    model = new_name()
    with sessions.opened(postgres.url, model, empty=True):
        pass  # which makes the tables
    with psycopg.connect(postgres.url, autocommit=True) as database:
        database.execute(f"ALTER TABLE {schema_of(model)}.documents ADD CHECK (data <> '')")
    assert copy(path, postgres.url, "--model", model) == 1
    assert "error: The database takes no such values" in capsys.readouterr().err
    assert not any(contents(postgres.url, model).values())


def test_a_source_without_sessions_is_refused_and_stays_as_it_is(
    tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file, target = new_name(), tmp_path / "empty.db", tmp_path / "target.db"
    file.touch()
    assert copy(postgres.url, target, "--model", model) == 1
    assert "There is no schema" in capsys.readouterr().err
    with psycopg.connect(postgres.url) as database:
        found = database.execute("SELECT to_regnamespace(%s)", (schema_of(model),)).fetchone()
    assert found == (None,)
    assert copy(file, target) == 1
    assert "There are no sessions in" in capsys.readouterr().err
    assert file.read_bytes() == b""


def test_damaged_rows_are_left_out_and_counted(
    path: Path, tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    raw(path, DAMAGE)
    assert copy(path, postgres.url, "--model", new_name()) == 0
    assert capsys.readouterr().out.endswith("; 1 damaged rows are left out\n")


def test_a_state_that_the_disk_does_not_give_now_is_not_left_out(
    path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, name = images.read, new_name()

    def unread(*_: object, **__: object) -> None:
        raise Unread("The file of a state cannot be read now (Input/output error); send the request again.")

    monkeypatch.setattr(images, "read", unread)
    assert copy(path, postgres.url, "--model", name) == 1
    assert "Input/output error" in capsys.readouterr().err
    monkeypatch.setattr(images, "read", read)
    assert copy(path, postgres.url, "--model", name) == 0
    assert "left out" not in capsys.readouterr().out


def test_a_file_that_is_missing_or_in_use_is_refused(
    path: Path, tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert copy(tmp_path / "missing.db", postgres.url) == 1
    assert "There is no database" in capsys.readouterr().err
    with closing(Store(path)):
        assert copy(path, postgres.url) == 1
    assert "in use by another server" in capsys.readouterr().err


def test_a_model_of_two_files_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert copy(path, target := tmp_path / "other.db", "--model", "m") == 1
    assert "--model is for a database in PostgreSQL" in capsys.readouterr().err and not target.exists()

"""The database when its file is damaged."""

import contextlib
import functools
import random
import resource
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from stores import (
    MODEL,
    VOCABULARY,
    chain,
    do,
    has,
    in_order,
    keys,
    next_turn,
    put_image,
    raw,
    session,
)

from rwkv_batch.state.entries import (
    NONE,
    PutSession,
    PutTurn,
    RowDamaged,
    Shrink,
    StoreBroken,
    StoreDocument,
    StoreError,
    Turn,
)
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.sql.sqlite import BEGINNING

pytestmark = pytest.mark.thorough

# what the damaged databases held
CONVERSATIONS, LENGTHS = 12, (3000, 2000)  # tokens of their turns
DOCUMENTS, DOCUMENT = 3, 40_000  # bytes of each
EVERYTHING = CONVERSATIONS + DOCUMENTS


@functools.cache
def conversation(number: int) -> list[Turn]:
    return chain(1 + number * len(LENGTHS), LENGTHS)


@functools.cache
def document(number: int) -> bytes:
    return random.Random(number).randbytes(DOCUMENT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with conversations that have nothing in common, and documents."""
    path = tmp_path_factory.mktemp("whole") / "sessions.db"
    store = Store(path)
    store.model_id(MODEL, VOCABULARY)
    for number in range(CONVERSATIONS):
        turns = conversation(number)
        do(store, *map(PutTurn, turns), PutSession(session(f"s{number}", turns[-1])), put_image(turns[0]))
    do(store, *(StoreDocument(f"d{number}", 1.5, document(number)) for number in range(DOCUMENTS)))
    store.close()
    return path.read_bytes()


@pytest.fixture
def filled(whole: bytes, path: Path) -> Path:
    path.write_bytes(whole)
    return path


def read_conversation(store: Store, number: int) -> list[Turn] | None:
    """The turns of a session, None if there is none. Raises RowDamaged."""
    found = store.find_session(f"s{number}")
    if found is None:
        return None
    expected = conversation(number)[-1].head(0)
    assert replace(found.head, imaged=0) == expected and found.updated == 1.5
    turns = [store.read_turn(found.head.turn)]
    while turns[-1].parent != NONE:
        turns.append(store.read_turn(turns[-1].parent))
    return turns[::-1]


def intact(store: Store) -> int:
    """How many conversations and documents can be read. What is read has to be right."""
    found = 0
    for number in range(CONVERSATIONS):
        with contextlib.suppress(RowDamaged):
            turns = read_conversation(store, number)
            assert turns in (conversation(number), None)
            found += turns is not None
    for number in range(DOCUMENTS):
        with contextlib.suppress(RowDamaged):
            data = store.read_document(f"d{number}")
            assert data in (document(number), None)
            found += data is not None
    return found


def survivors(path: Path) -> tuple[int, int]:
    """How much of a damaged file can be read, and how much when it has been replaced.

    Nothing wrong is read, and what is new can be stored.
    """
    store = Store(path)
    before = intact(store)
    new = next_turn(1000)
    try:
        do(store, PutTurn(new), PutSession(session("new", new)))
    except StoreBroken:  # the writer does the same
        store.restart()
        do(store, PutTurn(new), PutSession(session("new", new)))
    assert has(store, new) and store.find_session("new") == session("new", new)
    store.restart()
    after = intact(store)
    store.close()
    return before, after


def test_a_file_cut_anywhere_opens_with_what_is_whole(whole: bytes, tmp_path: Path) -> None:
    chance = random.Random(1)
    found = []
    for number, length in enumerate(
        [0, 1, 99, 100, 4096, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(12))]
    ):
        cut = tmp_path / f"cut{number}.db"
        cut.write_bytes(whole[:length])
        found.append(survivors(cut)[1])
        assert length in (0, 1, len(whole) - 1) or cut.with_name(f"{cut.name}.damaged-1").exists()
    assert found[0] == 0 and found[5] >= EVERYTHING - 1  # only its end was missing


def test_a_flipped_bit_anywhere_costs_at_most_what_it_hits(whole: bytes, tmp_path: Path) -> None:
    chance = random.Random(2)
    anywhere = [chance.randrange(8 * len(whole)) for _ in range(40)]
    # the first bytes of a page say what is in it, and the file's first page where everything is
    telling = [8 * 4096 * chance.randrange(len(whole) // 4096) + chance.randrange(8 * 40) for _ in range(30)]
    first = [chance.randrange(8 * 4096) for _ in range(10)]
    found, refused = [], 0
    for number, position in enumerate(anywhere + telling + first):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        copy = tmp_path / f"flip{number}.db"
        copy.write_bytes(data)
        try:
            found.append(survivors(copy))
        except StoreError as error:
            assert "has schema" in str(error)
            refused += 1
    assert refused <= 2
    for right in zip(*found[:40], strict=True):
        assert sum(right) >= 40 * (EVERYTHING - 1) - EVERYTHING


@pytest.mark.parametrize(
    "data", [b'\x98\x02\0\0\0\0\0\0{"a": {"dtype"', b"PK\3\4" + bytes(60), b"SQL notes, and more text"]
)
def test_a_file_of_something_else_is_left_alone(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(StoreError, match="no database"):
        Store(path)
    assert path.read_bytes() == data
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_a_database_whose_first_page_is_lost_is_replaced(filled: Path) -> None:
    data = filled.read_bytes()
    filled.write_bytes(bytes(4096) + data[4096:])
    Store(filled).close()
    assert filled.with_name(f"{filled.name}.damaged-1").exists()


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_replacing_a_damaged_file_loses_nothing_that_could_be_read(
    whole: bytes, tmp_path: Path, pages: int
) -> None:
    chance = random.Random(pages)
    for number in range(12):
        data = bytearray(whole)
        for page in chance.sample(range(1, len(whole) // 4096), pages):
            data[page * 4096 : (page + 1) * 4096] = bytes(4096)
        copy = tmp_path / f"pages{number}.db"
        copy.write_bytes(data)
        before, after = survivors(copy)
        assert after >= before


def test_rows_whose_keys_were_changed_are_not_served_under_the_new_ones(filled: Path) -> None:
    raw(filled, "UPDATE sessions SET key = ? WHERE key = ?", b"other", b"s3")
    raw(filled, "UPDATE turns SET id = 77 WHERE id = 1")
    raw(filled, "UPDATE documents SET key = ? WHERE key = ?", b"other", b"d1")
    store = Store(filled)
    for read in (store.find_session, store.read_document):
        with pytest.raises(RowDamaged):
            read("other")
    with pytest.raises(RowDamaged):
        store.read_turn(77)
    assert "other" not in keys(store) and intact(store) == EVERYTHING - 3
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        "turn = 1",
        "number = number + 1",
        "tokens = tokens + 1",
        "digest = zeroblob(16)",
        "model = model + 1",
        "updated = 2.5",
        "digest = CAST(x'ff00' AS TEXT)",  # one bit tells bytes from text, and these are no text
    ],
)
def test_a_damaged_session_is_reported_and_left_out_of_lists(filled: Path, change: str) -> None:
    raw(filled, f"UPDATE sessions SET {change} WHERE key = ?", b"s3")
    store = Store(filled)
    with pytest.raises(RowDamaged):
        store.find_session("s3")
    assert keys(store) == in_order([f"s{number}" for number in range(CONVERSATIONS) if number != 3])
    store.restart()
    assert store.find_session("s3") is None and intact(store) == EVERYTHING - 1
    store.close()


@pytest.mark.parametrize(
    "change",
    ["parent = 5", "number = 9", "start = 1", "prompt = completion", "model = 2", "digest = zeroblob(16)"],
)
def test_a_damaged_turn_is_reported(filled: Path, change: str) -> None:
    raw(filled, f"UPDATE turns SET {change} WHERE id = 2")
    store = Store(filled)
    with pytest.raises(RowDamaged):
        store.read_turn(2)
    assert intact(store) == EVERYTHING - 1
    store.close()


def raw_without_rules(path: Path, table: str, statement: str, *values: object) -> None:
    """Change a closed database to what its own rules forbid, as damage does."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA writable_schema = ON")
        database.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '') WHERE name = ?", (table,)
        )
    raw(path, statement, *values)


WRONG = ["x''", "'abc'", "NULL"]  # one bit tells these from numbers


@pytest.mark.parametrize("value", WRONG)
def test_a_damaged_note_of_the_last_image_is_no_state_of_the_session(filled: Path, value: str) -> None:
    raw_without_rules(filled, "sessions", f"UPDATE sessions SET imaged = {value} WHERE key = ?", b"s3")
    store = Store(filled)
    with contextlib.suppress(RowDamaged):
        found = store.find_session("s3")
        assert found is not None and isinstance(found.head.imaged, int)
    assert intact(store) >= EVERYTHING - 1
    store.restart()
    assert intact(store) >= EVERYTHING - 1
    store.close()


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("column", ["model", "saves", "size", "used"])
def test_a_damaged_row_of_an_image_costs_at_most_that_image(filled: Path, column: str, value: str) -> None:
    raw_without_rules(filled, "images", f"UPDATE images SET {column} = {value} WHERE turn = 1")
    store = Store(filled)
    with contextlib.suppress(RowDamaged):
        assert store.image_model(1) in (None, conversation(0)[0].model)
    assert store.image_model(3) == conversation(1)[0].model and store.size() > 0
    store.restart()
    assert intact(store) == EVERYTHING and store.image_turns() >= {3, 5, 7}
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE images SET size = 'abc' WHERE turn = 1",
        "UPDATE sessions SET key = x'ff' WHERE key = x'7330'",
        "UPDATE sessions SET key = 'abc' WHERE key = x'7330'",
        "UPDATE documents SET key = x'ff' WHERE key = x'6430'",
        "UPDATE documents SET key = 'abc' WHERE key = x'6430'",
    ],
)
def test_damaged_rows_go_like_others_when_the_limit_is_met(filled: Path, change: str) -> None:
    raw(filled, change)
    store = Store(filled)
    do(store, Shrink(store.size() // 2))
    do(store, Shrink(0))
    assert keys(store) == [] and intact(store) == 0
    store.close()


def test_a_damaged_row_of_a_model_does_not_make_its_sessions_those_of_another_one(filled: Path) -> None:
    store = Store(filled)
    before, other = store.model_id(MODEL, VOCABULARY), store.model_id("l", VOCABULARY)
    store.close()
    raw(filled, f"UPDATE models SET fingerprint = 'l' WHERE id = {before}")  # one bit
    store = Store(filled)
    assert store.model_id(MODEL, VOCABULARY) == before != other == store.model_id("l", VOCABULARY)
    store.close()


def test_a_session_whose_turn_is_lost_is_kept_if_there_is_an_image_of_its_end(filled: Path) -> None:
    store, (_, with_image), (_, without) = Store(filled), conversation(0), conversation(1)
    do(store, put_image(with_image))
    store.close()
    for turn in (with_image, without):
        raw(filled, "UPDATE turns SET start = 7 WHERE id = ?", turn.id)
    store = Store(filled)
    store.restart()
    found = store.find_session("s0")
    assert found is not None and (found.head.turn, found.head.digest) == (with_image.id, with_image.digest)
    stand_in = store.read_turn(with_image.id)
    assert stand_in.past_unknown and (stand_in.end, stand_in.digest) == (with_image.end, with_image.digest)
    assert with_image.id in store.image_turns() and store.find_session("s1") is None
    store.close()


def test_what_is_replaced_is_kept_and_said(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(filled)
    before = filled.read_bytes()
    store.restart()
    assert intact(store) == EVERYTHING and store.image_turns() == {1 + 2 * n for n in range(CONVERSATIONS)}
    assert filled.with_name("sessions.db.damaged-1").read_bytes() == before
    assert f"{CONVERSATIONS} sessions and {DOCUMENTS} documents" in caplog.text
    store.close()


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_damaged_file_that_cannot_be_replaced_is_an_error_of_the_store(whole: bytes, path: Path) -> None:
    path.write_bytes(whole[:-4096])
    with full_disk(len(whole) // 4), pytest.raises(StoreError):
        Store(path)


def test_a_damaged_file_that_could_not_be_replaced_is_replaced_later(whole: bytes, path: Path) -> None:
    path.write_bytes(whole[:-4096])
    with full_disk(len(whole) // 4), contextlib.suppress(StoreError, sqlite3.Error):
        Store(path)
    store = Store(path)
    assert intact(store) >= EVERYTHING - 1
    store.close()


def test_a_file_that_breaks_is_moved_aside_again_and_again(path: Path) -> None:
    for number in (1, 2):
        path.write_bytes(BEGINNING + b"and not a database" * 1000)
        Store(path).close()
        assert path.with_name(f"sessions.db.damaged-{number}").read_bytes()[16:23] == b"and not"

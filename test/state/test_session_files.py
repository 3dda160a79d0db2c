"""Files of sessions that begin in a state: one whose tokens are not known, or a start state, of no tokens."""

import io
import os
from collections.abc import Iterator
from errno import EIO, EMFILE
from pathlib import Path
from typing import Any

import pytest
from pools import BEGINNING, NEVER, Bench, after
from stores import MODEL, VOCABULARY, chain, sealed, tiny_layout, tiny_states, turns_of, unknown_past

from rwkv_batch.state import exported, images
from rwkv_batch.state.entries import SnapshotError, Unavailable
from rwkv_batch.state.snapshot import Damaged, Transfer

STATE = after(BEGINNING, [7, 7])  # in which the sessions begin


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture(params=[2, 0], ids=["past unknown", "start state"])
def tokens(request: pytest.FixtureRequest) -> int:
    """How many tokens the state in which a session begins counts."""
    return request.param


@pytest.fixture
def data(tmp_path: Path, tokens: int) -> Iterator[bytes]:
    """A file of a session that begins in STATE and has two turns."""
    bench = Bench(tmp_path / "origin.db")
    bench.begin_in("a", [7, 7], tokens)
    bench.turn("a", [1, 2])
    bench.turn("a", [3])
    yield bench.do(bench.pool.files.export, "a", "both").value
    bench.close()


def goes_back(bench: Bench, key: str) -> bool:
    """Whether the session is all that it was, at its end and at each of its turns."""
    wanted = {0: STATE, 1: after(STATE, [1, 2]), 2: after(STATE, [1, 2, 3])}
    assert bench.look(key) == wanted[2]
    for number, state in wanted.items():
        assert bench.fork(key, "fork", number) is None
        assert bench.look("fork") == state, number
    return True


def test_an_imported_session_goes_back_to_the_state_that_it_began_in(path: Path, data: bytes) -> None:
    bench = Bench(path)
    assert bench.do(bench.import_, "b", data).error is None
    assert goes_back(bench, "b")
    bench.turn("fork", [4])
    again = bench.do(bench.pool.files.export, "b", "both").value
    bench.close()
    reopened = Bench(path, l1=0, l2=0, replay_rate=NEVER)
    assert goes_back(reopened, "b")
    assert reopened.do(reopened.import_, "c", again).error is None and goes_back(reopened, "c")
    reopened.close()


def test_it_does_so_where_everything_is_kept_in_memory(data: bytes) -> None:
    bench = Bench(None, l1=1, l2=1)
    assert bench.do(bench.import_, "b", data).error is None
    for other in range(3):
        bench.turn(f"other{other}", [5])
    assert goes_back(bench, "b")
    bench.close()


@pytest.mark.parametrize("errno", [EMFILE, EIO])
@pytest.mark.parametrize(("what", "number"), [("state", 0), ("both", 1)])
def test_a_state_that_cannot_be_read_now_is_not_left_out_of_a_file(
    path: Path, data: bytes, what: str, number: int, errno: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it said that there is none: the file can be had later. `number`: of the state that fails."""
    bench, opened, failing = Bench(path), io.open, list[bool]()

    def open_(file: Any, *arguments: Any, **named: Any) -> Any:
        if str(file).endswith(".state") and failing and failing.pop():
            raise OSError(errno, os.strerror(errno))
        return opened(file, *arguments, **named)

    assert bench.do(bench.import_, "b", data).error is None
    bench.close()
    monkeypatch.setattr(io, "open", open_)
    bench = Bench(path)
    failing += [True, *[False] * number]
    error = bench.do(bench.pool.files.export, "b", what).error
    assert not failing and isinstance(error, Unavailable) and os.strerror(errno) in error
    bench.close()
    bench = Bench(path)
    whole = bench.do(bench.pool.files.export, "b", what).value
    assert bench.do(bench.import_, "c", whole).error is None
    assert bench.look("c") == after(STATE, [1, 2, 3]) and (what == "state" or goes_back(bench, "c"))
    bench.close()


def test_what_leaves_memory_is_not_lost_with_its_image(path: Path, data: bytes) -> None:
    """Images of turns are a cache, that of the beginning is not."""
    bench = Bench(path)
    assert bench.do(bench.import_, "b", data).error is None
    turns = [turn.id for turn in bench.do(bench.pool.turns, bench.pool.find("b"), range(9)).value]
    bench.close()
    images.remove(images.folder(path), turns[1:])
    reopened = Bench(path)
    assert goes_back(reopened, "b")
    reopened.close()


def test_a_later_state_of_a_file_is_used(path: Path, data: bytes) -> None:
    bench = Bench(path, replay_rate=NEVER, l1=1, l2=4)
    assert bench.do(bench.import_, "b", data).error is None
    assert bench.tier("b") == "L2"
    bench.close()


def test_a_session_that_begins_in_a_state_of_another_model_is_refused(data: bytes, tokens: int) -> None:
    """Its tokens alone would be another conversation."""
    bench = Bench(None, model=("new weights", 65536), replay_on_new_model=True)
    assert "another model" in bench.do(bench.import_, "b", data).error
    bench.close()


def test_without_its_beginning_a_file_is_a_session_that_begins_at_its_state() -> None:
    """Files of earlier versions have no beginning."""
    transfer, past = Transfer(tiny_states(), MODEL), unknown_past(1, 40)
    turns = [past, *chain(2, [5, 6, 7], past)]
    image = sealed(tiny_layout(MODEL), turns[2].end).numpy().tobytes()
    model = MODEL, VOCABULARY

    def read(position: int) -> exported.Imported:
        file = exported.encode(exported.from_turns(turns, model, position, image))
        return exported.read(file, transfer, model, any_model=False, tokens=True)

    content = read(turns[2].end).content
    first = unknown_past(9, turns[2].end)
    found = turns_of(content, first)
    assert found[0] == first and [turn.tokens for turn in found[1:]] == [turns[3].tokens]
    with pytest.raises(Damaged, match="the end of a turn"):
        read(turns[2].end + 1)


def test_a_damaged_beginning_is_found(data: bytes) -> None:
    transfer = Transfer(tiny_states(), MODEL)
    content = exported.decode(data)
    assert content.beginning
    wrong = exported.encode(
        exported.Exported(
            MODEL, VOCABULARY, content.start, content.turns, content.position, content.image, b"x" * 99
        )
    )
    with pytest.raises(SnapshotError):
        exported.read(wrong, transfer, (MODEL, VOCABULARY), any_model=False, tokens=True)

"""How sessions are brought back: from the nearest state that is whole, and from their tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from sqlite3 import connect

import pytest
import torch
from stores import (
    MODEL,
    VOCABULARY,
    chain,
    next_turn,
    put_image,
    sealed,
    session,
    tiny_layout,
    tiny_states,
    unknown_past,
)

from rwkv_batch.state import images
from rwkv_batch.state.entries import (
    NONE,
    Head,
    PutSession,
    PutTurn,
    RowDamaged,
    SnapshotError,
    Start,
    StoreError,
    Turn,
)
from rwkv_batch.state.log.adapted import AdaptedModels
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.pool.resume import Resumer
from rwkv_batch.state.snapshot import PREFIX, Damaged, Transfer, parts, seal

LENGTHS = (5, 6, 7, 8)


class Served:
    """A database, and the model that a server of it has."""

    def __init__(self, path: Path | None, wkv: torch.dtype = torch.float32) -> None:
        self.store, self.transfer = Store(path), Transfer(tiny_states(wkv=wkv), MODEL)
        self.held: set[int] = set()  # turns whose states are in memory
        self.model = self.store.model_id(MODEL, VOCABULARY)
        self.other = self.store.model_id("other", VOCABULARY)
        self.stranger = self.store.model_id("stranger", VOCABULARY + 1)

    def put(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        self.store.commit([[*map(PutTurn, turns), PutSession(session("a", turns[-1]))]])
        return turns

    def put_image(
        self, turn: Turn, model: str = MODEL, digest: bytes | None = None, number: float = 0.0
    ) -> torch.Tensor:
        """Store the state of the turn's end, with this number in it."""
        layout = tiny_layout(model)
        image = sealed(layout, turn.end, seed=turn.id)
        parts(image, layout)[1][0] = number
        seal(image, layout, turn.end, 1.5, turn.digest if digest is None else digest)
        assert self.store.images_folder
        images.write(images.prepared_folder(self.store.images_folder), turn.id, image)
        row = put_image(turn, len(image), model=self.store.model_id(model, VOCABULARY))
        self.store.commit([[row]])
        return image

    def image_file(self, turn: Turn) -> Path:
        assert self.store.images_folder
        return self.store.images_folder / f"{turn.id}.state"

    def resumer(self, foreign: bool = False) -> Resumer:
        models = AdaptedModels(self.store, MODEL, VOCABULARY, foreign)
        return Resumer(self.store, self.transfer, models, self.held.__contains__, 1.0)

    def find(self, head: Head, foreign: bool = False) -> Start:
        return self.resumer(foreign).find(Start([], head.turn), head)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "sessions.db")
    yield served
    served.store.close()


@pytest.fixture
def turns(served: Served) -> Sequence[Turn]:
    """The stored turns of a session."""
    return served.put(chain(1, LENGTHS, model=served.model))


def tokens_of(turns: Sequence[Turn]) -> list[int]:
    return [token for turn in turns for token in turn.tokens]


def is_at(start: Start, turns: Sequence[Turn], place: int, image: torch.Tensor | None = None) -> bool:
    """Whether it is behind so many of the turns, and feeds the others."""
    same = start.image is image is None
    if start.image is not None and image is not None:
        same = torch.equal(start.image[PREFIX:], image[PREFIX:])
    turn = turns[place - 1].id if place else NONE
    return same and start.turn == turn and start.tokens == tokens_of(turns[place:])


# Where a session is continued from


def test_without_images_all_tokens_are_fed_from_the_beginning(served: Served, turns: Sequence[Turn]) -> None:
    start = served.find(turns[-1].head(0))
    assert is_at(start, turns, 0) and start.unusable == []
    assert len(start.tokens) == turns[-1].end


def test_a_database_in_memory_has_tokens_and_no_images() -> None:
    served = Served(None)
    turns = served.put(chain(1, LENGTHS, model=served.model))
    assert is_at(served.find(turns[-1].head(0)), turns, 0)
    served.store.close()


def test_the_nearest_image_is_found(served: Served, turns: Sequence[Turn]) -> None:
    first, third = served.put_image(turns[0]), served.put_image(turns[2])
    start = served.find(turns[3].head(0))
    assert is_at(start, turns, 3, third) and start.unusable == []
    assert is_at(served.find(turns[2].head(0)), turns[:3], 3, third)
    assert is_at(served.find(turns[1].head(0)), turns[:2], 1, first)


def test_the_image_of_the_end_leaves_nothing_to_feed(served: Served, turns: Sequence[Turn]) -> None:
    image = served.put_image(turns[3])
    start = served.find(turns[3].head(0))
    assert is_at(start, turns, 4, image) and start.tokens == []


def test_a_state_in_memory_that_is_nearer_than_an_image_is_used(
    served: Served, turns: Sequence[Turn]
) -> None:
    image = served.put_image(turns[1])
    served.held = {turns[2].id}
    assert is_at(served.find(turns[3].head(0)), turns, 3)
    served.held = {turns[0].id}
    assert is_at(served.find(turns[3].head(0)), turns, 2, image)


def test_turns_that_are_not_stored_yet_are_fed_after_those_that_are(
    served: Served, turns: Sequence[Turn]
) -> None:
    late = next_turn(50, turns[-1], [7, 8, 9], model=served.model)
    start = served.resumer().find(Start([late], turns[-1].id), late.head(0))
    assert is_at(start, [*turns, late], 0)
    image = served.put_image(turns[-1])
    start = served.resumer().find(Start([late], turns[-1].id), late.head(0))
    assert is_at(start, [*turns, late], 4, image)


def test_a_state_whose_past_is_unknown_comes_back_from_its_image(served: Served) -> None:
    past = unknown_past(1, 30, served.model)
    turns = served.put([past, *chain(2, [4, 5], past, served.model)])
    image = served.put_image(past)
    start = served.find(turns[-1].head(0))
    assert is_at(start, turns, 1, image) and len(start.tokens) == turns[-1].end - 30


# Damage


def break_image(served: Served, turn: Turn, how: str) -> None:
    file = served.image_file(turn)
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(data[:-1])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "flipped":
        data[-100] ^= 1
        file.write_bytes(data)
    elif how == "another one":
        served.put_image(turn, digest=bytes(16))


BREAKS = ["missing", "cut", "empty", "flipped", "another one"]


@pytest.mark.parametrize("how", BREAKS)
def test_an_image_that_cannot_be_used_is_passed_over_with_a_warning(
    served: Served, turns: Sequence[Turn], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    image = served.put_image(turns[0])
    for turn in turns[1:3]:
        served.put_image(turn)
        break_image(served, turn, how)
    start = served.find(turns[3].head(0))
    assert is_at(start, turns, 1, image) and start.unusable == [turns[2].id, turns[1].id]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and all("passed over" in warning for warning in warnings)
    break_image(served, turns[0], how)
    start = served.find(turns[3].head(0))
    assert is_at(start, turns, 0) and start.unusable == [3, 2, 1]


def test_the_image_of_other_tokens_is_not_used(served: Served, turns: Sequence[Turn]) -> None:
    """Such as one that a server left behind, whose turn had the same number."""
    stale = chain(1, [9, 9, 9], model=served.model)
    for place in (2, 1):
        served.put_image(turns[place], digest=stale[place].digest)
    start = served.find(turns[3].head(0))
    assert is_at(start, turns, 0) and start.unusable == [3, 2]


def test_a_state_whose_past_is_unknown_needs_its_image(served: Served) -> None:
    past = unknown_past(1, 30, served.model)
    turns = served.put([past, next_turn(2, past, model=served.model)])
    with pytest.raises(RowDamaged, match="its tokens are not known"):
        served.find(turns[-1].head(0))


@pytest.mark.parametrize("how", BREAKS)
def test_without_its_image_a_state_whose_past_is_unknown_is_lost(served: Served, how: str) -> None:
    past = unknown_past(1, 30, served.model)
    turns = served.put([past, next_turn(2, past, model=served.model)])
    served.put_image(past)
    break_image(served, past, how)
    with pytest.raises((RowDamaged, Damaged)):
        served.find(turns[-1].head(0))


def test_an_image_stands_in_for_damaged_turns_before_it(served: Served, turns: Sequence[Turn]) -> None:
    image = served.put_image(turns[2])
    with connect(served.store.path) as connection:
        connection.execute("DELETE FROM turns WHERE id <= 3")
    assert is_at(served.find(turns[3].head(0)), turns, 3, image)


def test_a_missing_turn_is_reported(served: Served, turns: Sequence[Turn]) -> None:
    with connect(served.store.path) as connection:
        connection.execute("DELETE FROM turns WHERE id = 2")
    with pytest.raises(RowDamaged, match="missing"):
        served.find(turns[3].head(0))
    assert is_at(served.find(turns[0].head(0)), turns[:1], 0)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_turn_that_does_not_belong_to_those_after_it_is_never_fed(served: Served, place: int) -> None:
    turns = chain(1, LENGTHS, model=served.model)
    wrong = [*turns]
    wrong[place] = replace(turns[place], digest=bytes(16))
    served.put(wrong)
    with pytest.raises(RowDamaged, match="not what came before"):
        served.find(turns[3].head(0))


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_turn_with_other_tokens_than_its_digest_says_is_never_fed(served: Served, place: int) -> None:
    turns = chain(1, LENGTHS, model=served.model)
    wrong = [*turns]
    wrong[place] = replace(turns[place], prompt=[*turns[place].prompt[:-1], turns[place].prompt[-1] ^ 1])
    served.put(wrong)
    with pytest.raises(RowDamaged):
        served.find(turns[3].head(0))


def test_a_session_that_ends_elsewhere_than_its_head_says_is_reported(
    served: Served, turns: Sequence[Turn]
) -> None:
    with pytest.raises(RowDamaged, match="not what came before"):
        served.find(replace(turns[3].head(0), turn=turns[2].id))


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Served]:
    """States of float32 with numbers that a server of float16 cannot hold."""
    served = Served(tmp_path / "large.db", torch.float16)
    yield served
    served.store.close()


def test_a_state_with_numbers_past_those_of_this_server_gets_its_largest(large: Served) -> None:
    turns = large.put(chain(1, LENGTHS, model=large.model))
    large.put_image(turns[1], number=1e6)
    found = large.find(turns[3].head(0))
    assert found.image is not None and is_at(found, turns, 2, found.image)
    assert float(parts(found.image, large.transfer.layout)[1][0]) == 65504


def test_a_state_that_is_not_finite_is_passed_over_if_its_tokens_are_known(large: Served) -> None:
    turns = large.put(chain(1, LENGTHS, model=large.model))
    large.put_image(turns[1], number=math.nan)
    assert is_at(large.find(turns[3].head(0)), turns, 0)


def test_a_state_that_is_not_finite_is_refused_if_there_is_nothing_else(large: Served) -> None:
    past = unknown_past(1, 30, large.model)
    large.put([past])
    large.put_image(past, number=math.inf)
    with pytest.raises(SnapshotError, match="not finite; rewind"):
        large.find(past.head(0))


# Other models


@pytest.mark.parametrize("foreign", [True, False])
def test_a_session_of_a_model_with_another_vocabulary_is_refused(served: Served, foreign: bool) -> None:
    turns = served.put(chain(1, LENGTHS, model=served.stranger))
    with pytest.raises(
        StoreError, match=r"another model \(stranger.*; continue it with the model that made it\.$"
    ):
        served.find(turns[-1].head(0), foreign)


@pytest.mark.parametrize("foreign", [True, False])
def test_a_state_of_another_model_whose_past_is_unknown_is_refused(served: Served, foreign: bool) -> None:
    past = unknown_past(1, 30, served.other)
    served.put([past])
    served.put_image(past, "other")
    with pytest.raises(
        StoreError, match=r"another model \(other.*; continue it with the model that made it\.$"
    ):
        served.find(past.head(0), foreign)


def test_a_session_of_another_model_is_refused_and_the_way_out_is_named(served: Served) -> None:
    turns = served.put(chain(1, LENGTHS, model=served.other))
    served.put_image(turns[1], "other")
    with pytest.raises(StoreError, match=r"another model \(other.*that one, or .*--replay-on-new-model\.$"):
        served.find(turns[-1].head(0))


def test_tokens_of_another_model_are_fed_if_that_is_wanted(served: Served) -> None:
    turns = served.put(chain(1, LENGTHS, model=served.other))
    served.put_image(turns[1], "other")  # no state of this model
    start = served.find(turns[-1].head(0), foreign=True)
    assert is_at(start, turns, 0) and start.unusable == []


def test_a_session_that_this_model_has_gone_on_with_needs_nothing_of_the_other_one(served: Served) -> None:
    before = chain(1, [5, 6], model=served.other)
    turns = served.put([*before, *chain(3, [7, 8], before[-1], served.model)])
    with pytest.raises(StoreError, match="--replay-on-new-model"):
        served.find(turns[-1].head(0))
    assert is_at(served.find(turns[-1].head(0), foreign=True), turns, 0)
    image = served.put_image(turns[1])  # this model's, at the end of what the other one made
    assert is_at(served.find(turns[-1].head(0)), turns, 2, image)


def test_the_image_of_another_model_under_the_name_of_this_one_is_not_used(
    served: Served, turns: Sequence[Turn]
) -> None:
    image = sealed(tiny_layout("other"), turns[3].end, turns[3].digest)
    assert served.store.images_folder
    images.write(images.prepared_folder(served.store.images_folder), turns[3].id, image)
    served.store.commit([[put_image(turns[3], len(image), model=served.model)]])
    start = served.find(turns[3].head(0))
    assert is_at(start, turns, 0) and start.unusable == [turns[3].id]


# All turns


def test_all_turns_of_a_session_are_read_the_oldest_first(served: Served, turns: Sequence[Turn]) -> None:
    resumer, head = served.resumer(), turns[3].head(0)
    assert resumer.read_turns(Start([], head.turn), head) == [*turns]
    assert resumer.read_turns(Start([turns[3], turns[2]], turns[1].id), head) == [*turns]
    assert resumer.read_turns(Start([], turns[1].id), turns[1].head(0)) == [*turns[:2]]


def test_some_turns_of_a_session_are_read_without_the_others(
    served: Served, turns: Sequence[Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    resumer, read = served.resumer(), list[int]()
    one = served.store.read_turn
    monkeypatch.setattr(served.store, "read_turn", lambda turn: read.append(turn) or one(turn))
    for start in (Start([], turns[3].id), Start([turns[3], turns[2]], turns[1].id)):
        for first in range(6):
            for stop in range(first, 7):
                numbers = range(first, stop)
                wanted = [turn for turn in turns if turn.number in numbers]
                read.clear()
                assert resumer.read_some_turns(start, numbers) == wanted
                assert set(read) <= {turn.id for turn in wanted}


def test_an_unknown_past_is_one_of_the_turns(served: Served) -> None:
    past = unknown_past(1, 30, served.model)
    turns = served.put([past, *chain(2, [4, 5], past, served.model)])
    head = turns[-1].head(0)
    assert served.resumer().read_turns(Start([], head.turn), head) == turns
    assert served.resumer().read_some_turns(Start([], head.turn), range(1)) == [past]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_turns_that_do_not_follow_each_other_are_not_read(served: Served, place: int) -> None:
    turns = chain(1, LENGTHS, model=served.model)
    wrong = [*turns]
    wrong[place] = replace(turns[place], digest=bytes(16))
    served.put(wrong)
    head = turns[3].head(0)
    with pytest.raises(RowDamaged, match="not what came before"):
        served.resumer().read_turns(Start([], head.turn), head)
    with pytest.raises(RowDamaged, match="not what came before"):
        served.resumer().read_some_turns(Start([], head.turn), range(1, 9))

"""Files of exported sessions: what is written comes back, and nothing else passes for it."""

import random
import zlib
from dataclasses import replace

import msgspec
import pytest
import torch
from stores import (
    MODEL,
    VOCABULARY,
    chain,
    next_turn,
    random_tokens,
    sealed,
    tiny_layout,
    tiny_states,
    turns_of,
    unknown_past,
)

from rwkv_batch.state import exported
from rwkv_batch.state.entries import NONE, SnapshotError, Turn, pack
from rwkv_batch.state.exported import Exported, ExportedTurn
from rwkv_batch.state.snapshot import PREFIX, Damaged, Transfer

SERVED = MODEL, VOCABULARY


@pytest.fixture
def transfer() -> Transfer:
    return Transfer(tiny_states(), MODEL)


def image_at(tokens: int, model: str = MODEL) -> bytes:
    return sealed(tiny_layout(model), tokens).numpy().tobytes()


def file_of(
    turns: list[Turn], position: int = 0, image: bytes = b"", model: tuple[str, int] = SERVED
) -> bytes:
    return exported.encode(exported.from_turns(turns, model, position, image))


def read(
    data: bytes,
    transfer: Transfer,
    any_model: bool = False,
    tokens: bool = True,
    model: tuple[str, int] = SERVED,
) -> tuple[Exported, torch.Tensor | None]:
    """The session and its image."""
    return exported.read(data, transfer, model, any_model=any_model, tokens=tokens)[:2]


def same_turns(found: list[Turn], wanted: list[Turn]) -> bool:
    """Whether these are the same turns, with their own ids."""
    offset = found[0].id - wanted[0].id
    moved = [
        replace(turn, id=turn.id + offset, parent=turn.parent + offset if turn.parent else NONE)
        for turn in wanted
    ]
    return [replace(turn, model=0) for turn in found] == [replace(turn, model=0) for turn in moved]


def test_what_was_encoded_is_decoded() -> None:
    turns = [
        ExportedTurn(pack([]), pack([0]), 1.5),
        ExportedTurn(pack([65535, 1]), pack([65536, VOCABULARY - 1]), 2.5),
        ExportedTurn(pack(random_tokens(1, 1000)), pack([]), 3.5),
    ]
    content = Exported(MODEL, VOCABULARY, 7, turns, 9, b"a state")
    assert exported.decode(exported.encode(content)) == content


def test_turns_come_back_with_ids_of_their_own(transfer: Transfer) -> None:
    turns = chain(1, [500, 30, 2])
    content, image = read(file_of(turns), transfer)
    assert image is None and (content.start, content.position) == (0, 0)
    found = turns_of(content, unknown_past(50, 0, model=9))
    assert same_turns(found, turns) and [turn.id for turn in found] == [50, 51, 52]
    assert {turn.model for turn in found} == {9}
    assert max(turns[0].prompt) > 65535  # so that tokens of both lengths were there


def test_turns_after_an_unknown_past_come_back_after_one(transfer: Transfer) -> None:
    past = unknown_past(1, 40)
    turns = [past, *chain(2, [5, 6], past)]
    content, image = read(file_of(turns, 40, image_at(40)), transfer)
    assert image is not None and (content.start, content.position) == (40, 40)
    assert same_turns(turns_of(content, replace(past, id=70)), turns)


def test_every_flipped_bit_and_every_cut_is_found(transfer: Transfer) -> None:
    turns = chain(1, [300, 20])
    whole = file_of(turns, turns[-1].end, image_at(turns[-1].end))
    chance = random.Random(0)
    for position in (*range(8 * 40), *chance.sample(range(8 * 40, 8 * len(whole)), 400)):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(SnapshotError):
            read(bytes(data), transfer)
    for length in (*range(40), *chance.sample(range(40, len(whole)), 100), len(whole) - 1):
        with pytest.raises(Damaged):
            read(whole[:length], transfer)


@pytest.mark.parametrize("tokens", [[VOCABULARY], [1, 2**32 - 1]])
def test_tokens_that_the_model_does_not_have_are_refused(transfer: Transfer, tokens: list[int]) -> None:
    assert read(file_of([next_turn(1, None, [VOCABULARY - 1])]), transfer)
    for turn in (next_turn(1, None, tokens), next_turn(1, None, [1], tokens)):
        with pytest.raises(Damaged, match="does not have"):
            read(file_of([next_turn(1), replace(turn, id=2)]), transfer)


@pytest.mark.parametrize("packed", [b"", b"\x03\x00\x00", b"\x02\x00", b"\x04\x00\x00"])
def test_what_is_not_tokens_is_refused(transfer: Transfer, packed: bytes) -> None:
    content = Exported(MODEL, VOCABULARY, 0, [ExportedTurn(pack([1]), packed, 1.5)], 0, b"")
    with pytest.raises(Damaged, match="cannot be read"):
        read(exported.encode(content), transfer)


def test_files_of_a_later_format_are_refused(transfer: Transfer) -> None:
    data = bytearray(file_of([next_turn(1)]))
    data[8:12] = (2).to_bytes(4, "little")
    with pytest.raises(SnapshotError, match="has format 2, but this server reads format 1; use the version"):
        read(bytes(data), transfer)


def test_what_is_no_exported_session_is_refused(transfer: Transfer) -> None:
    for data in (b"", b"text", bytes(10_000)):
        with pytest.raises(Damaged):
            read(data, transfer)


def test_a_file_that_is_nested_too_deeply_is_refused(transfer: Transfer) -> None:
    """Its checksum is right, and what is nested is no field of a session."""
    content = (
        msgspec.msgpack.encode({"fingerprint": MODEL}).replace(b"\x81", b"\x82") + b"\xa1z" + b"\x91" * 9999
    )
    data = file_of([])[:12] + zlib.crc32(content).to_bytes(4, "little") + content
    with pytest.raises(Damaged, match="cannot be read"):
        read(data, transfer)


# What a file may hold


@pytest.mark.parametrize("tokens", [True, False])
def test_a_file_with_only_a_state_is_a_snapshot(transfer: Transfer, tokens: bool) -> None:
    data = image_at(12)
    content, image = read(data, transfer, tokens=tokens)
    assert image is not None and image[PREFIX:].numpy().tobytes() == data[PREFIX:]
    assert (content.fingerprint, content.start, content.position, content.turns) == (MODEL, 12, 12, [])
    past = unknown_past(5, 12)
    assert turns_of(content, past) == [past]


def test_tokens_come_back_with_the_state_of_one_of_their_turns(transfer: Transfer) -> None:
    turns = chain(1, [5, 6, 7])
    data = image_at(turns[1].end)
    content, image = read(file_of(turns, turns[1].end, data), transfer)
    assert image is not None and image[PREFIX:].numpy().tobytes() == data[PREFIX:]
    assert content.position == turns[1].end
    assert same_turns(turns_of(content, unknown_past(9, 0)), turns)


def test_tokens_whose_beginning_is_unknown_need_a_state(transfer: Transfer) -> None:
    past = unknown_past(1, 40)
    with pytest.raises(Damaged, match="no state"):
        read(file_of([past, next_turn(2, past)]), transfer)


def test_a_damaged_state_in_a_file_is_found(transfer: Transfer) -> None:
    turns = chain(1, [5])
    whole = image_at(7)
    for image in (whole[:-1], b"text", whole[:-1] + bytes([whole[-1] ^ 1])):
        with pytest.raises(Damaged):
            read(file_of(turns, turns[0].end, image), transfer)


# Models


@pytest.mark.parametrize("with_state", [True, False])
def test_sessions_of_another_model_are_refused(transfer: Transfer, with_state: bool) -> None:
    turns = chain(1, [5])
    image = image_at(turns[0].end, "other") if with_state else b""
    data = file_of(turns, turns[0].end if with_state else 0, image, ("other", VOCABULARY))
    with pytest.raises(SnapshotError, match=r"made by another model .*other.*continue it with the model"):
        read(data, transfer)


@pytest.mark.parametrize("any_model", [True, False])
def test_states_of_another_model_are_refused(transfer: Transfer, any_model: bool) -> None:
    past = unknown_past(1, 40)
    half_known = file_of([past, next_turn(2, past)], 40, image_at(40, "other"), ("other", VOCABULARY))
    for data in (image_at(12, "other"), half_known):
        with pytest.raises(SnapshotError, match="another model"):
            read(data, transfer, any_model)


@pytest.mark.parametrize("with_state", [True, False])
def test_tokens_of_another_model_with_the_same_vocabulary_can_be_taken(
    transfer: Transfer, with_state: bool
) -> None:
    turns = chain(1, [5, 6])
    image = image_at(turns[1].end, "other") if with_state else b""
    data = file_of(turns, turns[1].end if with_state else 0, image, ("other", VOCABULARY))
    content, state = read(data, transfer, any_model=True)
    assert state is None and (content.position, content.image) == (0, b"")
    assert same_turns(turns_of(content, unknown_past(9, 0)), turns)


def test_tokens_of_another_vocabulary_are_refused(transfer: Transfer) -> None:
    data = file_of(chain(1, [5]), model=("other", VOCABULARY + 1))
    with pytest.raises(SnapshotError, match="another model"):
        read(data, transfer, any_model=True)


# Servers that store no tokens


def test_a_server_that_stores_no_tokens_takes_the_state_at_the_end(transfer: Transfer) -> None:
    past = unknown_past(1, 40)
    for turns in (chain(1, [5, 6]), [past, *chain(2, [7], past)]):
        end = turns[-1].end
        content, image = read(file_of(turns, end, image_at(end)), transfer, tokens=False)
        assert image is not None and image[PREFIX:].numpy().tobytes() == image_at(end)[PREFIX:]
        assert (content.start, content.position, content.turns) == (end, end, [])
        assert turns_of(content, first := unknown_past(9, end)) == [first]


@pytest.mark.parametrize("any_model", [True, False])
def test_a_server_that_stores_no_tokens_refuses_a_file_without_a_state_at_its_end(
    transfer: Transfer, any_model: bool
) -> None:
    turns = chain(1, [5, 6])
    for data in (file_of(turns), file_of(turns, turns[0].end, image_at(turns[0].end))):
        with pytest.raises(SnapshotError, match="what=state"):
            read(data, transfer, any_model, tokens=False)


def test_a_server_that_stores_no_tokens_cannot_take_those_of_another_model(transfer: Transfer) -> None:
    turns = chain(1, [5, 6])
    data = file_of(turns, turns[1].end, image_at(turns[1].end, "other"), ("other", VOCABULARY))
    with pytest.raises(SnapshotError):
        read(data, transfer, any_model=True, tokens=False)


@pytest.mark.parametrize(
    "lie",
    [
        {"vocabulary": 10**9},
        {"turns": [ExportedTurn(pack([1]), pack([2]), float("nan"))]},
        {"turns": []},
        {"start": -1},
        {"start": 1 << 62},
        {"position": 3},
    ],
)
def test_a_file_that_says_what_no_session_has_is_refused(transfer: Transfer, lie: dict) -> None:
    whole = Exported(MODEL, VOCABULARY, 0, [ExportedTurn(pack([1]), pack([2]), 1.5)], 0, b"")
    assert read(exported.encode(whole), transfer)[0] == whole
    with pytest.raises(Damaged):
        read(exported.encode(msgspec.structs.replace(whole, **lie)), transfer)

"""Snapshots: what is written comes back, and nothing else passes for it."""

import math
import random
import struct
import zlib

import msgspec
import pytest
import torch

from rwkv_batch.state.slots import DeviceStates
from rwkv_batch.state.snapshot import (
    PREFIX,
    Damaged,
    SnapshotError,
    SnapshotLayout,
    fitted,
    parts,
    read_header,
    seal,
    tensor_from_bytes,
)


def layout(
    shift: torch.dtype = torch.float16, wkv: torch.dtype = torch.float32, model: str = "m", layers: int = 2
) -> SnapshotLayout:
    return SnapshotLayout.from_states(DeviceStates(1, layers, 128, shift, wkv), model)


DIGEST = bytes(range(16))


def snapshot(of: SnapshotLayout, tokens: int = 5, digest: bytes = DIGEST) -> torch.Tensor:
    data = torch.empty(of.size, dtype=torch.uint8)
    for part in parts(data, of):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(0)))
    seal(data, of, tokens, 17.5, digest)
    return data


def test_a_snapshot_is_a_prefix_and_the_bytes_of_a_slot() -> None:
    states = DeviceStates(3, 2, 128, torch.float16, torch.float32)
    assert SnapshotLayout.from_states(states, "m").size == PREFIX + states.memory.shape[1]
    states.shift[1], states.wkv[1] = 1, 2
    data = torch.cat([torch.empty(PREFIX, dtype=torch.uint8), states.memory[1]])
    shift, wkv = parts(data, SnapshotLayout.from_states(states, "m"))
    assert (shift == 1).all() and (wkv == 2).all()


def test_what_was_sealed_is_read() -> None:
    header, same = fitted(data := snapshot(layout()), layout())
    assert same is data
    assert (header.tokens, header.created, header.fingerprint, header.layout) == (5, 17.5, "m", "vk")
    assert header.digest == DIGEST
    assert (header.layers, header.heads, header.width, header.shift, header.wkv) == (
        2,
        2,
        128,
        "float16",
        "float32",
    )


def test_a_snapshot_without_a_digest_has_an_empty_one() -> None:
    data = snapshot(layout(), digest=b"")
    assert fitted(data, layout())[0].digest == b""


def test_files_of_the_first_version_are_read() -> None:
    body = snapshot(layout())[PREFIX:].numpy().tobytes()
    header = msgspec.msgpack.encode(
        {"fingerprint": "m", "layers": 2, "heads": 2, "width": 128, "shift": "float16", "wkv": "float32"}
        | {"tokens": 9, "created": 3.5, "layout": "vk"}
    )
    rest = (struct.pack("<I", len(header)) + header).ljust(PREFIX - 16, b"\0") + body
    data = tensor_from_bytes(b"RWKV7ST\n" + struct.pack("<II", 1, zlib.crc32(rest)) + rest)
    found, same = fitted(data, layout())
    assert same is data and (found.tokens, found.created, found.digest) == (9, 3.5, b"")
    assert same[PREFIX:].numpy().tobytes() == body


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    whole = snapshot(layout()).numpy().tobytes()
    chance = random.Random(0)
    for position in (*range(0, 8 * 20), *chance.sample(range(8 * 20, 8 * len(whole)), 400)):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(SnapshotError):
            read_header(data)
    for length in (0, 1, 100, PREFIX - 1, PREFIX, len(whole) - 1):
        with pytest.raises(Damaged):
            read_header(whole[:length])


@pytest.mark.parametrize(
    "header", [b"\x81\xabfingerprint\xa1\xff", b"\x81\xa1z" + b"\x91" * 9999], ids=["no UTF-8", "nested"]
)
def test_a_header_that_nobody_has_written_is_refused(header: bytes) -> None:
    """Its checksum is right."""
    rest = struct.pack("<I", len(header)) + header + bytes(PREFIX)
    with pytest.raises(Damaged, match="header cannot be read"):
        read_header(b"RWKV7ST\n" + struct.pack("<II", 1, zlib.crc32(rest)) + rest)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (layout(wkv=torch.float16), layout()),
        (layout(), layout(wkv=torch.float16)),
        (layout(shift=torch.float32), layout()),
        (layout(shift=torch.bfloat16), layout(shift=torch.float32, wkv=torch.float16)),
    ],
)
def test_other_dtypes_are_converted(stored: SnapshotLayout, wanted: SnapshotLayout) -> None:
    data = snapshot(stored)
    header, converted = fitted(data, wanted)
    again = read_header(converted.numpy().data)
    assert (header.tokens, again.tokens) == (5, 5) and (header.digest, again.digest) == (DIGEST, DIGEST)
    for source, target in zip(parts(data, stored), parts(converted, wanted), strict=True):
        assert torch.equal(source.to(target.dtype), target)


@pytest.mark.parametrize("part", [0, 1], ids=["token shift", "wkv"])
def test_numbers_that_the_other_dtype_does_not_have_become_its_largest(part: int) -> None:
    data = snapshot(of := layout(shift=torch.float32))
    parts(data, of)[part][:2] = torch.tensor([1e6, -1e38])
    seal(data, of, 5, 0)
    _, converted = fitted(data, halves := layout(wkv=torch.float16))
    assert parts(converted, halves)[part][:2].tolist() == [65504, -65504]
    assert parts(converted, halves)[part].isfinite().all()


@pytest.mark.parametrize("wanted", [layout(), layout(wkv=torch.float16)], ids=["as stored", "converted"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["token shift", "wkv"])
def test_a_state_with_numbers_that_are_not_finite_is_refused(
    wanted: SnapshotLayout, number: float, part: int
) -> None:
    data = snapshot(of := layout())
    parts(data, of)[part][-1] = number
    seal(data, of, 5, 0)
    with pytest.raises(SnapshotError, match="not finite; rewind"):
        fitted(data, wanted)


@pytest.mark.parametrize(
    ("other", "message"), [(layout(model="n"), "another model"), (layout(layers=3), "2 layers")]
)
def test_states_of_other_models_are_refused(other: SnapshotLayout, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        fitted(snapshot(layout()), other)

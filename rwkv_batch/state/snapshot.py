"""A snapshot: one session's state as bytes, the same in host memory, in images and in exported files.

    offset  length
    0       8       magic
    8       4       format version
    12      4       CRC-32 of everything that follows
    16      4       length of the header
    20      492     the header (msgpack, see `Header`), zeros up to its end
    512             the state: token shift, then WKV, as they lie in a slot (slots.py)

`Transfer` copies between slots and snapshots.

A CRC-32 finds every flipped bit and every run of up to 32 damaged ones, and zlib's is several times faster
than any digest of the standard library. It is no signature: who can write a file can make one that passes.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.device import stream_for
from rwkv_batch.ops.host_memory import pinned_if_possible, pins
from rwkv_batch.ops.torch_ops import as_stored
from rwkv_batch.state.entries import SnapshotError
from rwkv_batch.state.slots import SlotAccess, States, slot_bytes

PREFIX = 512
MAGIC = b"RWKV7ST\n"
VERSION = 1
_FIXED = struct.Struct("<8sIII")
_AFTER_CHECKSUM = 16
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Bytes = bytes | bytearray | memoryview


class Damaged(SnapshotError):
    """The bytes are not those that were written."""


class Header(msgspec.Struct, frozen=True):
    """The description of a snapshot that it begins with."""

    fingerprint: str  # of the model
    layers: int
    heads: int
    width: int
    shift: str  # dtypes by name
    wkv: str
    tokens: int  # that the state has seen
    created: float  # seconds since 1970
    layout: Literal["vk"] = "vk"  # of a head's matrix: [value, key]
    digest: bytes = b""  # of the tokens (entries.Head); files of the first version have none


@dataclass(frozen=True)
class SnapshotLayout:
    """The states of one model as this server keeps them."""

    fingerprint: str
    layers: int
    heads: int
    width: int
    shift: torch.dtype
    wkv: torch.dtype

    @classmethod
    def from_states(cls, states: States, fingerprint: str) -> "SnapshotLayout":
        return cls(fingerprint, *states.shape)

    @property
    def shift_bytes(self) -> int:
        return self.layers * 2 * self.width * self.shift.itemsize

    @property
    def size(self) -> int:
        """Bytes of a whole snapshot."""
        return PREFIX + slot_bytes(self.layers, self.width, self.shift, self.wkv)


def seal(snapshot: Tensor, layout: SnapshotLayout, tokens: int, created: float, digest: bytes = b"") -> None:
    """Write prefix and checksum of a snapshot (uint8 `[layout.size]`, host memory) whose body is in place."""
    description = Header(
        fingerprint=layout.fingerprint,
        layers=layout.layers,
        heads=layout.heads,
        width=layout.width,
        shift=_name(layout.shift),
        wkv=_name(layout.wkv),
        tokens=tokens,
        created=created,
        digest=digest,
    )
    write_header(snapshot, description)


def write_header(snapshot: Tensor, description: Header) -> None:
    """Write prefix and checksum of a snapshot whose body is in place."""
    header = msgspec.msgpack.encode(description)
    if len(header) > PREFIX - _FIXED.size:
        raise ValueError(
            f"The model fingerprint {description.fingerprint[:40]}... is too long for a snapshot; give a "
            "digest."
        )
    data = snapshot.numpy().data
    data[:PREFIX] = (_FIXED.pack(MAGIC, VERSION, 0, len(header)) + header).ljust(PREFIX, b"\0")
    _FIXED.pack_into(data, 0, MAGIC, VERSION, zlib.crc32(data[_AFTER_CHECKSUM:]), len(header))


def read_header(snapshot: Bytes) -> Header:
    """Check that the bytes are a whole snapshot, and return its header. Raises SnapshotError."""
    if not MAGIC.startswith(bytes(memoryview(snapshot)[: len(MAGIC)])):
        raise Damaged("The data is no session snapshot; give a file that a session was exported to.")
    if len(snapshot) < PREFIX:
        raise Damaged(
            f"The snapshot is cut short: it has {len(snapshot)} bytes, and its beginning alone takes "
            f"{PREFIX}."
        )
    _, version, checksum, length = _FIXED.unpack_from(snapshot)
    if version != VERSION:
        raise SnapshotError(
            f"The snapshot has format {version}, but this server reads format {VERSION}; use the version "
            "that wrote it."
        )
    if zlib.crc32(memoryview(snapshot)[_AFTER_CHECKSUM:]) != checksum:
        raise Damaged("The snapshot is damaged: its checksum is wrong.")
    try:
        return msgspec.msgpack.decode(memoryview(snapshot)[_FIXED.size : _FIXED.size + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"The snapshot's header cannot be read ({error}).") from error


def fitted(snapshot: Tensor, layout: SnapshotLayout, pinned: bool = False) -> tuple[Header, Tensor]:
    """A snapshot (uint8, host memory), checked, in this server's dtypes: itself, or a converted copy.

    Numbers that a dtype cannot hold become its largest ones, as where a step stores states. Raises
    SnapshotError, also for numbers that are not finite.
    """
    header = read_header(snapshot.numpy().data)
    if header.fingerprint != layout.fingerprint:
        raise SnapshotError(
            f"The session was made by another model ({header.fingerprint}, and this one is "
            f"{layout.fingerprint}); continue it with the model that made it."
        )
    if (header.layers, header.heads, header.width) != (layout.layers, layout.heads, layout.width):
        raise SnapshotError(
            f"The session's state has {header.layers} layers, {header.heads} heads and width {header.width}, "
            f"but this model has {layout.layers}, {layout.heads} and {layout.width}; continue it with the "
            "model that made it."
        )
    if header.shift not in DTYPES or header.wkv not in DTYPES:
        raise SnapshotError(
            f"The session is stored as {header.shift} and {header.wkv}; this server knows "
            f"{', '.join(DTYPES)}."
        )
    stored = replace(layout, shift=DTYPES[header.shift], wkv=DTYPES[header.wkv])
    if len(snapshot) != stored.size:
        raise Damaged(f"The snapshot has {len(snapshot)} bytes where {stored.size} belong.")
    for part in parts(snapshot, stored):
        if not all(bound.isfinite() for bound in part.aminmax()):  # several times as fast as isfinite().all()
            raise SnapshotError(
                "The session's state holds numbers that are not finite; "
                "rewind the session to an earlier turn."
            )
    if stored == layout:
        return header, snapshot
    converted = pinned_if_possible(torch.empty, layout.size, dtype=torch.uint8, wanted=pinned)
    for source, target in zip(parts(snapshot, stored), parts(converted, layout), strict=True):
        target.copy_(as_stored(source, target.dtype))
    seal(converted, layout, header.tokens, header.created, header.digest)
    return header, converted


def parts(snapshot: Tensor, layout: SnapshotLayout) -> tuple[Tensor, Tensor]:
    """Flat views of token shift and WKV."""
    split = PREFIX + layout.shift_bytes
    return snapshot[PREFIX:split].view(layout.shift), snapshot[split:].view(layout.wkv)


def tensor_from_bytes(data: bytes | memoryview) -> Tensor:
    """A copy, uint8."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


class Transfer:
    """Copies between slots and host memory, for one thread; every call returns when its copy is done.

    On a GPU they run on a stream of their own, after what the model's stream had queued when the access to
    the slot was made.
    """

    def __init__(self, states: States, fingerprint: str) -> None:
        self.layout = SnapshotLayout.from_states(states, fingerprint)
        self.pinned = pins(states.device)
        self._on_gpu = states.device.type == "cuda"
        self.counted = Counter(to_host=0, to_device=0)  # states that were copied

    def unsealed(self, slot: SlotAccess) -> Tensor:
        """The slot's state as a snapshot whose prefix is not written yet, uint8 `[layout.size]`."""
        snapshot = pinned_if_possible(torch.empty, self.layout.size, dtype=torch.uint8, wanted=self.pinned)
        self._to_host(snapshot[PREFIX:], slot)
        self.counted["to_host"] += 1
        return snapshot

    def restore(self, snapshot: Tensor, slot: SlotAccess) -> None:
        """Fill the slot with a snapshot of this server's layout."""
        sizes = [piece.nbytes for piece in slot.pieces]
        self._copy(zip(slot.pieces, snapshot[PREFIX:].split(sizes), strict=True), slot)
        self.counted["to_device"] += 1

    def to_host(self, slot: SlotAccess) -> Tensor:
        """The slot's state in host memory, uint8."""
        copy = pinned_if_possible(torch.empty, slot.nbytes, dtype=torch.uint8, wanted=self.pinned)
        self._to_host(copy, slot)
        self.counted["to_host"] += 1
        return copy

    def fitted(self, snapshot: Tensor) -> tuple[Header, Tensor]:
        """A stored snapshot, checked, in this server's layout. Raises SnapshotError."""
        return fitted(snapshot, self.layout, self.pinned)

    def _to_host(self, copy: Tensor, slot: SlotAccess) -> None:
        sizes = [piece.nbytes for piece in slot.pieces]
        self._copy(zip(copy.split(sizes), slot.pieces, strict=True), slot)

    @torch.inference_mode()
    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]], slot: SlotAccess) -> None:
        """Targets and sources; those on a device are pieces of the slot."""
        if not self._on_gpu:
            for target, source in pairs:
                np.copyto(target.numpy(), source.numpy())  # torch would wake a second team of threads
            return
        streams = {piece.device: stream_for(piece.device, "copies") for piece in slot.pieces}
        for stream in streams.values():
            for event in slot.ready:
                stream.wait_event(event)
        for target, source in pairs:
            with torch.cuda.stream(streams[target.device if target.is_cuda else source.device]):
                target.copy_(source, non_blocking=True)
        for stream in streams.values():
            stream.synchronize()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

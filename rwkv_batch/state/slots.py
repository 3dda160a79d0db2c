"""The states of all slots in device memory, and the writes to them that are deferred.

A forward pass may defer writes to a slot: the slot in memory then lags some tokens behind the sequence. So
whoever else reads, replaces or copies a slot goes through `States`, which flushes first.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.cuda.inputs.staging import upload
from rwkv_batch.ops.torch_ops import HEAD_SIZE, as_stored

ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True)
class SlotAccess:
    """The bytes of one slot with nothing deferred, for a copy on any stream and any thread."""

    pieces: tuple[Tensor, ...]  # uint8, in device memory; a slot is one after the other
    ready: tuple[torch.cuda.Event, ...] = ()  # other streams wait for them first; none on a CPU

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class StateShape(NamedTuple):
    """Of the state of one row."""

    layers: int
    heads: int
    width: int
    shift: torch.dtype
    wkv: torch.dtype

    @property
    def shift_bytes(self) -> int:
        return self.layers * 2 * self.width * self.shift.itemsize

    @property
    def nbytes(self) -> int:
        return slot_bytes(self.layers, self.width, self.shift, self.wkv)


class States(ABC):
    """The states of a number of slots.

    The bytes of a slot are the token shift `[layers, 2, width]`, the last normed input of the time mix (0)
    and of the channel mix (1), and then the wkv `[layers, heads, 64 (value), 64 (key)]`.
    """

    shape: StateShape
    copied = 0  # states, from slot to slot

    @abstractmethod
    def __len__(self) -> int:
        """How many slots there are."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where `read` gives the bytes of a slot."""

    @abstractmethod
    def flush(self, slots: Collection[int]) -> None:
        """Carry out the writes to these slots that forward passes have deferred."""

    @abstractmethod
    def access(self, slot: int) -> SlotAccess:
        """The slot itself. It must not take part in a forward pass before the copy is done."""

    @abstractmethod
    def clone(self, slot: int) -> SlotAccess:
        """A copy of the slot in device memory, taken in the order of the current stream."""

    @abstractmethod
    def flushed(self, slot: int) -> Tensor:
        """The bytes of a slot that has been flushed, to be copied to another slot at once."""

    @abstractmethod
    def read(self, slot: int) -> Tensor:
        """A copy of the bytes of a slot for the current stream: uint8, on `device`."""

    @abstractmethod
    def replace(self, contents: Mapping[int, Tensor | None]) -> None:
        """Give slots new states: bytes as from `read`, on any device; None: as before any token."""

    @abstractmethod
    def copy(self, sources: Mapping[int, int]) -> None:
        """Copy slots to others, by target, in the order of the current stream. No target is a source."""

    def duplicate(self, source: int, target: int) -> None:
        """Copy a slot to another one, in the order of the current stream."""
        self.copy({target: source})

    def spread(self, source: int, targets: Collection[int]) -> None:
        """Copy a slot to several others."""
        self.copy(dict.fromkeys(targets, source))

    def clear(self, slots: Collection[int]) -> None:
        """Give these slots the state before the first token."""
        self.replace(dict.fromkeys(slots))


class DeviceStates(States):
    """Slot-major arrays on one device. A slot is one run of bytes: a session is one contiguous copy.

    shift `[slots, layers, 2, width]`, wkv `[slots, layers, heads, 64 (value), 64 (key)]`. Forward passes use
    these two directly.
    """

    def __init__(
        self,
        slots: int,
        layers: int,
        width: int,
        shift_dtype: torch.dtype,
        wkv_dtype: torch.dtype,
        device: torch.device | str = "cpu",
        start: Tensor | None = None,
    ) -> None:
        """All slots hold the state before the first token.

        start: its wkv `[layers, heads, 64, 64]`; None: zero. Its shift is zero.
        """
        heads = width // HEAD_SIZE
        self.shape = StateShape(layers, heads, width, shift_dtype, wkv_dtype)
        split = self.shape.shift_bytes
        # [slots, bytes of a slot]; lags as slots do
        self.memory = _zeros(slots, self.shape.nbytes, torch.device(device))
        self.shift = self.memory[:, :split].view(shift_dtype).view(slots, layers, 2, width)
        self.wkv = self.memory[:, split:].view(wkv_dtype).view(slots, layers, heads, HEAD_SIZE, HEAD_SIZE)
        self._start: Tensor | None = None  # [bytes of a slot]
        if start is not None:
            self.wkv[:] = as_stored(start.to(self.device), wkv_dtype)
            self._start = self.memory[0].clone()

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def flush(self, slots: Collection[int]) -> None:
        """Here none are deferred."""

    def access(self, slot: int) -> SlotAccess:
        self.flush([slot])
        return self._accessible(self.memory[slot])

    def clone(self, slot: int) -> SlotAccess:
        self.flush([slot])
        return self._accessible(self.memory[slot].clone())

    def flushed(self, slot: int) -> Tensor:
        self.copied += 1
        return self.memory[slot]

    def read(self, slot: int) -> Tensor:
        return self.clone(slot).pieces[0]

    @torch.inference_mode()
    def replace(self, contents: Mapping[int, Tensor | None]) -> None:
        self.flush(contents.keys())
        self._begin(sorted(slot for slot, state in contents.items() if state is None))
        for slot, state in contents.items():
            if state is not None:
                self.memory[slot].copy_(state, non_blocking=True)

    @torch.inference_mode()
    def copy(self, sources: Mapping[int, int]) -> None:
        self.flush({*sources, *sources.values()})
        for target, source in sources.items():
            self.memory[target].copy_(self.memory[source])
        self.copied += len(sources)

    def _begin(self, slots: list[int]) -> None:
        """Give slots, which ascend, the state before the first token, zero in one operation."""
        if self._start is not None:
            for slot in slots:
                self.memory[slot].copy_(self._start)
            return
        words = self.memory.view(torch.int64)
        if (
            slots and slots[-1] - slots[0] == len(slots) - 1
        ):  # the slots of a large request often are neighbours
            words[slots[0] : slots[-1] + 1].zero_()
        elif slots:
            words.index_fill_(0, upload(slots, words.device), 0)

    def _accessible(self, data: Tensor) -> SlotAccess:
        if not data.is_cuda:
            return SlotAccess((data,))
        return SlotAccess((data,), (torch.cuda.current_stream(data.device).record_event(),))


def _zeros(slots: int, size: int, device: torch.device) -> Tensor:
    """`[slots, size]` uint8. On a CPU a slot takes memory only once it is written to."""
    if device.type != "cpu":
        return torch.zeros(slots, size, device=device, dtype=torch.uint8)
    memory = np.zeros(slots * size + ALIGNMENT, np.uint8)  # unlike torch's, zero pages of the system's
    first = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[first : first + slots * size]).view(slots, size)


def slot_bytes(layers: int, width: int, shift_dtype: torch.dtype, wkv_dtype: torch.dtype) -> int:
    """Bytes of one slot."""
    return layers * width * (2 * shift_dtype.itemsize + HEAD_SIZE * wkv_dtype.itemsize)

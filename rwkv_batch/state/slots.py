"""The states of all slots in device memory, and the writes to them that are deferred.

A forward pass may defer writes to a slot: the slot in memory then lags some tokens behind the sequence. So
whoever else reads, replaces or copies a slot goes through `States`, which flushes first.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.ops.cuda.inputs.staging import upload
from rwkv_batch.ops.torch_ops import HEAD_SIZE, as_stored

ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True)
class SlotAccess:
    """The bytes of one slot with nothing deferred, for a copy on any stream and any thread."""

    data: Tensor  # [bytes of a slot], uint8, in device memory
    ready: torch.cuda.Event | None  # another stream waits for it first; None on a CPU


class States:
    """Slot-major arrays. Both parts of a slot lie in one run of bytes: a session is one contiguous copy.

    shift `[slots, layers, 2, width]`: the last normed input of the time mix (0) and of the channel mix (1).
    wkv `[slots, layers, heads, 64 (value), 64 (key)]`. Forward passes use these two directly.
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
        heads, split = width // HEAD_SIZE, layers * 2 * width * shift_dtype.itemsize
        size = slot_bytes(layers, width, shift_dtype, wkv_dtype)
        self.memory = _zeros(slots, size, torch.device(device))  # [slots, bytes of a slot]; lags as slots do
        self.shift = self.memory[:, :split].view(shift_dtype).view(slots, layers, 2, width)
        self.wkv = self.memory[:, split:].view(wkv_dtype).view(slots, layers, heads, HEAD_SIZE, HEAD_SIZE)
        self.copied = 0  # states, from slot to slot
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
        """Carry out the writes to these slots that forward passes have deferred. Here none are deferred."""

    def access(self, slot: int) -> SlotAccess:
        """The slot itself. It must not take part in a forward pass before the copy is done."""
        self.flush([slot])
        return self._accessible(self.memory[slot])

    def clone(self, slot: int) -> SlotAccess:
        """A copy of the slot in device memory, taken in the order of the current stream."""
        self.flush([slot])
        return self._accessible(self.memory[slot].clone())

    def flushed(self, slot: int) -> Tensor:
        """The bytes of a slot that has been flushed, to be copied to another slot at once."""
        self.copied += 1
        return self.memory[slot]

    def read(self, slot: int) -> Tensor:
        """`clone` for the current stream: `[bytes of a slot]`, uint8, on the device."""
        return self.clone(slot).data

    @torch.inference_mode()
    def replace(self, contents: Mapping[int, Tensor | None]) -> None:
        """Give slots new states: bytes as from `read`, on any device; None: as before any token."""
        self.flush(contents.keys())
        self._begin(sorted(slot for slot, state in contents.items() if state is None))
        for slot, state in contents.items():
            if state is not None:
                self.memory[slot].copy_(state, non_blocking=True)

    def duplicate(self, source: int, target: int) -> None:
        """Copy a slot to another one, in the order of the current stream."""
        self.copy({target: source})

    def spread(self, source: int, targets: Collection[int]) -> None:
        """Copy a slot to several others."""
        self.copy(dict.fromkeys(targets, source))

    @torch.inference_mode()
    def copy(self, sources: Mapping[int, int]) -> None:
        """Copy slots to others, by target, in the order of the current stream. No target is a source."""
        self.flush({*sources, *sources.values()})
        for target, source in sources.items():
            self.memory[target].copy_(self.memory[source])
        self.copied += len(sources)

    def clear(self, slots: Collection[int]) -> None:
        """Give these slots the state before the first token."""
        self.replace(dict.fromkeys(slots))

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
            return SlotAccess(data, None)
        return SlotAccess(data, torch.cuda.current_stream(data.device).record_event())


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

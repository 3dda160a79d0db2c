"""The states of a model whose layers lie on several devices: each part on the device of its layers.

A slot read as a whole has the bytes of today's form, so that a session moves between one device and any
number of stages.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from rwkv_batch.state.slots import DeviceStates, SlotAccess, States, StateShape


class StagedStates(States):
    """States of consecutive layers, in the order of the layers; all have the same slots."""

    def __init__(self, parts: Sequence[DeviceStates]) -> None:
        self.parts = parts
        self.shape = StateShape(sum(part.shape.layers for part in parts), *parts[0].shape[1:])
        # Bytes of a slot in the order in which they are read: the token shift of all parts comes first.
        self._sizes = [part.shape.shift_bytes for part in parts]
        self._sizes += [part.shape.nbytes - part.shape.shift_bytes for part in parts]

    def __len__(self) -> int:
        return len(self.parts[0])

    @property
    def device(self) -> torch.device:
        return self.parts[-1].device

    def flush(self, slots: Collection[int]) -> None:
        for part in self.parts:
            part.flush(slots)

    def access(self, slot: int) -> SlotAccess:
        return self._joined([part.access(slot) for part in self.parts])

    def clone(self, slot: int) -> SlotAccess:
        return self._joined([part.clone(slot) for part in self.parts])

    def flushed(self, slot: int) -> Tensor:
        self.copied += 1
        return self._read([part.flushed(slot) for part in self.parts])

    def read(self, slot: int) -> Tensor:
        self.flush([slot])
        return self._read([part.memory[slot] for part in self.parts])

    @torch.inference_mode()
    def replace(self, contents: Mapping[int, Tensor | None]) -> None:
        cut = {slot: None if state is None else state.split(self._sizes) for slot, state in contents.items()}
        for index, part in enumerate(self.parts):
            pieces = {
                slot: None if state is None else torch.cat((state[index], state[index + len(self.parts)]))
                for slot, state in cut.items()
            }
            part.replace(pieces)

    def copy(self, sources: Mapping[int, int]) -> None:
        for part in self.parts:
            part.copy(sources)
        self.copied += len(sources)

    def _joined(self, of_parts: Sequence[SlotAccess]) -> SlotAccess:
        whole = [self._split(access.pieces[0], index) for index, access in enumerate(of_parts)]
        pieces = tuple(shift for shift, _ in whole) + tuple(wkv for _, wkv in whole)
        return SlotAccess(pieces, tuple(event for access in of_parts for event in access.ready))

    def _read(self, memories: Sequence[Tensor]) -> Tensor:
        """A copy of the parts of a slot, as one."""
        whole = [self._split(memory, index) for index, memory in enumerate(memories)]
        return torch.cat([piece[place].to(self.device) for place in (0, 1) for piece in whole])

    def _split(self, memory: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Token shift and wkv of a part of a slot."""
        shift = self._sizes[index]
        return memory[:shift], memory[shift:]

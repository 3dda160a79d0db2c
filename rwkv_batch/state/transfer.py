"""Copies between slots and snapshots in host memory, each of one run of bytes, beside the model's stream."""

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.rwkv7 import States
from rwkv_batch.state.snapshot import PREFIX, Header, SnapshotLayout, fitted, seal

Fence = torch.cuda.Event | None


class Transfer:
    """Copies for one thread; every call returns when its copy is done.

    On a GPU they run on a stream of their own and wait for what was queued on the model's stream when the
    `fence` was made.
    """

    def __init__(self, states: States, fingerprint: str) -> None:
        self.layout = SnapshotLayout.from_states(states, fingerprint)
        self.pinned = states.memory.is_cuda
        self._slots = states.memory
        self._stream = torch.cuda.Stream(states.memory.device) if self.pinned else None

    def fence(self) -> Fence:
        """For the thread that runs the model, before it asks for a copy."""
        return torch.cuda.current_stream(self._slots.device).record_event() if self.pinned else None

    def snapshot(self, slot: int, tokens: int, created: float, fence: Fence) -> Tensor:
        """The slot's state as a sealed snapshot, uint8 `[layout.size]`."""
        snapshot = torch.empty(self.layout.size, dtype=torch.uint8, pin_memory=self.pinned)
        self._copy(snapshot[PREFIX:], self._slots[slot], fence)
        seal(snapshot, self.layout, tokens, created)
        return snapshot

    def restore(self, snapshot: Tensor, slot: int, fence: Fence) -> None:
        """Copy a snapshot, which has this server's layout, into the slot."""
        self._copy(self._slots[slot], snapshot[PREFIX:], fence)

    def duplicate(self, source: int, target: int, fence: Fence) -> None:
        """Copy a slot into another."""
        self._copy(self._slots[target], self._slots[source], fence)

    def clone(self, slot: int) -> Tensor:
        """A copy of the slot's state, uint8, on its device."""
        return self._slots[slot].clone()

    def to_host(self, state: Tensor, fence: Fence) -> Tensor:
        """A copy in host memory of what `clone` returned."""
        copy = torch.empty(len(state), dtype=torch.uint8, pin_memory=self.pinned)
        self._copy(copy, state, fence)
        return copy

    def fitted(self, snapshot: Tensor) -> tuple[Header, Tensor]:
        """A stored snapshot, checked and in this server's layout. Raises SnapshotError."""
        return fitted(snapshot, self.layout, self.pinned)

    @torch.inference_mode()
    def _copy(self, target: Tensor, source: Tensor, fence: Fence) -> None:
        if self._stream is None:
            np.copyto(target.numpy(), source.numpy())  # torch would start threads beside the model's
            return
        with torch.cuda.stream(self._stream):
            if fence:
                self._stream.wait_event(fence)
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()

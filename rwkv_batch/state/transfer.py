"""Copies between slots and snapshots in host memory: one run of bytes each, off the model's stream."""

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.state.slots import SlotAccess, States
from rwkv_batch.state.snapshot import PREFIX, Header, SnapshotLayout, fitted, seal


class Transfer:
    """Copies for one thread; every call returns when its copy is done.

    On a GPU they run on a stream of their own, after what the model's stream had queued when the access to
    the slot was made.
    """

    def __init__(self, states: States, fingerprint: str) -> None:
        self.layout = SnapshotLayout.from_states(states, fingerprint)
        self.pinned = states.device.type == "cuda"
        self._stream = torch.cuda.Stream(states.device) if self.pinned else None

    def snapshot(self, slot: SlotAccess, tokens: int, created: float) -> Tensor:
        """The slot's state as a sealed snapshot, uint8 `[layout.size]`."""
        snapshot = torch.empty(self.layout.size, dtype=torch.uint8, pin_memory=self.pinned)
        self._copy(snapshot[PREFIX:], slot.data, slot)
        seal(snapshot, self.layout, tokens, created)
        return snapshot

    def restore(self, snapshot: Tensor, slot: SlotAccess) -> None:
        """Fill the slot with a snapshot of this server's layout."""
        self._copy(slot.data, snapshot[PREFIX:], slot)

    def duplicate(self, source: SlotAccess, target: SlotAccess) -> None:
        """Copy from slot to slot."""
        self._copy(target.data, source.data, source, target)

    def to_host(self, slot: SlotAccess) -> Tensor:
        """The slot's state in host memory, uint8."""
        copy = torch.empty(len(slot.data), dtype=torch.uint8, pin_memory=self.pinned)
        self._copy(copy, slot.data, slot)
        return copy

    def fitted(self, snapshot: Tensor) -> tuple[Header, Tensor]:
        """A stored snapshot, checked, in this server's layout. Raises SnapshotError."""
        return fitted(snapshot, self.layout, self.pinned)

    @torch.inference_mode()
    def _copy(self, target: Tensor, source: Tensor, *slots: SlotAccess) -> None:
        if self._stream is None:
            np.copyto(target.numpy(), source.numpy())  # torch would wake a second team of threads
            return
        with torch.cuda.stream(self._stream):
            for slot in slots:
                if slot.ready:
                    self._stream.wait_event(slot.ready)
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()

"""The states of slots on a GPU."""

from collections.abc import Collection

import torch
from torch import Tensor

from rwkv_batch.ops.cuda.binding import Kernels
from rwkv_batch.ops.cuda.inputs.feed import Feed, pending_writes
from rwkv_batch.ops.torch_ops import HEAD_SIZE
from rwkv_batch.state.slots import DeviceStates, slot_bytes


class CudaStates(DeviceStates):
    """States that may lag some tokens, and what the device knows of their slots."""

    def __init__(
        self,
        kernels: Kernels,
        slots: int,
        size: tuple[int, int],
        wkv: torch.dtype,
        start: Tensor | None = None,
        defers: bool = True,
        spare: int = 0,
    ) -> None:
        """size: layers and width. defers: whether writes to fp16 states are deferred. spare: slots behind the
        others, for drafts.
        """
        super().__init__(slots + spare, *size, torch.float16, wkv, kernels.device, start)
        self._slots = slots
        self.feed = Feed(kernels, self.wkv[:slots], defers)

    def __len__(self) -> int:
        return self._slots

    @staticmethod
    def bytes_of_slot(layers: int, width: int, wkv: torch.dtype, defers: bool = True) -> int:
        """What a slot takes of all this."""
        shape = 1, layers, width // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE
        pending = pending_writes(torch.empty(shape, dtype=wkv, device="meta")) if defers else None
        return slot_bytes(layers, width, torch.float16, wkv) + (0 if pending is None else pending.nbytes)

    def flush(self, slots: Collection[int]) -> None:
        self.feed.flush(slots)

    def keep(self, slot: int, spare: int) -> None:
        """The slot, which does not lag, gets the state of a spare one."""
        self.memory[slot].copy_(self.memory[spare])

"""Tensors on their way from one GPU to another, so that neither waits for the other while it has work.

They are packed on the source's stream, copied on streams of this way's own, by peer access where there is
(torch enables it), through the host's memory elsewhere, and read on the target's stream. Both may be one GPU.

A copy between two GPUs waits on a stream of each, and what is queued behind it there waits too. So no two
ways share a stream: the copy of draws that are yet to be made would hold up what the first stage hands on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rwkv_batch.ops.device import stream_for

ALIGNMENT = 256  # bytes, of each tensor


@dataclass(frozen=True)
class Parcel:
    """Tensors that have been sent: where they arrive, and in which turn."""

    tensors: list[Tensor]  # on the target
    turn: int


class Handover:
    """A way from one GPU to another, with memory for some parcels. All calls belong on one thread."""

    def __init__(self, way: str, source: torch.device, target: torch.device, nbytes: int, turns: int) -> None:
        """way: which of a model's. nbytes: of a parcel, at most; see `handover_bytes`.

        turns: how many parcels are under way, at most.
        """
        self.source, self.target = source, target
        # The same one where both are one GPU.
        self._leaving, self._arriving = (stream_for(gpu, f"handing on {way}") for gpu in (source, target))
        self._packed = torch.empty(turns, nbytes, dtype=torch.uint8, device=source)
        self._landed = torch.empty(turns, nbytes, dtype=torch.uint8, device=target)
        # By turn: it is packed; it has arrived; it has been read. An event that was never recorded is past.
        self._made, self._arrived, self._read = ([torch.cuda.Event() for _ in range(turns)] for _ in range(3))
        self._next = 0

    @torch.inference_mode()
    def send(self, tensors: Sequence[Tensor]) -> Parcel:
        """Queue the copy of contiguous tensors as they are in the order of the source's current stream."""
        turn, self._next = self._next, (self._next + 1) % len(self._made)
        ends = list(accumulate(_filled(tensor.nbytes) for tensor in tensors))
        here = torch.cuda.current_stream(self.source)
        here.wait_event(self._arrived[turn])  # then what was packed there before has left
        for tensor, place in zip(tensors, _views(self._packed[turn], tensors, ends), strict=True):
            place.copy_(tensor, non_blocking=True)
        self._made[turn].record(here)
        self._leaving.wait_event(self._made[turn])
        self._arriving.wait_event(self._read[turn])
        self._copy(turn, ends[-1], self._leaving, self._arriving)
        self._arrived[turn].record(self._arriving)
        return Parcel(_views(self._landed[turn], tensors, ends), turn)

    def _copy(self, turn: int, nbytes: int, leaving: torch.cuda.Stream, arriving: torch.cuda.Stream) -> None:
        """Queue the copy of a parcel behind what both streams have, so that the second one has its end."""
        # A copy between two devices is on the first of these streams, after and before what is on the other.
        with torch.cuda.stream(leaving), torch.cuda.stream(arriving):
            self._landed[turn, :nbytes].copy_(self._packed[turn, :nbytes], non_blocking=True)

    def receive(self, parcel: Parcel) -> list[Tensor]:
        """The tensors, for the target's current stream from now on, until `release`."""
        torch.cuda.current_stream(self.target).wait_event(self._arrived[parcel.turn])
        return parcel.tensors

    def release(self, parcel: Parcel) -> None:
        """What the target's current stream has been given until now is all that reads the parcel."""
        self._read[parcel.turn].record(torch.cuda.current_stream(self.target))


def handover_bytes(*tensors: int) -> int:
    """Of a parcel of tensors of so many bytes each."""
    return sum(map(_filled, tensors))


def _filled(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _views(memory: Tensor, tensors: Sequence[Tensor], ends: Sequence[int]) -> list[Tensor]:
    """Places for these tensors in memory, uint8."""
    return [
        memory[end - _filled(tensor.nbytes) :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, end in zip(tensors, ends, strict=True)
    ]

"""A checkpoint's tensors on their way to a GPU, or to those of its stages: in pieces, through pinned memory.

While one piece is on its way, all threads copy the next out of the file's pages. Numbers are converted and
checked on the GPU, so that a file is read once.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from rwkv_batch.model.checkpoint import Checkpoint, Progress, not_finite
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.ops.host_memory import pinned_if_possible, pins

BUFFER = 16 << 20  # bytes
BUFFERS = 3  # under way


class UploadedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint, each copied to the device as it is read, until `finish`.

    They keep their dtype. `progress(done_bytes, total_bytes)` is called as they are read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        progress: Progress | None = None,
        place_of: Callable[[str], torch.device] | None = None,
    ) -> None:
        """place_of: to which device a tensor of that name goes; None: all to this one."""
        self._tensors, self._name, self._device = checkpoint.tensors, checkpoint.name, device
        self._place_of = place_of or (lambda _: device)
        self._progress, self._done, self._total = progress, 0, checkpoint.parameters  # numbers
        self._size = 0  # bytes of one
        on_gpu = pins(device)
        self._buffers = list(
            pinned_if_possible(torch.empty, BUFFERS, BUFFER, dtype=torch.uint8, wanted=on_gpu)
        )
        self._sent = [torch.cuda.Event() for _ in range(BUFFERS)] if on_gpu else []
        self._next = 0
        self._finite: dict[str, Tensor] = {}  # of each tensor that has been read

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return self._upload(name, tensor) if self._buffers and tensor.device.type == "cpu" else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def finish(self) -> None:
        """From now on tensors come as they are. Raises CheckpointError for one that was not finite."""
        self._buffers, self._done = [], self._total  # what is not read is not needed
        self._report()
        read, self._finite = self._finite, {}  # a block of the GPU's memory each
        finite = torch.stack([each.to(self._device) for each in read.values()]).tolist() if read else []
        for name, good in zip(read, finite, strict=True):
            if not good and not self._tensors[name].isfinite().all():
                raise CheckpointError(not_finite(self._name, name))

    def _upload(self, name: str, tensor: Tensor) -> Tensor:
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._place_of(name))
        data, target = (each.view(-1).view(torch.uint8) for each in (tensor.contiguous(), found))
        for some, to in zip(data.split(BUFFER), target.split(BUFFER), strict=True):
            self._send(some, to)
        if name not in self._finite:
            self._done, self._size = self._done + tensor.numel(), tensor.element_size()
            self._report()
        # A sum meets every infinity and NaN; only a strange one asks for the exact look.
        self._finite[name] = found.sum(dtype=torch.float32).isfinite()
        return found

    def _report(self) -> None:
        if self._progress:
            self._progress(self._done * self._size, self._total * self._size)

    def _send(self, data: Tensor, target: Tensor) -> None:
        self._next = (self._next + 1) % BUFFERS
        if self._sent:
            self._sent[self._next].synchronize()
        staged = self._buffers[self._next][: len(data)]
        staged.copy_(data)
        target.copy_(staged, non_blocking=True)
        if self._sent:
            self._sent[self._next] = torch.cuda.current_stream(target.device).record_event()

"""CUDA's streams and events without a GPU: when each piece of work would run, and what it may not race with.

A stream runs what it is given in order; an event is a moment of a stream, for which another one, or the host,
waits. The host takes no time, unless it waits. Tensors are on the CPU, and what is done to them is done at
once; the simulation says when a GPU would have done it, and fails where two streams touch the same bytes, one
of them to write, and neither waits for the other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rwkv_batch.ops.device import stream_for


@dataclass(frozen=True)
class Moment:
    """A time, and how many operations of each stream are over by then for certain."""

    time: float = 0.0
    over: Counter["FakeStream"] = field(default_factory=Counter)

    def after(self, other: "Moment") -> "Moment":
        """When both have been."""
        return Moment(max(self.time, other.time), self.over | other.over)


@dataclass(frozen=True)
class Access:
    """Bytes that an operation reads or writes."""

    first: int
    end: int
    writes: bool
    stream: "FakeStream"
    number: int  # of the operation on its stream


@dataclass(frozen=True)
class Span:
    """Work of a GPU."""

    what: Any
    begin: float
    end: float


class FakeStream:
    """As torch.cuda.Stream."""

    def __init__(self, cuda: "FakeCuda", device: torch.device) -> None:
        self.device, self._cuda = device, cuda
        self.reached = Moment()

    def wait_event(self, event: "FakeEvent") -> None:
        if event.moment:
            self.reached = self.reached.after(event.moment)

    def wait_stream(self, other: "FakeStream") -> None:
        self.reached = self.reached.after(other.reached)

    def record_event(self) -> "FakeEvent":
        event = FakeEvent(self._cuda)
        event.record(self)
        return event

    def run(self, seconds: float = 0.0) -> float:
        """Queue an operation; returns when it begins."""
        ready = self.reached.after(self._cuda.host)
        over = ready.over + Counter({self: 1})
        self.reached = Moment(ready.time + seconds, over)
        return ready.time


class FakeEvent:
    """As torch.cuda.Event: who waits for it waits for what it was when they began to."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.moment: Moment | None = None
        self._cuda = cuda

    def record(self, stream: FakeStream | None = None) -> None:
        self.moment = (stream or self._cuda.current_stream()).reached

    def synchronize(self) -> None:
        if self.moment:
            self._cuda.host = self._cuda.host.after(self.moment)


class FakeCuda:
    """GPUs of which each does one piece of work at a time, on its current stream, and copies besides."""

    def __init__(self, copy_seconds: float) -> None:
        """copy_seconds: from one GPU to another."""
        self.host = Moment()
        self.spans: list[Span] = []
        self._copy_seconds, self._device = copy_seconds, torch.device("cuda", 0)
        self._current: dict[torch.device, FakeStream] = {}
        self._places: dict[int, torch.device] = {}  # of tensors, by the address of their memory
        self._kept: list[Tensor] = []  # so that no address is used again
        self._accesses: dict[int, list[Access]] = defaultdict(list)  # by the address of the memory

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        device = device or self._device
        if device not in self._current:
            self._current[device] = FakeStream(self, device)
        return self._current[device]

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self._device = self._device, device
        yield
        self._device = before

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current[stream.device] = self.current_stream(stream.device), stream
        with self.device(stream.device):
            yield
        self._current[stream.device] = before

    def work(self, device: torch.device, seconds: float, what: Any) -> None:
        """Queue work on the GPU's current stream."""
        begin = self.current_stream(device).run(seconds)
        self.spans.append(Span(what, begin, begin + seconds))

    def placed(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor, which is on that GPU from now on."""
        self._places[tensor.untyped_storage().data_ptr()] = device
        self._kept.append(tensor)
        return tensor

    def place(self, tensor: Tensor) -> torch.device | None:
        """None: the host."""
        return self._places.get(tensor.untyped_storage().data_ptr())

    def operation(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Queue one where torch does: on the current stream of its GPU, or of both."""
        devices = [*dict.fromkeys(p for t in reads + writes if (p := self.place(t)) is not None)]
        if not devices:
            return
        stream = self.current_stream(devices[0])
        others = [self.current_stream(device) for device in devices[1:]]
        for other in others:
            stream.wait_stream(other)
        stream.run(self._copy_seconds if others else 0.0)
        for other in others:
            other.wait_stream(stream)
        for tensor in reads:
            self._touch(tensor, False, stream)
        for tensor in writes:
            self._touch(tensor, True, stream)

    def _touch(self, tensor: Tensor, writes: bool, stream: FakeStream) -> None:
        if self.place(tensor) is None:
            return
        first = tensor.data_ptr()
        here = Access(first, first + tensor.nbytes, writes, stream, stream.reached.over[stream])
        memory = tensor.untyped_storage().data_ptr()
        for before in self._accesses[memory]:
            meets = before.first < here.end and here.first < before.end and (before.writes or writes)
            late = meets and before.number > stream.reached.over[before.stream]
            assert not late, f"{here} does not wait for {before}"
        if writes:  # who waits for this one waits for those
            kept = [b for b in self._accesses[memory] if b.first < here.first or b.end > here.end]
            self._accesses[memory] = kept
        self._accesses[memory].append(here)


class _OnFakeGpus(TorchFunctionMode):
    """Tensors for a GPU are made on the CPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func is Tensor.to and isinstance(args[1], torch.device):
            return self._cuda.placed(args[0].clone(), args[1])
        device = kwargs.get("device")
        if isinstance(device, torch.device) and device.type == "cuda":
            return self._cuda.placed(func(*args, **kwargs | {"device": "cpu"}), device)
        return func(*args, **kwargs)


class _Recorded(TorchDispatchMode):
    """Every operation on tensors is one of a stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, Tensor)]
        if func.is_view or not given:
            return found
        in_place = func.name().endswith("_")  # which writes to its first argument
        reads, written = given[in_place:], given[0]
        if not in_place and (device := self._cuda.place(given[0])):
            written = self._cuda.placed(found, device)
        self._cuda.operation(reads, [written])
        return found


@contextmanager
def fake_cuda(copy_seconds: float) -> Iterator[FakeCuda]:
    """torch.cuda is a FakeCuda inside."""
    cuda = FakeCuda(copy_seconds)
    stream_for.cache_clear()
    with pytest.MonkeyPatch.context() as patch, _OnFakeGpus(cuda), _Recorded(cuda):
        patch.setattr(torch.cuda, "Stream", lambda device: FakeStream(cuda, device))
        patch.setattr(torch.cuda, "Event", lambda: FakeEvent(cuda))
        for name in ("current_stream", "device", "stream"):
            patch.setattr(torch.cuda, name, getattr(cuda, name))
        yield cuda
    stream_for.cache_clear()

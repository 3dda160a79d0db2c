"""Copies between slots and host memory, on every device there is."""

import threading
from collections.abc import Callable, Collection

import pytest
import torch

from rwkv_batch.state.slots import DeviceStates
from rwkv_batch.state.snapshot import PREFIX, Transfer, seal

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
    ),
]


def on_another_thread(action: Callable[[], object]) -> object:
    result: list[object] = []
    thread = threading.Thread(target=lambda: result.append(action()))
    thread.start()
    thread.join()
    return result[0]


def late(memory: torch.Tensor, value: int) -> None:
    """Fill at the end of a queue of work that takes a GPU some time."""
    if memory.is_cuda:
        busy = torch.ones(4096, 4096, device=memory.device)
        for _ in range(50):
            busy = busy @ busy * 1e-4
    memory.fill_(value)


@pytest.mark.parametrize("device", DEVICES)
def test_copies_wait_for_the_model_and_are_done_when_they_return(device: str) -> None:
    states = DeviceStates(4, 8, 512, torch.float16, torch.float32, device)
    transfer = Transfer(states, "m")
    late(states.memory[1], 7)
    slot = states.access(1)
    snapshot = on_another_thread(lambda: transfer.unsealed(slot))
    assert isinstance(snapshot, torch.Tensor) and snapshot.is_pinned() == (device == "cuda")
    assert len(snapshot) == transfer.layout.size and (snapshot[PREFIX:] == 7).all()

    late(states.memory[2], 9)  # whoever had the slot before; its last kernel must not come after the copy
    slot = states.access(2)
    on_another_thread(lambda: transfer.restore(snapshot, slot))
    assert (states.memory[2] == 7).all() and (states.memory[3] == 0).all()

    late(states.memory[0], 5)
    slot = states.access(0)
    copy = on_another_thread(lambda: transfer.to_host(slot))
    assert isinstance(copy, torch.Tensor) and copy.device.type == "cpu" and (copy == 5).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_copied_slot_has_what_was_queued_before_and_not_what_comes_after(device: str) -> None:
    states = DeviceStates(4, 8, 512, torch.float16, torch.float32, device)
    late(states.memory[0], 5)
    late(states.memory[3], 9)  # whoever had the slot before
    states.duplicate(0, 3)
    states.memory[0].fill_(6)
    assert (states.memory[3] == 5).all() and (states.memory[0] == 6).all() and (states.memory[1:3] == 0).all()


def test_writes_that_were_deferred_are_carried_out_before_a_slot_is_copied() -> None:
    states = DeviceStates(3, 1, 64, torch.float16, torch.float32)
    flushed: list[int] = []

    def flush(slots: Collection[int]) -> None:
        flushed.extend(slots)
        if 0 in slots:
            states.memory[0].fill_(7)

    states.flush = flush  # type: ignore[method-assign]
    states.duplicate(0, 2)
    assert (states.memory[2] == 7).all() and sorted(flushed) == [0, 2]


def test_an_unsealed_snapshot_is_sealed_and_restored() -> None:
    states = DeviceStates(2, 1, 64, torch.float16, torch.float32)
    states.shift[0], states.wkv[0] = 1, 2
    transfer = Transfer(states, "m")
    snapshot = transfer.unsealed(states.access(0))
    seal(snapshot, transfer.layout, 3, 17.5, b"digest")
    header, same = transfer.fitted(snapshot)
    assert (header.tokens, header.digest) == (3, b"digest")
    transfer.restore(same, states.access(1))
    assert (states.shift[1] == 1).all() and (states.wkv[1] == 2).all()

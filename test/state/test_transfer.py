"""Copies between slots and host memory, on every device there is."""

import threading
from collections.abc import Callable

import pytest
import torch

from rwkv_batch.state.slots import States
from rwkv_batch.state.snapshot import PREFIX, Transfer, read_header

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
    states = States(4, 8, 512, torch.float16, torch.float32, device)
    transfer = Transfer(states, "m")
    late(states._memory[1], 7)
    slot = states.access(1)
    snapshot = on_another_thread(lambda: transfer.snapshot(slot, 3, 0.0))
    assert isinstance(snapshot, torch.Tensor) and snapshot.is_pinned() == (device == "cuda")
    assert read_header(snapshot.numpy().data).tokens == 3 and (snapshot[PREFIX:] == 7).all()

    late(states._memory[2], 9)  # whoever had the slot before; its last kernel must not come after the copy
    slot = states.access(2)
    on_another_thread(lambda: transfer.restore(snapshot, slot))
    assert (states._memory[2] == 7).all() and (states._memory[3] == 0).all()

    late(states._memory[0], 5)
    source, target = states.access(0), states.access(3)
    on_another_thread(lambda: transfer.duplicate(source, target))
    assert (states._memory[3] == 5).all() and (states._memory[1:3] == 7).all()

"""The system has no pinned memory for one copy: other memory is used, or the request is to come again."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import tiny
from engine_driver import PROMPTS, Driver
from engine_faults import Asked
from fault_points import FaultPoints
from pinned_memory import CUDA, MAKERS, pinned_memory, refused
from row_adapters import write

from rwkv_batch.ops import host_memory
from rwkv_batch.runner import backends
from rwkv_batch.runner.protocol import Batch, Draws
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.wire.commands import LoadAdapter
from rwkv_batch.wire.protocol import Rejected
from state_pool import StatePool


@pytest.mark.thorough
def test_states_and_adapters_do_without(tmp_path: Path) -> None:
    """Each place that copies them, once; nobody gets an error, and the answers are the same."""
    points = FaultPoints()
    with pinned_memory(points):
        points.arm(0, places=True)
        expected = asked(tmp_path / "expected", points)
        assert points.places
        found: dict[str, None] = {}
        for place in points.places:
            frames = [frame for frame in place.split(" < ") if "host_memory.py" not in frame]
            found[" < ".join(frames[:3])] = None
        failed = set[str]()
        for number, place in enumerate(found):
            points.arm(1, at=place)
            assert asked(tmp_path / str(number), points) == expected, place
            if points.hit:  # not where threads have come in an order in which nothing is copied there
                failed.add(place.partition(":")[0].rpartition("/")[2])
        assert failed >= {"snapshot.py", "images.py", "start_states.py", "low_rank.py"}


def asked(folder: Path, points: FaultPoints) -> tuple[object, ...]:
    """What an engine of its own says to everything, and the slots that are free in the end."""
    folder.mkdir()
    engine = Asked(folder, points)
    outcome = engine.run()
    engine.driver.engine.close()
    assert outcome.errors == []
    return outcome.answers, outcome.free


def test_an_adapter_and_a_session_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their copies."""
    path = str(write(tmp_path, tiny(vocab=400), "lora", 1))

    def said() -> list[object]:
        with pinned_memory(points):
            driver = Driver(max_adapters=1, l1=1, l2=1)
            driver.ask(LoadAdapter("load", "lora", path, scaling=0.5))
            texts = [driver.say(PROMPTS[0], key, adapter="lora") for key in ("a", "b", "c", "a", "b")]
            driver.engine.close()
            return texts

    points = FaultPoints()
    expected, asked = said(), list[int]()

    def none_left(error: object) -> None:
        asked.append(1)
        raise refused()

    monkeypatch.setattr(points, "reach", none_left)
    assert said() == expected and len(asked) > 5


def test_a_step_without_pinned_memory_fails_its_request_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    points = FaultPoints()

    class Staged(TorchRunner):
        """Has its numbers in pinned memory, as on a GPU."""

        def run(self, batch: Batch) -> Draws:
            host_memory.pinned(torch.empty, 8, dtype=torch.int32)
            return super().run(batch)

    monkeypatch.setattr(backends, "TorchRunner", Staged)
    with pinned_memory(points):
        driver = Driver()
        expected = driver.say(PROMPTS[0], "a")
        points.arm(1)
        answer = driver.until(driver.add(PROMPTS[1], "a"), (Rejected,))[-1]
        assert isinstance(answer, Rejected) and answer.reason == "unavailable" and points.hit
        points.arm(1)
        with pytest.raises(RuntimeError, match="too little memory for this request"):
            driver.engine.generate([PROMPTS[1]], max_tokens=3)
        points.disarm()
        assert driver.say(PROMPTS[0], "b") == expected
        assert driver.engine.drained
        driver.engine.close()


def test_a_state_that_finds_none_on_its_way_to_a_slot_fails_the_turn_for_now() -> None:
    """A GPU writes what it has put off first, by numbers that lie in pinned memory."""
    driver = Driver(l1=1, l2=4)
    for key in ("a", "b"):
        driver.say(PROMPTS[0], key)
    none_left = host_memory.NoPinnedMemory("The system has no pinned memory left.")
    with mock.patch.object(StatePool, "_fill", side_effect=none_left):
        answer = driver.until(driver.add(PROMPTS[1], "a"), (Rejected,))[-1]
    assert isinstance(answer, Rejected) and answer.reason == "unavailable"
    assert driver.say(PROMPTS[1], "a") == driver.say(PROMPTS[1], "b")
    driver.engine.close()


@pytest.mark.parametrize("sentence", [CUDA, "CUDA error: OS call failed or operation not supported"])
def test_what_cuda_refuses_is_a_lack_of_memory(sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, sentence)
    with pytest.raises(host_memory.NoPinnedMemory, match=r"no pinned memory left \(CUDA error: [^\n]*\)\.$"):
        host_memory.pinned(torch.empty, 3, dtype=torch.int32)
    found = host_memory.pinned_if_possible(torch.tensor, [1, 2], dtype=torch.int32)
    assert found.tolist() == [1, 2] and found.dtype == torch.int32
    assert host_memory.pinned_copy(found).tolist() == [1, 2]


def test_another_error_of_a_gpu_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a kernel comes with the next call, which may be this."""
    fails_with(monkeypatch, "CUDA error: an illegal memory access was encountered")
    for call in (host_memory.pinned, host_memory.pinned_if_possible):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            call(torch.empty, 3, dtype=torch.int32)


def fails_with(monkeypatch: pytest.MonkeyPatch, sentence: str) -> None:
    """Each allocation of pinned memory, from now on."""
    for name in MAKERS:
        make = getattr(torch, name)

        def made(*arguments: Any, pin_memory: bool = False, make: Any = make, **options: Any) -> torch.Tensor:
            if pin_memory:
                raise RuntimeError(sentence)
            return make(*arguments, **options)

        monkeypatch.setattr(torch, name, made)


def test_the_log_says_so_once() -> None:
    """Of a process."""
    code = (
        "import logging, torch\n"
        "from rwkv_batch.ops import host_memory\n"
        "def empty(*arguments, dtype, pin_memory=False):\n"
        "    if pin_memory: raise RuntimeError('CUDA error: out of memory')\n"
        "for _ in range(3): host_memory.pinned_if_possible(empty, 3, dtype=torch.int32)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert "no pinned memory left (CUDA error: out of memory). Other memory is used" in line

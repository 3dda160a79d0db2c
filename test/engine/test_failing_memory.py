"""The host or the device has no memory for one allocation, for any purpose, and the engine goes on."""

from pathlib import Path
from typing import Any

import pytest
from engine_driver import PROMPTS, Driver
from engine_faults import PLATE, Asked, request, turn
from failing_memory import device_memory, failing_memory, host_memory
from fault_points import FaultPoints, caller_of
from row_adapters import write
from tools import absent

from rwkv_batch.ops.cpu.binding import NO_MEMORY, CpuKernels, load
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.state.slots import DeviceStates
from rwkv_batch.wire.commands import LoadAdapter
from rwkv_batch.wire.protocol import Failed, Progress, Rejected, Sampling

GREEDY = Sampling(temperature=0.0)


def test_every_allocation_may_fail_once(tmp_path: Path) -> None:
    """One for each place of the engine that allocates: an error or the text, and the next time the text."""
    points = FaultPoints()
    with failing_memory(points, host_memory):
        asked = Asked(tmp_path, points)
        ask(asked, "warm")
        points.arm(0, places=True)
        expected = ask(asked, "expected")
        assert points.places is not None
        numbers = {caller_of(place): number for number, place in enumerate(points.places, 1)}
        for number in numbers.values():
            points.arm(number)
            assert ask(asked, f"{number}") == expected, points.hit
            points.disarm()
        asked.clear()
        asked.driver.engine.close()
    assert asked.outcome.errors and asked.outcome.free == len(asked.driver.engine.runner.states)


def ask(asked: Asked, key: str) -> list:
    """What is said to a few requests, each asked again if it fails; two sessions come to lie in the host."""
    asked.each(
        bound=request([7], max_tokens=6, grammar=PLATE, sampling=GREEDY),
        scored=request(PROMPTS[2], n=2, top_logprobs=1, prompt_logprobs=0),
        turn=turn(key, PROMPTS[0]),
    )
    asked.each(second=turn(f"{key}-2", PROMPTS[0], stop_strings=["zz"]))
    asked.each(third=turn(key, PROMPTS[1]))
    answers, asked.outcome.answers = asked.outcome.answers, {}
    return sorted(answers.items())


def fail_once(patch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """The next call of this method finds no memory on the device; gets its name then."""
    method, failed = getattr(owner, name), list[str]()

    def call(*arguments: Any) -> Any:
        if not failed:
            failed.append(name)
            raise device_memory()
        return method(*arguments)

    patch.setattr(owner, name, call)
    return failed


def test_an_adapter_for_which_the_device_has_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request fails; a row beside it goes on, and so does the next request with it."""
    driver = Driver(max_adapters=1, max_rows=4)
    path = write(tmp_path, driver.engine.parts.weights, "lora", 1)
    driver.ask(LoadAdapter("load", "lora", str(path), scaling=0.5))
    expected = driver.say(PROMPTS[0])
    failed = fail_once(monkeypatch, TorchRunner, "load_adapter")
    refused, other = driver.add(PROMPTS[1], adapter="lora"), driver.add(PROMPTS[0])
    answer = driver.until(refused, (Rejected,))[-1]
    assert isinstance(answer, Rejected) and answer.reason == "unavailable" and failed
    assert driver.said(other) == expected
    assert driver.say(PROMPTS[1], adapter="lora") != driver.say(PROMPTS[1])
    assert driver.engine.drained
    driver.engine.close()


@pytest.mark.parametrize("name", ["product", "rwkv7_layers"])
def test_a_step_for_which_a_kernel_has_no_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its requests fail, and the engine goes on."""
    if load() is None:
        absent("There is no C++ compiler.")
    driver = Driver()
    expected = driver.say(PROMPTS[0])
    method, failed = getattr(CpuKernels, name), list[str]()

    def call(*arguments: Any) -> Any:
        if not failed:
            failed.append(name)
            raise MemoryError(NO_MEMORY)
        return method(*arguments)

    monkeypatch.setattr(CpuKernels, name, call)
    last = driver.until(driver.add(PROMPTS[0]), (Failed, Progress, Rejected))[-1]
    assert failed and not (isinstance(last, Progress) and not last.rows[-1].error)
    assert driver.say(PROMPTS[0]) == expected
    driver.engine.close()


def test_a_prompt_is_not_cached_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request does not fail for that."""
    driver, prompt = Driver(prefix_cache_mb=1), [(11 * i) % 390 + 1 for i in range(300)]
    expected = driver.say(prompt, prefix_cache=False)
    failed = fail_once(monkeypatch, DeviceStates, "read")
    assert [driver.say(prompt) for _ in range(3)] == 3 * [expected] and failed
    driver.engine.close()


def test_a_row_of_a_batch_stays_where_its_state_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that wants its slot waits until it has ended."""
    driver = Driver(max_rows=1)
    expected = driver.say(PROMPTS[0], max_tokens=30), driver.say(PROMPTS[1])
    failed = fail_once(monkeypatch, DeviceStates, "read")
    batch = driver.add(PROMPTS[0], max_tokens=30, batch=True)
    for _ in range(3):
        driver.step()
    other = driver.add(PROMPTS[1])
    assert (driver.said(batch), driver.said(other)) == expected and failed
    driver.engine.close()

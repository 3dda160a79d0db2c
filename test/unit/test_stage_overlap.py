"""Stages work at once: how long steps would take on GPUs, which are simulated (fake_cuda.py).

The unit of time is what a stage needs for a group of decoding rows. The GPUs take no time but for layers, and
for copies from one to another.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fake_cuda import FakeCuda, fake_cuda
from fake_stages import FakeDraws, fake_runner

from rwkv_batch.runner import staged_runner
from rwkv_batch.runner.protocol import LAST, Batch, Draws, NewRow
from rwkv_batch.runner.staged_runner import StagedRunner
from rwkv_batch.wire.protocol import Sampling

COPY = 0.01
GROUP = 32  # rows
FOUR = [0, 1, 2, 3]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(staged_runner, "QueuedDraws", FakeDraws)
    with fake_cuda(COPY) as found:
        yield found


def begun(cuda: FakeCuda, devices: list[int], groups: int) -> StagedRunner:
    """A stage on each of these GPUs, and rows for so many groups."""
    runner = fake_runner(cuda, devices, 1 / GROUP, groups * GROUP, 4096)
    for slot in range(groups * GROUP):
        runner.begin(slot, NewRow(Sampling(), 1, slot, ()))
    return runner


def decoding(rows: int) -> Batch:
    return Batch([LAST] * rows, [1] * rows, list(range(rows)), list(range(rows)))


def landed(cuda: FakeCuda, runner: StagedRunner, batches: list[Batch]) -> list[float]:
    """When each step has been drawn. One is queued before the host waits for the one before."""
    flying: list[Draws] = []
    times = []
    for batch in batches:
        flying.append(runner.run(batch))
        if len(flying) > 1:
            flying.pop(0).wait()
            times.append(cuda.host.time)
    flying.pop().wait()
    return [*times, cuda.host.time]


@pytest.mark.parametrize("steps", [1, 4])  # that are queued together
@pytest.mark.parametrize("devices", [[0, 1], [0, 1, 2], FOUR, [*range(8)]], ids=str)
def test_every_stage_works_on_one_group_after_the_other(cuda, devices, steps):
    stages = len(devices)
    batch = replace(decoding(stages * GROUP), steps=steps)
    times = landed(cuda, begun(cuda, devices, stages), [batch] * 4)
    # As long as a group takes through all stages and back; the stages have the others meanwhile.
    assert times[-1] - times[-2] == pytest.approx(steps * stages * (1 + COPY))


def test_stages_on_one_gpu_hold_up_no_others(cuda):
    """Two on each of two GPUs, with a group on each."""
    times = landed(cuda, begun(cuda, [0, 0, 1, 1], 2), [decoding(2 * GROUP)] * 4)
    assert times[-1] - times[-2] == pytest.approx(2 * (2 + COPY))


@pytest.mark.parametrize("prompts", [1, 8])
@pytest.mark.parametrize(("devices", "chunks"), [([0, 1], 2), (FOUR, 4)], ids=str)
def test_the_chunks_of_prompts_follow_each_other(cuda, devices, chunks, prompts):
    """Also where each of them draws."""
    stages, tokens, slots = len(devices), 4096, list(range(prompts))
    batch = Batch([5] * tokens, [tokens // prompts] * prompts, slots, slots)
    (time,) = landed(cuda, begun(cuda, devices, 1), [batch])
    chunk = tokens / chunks / GROUP
    assert time == pytest.approx((chunks + stages - 1) * chunk + (stages - 1) * COPY)


@pytest.mark.parametrize("devices", [[0, 1], FOUR], ids=str)
def test_rows_that_begin_hold_up_no_group(cuda, devices):
    """One in each step, with a prompt of 8 tokens, in place of one that has ended."""
    stages, steps = len(devices), 40
    rows = stages * GROUP
    runner, flying, times = begun(cuda, devices, stages), deque[Draws](), []
    for step in range(steps):
        new = 37 * step % rows
        runner.begin(new, NewRow(Sampling(), 1, new, ()))
        slots = [*(slot for slot in range(rows) if slot != new), new]
        batch = Batch([LAST] * (rows - 1) + [5] * 8, [1] * (rows - 1) + [8], slots, list(range(rows)))
        flying.append(runner.run(batch))
        if len(flying) > 1:
            flying.popleft().wait()
            times.append(cuda.host.time)
    each = (times[-1] - times[0]) / (len(times) - 1)
    # Each group is as large as the largest, at most: no step waits for a group that comes after its own.
    assert each < stages * (1 + 8 / GROUP)

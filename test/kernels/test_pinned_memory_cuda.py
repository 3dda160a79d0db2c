"""On a GPU the system has no pinned memory for one copy: at the start, in a step, or of a state."""

import gc
import logging
from pathlib import Path

import pytest
from checkpoints import tiny
from cuda_gpu import needs_gpu
from engine_driver import PROMPTS
from engine_faults import Asked
from fault_points import FaultPoints
from pinned_memory import pinned_memory

from rwkv_batch.engine.engine import Engine
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.wire.protocol import Sampling

pytestmark = [*needs_gpu, pytest.mark.many_launches, pytest.mark.thorough]
GREEDY = Sampling(temperature=0.0)


def first_of_each(places: list[str]) -> dict[str, tuple[int, str]]:
    """The first allocation of each place, as the three innermost functions: its number, and all functions."""
    found: dict[str, tuple[int, str]] = {}
    for number, place in enumerate(places, 1):
        frames = [frame for frame in place.split(" < ") if "host_memory.py" not in frame]
        found.setdefault(" < ".join(frames[:3]), (number, place))
    return found


def test_each_place_may_be_refused_once_while_requests_run(tmp_path: Path) -> None:
    """What is asked is answered, or refused for now and answered the next time; all is free in the end."""
    points = FaultPoints()
    with pinned_memory(points):
        asked = Asked(tmp_path, points, device="cuda")
        engine = asked.driver.engine
        asked.run()  # what is made when it is first needed
        points.arm(0, places=True)
        asked.run()
        assert points.places
        first = first_of_each(points.places)
        free, reached = asked.outcome.free, set[str]()
        for number, _ in first.values():
            points.arm(number)
            outcome = asked.run()
            reached.add(points.hit.partition(":")[0])
            assert outcome.free == free, points.hit
            assert all("too little memory" in error for error in outcome.errors), (points.hit, outcome.errors)
        print(f"{len(first)} places, {len(outcome.errors)} refused, in {sorted(reached)}")
        expected = asked.driver.say(PROMPTS[0], sampling=GREEDY)
        assert asked.driver.say(PROMPTS[0], sampling=GREEDY) == expected and engine.drained
        engine.close()


@pytest.mark.parametrize("weights", [None, "int4"])
def test_an_engine_begins_without(weights: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """What is kept lies in other memory, the embedding of int4 on the GPU; a step's numbers end the start."""
    points, checkpoint = FaultPoints(), tiny(vocab=400, width=256)

    def begin() -> None:
        engine = Engine(checkpoint, device="cuda", max_rows=4, l1=1, l2=1, weights=weights)
        (found,) = engine.generate([PROMPTS[0]], max_tokens=3, stop_ids=[])
        assert found.tokens == 3
        engine.close()

    with pinned_memory(points), caplog.at_level(logging.WARNING):
        begin()  # with what is made once, such as the times of GEMMs
        points.arm(0, places=True)
        begin()
        assert points.places
        for number, _ in first_of_each(points.places).values():
            points.arm(number)
            error = None
            try:
                begin()
            except (DeviceError, RuntimeError) as caught:
                error = caught
            assert points.hit
            kept = "pinned_if_possible" in points.hit or "_on_host" in points.hit
            assert (error is None) == kept, (points.hit, error)
            assert kept or "memory" in str(error), points.hit
            del error
            gc.collect()
    assert ("The embedding takes" in caplog.text) == bool(weights)

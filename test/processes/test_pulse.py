"""When an engine counts as late, and when it is ended: by a clock that the test moves."""

from collections.abc import Iterator

import pytest

from rwkv_batch.processes.pulse import Pulse

SECOND = 1.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def looks(self, pulse: Pulse, seconds: float) -> Iterator[tuple[float, str]]:
        """How it is, second after second, with the time since the beginning."""
        began = self.now
        while self.now < began + seconds:
            self.now += SECOND
            yield self.now - began, pulse.look()


def first(looks: Iterator[tuple[float, str]], how: str) -> float | None:
    return next((at for at, look in looks if look == how), None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_one_that_answers_is_asked_again_and_again(clock: Clock):
    pulse = Pulse(30, clock)
    pulse.serve(0.1)
    asked = 0
    for _, look in clock.looks(pulse, 100):
        assert look in ("fine", "ask")
        if look == "ask":
            asked += 1
            pulse.answer()
    assert asked >= 15


def test_silence_is_late_and_then_hung_within_the_limit(clock: Clock):
    pulse = Pulse(30, clock)
    pulse.serve(0.1)
    late = first(clock.looks(pulse, 40), "late")
    assert late is not None and late <= 15
    assert first(clock.looks(pulse, 40), "hung") == 31 - late, "30 seconds after its last answer"


def test_one_that_loads_is_never_asked(clock: Clock):
    pulse = Pulse(30, clock)
    assert {look for _, look in clock.looks(pulse, 1000)} == {"fine"}
    pulse.serve(0.1)
    pulse.rest()
    assert {look for _, look in clock.looks(pulse, 1000)} == {"fine"}


def test_long_steps_are_no_silence(clock: Clock):
    """A large model on a CPU reads for minutes between two looks at its messages."""
    pulse = Pulse(30, clock)
    pulse.serve(step=40.0)
    assert "hung" not in {look for _, look in clock.looks(pulse, 120)}
    assert first(clock.looks(pulse, 200), "hung") is not None


def test_what_was_stopped_together_with_its_engine_goes_on(clock: Clock):
    pulse = Pulse(30, clock)
    pulse.serve(0.1)
    assert first(clock.looks(pulse, 10), "ask")
    clock.now += 3600  # Ctrl-Z, and fg
    assert pulse.look() == "fine"
    pulse.answer()
    assert first(clock.looks(pulse, 40), "ask")


def test_zero_is_never(clock: Clock):
    pulse = Pulse(0, clock)
    pulse.serve(0.1)
    assert pulse.every is None and {look for _, look in clock.looks(pulse, 1000)} == {"fine"}

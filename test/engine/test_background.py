"""Work that makes later steps faster comes between steps, and streams hardly wait for it."""

import pytest
from models_driver import ModelsDriver

from rwkv_batch.engine.serving.background import LONGEST_GAP, QUIET, Background

MS = 0.001


class Machine:
    """A clock, and work of so many pieces that take so many seconds each."""

    def __init__(self, *pieces: float, idle: int = 0) -> None:
        """idle: how many pieces follow that come only while nothing runs."""
        self.now, self.left, self.idle, self.done = 100.0, list(pieces), idle, 0
        self.background = Background(self.improve, lambda: self.now)

    def improve(self, idle: bool) -> bool:
        if not self.left and not (idle and self.idle):
            return False
        if self.left:
            self.now += self.left.pop(0)
        else:
            self.idle -= 1
        self.done += 1
        return True

    def steps(self, count: int, seconds: float) -> list[float]:
        """Run so many steps; the time between the ends of two of them."""
        gaps = []
        for _ in range(count):
            before = self.now
            self.background.begin_step()
            self.now += seconds
            self.background.end_step()
            self.background.between_steps()
            gaps.append(self.now - before)
        return gaps


@pytest.mark.parametrize("step", [3 * MS, 11 * MS, 30 * MS, 50 * MS])
@pytest.mark.parametrize("piece", [5 * MS, 30 * MS, 45 * MS])
def test_all_of_it_is_done_while_rows_run_and_no_gap_is_long(step, piece):
    machine = Machine(*[piece] * 60)
    gaps = machine.steps(3000, step)
    assert machine.done == 60
    assert max(gaps) <= LONGEST_GAP


def test_rows_that_run_keep_half_of_the_time():
    machine = Machine(*[30 * MS] * 1000)
    began = machine.now
    machine.steps(500, 3 * MS)
    assert 0.45 * (machine.now - began) <= 500 * 3 * MS
    assert machine.done > 10


def test_a_piece_never_makes_long_steps_longer():
    machine = Machine(*[30 * MS] * 10)
    assert machine.steps(500, 95 * MS) == pytest.approx([95 * MS] * 500) and machine.done == 0


def test_one_piece_that_took_long_does_not_end_the_work():
    machine = Machine(300 * MS, *[10 * MS] * 5)
    gaps = machine.steps(2000, 10 * MS)
    assert machine.done == 6 and sum(gap > LONGEST_GAP for gap in gaps) == 1


def test_what_waits_for_an_idle_moment_comes_then_and_the_end_is_known():
    machine = Machine(10 * MS, idle=3)
    machine.steps(200, 10 * MS)
    assert machine.done == 1 and machine.background.pending
    while machine.background.pending:
        machine.background.while_idle()
    assert machine.done == 4


@pytest.mark.parametrize("pause", [1 * MS, 20 * MS])
def test_a_client_that_asks_again_at_once_seldom_waits_for_a_piece(pause):
    machine = Machine(*[30 * MS] * 1000)
    machine.background.while_idle()
    began, waited = machine.now, 0
    for _ in range(1000):
        machine.background.begin_step()
        machine.now += 10 * MS
        machine.background.end_step()
        asked = machine.now + pause
        while machine.now < asked:
            machine.now += min(machine.background.due(machine.background.ended), asked - machine.now)
            if machine.now < asked:
                machine.background.while_idle()
        waited += machine.now > asked
    share = 30 * MS * (machine.done - 1) / (machine.now - began)
    assert 0 < share <= 0.1 and waited == machine.done - 1 <= 100


def test_pieces_follow_each_other_when_no_client_asks():
    machine = Machine(*[30 * MS] * 10)
    machine.background.begin_step()
    machine.background.end_step()
    ended = machine.now
    machine.background.while_idle()
    assert machine.background.due(ended) == pytest.approx(ended + QUIET - machine.now)
    machine.now = ended + QUIET
    while machine.background.pending:
        assert machine.background.due(ended) == 0
        machine.background.while_idle()
    assert machine.done == 10


class TestBesideRequests:
    @pytest.fixture
    def driver(self, monkeypatch):
        self.pieces: list[bool] = []  # whether nothing ran
        self.now = 100.0

        def improve(idle: bool) -> bool:
            self.pieces.append(idle)
            self.now += 30 * MS
            return len(self.pieces) < 30

        driver = ModelsDriver("one")
        member = driver.models.member("one")
        member.background = Background(improve, lambda: self.now)
        return driver

    def test_a_request_is_answered_before_the_work_is_done(self, driver):
        assert driver.models.improves_in is not None and not driver.models.busy
        request = driver.add("one", max_tokens=12)
        while not driver.ended(request):
            driver.step()
            driver.models.improve()
        assert driver.text(request) and driver.models.improves_in is not None

    def test_it_goes_on_when_the_rows_have_ended_and_none_follow(self, driver):
        driver.models.improve()
        driver.finish(driver.add("one"))
        assert driver.models.improves_in == pytest.approx(QUIET)
        self.now += QUIET
        while driver.models.improves_in is not None:
            assert not [*driver.models.launch(), *driver.models.land()]  # as the process does
            assert driver.models.improves_in == 0
            driver.models.improve()
        assert len(self.pieces) == 30 and self.pieces[-1]

"""Admission and the step's plan: who runs, with how many tokens, and that nobody starves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_batch.engine.rows.lives import Fresh
from rwkv_batch.engine.scheduling.row import Row, RowDraws
from rwkv_batch.engine.scheduling.scheduler import QueueFull, Scheduler
from rwkv_batch.wire.protocol import GenerateRequest


def row(length: int, name: str = "r") -> Row:
    prompt = [1] * length
    request = GenerateRequest(id=name, prompts=[prompt], max_tokens=4)
    return Row((b"test", name), 0, prompt, request, Fresh(None, None), RowDraws(seed=0))


def feed(plan: list[tuple[Row, int]]) -> None:
    for each, count in plan:
        each.advance(count)


def release(scheduler: Scheduler, done: Row) -> None:
    """It has finished."""
    done.end()
    scheduler.free(scheduler.detach(done))


def test_rows_wait_in_order_and_take_slots_as_they_fall_free():
    scheduler = Scheduler(max_rows=2, prefill_tokens=64, max_waiting=8)
    rows = [row(3) for _ in range(4)]
    scheduler.add(rows)
    assert scheduler.admit() == rows[:2]
    release(scheduler, rows[1])
    assert scheduler.admit() == rows[2:3]
    assert sorted(scheduler.running) == [0, 1]


def test_a_request_that_does_not_fit_the_queue_is_refused_whole():
    scheduler = Scheduler(max_rows=1, prefill_tokens=64, max_waiting=2)
    scheduler.add([row(1), row(1), row(1)])  # one slot is free and two may wait
    with pytest.raises(QueueFull, match="at most 3 rows that may wait now 3 do"):
        scheduler.add([row(1)])
    scheduler.admit()
    assert len(scheduler.waiting) == 2


def test_a_long_prompt_neither_stops_texts_nor_short_prompts():
    scheduler = Scheduler(max_rows=4, prefill_tokens=64, max_waiting=8)
    talking, long, short = row(1), row(4000), row(20)
    scheduler.add([talking])
    scheduler.admit()
    feed(scheduler.plan())
    scheduler.add([long, short])
    scheduler.admit()
    plan = dict(scheduler.plan())
    assert plan == {talking: 1, long: 32, short: 20}
    assert sum(plan.values()) <= 1 + 64


def test_dropped_rows_free_their_slots_wherever_they_are():
    scheduler = Scheduler(max_rows=1, prefill_tokens=64, max_waiting=8)
    mine, other = [row(2, "mine"), row(2, "mine")], row(2, "other")
    scheduler.add([*mine, other])
    scheduler.admit()
    for row_ in scheduler.drop(lambda r: r.key[1] == "mine"):
        release(scheduler, row_)
    assert scheduler.admit() == [other]
    for row_ in scheduler.drop(lambda r: True):
        release(scheduler, row_)
    assert not (scheduler.waiting or scheduler.running)


def test_rows_of_one_session_run_one_after_the_other():
    scheduler = Scheduler(max_rows=4, prefill_tokens=64, max_waiting=2)
    first, second, third, other = (row(2, name) for name in ("1", "2", "3", "other"))
    for turn in (first, second, third):
        turn.life.target = "session"
        scheduler.add([turn])
    scheduler.add([other])
    assert scheduler.admit() == [first, other]
    # Turns that wait for their session wait like others.
    with pytest.raises(QueueFull, match="at most 4 rows that may wait now 2 do, and the request has 3"):
        scheduler.add([row(1), row(1), row(1)])
    scheduler.drop(lambda r: r is second)
    release(scheduler, first)
    assert scheduler.admit() == []
    scheduler.unlock(first.life.target)
    assert scheduler.admit() == [third]
    release(scheduler, third)
    scheduler.unlock(third.life.target)
    assert not scheduler.queues


def test_a_slot_is_spare_if_all_rows_can_run_without_it():
    scheduler = Scheduler(2, 8, 10, slots=3)
    spare = scheduler.spare()
    assert spare is not None and scheduler.spare() is None
    scheduler.add([row(1), row(1)])
    first, second = scheduler.admit()
    assert scheduler.spare() is None
    idle = scheduler.detach(first)
    assert scheduler.spare() is None, "the next row needs a slot"
    scheduler.free(spare)
    assert scheduler.spare() is None
    scheduler.free(idle)
    assert scheduler.spare() is not None
    release(scheduler, second)


def test_a_step_ends_at_each_cut():
    scheduler = Scheduler(max_rows=1, prefill_tokens=64, max_waiting=2)
    long = row(100)
    long.input.cuts = [20, 21, 90]
    scheduler.add([long])
    scheduler.admit()
    ends = []
    while long.input.left:
        feed(scheduler.plan())
        ends.append(long.input.fed)
    assert ends == [20, 21, 85, 90, 100]


def test_rows_that_wait_for_their_state_are_not_run():
    scheduler = Scheduler(max_rows=1, prefill_tokens=64, max_waiting=2)
    loading = row(5)
    scheduler.add([loading])
    scheduler.admit()
    loading.begin_loading()
    assert scheduler.plan() == [] and scheduler.running and not scheduler.runnable
    loading.loaded([1, 2])
    assert scheduler.plan() == [(loading, 7)]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    slots=st.integers(1, 5),
    budget=st.integers(1, 100),
)
def test_every_prompt_is_fed_once_within_the_budget(lengths: list[int], slots: int, budget: int):
    scheduler = Scheduler(slots, budget, max_waiting=100)
    rows = [row(n) for n in lengths]
    scheduler.add(rows)
    for _ in range(sum(lengths) + len(lengths) + 1):
        scheduler.admit()
        plan = scheduler.plan()
        prefill = [(r, count) for r, count in plan if r.input.left]
        assert sum(count for _, count in prefill) <= budget
        assert all(0 < count <= r.input.left for r, count in prefill)
        assert len({r.slot for r, _ in plan}) == len(plan) <= slots
        feed(plan)
        for done in [r for r, _ in plan if not r.input.left]:
            release(scheduler, done)
        if not (scheduler.waiting or scheduler.running):
            break
    assert not (scheduler.waiting or scheduler.running)
    assert [r.input.fed for r in rows] == lengths

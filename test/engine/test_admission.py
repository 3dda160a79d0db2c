"""Many prompts at once: the first rows draw while others wait, and rows that run do not wait for them."""

import pytest
from engine_driver import Driver

from rwkv_batch.engine import admission
from rwkv_batch.engine.admission import Portion
from rwkv_batch.engine.rows.lives import Fresh, SharedPrompt
from rwkv_batch.engine.scheduling.row import Row, RowDraws
from rwkv_batch.runner.protocol import Batch
from rwkv_batch.wire.protocol import GenerateRequest, Progress

ROWS = 24
PARTS = BEGINNINGS = None  # which are not looked at here


def prompts(count: int, length: int = 16) -> list[list[int]]:
    return [[20 + (i + j) % 300 for j in range(length)] for i in range(count)]


def row(length: int, shared: Fresh | None = None) -> Row:
    prompt = [1] * length
    request = GenerateRequest(id="r", prompts=[prompt], max_tokens=4)
    return Row((b"test", "r"), 0, prompt, request, shared or Fresh(PARTS, BEGINNINGS), RowDraws(seed=0))


@pytest.fixture
def driver(monkeypatch) -> Driver:
    monkeypatch.setattr(admission, "PORTION", 4)
    monkeypatch.setattr(admission, "MOST_AT_ONCE", 4)
    return Driver(max_rows=ROWS, prefill_tokens=32)


def steps(driver: Driver, request: str) -> list[tuple[int, int]]:
    """After each step: rows that have drawn something, and rows whose prompt has not been fed."""
    found, drawing = [], set()
    while not found or found[-1] != (ROWS, 0):
        driver.step()
        for event in driver.events.pop(request, []):
            if isinstance(event, Progress):
                drawing |= {delta.row for delta in event.rows if delta.tokens}
        scheduler = driver.engine.scheduler
        waiting = len(scheduler.waiting) + sum(not row.input.fed for row in scheduler.running.values())
        found.append((len(drawing), waiting))
    return found


def test_the_first_rows_draw_while_most_prompts_wait(driver):
    request = driver.add([], prompts=prompts(ROWS), max_tokens=60, flush_tokens=1)
    found = steps(driver, request)
    assert found[0] == (2, ROWS - 2)  # 32 of their tokens are one step
    assert [drawing for drawing, _ in found] == sorted(drawing for drawing, _ in found)


def test_all_prompts_take_as_many_steps_as_if_they_came_in_together(driver, monkeypatch):
    portions = len(steps(driver, driver.add([], prompts=prompts(ROWS), max_tokens=60, flush_tokens=1)))
    monkeypatch.setattr(admission, "PORTION", 1000)
    together = Driver(max_rows=ROWS, prefill_tokens=32)
    whole = len(steps(together, together.add([], prompts=prompts(ROWS), max_tokens=60, flush_tokens=1)))
    assert portions == whole == ROWS * 16 // 32


def test_a_row_that_runs_draws_in_each_step_while_others_come_in(driver, monkeypatch):
    running = driver.add([5, 6, 7], max_tokens=100)
    driver.step()
    batches: list[Batch] = []
    run = driver.engine.runner.run
    monkeypatch.setattr(driver.engine.runner, "run", lambda batch: (batches.append(batch), run(batch))[1])
    driver.add([], prompts=prompts(ROWS - 1), max_tokens=4)
    slot = next(s for s, each in driver.engine.scheduler.running.items() if each.key[1] == running)
    for _ in range(8):
        driver.step()
    assert all(slot in [batch.slots[i] for i in batch.draws] for batch in batches) and len(batches) == 8


def test_rows_of_one_prompt_come_in_together_and_feed_it_once(driver, monkeypatch):
    fed: list[int] = []
    run = driver.engine.runner.run
    monkeypatch.setattr(
        driver.engine.runner, "run", lambda batch: (fed.append(len(batch.tokens)), run(batch))[1]
    )
    driver.add(list(range(20, 50)), n=ROWS, max_tokens=1)
    driver.step()
    assert not driver.engine.scheduler.waiting
    driver.step()
    assert sum(fed) == 29 + ROWS


class TestPortion:
    def taken(self, portion: Portion, rows: list[Row]) -> int:
        return next((i for i, each in enumerate(rows) if not portion.takes(each)), len(rows))

    def test_long_prompts_come_in_by_number(self):
        assert self.taken(Portion(4096), [row(500) for _ in range(1000)]) == admission.PORTION

    def test_short_ones_until_they_fill_a_step(self):
        assert self.taken(Portion(4096), [row(16) for _ in range(1000)]) == 256
        assert self.taken(Portion(4096), [row(1) for _ in range(1000)]) == admission.MOST_AT_ONCE

    def test_rows_that_share_a_prompt_count_once(self):
        rows = [row(100, SharedPrompt(PARTS, BEGINNINGS, 99, 4)) for _ in range(3)]
        several = [row(100, each.life) for each in rows for _ in range(500)]
        assert self.taken(Portion(4096), several) == 1500

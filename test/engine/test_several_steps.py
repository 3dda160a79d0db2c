"""Steps that are launched together give the same rows as steps launched one by one."""

from types import SimpleNamespace

import pytest
from ahead import SeveralRunner, plain_and, without_time

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.scheduling import pace as pacing
from rwkv_batch.engine.scheduling.pace import Pace
from rwkv_batch.runner.protocol import LAST, Batch, Draws, KnownDraws
from rwkv_batch.wire.protocol import Failed, GenerateRequest, Grammar, Progress, Sampling, SessionTurn

pytestmark = pytest.mark.thorough

CAPITAL = "User: What is the capital of France?\n\nAssistant:"
PROMPTS = ["English: Good morning!\n\nChinese:", CAPITAL, "one two three", ""]
END = 0
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    """One that launches step after step, and one that launches several together."""
    return plain_and(SeveralRunner, max_rows=8)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    without_time(monkeypatch)


def said(engine: Engine, *requests: GenerateRequest) -> dict[tuple[str, int], tuple]:
    """Text, tokens, ids, logprobs and the reason of the end of each row."""
    for request in requests:
        engine.add((b"test", request.id), request)
    found: dict[tuple[str, int], tuple] = {}
    rows = sum(len(request.prompts) * request.n for request in requests)
    while sum(row[-1] is not None for row in found.values()) < rows or engine.busy:
        for _, event in engine.step():
            if isinstance(event, Progress):
                for delta in event.rows:
                    text, tokens, ids, entries, _ = found.get((event.id, delta.row), ("", 0, [], [], None))
                    assert found.get((event.id, delta.row), (None,))[-1] is None, "nothing follows the end"
                    found[event.id, delta.row] = (
                        text + delta.text,
                        tokens + delta.tokens,
                        ids + delta.ids,
                        entries + delta.logprobs,
                        delta.finish_reason,
                    )
    return found


def request(id_: str = "same", **options) -> GenerateRequest:
    how = {"prompts": PROMPTS, "max_tokens": 23, "sampling": GREEDY, "stop_ids": [END], "flush_tokens": 1}
    return GenerateRequest(id=id_, **how | options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop_ids": []},
        {"stop_ids": [], "n": 2},
        {"stop_ids": [END, 24281]},
        {"stop_ids": [], "stop_strings": ["a", "。", "\n\n"]},
        {"stop_ids": [], "max_tokens": 6, "return_ids": True},
        {"sampling": Sampling(temperature=1.5, seed=3, presence_penalty=1.0)},
        {"sampling": Sampling(temperature=1.2, seed=4), "flush_tokens": 5},
    ],
    ids=str,
)
def test_the_same_is_said(engines: tuple[Engine, Engine], options: dict):
    runner = engines[1].runner
    runner.steps.clear()
    plain, several = (said(engine, request(**options)) for engine in engines)
    assert plain == several
    assert max(runner.steps) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"stop_ids": []},
        {"stop_ids": [END, 24281]},
        {"stop_ids": [], "stop_strings": ["a", "。", "\n\n"]},
        {"stop_ids": [], "stop_strings": ["France is"]},  # that it draws part of, and then all of
        {"sampling": Sampling(temperature=1.5, seed=3, presence_penalty=1.0)},
    ],
    ids=str,
)
def test_turns_leave_the_same_state(engines: tuple[Engine, Engine], options: dict):
    """What is said in the next turn shows it."""
    runner = engines[1].runner
    for number in range(3):
        runner.steps.clear()
        names = [f"{options} {row}" for row in range(len(PROMPTS))]
        turns = [
            request(name, turn=SessionTurn(source=name, target=name), prompts=[prompt], **options)
            for name, prompt in zip(names, PROMPTS if number == 0 else PROMPTS[::-1], strict=True)
        ]
        plain, several = (said(engine, *turns) for engine in engines)
        assert plain == several
        assert max(runner.steps) > 1


def test_rows_with_few_tokens_left_end_at_their_number(engines: tuple[Engine, Engine]):
    requests = [request(str(n), prompts=PROMPTS[:1], stop_ids=[], max_tokens=n) for n in range(1, 9)]
    plain, several = (said(engine, *requests) for engine in engines)
    assert plain == several
    assert [tokens for _, tokens, *_ in several.values()] == list(range(1, 9))


@pytest.mark.parametrize(
    "options",
    [
        {"top_logprobs": 2},
        {"grammar": Grammar("regex", "[a-z]{1,30}"), "prompts": [CAPITAL]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_needs_each_draw_has_step_after_step(engines: tuple[Engine, Engine], options: dict):
    runner = engines[1].runner
    runner.steps.clear()
    runner.rows.clear()
    beside = request("beside", prompts=PROMPTS[:1], stop_ids=[], max_tokens=60)  # which does not need it
    plain, several = (said(engine, request(stop_ids=[], **options), beside) for engine in engines)
    assert plain == several
    found = list(zip(runner.steps, runner.rows, strict=True))
    assert {steps for steps, rows in found if rows > 1} == {1}
    assert max(runner.steps) > 1, "when the row beside is alone again"


def test_a_row_that_waits_for_each_draw_has_every_second_step(engines: tuple[Engine, Engine]):
    """With more stop ids than the device looks for, it is left out until its last draw is known."""
    runner = engines[1].runner
    runner.steps.clear()
    runner.rows.clear()
    many = list(range(300, 301 + runner.run_ahead_stop_ids))
    waits = request("waits", prompts=PROMPTS[:1], stop_ids=many, max_tokens=20)
    beside = request("beside", prompts=PROMPTS[1:2], stop_ids=[], max_tokens=150)
    plain, several = (said(engine, waits, beside) for engine in engines)
    assert plain == several
    together = next(i for i, steps in enumerate(runner.steps) if steps > 1)
    assert runner.rows[:together].count(2) == 20
    assert max(runner.steps) == 4, "when the row beside is alone"


def test_a_new_row_is_read_in_the_next_step(engines: tuple[Engine, Engine]):
    engine, runner = engines[1], engines[1].runner
    engine.add((b"test", "long"), request("long", prompts=PROMPTS[:1], stop_ids=[], max_tokens=200))
    while 4 not in runner.steps[-1:]:
        engine.step()
    engine.add((b"test", "new"), request("new", prompts=PROMPTS[2:3], stop_ids=[], max_tokens=5))
    engine.step()
    assert runner.steps[-1] == 1
    assert all(len(row.drawn) + row.in_flight for row in engine.scheduler.running.values())
    engine.cancel_frontend(b"test")


def test_counts_are_those_of_tokens(engines: tuple[Engine, Engine]):
    counts = engines[1].counts
    before, gaps = counts.generation_tokens, sum(counts.waits.between_tokens.counts)
    found = said(engines[1], request(stop_ids=[END, 24281], stop_strings=["b"]))
    tokens = sum(tokens for _, tokens, *_ in found.values())
    assert counts.generation_tokens - before == tokens
    first = sum(1 for _, tokens, *_ in found.values() if tokens)
    assert sum(counts.waits.between_tokens.counts) - gaps == tokens - first


@pytest.mark.parametrize("ids", [0, 1, 3, 9])
def test_draws_that_are_too_few_or_too_many_fail_the_request(engines, monkeypatch, ids: int):
    """In steps that are launched alone and together: two rows draw 2 ids, or 8 in four steps."""
    engine, runner = engines[1], engines[1].runner
    real = type(runner).run

    def run(batch: Batch) -> Draws:
        drawn = real(runner, batch)
        return KnownDraws([7] * ids) if batch.steps == several else drawn

    monkeypatch.setattr(runner, "run", run)
    for several in (1, 4):
        name = f"wrong {several}"
        engine.add((b"test", name), request(name, prompts=PROMPTS[:2], stop_ids=[]))
        events = [event for _ in range(30) for _, event in engine.step()]
        assert [event.id for event in events if isinstance(event, Failed)] == [name]
        assert not engine.busy


@pytest.mark.parametrize(
    # Seconds of a step, and of the host for steps that it launches together.
    ("device", "host", "steps"),
    [
        (0.0003, 0.0006, 4),
        (0.0004, 0.0001, 4),  # the host waits much, but all of them are over soon
        (0.001, 0.0011, 2),
        (0.001, 0.0004, 1),
        (0.003, 0.004, 2),
        (0.004, 0.0055, 2),
        (0.004, 0.009, 4),
        (0.007, 0.011, 2),  # 14 ms, for which the host waits little
        (0.009, 0.02, 1),
    ],
)
def test_steps_are_launched_together_while_the_device_waits_for_the_host(
    engines, monkeypatch, device: float, host: float, steps: int
):
    now = ends = 0.0  # of the host's clock; when the device is done
    times = 0.009, 0.02  # seconds of a step: of the device, of the host; these are launched alone
    monkeypatch.setattr(pacing, "monotonic", lambda: now)
    engine, runner = engines[1], engines[1].runner
    real = type(runner).run

    class Late:
        def __init__(self, draws: Draws, end: float) -> None:
            self._draws, self._end = draws, end

        def wait(self) -> list[int]:
            nonlocal now
            now = max(now, self._end)
            return self._draws.wait()

    def run(batch: Batch) -> Late:
        nonlocal now, ends
        now += times[1]
        ends = max(now, ends) + times[0] * batch.steps
        return Late(real(runner, batch), ends)

    monkeypatch.setattr(runner, "run", run)
    said(engine, request("alone", prompts=PROMPTS[:1], stop_ids=[], max_tokens=9))
    times = device, host  # between 12 and 24 ms of a launch it stays as it was
    runner.steps.clear()
    said(engine, request("long", prompts=PROMPTS[:1], stop_ids=[], max_tokens=90))
    assert set(runner.steps[12:20]) == {steps}


@pytest.mark.parametrize(
    # Milliseconds of a step, what part of them the host waits, and how many steps are launched together then.
    "found",
    [
        [(1, 0.0, 1), (1, 0.0, 2), (1, 0.0, 4), (1, 0.9, 4), (1, 0.5, 2), (1, 0.9, 2)],
        [(4, 0.0, 1), (4, 0.0, 2), (7, 0.1, 4), (7, 0.1, 2), (13, 0.1, 2), (30, 0.1, 1)],
    ],
    ids=["the host is fast", "steps become long"],
)
def test_steps_are_launched_alone_again_when(found: list[tuple[float, float, int]], monkeypatch):
    now = 0.0
    monkeypatch.setattr(pacing, "monotonic", lambda: now)
    pace = Pace(4)
    for milliseconds, waits, steps in found:
        assert pace.steps == steps
        took = milliseconds / 1e3 * steps
        now += took * (1 - waits)
        pace.wait()
        now += took * waits
        pace.land(steps)
    assert pace.steps == 1


def test_many_rows_have_no_more_steps_than_the_host_needs(monkeypatch):
    now = 0.0
    monkeypatch.setattr(pacing, "monotonic", lambda: now)
    pace = Pace(4)
    for _ in range(2):
        pace.wait()
        now += 0.0004
        pace.land(1)
    sequence = SimpleNamespace(known_draws_left=9, waits_for_draw=False)

    def steps(rows: int, running: int) -> int:
        batch = Batch([LAST] * rows, [1] * rows, list(range(rows)), list(range(rows)))
        return pace.steps_of(batch, [sequence] * rows, [sequence] * running)

    assert [steps(1, 1), steps(2, 2), steps(1, 2)] == [4, 1, 1]
    for took in (0.03, 0.0002):  # of a host that was busy elsewhere while two launches of a large model ran
        now += took
        pace.wait()
        pace.land(1)
        assert steps(1, 1) < 4

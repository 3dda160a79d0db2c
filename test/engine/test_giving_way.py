"""Rows of batches give their slots to others, and go on later with what they would have drawn."""

import pytest
from ahead import LateRunner
from checkpoints import tiny
from cuda_gpu import needs_gpu
from engine_driver import Driver

from rwkv_batch.bundled import unpack
from rwkv_batch.engine import giving_way
from rwkv_batch.model.checkpoint import from_tensors
from rwkv_batch.runner import backends
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.wire.commands import ListRequests, StopRequest
from rwkv_batch.wire.protocol import Grammar, Progress, Sampling

GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=1.5, seed=7, presence_penalty=0.5, alpha_frequency=0.2, repetition_penalty=1.2)
LONG = 40  # tokens


@pytest.fixture(params=["waits", "queues ahead", pytest.param("on a GPU", marks=needs_gpu)])
def driver(request, monkeypatch, engines: list[Driver]) -> Driver:
    options = {"max_rows": 2, "prefill_tokens": 16}
    if request.param == "on a GPU":
        weights = from_tensors("demo", unpack.tensors())
        # Few idle slots: the engine of the test before may not have given its memory back yet.
        options |= {"device": "cuda", "batch_invariant": True, "l1": 4}
        engines.append(made := Driver(weights=weights, **options))
        return made
    runner = TorchRunner if request.param == "waits" else LateRunner
    monkeypatch.setattr(backends, "TorchRunner", runner)
    engines.append(made := Driver(**options))
    return made


def tokens(driver: Driver, name: str) -> int:
    events = driver.events.get(name, [])
    return sum(row.tokens for event in events if isinstance(event, Progress) for row in event.rows)


def begin(driver: Driver, name: str, count: int = 5) -> None:
    while tokens(driver, name) < count:
        driver.step()


def over(driver: Driver, name: str) -> bool:
    events = [event for event in driver.events.get(name, []) if isinstance(event, Progress)]
    return bool(events) and events[-1].rows[-1].finish_reason is not None


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_row_that_gave_way_says_what_it_would_have_said(driver: Driver, sampling: Sampling):
    fields = {"sampling": sampling, "max_tokens": LONG, "flush_tokens": 1}
    prompts = [list(range(20, 60)), [9, 9, 9]]
    alone = [driver.say(prompt, **fields) for prompt in prompts]
    batch = [driver.add(prompt, batch=True, **fields) for prompt in prompts]
    begin(driver, batch[1])
    urgent = [driver.add([5, 6, number], max_tokens=8) for number in range(5)]
    for name in urgent:
        driver.said(name)
    assert not any(over(driver, name) for name in batch), "the others came first"
    assert [driver.said(name) for name in batch] == alone
    assert driver.engine.counts.waits.preemptions >= 2


def test_only_as_many_give_way_as_are_needed_and_the_latest_first(driver: Driver):
    fields = {"batch": True, "max_tokens": LONG, "flush_tokens": 1, "sampling": GREEDY}
    later, sooner = driver.add([9, 9], **fields), driver.add([8, 8], deadline=1.0, **fields)
    begin(driver, later)
    begin(driver, sooner)
    urgent = driver.add([5, 6], max_tokens=20)
    before = tokens(driver, later)
    driver.said(urgent)
    assert tokens(driver, later) <= before + 2 and tokens(driver, sooner) >= before + 10
    assert driver.engine.counts.waits.preemptions == 1


def test_rows_of_one_kind_go_by_their_deadlines(driver: Driver):
    running = [driver.add([7, 7], max_tokens=LONG, sampling=GREEDY) for _ in range(2)]
    begin_after = {"max_tokens": 4, "sampling": GREEDY, "flush_tokens": 1}
    last = driver.add([1, 2], batch=True, deadline=5.0, **begin_after)
    third = driver.add([1, 3], **begin_after)
    second = driver.add([1, 4], deadline=2000.0, **begin_after)
    first = driver.add([1, 5], deadline=1000.0, **begin_after)
    ended = []
    while len(ended) < 4:
        driver.step()
        ended += [name for name in (first, second, third, last) if over(driver, name) and name not in ended]
    assert ended == [first, second, third, last]
    for name in running:
        driver.said(name)


def test_a_full_queue_of_batches_takes_others_still():
    driver = Driver(max_rows=1, max_waiting=2)
    batch = [driver.add([9, number], batch=True, max_tokens=3) for number in range(3)]
    refused = driver.add([9, 9], batch=True, max_tokens=3)
    taken = driver.add([5, 5], max_tokens=3)
    for name in (*batch, taken):
        assert driver.said(name)[1] == 3
    assert type(driver.events[refused][0]).__name__ == "Rejected"
    driver.engine.close()


def test_one_that_gave_way_can_be_stopped_and_cancelled(driver: Driver):
    fields = {"batch": True, "max_tokens": 10_000, "flush_tokens": 1, "sampling": GREEDY}
    stopped, cancelled = driver.add([9, 9], name="a", **fields), driver.add([8, 8], name="b", **fields)
    begin(driver, stopped)
    begin(driver, cancelled)
    urgent = [driver.add([5, number], max_tokens=10_000, sampling=GREEDY) for number in range(2)]
    while driver.engine.counts.waits.preemptions < 2:
        driver.step()
    listed = driver.ask(ListRequests("list")).requests
    assert {each.name for each in listed} >= {"a", "b"}
    driver.ask(StopRequest("stop", "a"))
    assert over(driver, stopped)
    driver.engine.cancel((b"test", cancelled))
    for name in urgent:
        driver.engine.cancel((b"test", name))
    while driver.engine.busy:
        driver.step()
    assert not [*driver.engine.scheduler.rows()]
    assert driver.say([5, 6], max_tokens=3)[1] == 3


def test_a_bound_text_goes_on_where_it_was(engines: list[Driver]):
    engines.append(driver := Driver(weights=tiny(vocab=65536), max_rows=1))
    fields = {
        "grammar": Grammar("regex", "[a-f]{30}"),
        "sampling": Sampling(temperature=1.0, seed=3),
        "max_tokens": LONG,
        "flush_tokens": 1,
    }
    alone = driver.say("Hex:", **fields)
    name = driver.add("Hex:", batch=True, **fields)
    while tokens(driver, name) < 5:
        if not driver.engine.busy:
            assert driver.woken.wait(30)
        driver.step()
    driver.say([5, 6], max_tokens=4)
    assert driver.said(name) == alone
    assert driver.engine.counts.waits.preemptions == 1


def test_rows_of_one_prompt_give_way_too(driver: Driver):
    fields = {"n": 3, "sampling": SEEDED, "max_tokens": 20, "flush_tokens": 1}

    def texts(name: str) -> dict[int, str]:
        found: dict[int, str] = {}
        ended = 0
        while ended < 3:
            driver.step()
            rows = [row for e in driver.events.get(name, []) if isinstance(e, Progress) for row in e.rows]
            ended = sum(1 for row in rows if row.finish_reason)
        for row in rows:
            found[row.row] = found.get(row.row, "") + row.text
        return found

    prompt = list(range(20, 60))
    alone = texts(driver.add(prompt, **fields))
    name = driver.add(prompt, batch=True, **fields)
    begin(driver, name, 4)
    urgent = [driver.add([5, number], max_tokens=5) for number in range(3)]
    for each in urgent:
        driver.said(each)
    assert texts(name) == alone


def test_no_more_give_way_than_the_host_may_keep(driver: Driver, monkeypatch, engines: list[Driver]):
    monkeypatch.setattr(giving_way, "SHARE", 1 << 60)  # which leaves room for one
    engines.append(driver := Driver(max_rows=4, prefill_tokens=16))
    fields = {"max_tokens": LONG, "flush_tokens": 1, "sampling": GREEDY}
    batch = [driver.add([9, number], batch=True, **fields) for number in range(4)]
    for name in batch:
        begin(driver, name)
    urgent = [driver.add([5, number], **fields) for number in range(4)]
    begin(driver, urgent[0], 10)
    assert driver.engine.counts.waits.preemptions == 1
    for name in batch + urgent:
        assert driver.said(name)[1] == LONG

"""Steps that fail where steps are queued ahead: when they are queued, or when what they drew is
asked for.
"""

import random
import threading
from collections import defaultdict

import pytest
from ahead import LateRunner
from checkpoints import tiny
from msgspec.structs import replace

from rwkv_batch.engine.engine import Engine
from rwkv_batch.runner import backends
from rwkv_batch.runner.protocol import Batch, Draws
from rwkv_batch.wire.protocol import (
    Accepted,
    Event,
    Failed,
    GenerateRequest,
    Progress,
    RowDelta,
    Sampling,
    SessionTurn,
)

KEY = b"test"
WEIGHTS = tiny(vocab=400)
GREEDY = Sampling(temperature=0)


class Failing(LateRunner):
    """`now` and `later`: how many of the next steps fail at once, or are queued and have no draws. `waiting`:
    queued, not asked for.
    """

    now = later = waiting = most = 0

    def run(self, batch: Batch) -> Draws:
        if self.now:
            self.now -= 1
            raise RuntimeError("The step was refused.")
        draws, fails = super().run(batch), self.later > 0
        self.later -= fails
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return Late(self, draws, fails)


class Late:
    """Draws of a step, or none."""

    def __init__(self, of: Failing, draws: Draws, fails: bool) -> None:
        self._of, self._draws, self._fails = of, draws, fails

    def wait(self) -> list[int]:
        self._of.waiting -= 1
        if self._fails:
            raise RuntimeError("The step has failed.")
        return self._draws.wait()

    def logprobs(self) -> list:
        return self._draws.logprobs()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(backends, "TorchRunner", Failing)
    return Engine(WEIGHTS, device="cpu", max_rows=4, prefill_tokens=8, l1=2, l2=64, prefix_cache_mb=0)


def add(engine: Engine, name: str, prompts: list, max_tokens: int, **options) -> None:
    engine.add(
        (KEY, name),
        GenerateRequest(id=name, prompts=prompts, max_tokens=max_tokens, sampling=GREEDY, **options),
    )


def drain(engine: Engine) -> dict[str, list[Event]]:
    """All events by request, until the engine is idle."""
    events: dict[str, list[Event]] = defaultdict(list)
    while engine.busy:
        for (_, name), event in engine.step():
            events[name].append(event)
    return events


@pytest.mark.parametrize("kind", ["now", "later"])
def test_a_failed_step_fails_each_request_it_fed_once_and_no_other(engine: Engine, kind: str):
    add(engine, "over", [[5, 6]], 2, stop_ids=[])
    add(engine, "talks", [[7]], 20, stop_ids=[])
    add(engine, "reads", [list(range(1, 60))] * 2, 1, stop_ids=[])
    engine.step()
    engine.step()  # queued: the last token of the first
    add(engine, "waits", [[9]] * 2, 3, stop_ids=[])
    setattr(engine.runner, kind, 1)
    received = drain(engine)
    assert {name: [type(event) for event in events] for name, events in received.items()} == {
        "over": [Progress],
        "talks": [Failed],
        "reads": [Failed],
        "waits": [Accepted, *[Progress] * len(received["waits"][1:])],
    }
    assert engine.generate([[7]], max_tokens=3)[0].tokens == 3


def test_two_steps_that_fail_are_one_failure(engine: Engine):
    add(engine, "talks", [[7], [8]], 20, stop_ids=[])
    engine.runner.later = 1
    engine.step()
    engine.runner.now = 1
    assert [type(event) for event in drain(engine)["talks"]] == [Failed]


def test_a_finished_request_gets_no_failure_later(engine: Engine):
    first = engine.generate([[7]], max_tokens=3, stop_ids=[], sampling=GREEDY)[0].text[:1]
    add(engine, "stops", [[7]], 20, stop_ids=[], stop_strings=[first])
    engine.step()
    engine.runner.later = 1  # the step that is queued before the stop is known
    assert [type(event) for event in drain(engine)["stops"]] == [Progress]
    assert engine.step() == []
    assert engine.generate([[7]], max_tokens=3)[0].tokens == 3


def test_long_prompts_do_not_pile_up_on_the_device(engine: Engine):
    add(engine, "reads", [list(range(1, 200))], 1, stop_ids=[])
    drain(engine)
    assert engine.runner.most == 2 and engine.runner.waiting == 0


@pytest.mark.parametrize("seed", range(2))
def test_every_request_of_a_crowd_ends_once_and_says_what_it_says_alone(
    monkeypatch: pytest.MonkeyPatch, seed: int
):
    alone = Engine(WEIGHTS, device="cpu", max_rows=1, l1=0, l2=64, prefix_cache_mb=0)
    monkeypatch.setattr(backends, "TorchRunner", Failing)
    woken = threading.Event()
    crowd = Engine(
        WEIGHTS,
        device="cpu",
        max_rows=4,
        prefill_tokens=24,
        l1=1,
        l2=64,
        prefix_cache_mb=0,
        wake=woken.set,
    )
    rng, requests, ends = random.Random(seed), {}, defaultdict(list)
    deltas: dict[str, list[RowDelta]] = defaultdict(list)

    def step() -> None:
        woken.clear()
        for (_, name), event in crowd.step():
            if isinstance(event, Failed):
                ends[name].append("failed")
            elif isinstance(event, Progress):
                assert not ends[name], "text after the end"
                deltas[name] += event.rows
                if sum(delta.finish_reason is not None for delta in deltas[name]) == len(
                    requests[name].prompts
                ):
                    ends[name].append("over")
                    assert spoken(deltas[name]) == replay(requests[name]), requests[name]

    def replay(request: GenerateRequest) -> dict[int, tuple]:
        """On the engine that waits, whose sessions have seen the same turns."""
        alone.add((KEY, "replay"), replace(request, id="replay"))
        rows: list[RowDelta] = []
        while sum(delta.finish_reason is not None for delta in rows) < len(request.prompts):
            rows += [
                delta for _, event in alone.step() if isinstance(event, Progress) for delta in event.rows
            ]
        return spoken(rows)

    for number in range(60):
        request = some_request(f"r{number}", rng)
        requests[request.id] = request
        crowd.add((KEY, request.id), request)
        crowd.runner.now, crowd.runner.later = rng.random() < 0.05, rng.random() < 0.1
        for _ in range(rng.choice([1, 2, 5])):
            step()
    crowd.runner.now = crowd.runner.later = 0
    scheduler = crowd.scheduler
    while crowd.busy or scheduler.waiting or scheduler.running or scheduler.queues:
        assert crowd.busy or woken.wait(30), "the engine waits for nothing"
        step()
    assert {name: len(ends[name]) for name in requests} == dict.fromkeys(requests, 1)
    assert {kind for [kind] in ends.values()} == {"failed", "over"}


def some_request(name: str, rng: random.Random) -> GenerateRequest:
    session = f"s{rng.randrange(3)}"
    turn = rng.choice([None, SessionTurn(source=session, target=session)])
    prompts: list[str | list[int]] = [
        [rng.randrange(1, 400) for _ in range(rng.choice([1, 3, 40]))] for _ in range(1 if turn else 2)
    ]
    sampling = rng.choice(
        [GREEDY, Sampling(seed=rng.randrange(1 << 40)), Sampling(seed=1, presence_penalty=1.0, top_k=40)]
    )
    return GenerateRequest(
        id=name,
        prompts=prompts,
        max_tokens=rng.choice([1, 2, 3, 12]),
        sampling=sampling,
        turn=turn,
        stop_ids=rng.choice([[], rng.sample(range(400), 3), rng.sample(range(400), 40)]),
        stop_strings=rng.choice([[], ["a", "e", "1"]]),
        flush_tokens=rng.choice([0, 1, 3]),
    )


def spoken(deltas: list[RowDelta]) -> dict[int, tuple]:
    """Text, tokens and end of each row."""
    rows = {delta.row: [other for other in deltas if other.row == delta.row] for delta in deltas}
    return {
        row: ("".join(d.text for d in of), sum(d.tokens for d in of), of[-1].finish_reason)
        for row, of in rows.items()
    }

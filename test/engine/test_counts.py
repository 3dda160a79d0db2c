"""What an engine counts is what its events say, no matter what becomes of the requests."""

import random
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from ahead import LateRunner
from engine_driver import WEIGHTS, Driver

from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.metrics import device_time
from rwkv_batch.engine.metrics.device_time import WINDOW, DeviceTime
from rwkv_batch.engine.metrics.histogram import Histogram
from rwkv_batch.engine.scheduling import counts as counting
from rwkv_batch.runner import backends
from rwkv_batch.runner.torch_runner import TorchRunner
from rwkv_batch.state.log.store import Store
from rwkv_batch.wire.commands import PauseRequest, StopRequest
from rwkv_batch.wire.protocol import (
    Accepted,
    Failed,
    GenerateRequest,
    MixturePart,
    Progress,
    Rejected,
    Sampling,
    SessionTurn,
)

MANY_STOPS = [0, *range(200, 210)]  # too many to be known on a device
KEY = b"front"


@pytest.fixture(params=[TorchRunner, LateRunner], ids=["waits", "queues ahead"])
def engine(request, monkeypatch) -> Engine:
    monkeypatch.setattr(backends, "TorchRunner", request.param)
    return Engine(WEIGHTS, device="cpu", max_rows=6, max_waiting=12, prefill_tokens=48, l1=2)


class Ledger:
    """Sends requests to an engine, and keeps what it was told of each row."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.accepted: dict[str, Accepted] = {}
        self.rejected: Counter[str] = Counter()
        self.rows: dict[str, int] = {}
        self.tokens: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.reasons: Counter[str] = Counter()
        self.open: dict[str, set[int]] = {}
        self._number = 0

    def add(self, **fields) -> str:
        self._number += 1
        given = {"prompts": [[5, 6, 7]], "max_tokens": 8, "stop_ids": [], "flush_tokens": 1} | fields
        request = GenerateRequest(id=str(self._number), name=str(self._number), **given)
        self.rows[request.id] = len(request.prompts) * request.n
        self.engine.add((KEY, request.id), request)
        return request.id

    def step(self) -> None:
        for (_, name), event in self.engine.step():
            match event:
                case Accepted():
                    self.accepted[name] = event
                    self.open[name] = set(range(self.rows[name]))
                case Rejected(reason=reason):
                    self.rejected[reason] += 1
                case Failed():
                    self.reasons["error"] += len(self.open.pop(name))
                case Progress(rows=deltas):
                    for delta in deltas:
                        self.tokens[name, delta.row] += delta.tokens
                        if delta.finish_reason:
                            self.reasons[delta.finish_reason] += 1
                            self.open[name].discard(delta.row)

    def cancel(self, name: str) -> None:
        """The reader leaves; what the rows have drawn and not said yet counts all the same."""
        if name not in self.open:  # it is rejected, or nobody knows yet
            return
        for row in self.engine.scheduler.rows():
            if row.key == (KEY, name) and row.leads and row.number in self.open[name]:
                self.tokens[name, row.number] = len(row.drawn)
        self.engine.cancel((KEY, name))
        self.reasons["abort"] += len(self.open[name])
        self.open[name] = set()

    def finish(self) -> None:
        while any(self.open.values()) or self.engine.busy:
            self.step()


def assert_agrees(ledger: Ledger) -> None:
    counts = ledger.engine.counts
    drawn = [tokens for tokens in ledger.tokens.values() if tokens]
    assert counts.requests == Counter(accepted=len(ledger.accepted)) + ledger.rejected
    assert counts.rows == sum(ledger.rows[name] for name in ledger.accepted)
    assert counts.prompt_tokens == sum(sum(a.prompt_tokens) for a in ledger.accepted.values())
    assert counts.cached_tokens == sum(sum(a.cached_tokens) for a in ledger.accepted.values())
    assert counts.finished == ledger.reasons
    assert counts.generation_tokens == sum(drawn)
    assert sum(counts.waits.first_token.counts) == len(drawn)
    assert sum(counts.waits.between_tokens.counts) == sum(drawn) - len(drawn)
    assert min(counts.waits.between_tokens.counts) >= 0
    assert sum(counts.waits.whole.counts) == ledger.reasons["stop"] + ledger.reasons["length"]


def test_counts_are_those_of_the_events(engine):
    ledger, chance = Ledger(engine), random.Random(5)
    wild = Sampling(temperature=1.5, seed=3)
    kinds = [
        {"prompts": [[9] * 5, [300]], "n": 2, "max_tokens": 5},
        {"stop_ids": [0, 5, 6], "sampling": wild, "max_tokens": 40},
        {"stop_ids": MANY_STOPS, "sampling": wild, "max_tokens": 40},
        {"stop_strings": ["a", "e", " "], "sampling": wild, "max_tokens": 40},
        {"max_tokens": 0, "n": 2},
        {"max_tokens": 1, "n": 3},
        {"prompts": [[chance.randrange(1, 400) for _ in range(200)]], "flush_tokens": 0},
        {"prompts": [[chance.randrange(1, 400) for _ in range(100)]] * 2},
        {"turn": SessionTurn(source="anna", target="anna"), "stop_ids": [0, 5], "sampling": wild},
        {"turn": SessionTurn(target="ben"), "max_tokens": 0},
        {"turn": SessionTurn(source="ben", target="ben"), "stop_strings": ["a"], "sampling": wild},
        {"mixture": [MixturePart("", 1.0), MixturePart("", 2.0)], "stop_ids": [0, 5], "sampling": wild},
        {"prompts": [[100_000]]},
        {"turn": SessionTurn(source="nobody", required=True)},
        {"n": 18},
    ]
    for _ in range(12):
        names = []
        for kind in chance.sample(kinds, 5):
            names.append(ledger.add(**kind))
            for _ in range(chance.randrange(4)):
                ledger.step()
        ledger.step()
        if chance.random() < 0.6:
            ledger.cancel(chance.choice(names))
        for _ in range(chance.randrange(30)):
            ledger.step()
    ledger.finish()
    assert_agrees(ledger)
    assert all(ledger.reasons[reason] for reason in ("stop", "length", "abort"))
    assert all(ledger.rejected[reason] for reason in ("invalid", "not_found", "overloaded"))


def test_a_front_end_that_dies_leaves_its_counts(engine):
    ledger = Ledger(engine)
    name = ledger.add(n=3, max_tokens=1000)
    waiting = ledger.add(n=9)
    for _ in range(8):
        ledger.step()
    for row in engine.scheduler.running.values():
        ledger.tokens[row.key[1], row.number] = len(row.drawn)
    engine.cancel_frontend(KEY)
    ledger.reasons["abort"] = 12 - ledger.reasons["length"]
    ledger.open = {name: set(), waiting: set()}
    ledger.finish()
    assert_agrees(ledger)


def test_what_clients_stop_and_pause_has_ended(engine):
    ledger = Ledger(engine)
    names = [ledger.add(max_tokens=1000, turn=turn) for turn in (None, None, SessionTurn(target="s"), None)]
    for _ in range(9):
        ledger.step()
    for name, command in zip(names, (StopRequest, PauseRequest, StopRequest, None), strict=True):
        if command:
            engine.command((KEY, f"of {name}"), command(f"of {name}", name))
    ledger.cancel(names[3])
    ledger.finish()
    assert engine.counts.finished == {"stop": 2, "paused": 1, "abort": 1}
    assert_agrees(ledger)


def test_a_step_that_fails_ends_its_rows(engine, monkeypatch):
    ledger = Ledger(engine)
    ledger.add(n=3, max_tokens=50)
    for _ in range(6):
        ledger.step()
    for row in engine.scheduler.running.values():
        ledger.tokens[row.key[1], row.number] = len(row.drawn)
    drawn = engine.counts.generation_tokens

    def broken(batch):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", broken)
        ledger.step()
    ledger.add(n=2)
    ledger.finish()
    assert engine.counts.finished == {"error": 3, "length": 2}
    assert drawn <= engine.counts.generation_tokens


def test_the_prefix_cache_says_what_it_had(engine):
    prompt = [random.Random(1).randrange(1, 400) for _ in range(300)]
    ledger = Ledger(engine)
    ledger.add(prompts=[prompt])
    ledger.finish()
    assert (engine.counts.cache_queries, engine.counts.cache_hits) == (300, 0)
    ledger.add(prompts=[prompt, prompt])
    ledger.finish()
    hits = engine.counts.cache_hits
    assert engine.counts.cache_queries == 900 and hits > 500
    assert engine.counts.cached_tokens == hits, "as clients were told"
    assert engine.counts.prefill_tokens == 900 - hits
    ledger.add(prompts=[prompt], prefix_cache=False)
    ledger.finish()
    assert engine.counts.cache_queries == 900


def test_times_are_those_between_steps(engine, monkeypatch):
    """Beside a row that runs ahead, one whose draws must be known first has every other step."""
    now, step = 0.0, 1 / 64  # seconds of a clock that goes on once a step
    monkeypatch.setattr(counting, "monotonic", lambda: now)
    ledger = Ledger(engine)
    greedy = Sampling(temperature=0)
    ledger.add(max_tokens=40, sampling=greedy)
    ledger.add(stop_ids=MANY_STOPS, max_tokens=9, sampling=greedy)
    rows = list(engine.scheduler.waiting)
    now += 1.0  # until the first step
    while any(ledger.open.values()) or engine.busy:
        now += step
        ledger.step()
    counts, ahead = engine.counts, isinstance(engine.runner, LateRunner)
    assert [len(row.drawn) for row in rows] == [40, 9]
    seconds = 39 * step + 8 * (2 * step if ahead else step)
    assert counts.waits.between_tokens.total == pytest.approx(seconds)
    assert sum(counts.waits.between_tokens.counts) == 39 + 8
    assert counts.waits.queued.total == pytest.approx(2 * (1.0 + step))
    assert counts.waits.first_token.total == pytest.approx(2 * (1.0 + (2 if ahead else 1) * step))


def test_steps_are_told_apart(engine):
    ledger = Ledger(engine)
    ledger.add(max_tokens=30)
    ledger.step()
    assert engine.counts.steps.kind == "prefill"
    ledger.step()
    assert engine.counts.steps.kind == "decode"
    ledger.add(prompts=[[7] * 100])
    ledger.step()
    assert engine.counts.steps.kind == "mixed"
    ledger.finish()
    rows, tokens = engine.counts.steps.rows, engine.counts.steps.tokens
    assert sum(rows.counts) == sum(tokens.counts)
    # what was fed: prompts, and every draw but the last of each row
    assert tokens.total == engine.counts.prefill_tokens + (30 - 1) + (8 - 1)
    assert engine.counts.prefill_tokens == 3 + 100


def test_a_histogram_puts_a_bound_into_its_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value, 2)
    histogram.observe(1.5, -1)
    assert histogram.values == [4, 3, 2, 13.5]


def test_the_idle_share_is_that_of_the_last_seconds(monkeypatch):
    now = 100.0
    monkeypatch.setattr(device_time, "monotonic", lambda: now)
    time = DeviceTime()
    assert time.idle_share == 1.0
    for _ in range(20):
        now += WINDOW / 5
        time.add(WINDOW / 5)
    assert time.idle_share == pytest.approx(0.0)
    for _ in range(20):
        now += WINDOW / 5
        time.add(WINDOW / 20)
    assert time.idle_share == pytest.approx(0.75)
    now += 100 * WINDOW  # no step, and nobody asks
    assert time.idle_share > 0.98
    now += WINDOW
    assert time.idle_share == 1.0
    assert time.busy == pytest.approx(5 * WINDOW)


def test_a_turn_that_waits_for_its_commit_is_no_stall(engines: list[Driver], tmp_path: Path):
    """The database is away; what needs a step meanwhile, and gets none, still counts."""
    store, free = Store(tmp_path / "sessions.db"), threading.Event()
    commit = store.commit

    def blocked(groups):
        assert free.wait(30)
        return commit(groups)

    free.set()
    store.commit = blocked
    engines.append(driver := Driver(store=store))
    free.clear()
    turn = driver.add([5, 6, 7], session="a", max_tokens=3)
    behind = driver.add([5, 6], session="a", max_tokens=3)
    for _ in range(10):
        driver.step()
    later = time.monotonic() + 100
    assert driver.engine.waited(later) == 0
    other = driver.add([9, 9], max_tokens=3)
    assert driver.engine.waited(later) > 90
    assert driver.said(other)[1] == 3 and driver.engine.waited(later) == 0
    free.set()
    assert [driver.said(name)[1] for name in (turn, behind)] == [3, 3]

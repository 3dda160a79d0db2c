"""Requests that multiply what their adapter changes: each scale is an adapter of its own."""

import itertools
from pathlib import Path

import pytest
from adapter_files import FACTOR
from engine_driver import PROMPTS, WEIGHTS, Driver
from msgspec.structs import replace
from row_adapters import write

from rwkv_batch.ops.low_rank import scaled_digest
from rwkv_batch.state.entries import DiskFailed
from rwkv_batch.state.log.store import Store
from rwkv_batch.state.sql.tables import id_of_model
from rwkv_batch.wire.codec import decode_paused
from rwkv_batch.wire.commands import PAUSED, GetDocument, LoadAdapter, PauseRequest, RemoveAdapter
from rwkv_batch.wire.protocol import CommandReply, Failed, Progress, Rejected, Sampling

GREEDY = Sampling(temperature=0)
NUMBERS = itertools.count()


@pytest.fixture
def loaded(engines: list[Driver], tmp_path: Path):
    file = write(tmp_path, WEIGHTS, "lora", 1)

    def make(factor: float = FACTOR, **options) -> Driver:
        driver = Driver(weights=WEIGHTS, **{"max_adapters": 2, "max_rows": 4} | options)
        engines.append(driver)
        id_ = f"load {next(NUMBERS)}"
        driver.engine.command((b"test", id_), LoadAdapter(id_, "a", str(file), scaling=factor))
        assert isinstance(driver.until(id_, (CommandReply, Rejected))[-1], CommandReply)
        return driver

    return make


def said(driver: Driver, prompt: list[int], scale: float = 1.0, **fields) -> tuple[str, int]:
    return driver.say(prompt, sampling=GREEDY, max_tokens=12, adapter="a", adapter_scale=scale, **fields)


@pytest.mark.parametrize("scale", [0.5, 2.0, -1.0, 0.0])
def test_a_scale_is_that_of_an_adapter_loaded_so(loaded, scale):
    served, expected = loaded(), loaded(FACTOR * scale)
    for prompt in PROMPTS:
        assert said(served, prompt, scale) == said(expected, prompt)


def test_rows_of_more_scales_than_slots_run_together(loaded):
    served, scales = loaded(adapter_cache_mb=0), (1.0, 0.5, 2.0, 4.0)
    asked = {
        scale: served.add(PROMPTS[0], sampling=GREEDY, max_tokens=12, adapter="a", adapter_scale=scale)
        for scale in scales
    }
    for scale, request in asked.items():
        assert served.said(request) == said(loaded(FACTOR * scale), PROMPTS[0])
    texts = {
        served.say(PROMPTS[0], sampling=GREEDY, max_tokens=12, adapter="a", adapter_scale=s) for s in scales
    }
    assert len(texts) > 1


def refusal(driver: Driver, session: str, scale: float) -> Rejected:
    request = driver.add(PROMPTS[0], session, adapter="a", adapter_scale=scale)
    (*_, event) = driver.until(request, (Rejected, Progress))
    assert isinstance(event, Rejected)
    return event


def test_a_session_belongs_to_the_scale_also_after_a_restart(loaded, tmp_path):
    before, expected = loaded(store=Store(tmp_path / "sessions.db")), loaded(FACTOR * 0.5)
    assert said(before, PROMPTS[0], 0.5, session="s") == said(expected, PROMPTS[0], session="s")
    assert refusal(before, "s", 1.0).reason == refusal(before, "s", 2.0).reason == "conflict"
    before.engine.close()
    after = loaded(store=Store(tmp_path / "sessions.db"))
    assert refusal(after, "s", 1.0).reason == refusal(after, "s", 2.0).reason == "conflict"
    assert said(after, PROMPTS[1], 0.5, session="s") == said(expected, PROMPTS[1], session="s")


def test_a_new_scale_asks_nothing_of_the_database_before_a_turn_is_stored(loaded, tmp_path, monkeypatch):
    """It may be full, or away, and its disk slow: the engine's thread does not wait for it."""
    served = loaded(store=Store(tmp_path / "sessions.db"))
    expected = [said(loaded(FACTOR * scale), PROMPTS[0]) for scale in (0.5, 2.0)]

    def full(store: Store, fingerprint: str, vocabulary: int) -> int:
        raise DiskFailed("The disk of the database is full.")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "model_id", full)
        assert [said(served, PROMPTS[0], scale) for scale in (0.5, 2.0)] == expected
        assert said(served, PROMPTS[0], 2.0, session="s") == expected[1]
    served.engine.close()
    after = loaded(store=Store(tmp_path / "sessions.db"))
    assert refusal(after, "s", 0.5).reason == "conflict"
    said(after, PROMPTS[1], 2.0, session="s")


def test_cached_prefixes_belong_to_the_scale(loaded):
    long = [(7 * i) % 390 + 1 for i in range(300)]
    served = loaded(prefix_cache_mb=16)
    for scale in (1.0, 0.5, 1.0, 0.5):
        assert said(served, long, scale) == said(loaded(FACTOR * scale), long)


def test_scales_that_nobody_uses_are_forgotten_and_work_again(loaded, tmp_path, monkeypatch):
    """Clients choose them, and an engine lives for months."""
    monkeypatch.setattr("rwkv_batch.engine.rows.adapters.MOST_SCALES", 2)
    served = loaded(store=Store(tmp_path / "sessions.db"), prefix_cache_mb=16, adapter_cache_mb=0)
    expected = said(loaded(FACTOR * 0.5), PROMPTS[0], session="s")
    long = [(7 * i) % 390 + 1 for i in range(300)]
    assert said(served, PROMPTS[0], 0.5, session="s") == expected
    scales = [float(scale) for scale in range(2, 22)]
    texts = [said(served, long, scale) for scale in (0.5, *scales)]
    known, (info,) = served.engine.pool.adapted, served.engine.adapters.infos("a")
    models = [f"{known.plain.fingerprint}+{scaled_digest(info.digest, scale)}" for scale in scales]
    assert sum(known.serves(id_of_model(model)) for model in models) < len(scales) // 2
    assert [said(served, long, scale) for scale in (0.5, *scales)] == texts
    assert refusal(served, "s", 2.0).reason == "conflict"
    other = loaded(FACTOR * 0.5)
    said(other, PROMPTS[0], session="s")
    assert said(served, PROMPTS[1], 0.5, session="s") == said(other, PROMPTS[1], session="s")


def test_a_paused_request_goes_on_in_its_scale(loaded, tmp_path):
    served, expected = loaded(store=Store(tmp_path / "sessions.db")), loaded(FACTOR * 0.5)
    fields = {"sampling": GREEDY, "max_tokens": 12, "flush_tokens": 1, "adapter": "a", "adapter_scale": 0.5}
    request = served.add(PROMPTS[0], name="tale", **fields)
    while not served.text(request):
        served.step()
    served.ask(PauseRequest("pause", "tale"))
    first = served.said(request)[0]
    paused = decode_paused(served.ask(GetDocument("get", PAUSED + "tale")).data)
    served.engine.add((b"test", "again"), replace(paused, id="again"))
    assert first + served.said("again")[0] == said(expected, PROMPTS[0])[0]


def test_an_unloaded_adapter_takes_its_scales_along(loaded):
    served = loaded()
    running = served.add(PROMPTS[0], sampling=GREEDY, max_tokens=12, adapter="a", adapter_scale=0.5)
    served.until(running, (Progress,))
    served.ask(RemoveAdapter("r", "a"))
    assert served.said(running) == said(loaded(FACTOR * 0.5), PROMPTS[0])
    request = served.add(PROMPTS[0], adapter="a", adapter_scale=0.5)
    (*_, event) = served.until(request, (Rejected, Progress))
    assert isinstance(event, Rejected) and "There is no adapter a" in event.message


def test_numbers_that_the_dtype_cannot_hold_fail_the_request(loaded):
    served = loaded(1e37)
    request = served.add(PROMPTS[0], adapter="a", adapter_scale=100.0)
    (*_, event) = served.until(request, (Failed, Rejected, Progress))
    assert isinstance(event, Failed) and "100.0 times its numbers" in event.message

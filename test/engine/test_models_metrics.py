"""What several models have counted, while they come and go."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models_driver import WEIGHTS, ModelsDriver, engine

from rwkv_batch.engine.metrics.device_time import DeviceTime
from rwkv_batch.engine.serving.report import of_process
from rwkv_batch.engine.serving.shares import Shares
from rwkv_batch.ops.device import StepClock
from rwkv_batch.wire.commands import GetMetrics
from rwkv_batch.wire.metrics import ENGINE
from rwkv_batch.wire.protocol import CommandReply, SessionTurn

Figures = dict[tuple[str, ...], list[float]]  # by family and labels


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[ModelsDriver]:
    made = ModelsDriver("one", "two", folder=tmp_path)
    yield made
    made.models.close()


def ask(driver: ModelsDriver) -> Figures:
    driver.events.pop("metrics", None)
    reply = driver.ask(GetMetrics("metrics"))
    assert isinstance(reply, CommandReply)
    figures = {(series.family, *series.labels): series.values for series in reply.metrics}
    assert len(figures) == len(reply.metrics), "each series is there once"
    for (family, *labels), values in figures.items():
        assert len(labels) == len(ENGINE[family].labels)
        assert len(values) == (len(ENGINE[family].bounds) + 2 if ENGINE[family].bounds else 1)
    return figures


def counters(figures: Figures) -> Figures:
    return {key: values for key, values in figures.items() if ENGINE[key[0]].kind != "gauge"}


def number(figures: Figures, *key: str) -> float:
    return figures[key][0]


def end(driver: ModelsDriver, old) -> None:
    """Close a model that has ended in the way of ModelChanges."""
    while not old.drained.is_set():
        driver.models.post(lambda: None)  # which wakes them
        driver.step()
    old.close()
    driver.models.flush(old)
    old.forget()


def test_each_model_has_its_series(driver):
    driver.finish(driver.add("one", max_tokens=5), driver.add("two", max_tokens=7, n=2))
    driver.finish(driver.add("two", turn=SessionTurn(target="s")))
    figures = ask(driver)
    assert {key[0] for key in figures} == set(ENGINE), "every metric of the engine's table"
    of_models = {key[1] for key in figures if ENGINE[key[0]].labels[:1] == ("model_name",)}
    assert of_models == {"one", "two"}
    assert number(figures, "generation_tokens", "one") == 5
    assert number(figures, "generation_tokens", "two") == 2 * 7 + 12
    assert number(figures, "models_loaded") == 2
    assert [number(figures, "sessions", "two", tier) for tier in ("L1", "L2", "L3")] == [1, 0, 0]
    assert number(figures, "session_commits", "two") == 1 and number(figures, "session_commits", "one") == 0
    times = [values for key, values in figures.items() if key[0] == "step_time_seconds"]
    steps = [values for key, values in figures.items() if key[0] == "batch_size"]
    assert sum(sum(values[:-1]) for values in times) == sum(sum(values[:-1]) for values in steps) > 0
    assert sum(values[-1] for values in times) == pytest.approx(number(figures, "device_busy_seconds", "cpu"))


def test_rows_that_wait_and_run_are_told_apart(driver):
    turn = SessionTurn(source="s", target="s")
    ids = [driver.add("one", max_tokens=50, turn=turn) for _ in range(2)]
    ids += [driver.add("one", prompts=[[5]] * 6, max_tokens=50)]
    for _ in range(4):
        driver.step()
    figures = ask(driver)
    assert number(figures, "num_requests_running", "one") == 4
    assert number(figures, "num_requests_waiting", "one") == 4
    driver.finish(*ids)
    figures = ask(driver)
    rows = [number(figures, f"num_requests_{state}", "one") for state in ("running", "waiting")]
    assert rows == [0, 0]


def test_memory_has_a_purpose(driver):
    figures = ask(driver)
    for name, it in ((name, driver.models.member(name).engine) for name in ("one", "two")):
        purposes = ("weights", "states", "sessions")
        of = {purpose: number(figures, "device_memory_bytes", name, purpose) for purpose in purposes}
        states = it.runner.states
        assert of["weights"] == 4 * WEIGHTS[name].parameters
        assert of["states"] + of["sessions"] == len(states) * states.shape.nbytes
        assert of["states"] * len(states) == (of["states"] + of["sessions"]) * it.info.slots
    assert 0 < number(figures, "device_free_bytes", "cpu") < number(figures, "device_total_bytes", "cpu")


def test_a_swap_loses_no_counts(driver, monkeypatch):
    spent = Shares.spent  # every step counts alike, so that the models take turns
    monkeypatch.setattr(Shares, "spent", lambda shares, member, seconds: spent(shares, member, 1.0))
    driver.finish(driver.add("one", turn=SessionTurn(target="s")), driver.add("two"))
    running = driver.add("one", max_tokens=60)
    driver.step()
    before, old = counters(ask(driver)), driver.models.member("one")
    driver.models.take_over("one", engine("one", driver.woken.set, model=WEIGHTS["two"]))
    driver.finish(driver.add("one", max_tokens=9))
    during = ask(driver)
    assert number(during, "num_requests_running", "one") == 1, "that of the old weights"
    end(driver, old)
    assert driver.ended(running)
    driver.models.attach("one", None)
    driver.finish(driver.add("one", max_tokens=1))
    after = ask(driver)
    for smaller, larger in ((before, counters(during)), (counters(during), counters(after))):
        assert set(smaller) == set(larger)
        for key, values in smaller.items():
            assert all(a <= b for a, b in zip(values, larger[key], strict=True)), key
    assert number(after, "generation_tokens", "one") == 12 + 60 + 9 + 1
    assert number(after, "request_rows", "one") == number(after, "request_success", "one", "length") == 4
    assert number(after, "session_commits", "one") == 1
    alone = driver.models.member("one").engine
    assert number(after, "device_memory_bytes", "one", "weights") == alone.weight_bytes


def test_there_are_metrics_while_no_model_runs(driver):
    """Where the device does not hold both models of a swap, and the second is not there yet."""
    driver.finish(driver.add("one", max_tokens=5))
    both = [driver.models.member(name) for name in ("one", "two")]
    for member in both:
        driver.models.hold(member.info.model)
    for member in both:
        end(driver, member)
    figures = ask(driver)
    assert number(figures, "generation_tokens", "one") == 5
    assert number(figures, "models_loaded") == 2
    assert not {("sessions", "one", "L1"), ("device_memory_bytes", "one", "weights")} & set(figures)
    for name in ("one", "two"):
        driver.models.take_over(name, engine(name, driver.woken.set))
    assert ("sessions", "one", "L1") in ask(driver)


def test_a_model_that_is_removed_has_no_series(driver):
    driver.finish(driver.add("two"))
    end(driver, driver.models.retire("two"))
    figures = ask(driver)
    assert "two" not in {label for key in figures for label in key[1:]}
    assert number(figures, "models_loaded") == 1


def test_every_device_of_a_model_in_stages_has_its_series():
    """Two names of the same processor stand for two devices; the last stage is on the first one's."""
    first, second = torch.device("cpu"), torch.device("cpu", 0)
    clock = StepClock([first, second, first])
    clock.start()
    clock.stop("decode", 2)
    ((kind, seconds, steps),) = clock.read()
    assert (kind, steps, len(seconds)) == ("decode", 2, 2)
    times = {device: DeviceTime() for device in clock.devices}
    times[second].add(3.0)
    series = of_process(times, 1).series
    for family in ("device_free_bytes", "device_total_bytes", "device_idle_ratio"):
        assert [each.labels for each in series if each.family == family] == [["cpu"], ["cpu:0"]]
    busy = {each.labels[0]: each.values for each in series if each.family == "device_busy_seconds"}
    assert busy == {"cpu": [0.0], "cpu:0": [3.0]}

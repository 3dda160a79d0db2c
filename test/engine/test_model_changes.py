"""Models that are loaded, swapped and removed while others serve."""

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ahead import LateRunner
from changing_driver import ChangingDriver
from checkpoints import write_pth
from cuda_gpu import needs_gpu
from models_driver import PROMPT, WEIGHTS, alone

from rwkv_batch.engine.serving import changes
from rwkv_batch.engine.serving.models import Member
from rwkv_batch.model.checkpoint import load
from rwkv_batch.ops.device import DeviceError, StepClock
from rwkv_batch.runner import backends
from rwkv_batch.state.entries import StoreError
from rwkv_batch.wire.commands import ListSessions, LoadModel, RemoveModel, StopRequest
from rwkv_batch.wire.protocol import Accepted, CommandReply, Failed, Rejected, SessionTurn
from rwkv_batch.wire.supervision import ModelDefaults, Serving

LONG = 150  # tokens of a row that runs through a swap


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_pth(folder / f"{name}.pth", dict(w.tensors)) for name, w in WEIGHTS.items()}


@pytest.fixture(scope="module")
def long_texts() -> dict[str, str]:
    return {name: alone(PROMPT, weights, LONG) for name, weights in WEIGHTS.items()}


@pytest.fixture
def driver(tmp_path, files) -> Iterator[ChangingDriver]:
    made = ChangingDriver("one", folder=tmp_path, files=files)
    yield made
    made.settle()
    made.models.close()


def test_a_loaded_model_answers_beside_the_first(driver, files, long_texts):
    running = driver.add("one", max_tokens=LONG)
    driver.step()
    reply = driver.change(LoadModel("l", str(files["two"]), "two", defaults=ModelDefaults(0.5)))
    assert isinstance(reply, CommandReply) and not reply.note
    assert [info.model for info in reply.models] == driver.served() == ["one", "two"]
    assert reply.models[1].defaults.temperature == 0.5
    asked = driver.add("two", max_tokens=LONG)
    driver.finish(running, asked)
    assert [driver.text(running), driver.text(asked)] == [long_texts["one"], long_texts["two"]]
    stages = [loading.stage for told in driver.told for loading in told.loading]
    assert stages[0] == "reading" and stages[-1] == "preparing"
    driver.settle()
    assert driver.told[-1] == Serving(driver.models.infos)


def test_a_swap_under_streams_fails_none_and_mixes_no_weights(driver, files, long_texts):
    old = [driver.add("one", max_tokens=LONG) for _ in range(3)]
    member = driver.models.member("one")
    states = weakref.ref(member.engine.runner.states)
    driver.step()
    driver.begin(LoadModel("l", str(files["two"]), "one"))
    driver.wait(lambda: driver.ended("l"))
    assert not any(map(driver.ended, old))
    new = [driver.add("one", max_tokens=LONG), driver.add("", max_tokens=LONG)]
    driver.finish(*old, *new)
    assert {driver.text(id_) for id_ in old} == {long_texts["one"]}
    assert {driver.text(id_) for id_ in new} == {long_texts["two"]}
    for ids, name in ((old, "one"), (new, "two")):
        accepted = [driver.events[id_][0] for id_ in ids]
        assert all(isinstance(event, Accepted) for event in accepted)
        assert {event.fingerprint for event in accepted} == {WEIGHTS[name].fingerprint}
    driver.settle()
    assert states() is None, "the old model's memory is free"


def test_a_session_waits_for_its_database_and_is_not_continued_by_other_weights(driver, files):
    turn = SessionTurn(source="s", target="s")
    driver.finish(driver.add("one", turn=turn))
    running = driver.add("one", max_tokens=LONG)
    driver.step()
    driver.change(LoadModel("l", str(files["two"]), "one"))
    assert not driver.ended(running)
    waiting, fresh = driver.add("one", turn=turn), driver.add("one", turn=SessionTurn(target="t"))
    stateless = driver.add("one")
    driver.finish(stateless)
    assert waiting not in driver.events and fresh not in driver.events
    listed = driver.ask(ListSessions("before", to_model="one"))
    assert isinstance(listed, CommandReply) and [s.key for s in listed.sessions] == ["s"]
    driver.finish(running, waiting, fresh)
    (*_, refused) = driver.events[waiting]
    assert isinstance(refused, Rejected) and refused.reason == "conflict" and "model" in refused.message
    assert driver.text(fresh) == driver.text(stateless)
    reply = driver.ask(ListSessions("s", to_model="one"))
    assert isinstance(reply, CommandReply) and {s.key for s in reply.sessions} == {"s", "t"}


def test_a_request_of_the_old_weights_can_be_stopped(driver, files):
    running = driver.add("one", max_tokens=LONG, name="tale")
    driver.step()
    driver.change(LoadModel("l", str(files["two"]), "one"))
    stopped = driver.ask(StopRequest("stop", "tale", to_model="one"))
    assert isinstance(stopped, CommandReply) and [r.name for r in stopped.requests] == ["tale"]
    driver.finish(running)
    assert len(driver.text(running)) < LONG


def test_a_database_that_cannot_go_over_leaves_the_model_serving(driver, files, monkeypatch):
    def broken(config, share):
        raise StoreError("The disk is gone.")

    monkeypatch.setattr(changes, "open_store", broken)
    driver.change(LoadModel("l", str(files["two"]), "one"))
    turn = driver.add("one", turn=SessionTurn(target="s"))
    driver.finish(turn)
    assert driver.text(turn)
    driver.settle()


def test_a_client_that_leaves_does_not_wait_for_the_database(driver, files):
    running = driver.add("one", max_tokens=LONG)
    driver.step()
    driver.change(LoadModel("l", str(files["two"]), "one"))
    gone, stays = (driver.add("one", turn=SessionTurn(target=target)) for target in ("gone", "stays"))
    driver.models.cancel((b"test", gone))
    driver.finish(running, stays)
    driver.settle()
    assert gone not in driver.events
    reply = driver.ask(ListSessions("s", to_model="one"))
    assert isinstance(reply, CommandReply) and [s.key for s in reply.sessions] == ["stays"]


def test_where_memory_does_not_hold_both_the_old_model_ends_first(driver, files, long_texts, monkeypatch):
    build, refused = changes.load_model, threading.Event()

    def small(weights, config):
        if not refused.is_set():
            refused.set()
            raise DeviceError("The weights do not fit.")
        assert driver.ended(running), "the old model has ended its row"
        return build(weights, config)

    monkeypatch.setattr(changes, "load_model", small)
    running = driver.add("one", max_tokens=LONG)
    driver.step()
    driver.begin(LoadModel("l", str(files["two"]), "one"))
    driver.wait(lambda: driver.holding)
    waiting = driver.add("one", max_tokens=LONG)
    driver.finish("l", running, waiting)
    reply = driver.events["l"][-1]
    assert isinstance(reply, CommandReply) and "memory" in reply.note
    assert driver.text(running) == long_texts["one"]
    assert driver.text(waiting) == long_texts["two"]


def test_a_client_leaves_while_there_is_no_model(driver, files, monkeypatch):
    """The old one has ended, as memory does not hold both, and the new one is not there yet."""
    build, calls, left = changes.load_model, iter([DeviceError("The weights do not fit.")]), threading.Event()
    alone_now = threading.Event()

    def small(weights, config):
        if error := next(calls, None):
            raise error
        alone_now.set()
        driver.woken.set()
        assert left.wait(30)
        return build(weights, config)

    monkeypatch.setattr(changes, "load_model", small)
    driver.begin(LoadModel("l", str(files["two"]), "one"))
    driver.wait(alone_now.is_set)
    asked, stays = driver.add("one"), driver.add("one")
    driver.models.cancel((b"test", asked), closes=True)
    left.set()
    driver.finish("l", stays)
    (event,) = driver.events[asked]
    assert isinstance(event, Failed) and "cancelled" in event.message
    assert driver.text(stays) == alone(PROMPT, WEIGHTS["two"])


@pytest.mark.parametrize("failure", [DeviceError("The weights do not fit."), RuntimeError("broken")])
def test_where_it_cannot_run_alone_either_the_old_model_comes_back(
    driver, files, long_texts, monkeypatch, failure
):
    build, failures = changes.load_model, [failure, DeviceError("The memory does not hold both.")]

    def small(weights, config):
        if weights.fingerprint == WEIGHTS["two"].fingerprint:
            raise failures.pop()
        return build(weights, config)

    monkeypatch.setattr(changes, "load_model", small)
    reply = driver.change(LoadModel("l", str(files["two"]), "one"))
    assert isinstance(reply, Rejected if isinstance(failure, DeviceError) else Failed)
    assert reply.message.endswith(".") and ("do not fit" in reply.message or "RuntimeError" in reply.message)
    asked = driver.add("one", max_tokens=LONG)
    driver.finish(asked)
    assert driver.text(asked) == long_texts["one"]


def test_a_removed_model_ends_its_rows_and_takes_no_more(driver, files, long_texts):
    driver.change(LoadModel("l", str(files["two"]), "two"))
    running = driver.add("one", max_tokens=LONG)
    driver.step()
    driver.begin(RemoveModel("r", "one"))
    driver.wait(lambda: len(driver.served()) == 1)
    refused, default = driver.add("one"), driver.add("", max_tokens=LONG)
    driver.finish("r", running, refused, default)
    assert isinstance(driver.events["r"][-1], CommandReply)
    assert isinstance(driver.events[refused][-1], Rejected)
    assert driver.text(running) == long_texts["one"]
    assert driver.text(default) == long_texts["two"], "the next one is the default"


class TestOverADeviceThatIsAhead:
    """Behind the draw that ends the last row of a model is a step without that row, of which nobody waits."""

    @pytest.fixture
    def driver(self, tmp_path, monkeypatch) -> Iterator[ChangingDriver]:
        monkeypatch.setattr(backends, "TorchRunner", LateRunner)
        made = ChangingDriver("one", "two", folder=tmp_path)
        yield made
        made.models.close()

    @pytest.fixture
    def stop_id(self, driver) -> int:
        """What a row draws that has run for a while."""
        first = driver.add("one", max_tokens=60, return_ids=True)
        driver.finish(first)
        ids = [id_ for event in driver.events[first][1:] for row in event.rows for id_ in row.ids]
        found = max(ids, key=ids.index)
        assert ids.index(found) > 20
        return found

    @pytest.mark.parametrize("kind", ["swapped", "removed"])
    @pytest.mark.parametrize("end", ["stop id", "cancelled"])
    def test_a_model_ends_with_its_last_row(self, driver, files, stop_id, kind, end):
        running = driver.add("one", max_tokens=LONG, stop_ids=[stop_id])
        driver.step()
        swap = kind == "swapped"
        driver.begin(LoadModel("c", str(files["two"]), "one") if swap else RemoveModel("c", "one"))
        driver.wait(lambda: driver.ended("c") if swap else len(driver.served()) == 1)
        assert not driver.ended(running)
        if end == "cancelled":
            driver.models.cancel((b"test", running))
            driver.woken.set()
        else:
            driver.finish(running)
        driver.wait(lambda: driver.ended("c") and (not swap or driver.drained()))
        assert isinstance(driver.events["c"][-1], CommandReply)

    def test_where_memory_does_not_hold_both_the_new_one_follows(self, driver, files, stop_id, monkeypatch):
        refusals = [DeviceError("The weights do not fit.")]
        build = changes.load_model

        def small(weights, config):
            if refusals:
                raise refusals.pop()
            return build(weights, config)

        monkeypatch.setattr(changes, "load_model", small)
        running = driver.add("one", max_tokens=LONG, stop_ids=[stop_id])
        driver.step()
        driver.begin(LoadModel("c", str(files["two"]), "one"))
        driver.wait(lambda: driver.holding)
        driver.finish(running)
        driver.wait(lambda: driver.ended("c"))
        reply = driver.events["c"][-1]
        assert isinstance(reply, CommandReply) and "memory" in reply.note


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [("one", "invalid", "only model"), ("nobody", "not_found", "here; this server has one.")],
)
def test_a_model_that_cannot_be_removed_stays(driver, name, reason, words):
    reply = driver.change(RemoveModel("r", name))
    assert isinstance(reply, Rejected) and reply.reason == reason and words in reply.message
    assert driver.served() == ["one"]


def test_no_more_models_are_loaded_than_there_are_streams_for(driver, files, monkeypatch):
    monkeypatch.setattr(changes, "MOST_LOADED", 2)
    for name in ("two", "three"):
        assert isinstance(driver.change(LoadModel(name, str(files["two"]), name)), CommandReply)
    refused = driver.change(LoadModel("l", str(files["two"]), "four"))
    assert isinstance(refused, Rejected) and "2 models" in refused.message
    driver.change(RemoveModel("r", "two"))
    assert isinstance(driver.change(LoadModel("m", str(files["two"]), "four")), CommandReply)
    assert driver.served() == ["one", "three", "four"]


def test_a_server_that_stops_stores_what_a_replaced_model_has(files, tmp_path, monkeypatch):
    driver = ChangingDriver("one", folder=tmp_path, token_log=False)
    driver.finish(driver.add("one", turn=SessionTurn(target="s")))
    close, over, waits = Member.close, threading.Event(), []

    def by_the_server(self):
        """Whoever loads the other model comes no further."""
        if threading.current_thread() is threading.main_thread():
            return close(self)
        waits.append(threading.current_thread())
        over.wait()

    monkeypatch.setattr(Member, "close", by_the_server)
    driver.change(LoadModel("l", str(files["two"]), "one"))
    driver.models.close()
    again = ChangingDriver("one", folder=tmp_path, token_log=False)
    reply = again.ask(ListSessions("s"))
    assert isinstance(reply, CommandReply) and [s.key for s in reply.sessions] == ["s"]
    again.models.close()
    over.set()
    for thread in waits:
        thread.join(60)  # a deadline
        assert not thread.is_alive(), "it waits for models that are closed"


class Evil:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def spoilt(path: Path, kind: str, good: Path) -> Path:
    """A file that cannot be served."""
    if kind == "truncated":
        path.write_bytes(good.read_bytes()[:-2000])
    elif kind == "code":
        torch.save({"emb.weight": torch.zeros(2, 2), "x": Evil(path.with_suffix(".ran"))}, path)
    elif kind == "family":
        torch.save({"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}, path)
    elif kind == "not finite":
        tensors = torch.load(good)
        tensors["emb.weight"][3, 3] = float("nan")
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("kind", ["truncated", "code", "family", "not finite", "missing"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_a_bad_file_is_one_sentence_and_changes_nothing(driver, files, long_texts, tmp_path, kind, name):
    running = driver.add("one", max_tokens=LONG)
    driver.step()
    reply = driver.change(LoadModel("l", str(spoilt(tmp_path / "bad.pth", kind, files["two"])), name))
    assert isinstance(reply, Rejected) and reply.reason == "invalid"
    assert reply.message.endswith(".") and "\n" not in reply.message and "bad" in reply.message
    assert not (tmp_path / "bad.ran").exists()
    again = driver.add("one", max_tokens=LONG)
    driver.finish(running, again)
    assert [driver.text(running), driver.text(again)] == [long_texts["one"]] * 2
    assert driver.served() == ["one"]


class TestOnAGpu:
    """Where a model is warmed up on a stream of its own, beside steps and their graphs."""

    pytestmark = needs_gpu

    @staticmethod
    def rows(driver: ChangingDriver, model: str) -> list[str]:
        return [driver.add(model, prompt, max_tokens=LONG) for prompt in ([5, 6, 7], [300, 2], [9] * 40)]

    def test_a_swap_under_streams_changes_no_text(self, files, tmp_path):
        texts = {}
        for name in WEIGHTS:
            alone = ChangingDriver(name, device="cuda")
            ids = self.rows(alone, name)
            alone.finish(*ids)
            texts[name] = [alone.text(id_) for id_ in ids]
        driver = ChangingDriver("one", folder=tmp_path, device="cuda")
        driver.begin(LoadModel("l", str(files["two"]), "one"))
        old: list[str] = []
        while not driver.ended("l"):  # rows run all the time while the other model is built and warmed up
            if all(map(driver.ended, old)):
                old += self.rows(driver, "one")
            driver.step()
        new = self.rows(driver, "one")
        driver.finish(*old, *new)
        # The last of `old` may be the new model's: it has taken over before "l" is answered.
        names = {weights.fingerprint: name for name, weights in WEIGHTS.items()}
        served = [names[driver.events[id_][0].fingerprint] for id_ in old + new]
        assert served[:3] == ["one"] * 3 and served[-3:] == ["two"] * 3
        expected = [texts[name][i % 3] for i, name in enumerate(served)]
        assert [driver.text(id_) for id_ in old + new] == expected
        driver.settle()
        driver.models.close()

    def test_the_memory_of_what_was_swapped_is_free_again(self, files):
        driver = ChangingDriver("one", device="cuda", l1=0)
        held = []
        for number in range(6):  # cuBLAS keeps a workspace of 33 MB for each stream of which it is used
            driver.change(LoadModel(str(number), str(files["two" if number == 0 else "one"]), "one"))
            driver.settle()
            gc.collect()
            held.append(torch.cuda.memory_allocated())
        assert held[-1] <= held[2] + (8 << 20)
        driver.models.close()

    def test_the_time_of_steps_is_measured_without_waiting(self):
        clock = StepClock([torch.device("cuda", 0)])
        clock.start()
        torch.cuda._sleep(int(5e7))
        clock.stop("decode", 3)
        assert clock.read() == [], "it has not ended"
        torch.cuda.synchronize()
        ((kind, (seconds,), steps),) = clock.read()
        assert (kind, steps) == ("decode", 3) and seconds > 0.001
        assert clock.read() == []


def test_the_files_are_those_weights(files):
    for name, file in files.items():
        assert load(file).fingerprint == WEIGHTS[name].fingerprint
